"""TVM 16098: the rows of its table on a symbolic number of workers, each a test of that name."""

from __future__ import annotations

import ast
import inspect
import math
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.api import request
from alpa_lite.core.program import Program
from alpa_lite.errors import MemoryBudgetError
from alpa_lite.executor.local import runnable
from alpa_lite.intraop.strategies import UNUSED, KnownStrategies
from alpa_lite.plan.encode import encode_plan
from alpa_lite.trace.program import trace
from examples import seven_b
from examples.registry import EXAMPLES
from tests.harness import device_mesh

SRC = Path(inspect.getfile(al)).parent
H100 = {"device": "h100-sxm", "devices_per_host": 8}
COLLECTIVES = {"psum", "psum_invariant", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "pmax", "axis_index"}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tvm_mlp(w1, w2, x):
    """TVM's sample: x whole, w1 split by columns, w2 by rows, one sum after the second matmul."""
    return {"y": jax.nn.relu(x @ w1) @ w2}


TVM_ARGS = (f32(128, 128), f32(128, 128), f32(128, 128))
TVM_PINS = {"0": P(None, "w"), "1": P("w", None), "2": P(), "out/y": P()}


def large_mlp(params, x):
    """Large enough that splitting pays, with sizes that divide over different numbers."""

    def loss(params):
        h = jnp.tanh(x @ params["up"])
        return ((h @ params["down"]) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


LARGE_ARGS = ({"up": f32(4096, 12288), "down": f32(12288, 4096)}, f32(16384, 4096))


def gpt():
    example = EXAMPLES["gpt_linen"]("small", optimizer="sgd")
    shapes = jax.eval_shape(example.init, jax.random.key(0)), jax.eval_shape(lambda: example.batch(0))
    return example.grads_step, shapes


def settings(name, rest=(), first="n"):
    """(function, arguments, other settings, options) of a case, the number of workers being ``first``."""
    options = {"mesh_shape": (first, *rest), "padding": "off", "remat": "none"}
    if name == "tvm":
        return tvm_mlp, TVM_ARGS, {"pins": TVM_PINS}, {**options, "axis_names": ("w", "v")[: 1 + len(rest)]}
    if name == "gpt":
        fn, args = gpt()
        return fn, args, {}, options
    return large_mlp, LARGE_ARGS, {"donate_argnums": 0}, options


@cache
def symbolic(name, values, rest=(), device="h100-sxm"):
    fn, args, other, options = settings(name, rest)
    cluster = al.Cluster.symbolic("n", device=device, devices_per_host=8, values=values)
    return al.plan(fn, *args, cluster=cluster, options=al.PlanOptions(**options), **other)


def early(name, n, rest=(), device="h100-sxm"):
    fn, args, other, options = settings(name, rest, n)
    hosts = math.ceil(n * math.prod(rest) / 8)
    cluster = al.Cluster.parse(f"{hosts}x8:{device}")
    return al.plan(fn, *args, cluster=cluster, options=al.PlanOptions(**options), **other)


def same_as_concrete(plan, n, concrete):
    """Memory and traffic of the formulas against those of the plan that was made for ``n`` alone."""
    regime = plan.regime(n)
    assert plan.memory(n) == regime.memory_at(n) == concrete.memory
    assert plan.traffic(n) == regime.traffic_at(n)
    for word, formula in regime.memory.items():
        assert formula.at(n) == getattr(concrete.memory, word), word
    formulas = [(c.kind, c.axes, c.size_bytes.at(n), c.count, c.op, c.tensor) for c in regime.collectives]
    assert formulas == [(c.kind, c.axes, c.size_bytes, c.count, c.op, c.tensor) for c in concrete.collectives]
    leaves = {leaf.path: leaf for leaf in concrete.inputs + concrete.outputs}
    for path, shape in regime.local_shapes.items():
        local = leaves[path].spec.local_shape(leaves[path].value.shape, concrete.mesh)
        assert tuple(size.at(n) for size in shape) == local, path
    assert plan.objective(n) == concrete.objective


# -- Symbolic worker count ------------------------------------------------------------------------------------------


def test_symbolic_worker_count_tvm_sample():
    """Row: memory(n) = replicated + sharded/n; one plan for all n with one sum, after the second matmul."""
    plan = symbolic("tvm", (1, 2, 4, 8))
    regime = plan.regime(8)
    assert regime.values[-3:] == (2, 4, 8)
    assert [str(size) for size in regime.local_shapes["0"]] == ["128", "128/n"]
    assert [str(size) for size in regime.local_shapes["1"]] == ["128/n", "128"]
    (total,) = regime.collectives
    assert (total.kind.value, total.axes, str(total.size_bytes)) == ("all-reduce", ("w",), "65,536")
    assert str(total.moved_bytes) == "131,072 - 131,072/n"
    assert str(regime.memory["inputs"]) == "65,536 + 131,072/n"
    assert regime.divides == 128
    assert "peak" not in regime.memory  # how XLA:GPU splits these small matmuls depends on n
    assert f"8: {plan.memory(8).peak:,}" in str(regime)
    for n in (1, 2, 4, 8):
        same_as_concrete(plan, n, early("tvm", n))


@pytest.mark.parametrize("name", ["large", pytest.param("gpt", marks=pytest.mark.medium)])
def test_symbolic_worker_count_equals_concrete(name):
    """Row: memory(n), comm(n) and local shapes equal the concrete plan byte for byte at n = 1, 2, 4, 8, 16."""
    plan = symbolic(name, (1, 2, 3, 4, 5, 8, 16))
    assert len(plan.regimes) > 1
    for n in (1, 2, 4, 8, 16):
        same_as_concrete(plan, n, early(name, n))


@pytest.mark.medium
@pytest.mark.parametrize("device", ["h100-sxm", "cpu"])
def test_symbolic_worker_count_beside_a_fixed_axis(device):
    """Row: n beside an axis of 2; on CPU memory is packed anew for every n and equals the plan's as well."""
    plan = symbolic("large", (1, 2, 3, 4), (2,), device)
    for n in plan.values:
        same_as_concrete(plan, n, early("large", n, (2,), device))
    assert ("peak" in plan.regime(4).memory) == (device != "cpu")


def local_steps(n):
    """(primitive, whether it communicates) along the program that one device runs."""
    fn, args, _, _ = settings("tvm")
    plan = symbolic("tvm", (1, 2, 4, 8)).specialize(n)
    mesh = AbstractMesh(plan.mesh.shape, plan.mesh.axis_names, axis_types=(AxisType.Auto,))
    step = runnable(trace(fn, args, {}), plan, (), mesh)
    jaxpr = jax.make_jaxpr(step.run)(*args).jaxpr
    while not any(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns):
        (eqn,) = [e for e in jaxpr.eqns if e.primitive.name in ("shard_map", "jit", "pjit", "custom_jvp_call")]
        inner = eqn.params["jaxpr"]
        jaxpr = getattr(inner, "jaxpr", inner)
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_symbolic_worker_count_local_regions_are_identical():
    """Row: what runs between the collectives is the same for all n, and so are the collectives from n = 2 on."""
    steps = {n: local_steps(n) for n in (1, 2, 4, 8)}
    assert steps[2] == steps[4] == steps[8]
    assert [s for s in steps[2] if s in COLLECTIVES] == ["psum"] or [s for s in steps[2] if s in COLLECTIVES] == [
        "psum_invariant"
    ]
    assert [s for s in steps[8] if s not in COLLECTIVES] == [s for s in steps[1] if s not in COLLECTIVES]


# -- Analysis as a function of n -------------------------------------------------------------------------------------


@cache
def seven_b_plan(**options):
    cluster = al.Cluster.symbolic("n", device="v100-sxm2-16gb", devices_per_host=8, values=(1, 2, 3, 4))
    chosen = al.PlanOptions(mesh_shape=("n",), **options)
    return al.plan(seven_b.step, *seven_b.ARGS, cluster=cluster, donate_argnums=0, options=chosen)


@pytest.mark.medium
def test_analysis_as_a_function_of_n_7b_on_16_gb():
    """Row: the smallest n that holds the training of 7B parameters in bfloat16 on 16 GB, and both sides of the boundary."""
    plan = seven_b_plan()
    n = plan.smallest(memory_budget_bytes=16e9)
    assert n == 2
    cluster = plan._task.cluster

    def concrete(n, budget):
        options = al.PlanOptions(mesh_shape=(n,), padding="off", remat="none", memory_budget_bytes=budget)
        return al.plan(seven_b.step, *seven_b.ARGS, cluster=cluster.specialize(n), donate_argnums=0, options=options)

    with pytest.raises(MemoryBudgetError, match="no plan fits"):
        concrete(n - 1, 16e9)
    assert concrete(n, 16e9).memory.peak <= 16e9
    # From below: parameters and gradients alone are twice 13.5 GB, which one device cannot hold and two can.
    weights = 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(seven_b.PARAMS))
    assert weights > 13e9 and 2 * weights > 16e9 > 2 * weights / n
    with pytest.raises(MemoryBudgetError, match=r"too little for every n in 1-4"):
        plan.smallest(memory_budget_bytes=1e9)


@pytest.mark.medium
def test_analysis_as_a_function_of_n_without_plan():
    """Row: numbers that cannot hold the step say so, as a plan for that number alone does."""
    plan = seven_b_plan()
    assert plan.without_plan == (1, 3)
    assert plan.breakpoints[:2] == (2, 3)
    with pytest.raises(MemoryBudgetError, match="no plan fits"):
        plan.specialize(3)
    with pytest.raises(MemoryBudgetError, match="no plan fits"):
        plan.memory(1)


def test_analysis_as_a_function_of_n_breakpoints():
    """Row: both sides of each breakpoint have the plans that planning early gives, and these differ."""
    plan = symbolic("large", tuple(range(1, 17)))
    assert plan.breakpoints
    for n in plan.breakpoints[:4]:
        before, after = early("large", n - 1), early("large", n)
        for m, concrete in ((n - 1, before), (n, after)):
            same_as_concrete(plan, m, concrete)
            assert encode_plan(plan.specialize(m)) == encode_plan(concrete)
        choices = [[(d.operands, d.results) for d in p.stages[0].decisions] for p in (before, after)]
        assert choices[0] != choices[1] or before.stages[0].conversions != after.stages[0].conversions
    inside = [n for n in plan.values[1:] if n not in plan.breakpoints]
    assert all(plan.regime(n) is plan.regime(n - 1) for n in inside)


def test_analysis_as_a_function_of_n_traces_once(monkeypatch):
    """Row: a sweep over 16 values traces and asks for sharding rules once (times: benchmarks/symbolic_sweep.py)."""
    calls = []
    monkeypatch.setattr(request, "trace", lambda *args, **kwargs: calls.append(1) or trace(*args, **kwargs))
    plan = symbolic.__wrapped__("tvm", tuple(range(1, 17)))
    assert len(plan.regimes) > 1
    assert len(calls) == 1


# -- Late specialization = early specialization ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("tvm", ()),
        *(pytest.param(*case, marks=pytest.mark.medium) for case in (("large", ()), ("large", (2,)))),
        pytest.param("gpt", (), marks=pytest.mark.slow),
    ],
)
def test_late_specialization_equals_early_specialization(name, rest):
    """Row: specialise(plan(n), k) is plan(k), byte for byte when saved."""
    plan = symbolic(name, (1, 2, 3, 4, 5, 7, 8, 11, 16) if name != "tvm" else (1, 2, 4, 8), rest)
    for n in plan.values:
        late = plan.specialize(n=n)
        assert encode_plan(late) == encode_plan(early(name, n, rest))
        assert late == plan.specialize(n)


def test_late_specialization_outside_of_a_regime_says_so():
    """Row: outside, the tool says so."""
    plan = symbolic("large", tuple(range(1, 17)))
    regime = plan.regime(8)
    other = next(n for n in plan.values if n not in regime.values)
    with pytest.raises(
        al.AlpaLiteError, match=rf"n = {other} is outside of this regime.*another regime holds it.*plan\.regime"
    ):
        regime.memory_at(other)
    with pytest.raises(
        al.AlpaLiteError, match=r"n = 99 is outside of this regime.*no regime of the symbolic plan holds it"
    ):
        regime.traffic_at(99)
    with pytest.raises(al.AlpaLiteError, match=r"plan.specialize\(n=99\) names no number.*Allowed is one n of 1-16"):
        plan.specialize(n=99)


# -- General before special ------------------------------------------------------------------------------------------


def imported(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return found | {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}


RULE_FILES = (
    *("rules", "own_rules", "linearity", "blocked", "elementwise", "shardy"),
    *("flatten", "influence", "user_rules", "rule_check", "tiles"),
)


@pytest.mark.parametrize("name", RULE_FILES)
def test_general_before_special_rules_know_no_mesh(name):
    """Row: what finds and rewrites rules cannot see how many devices there are."""
    modules = imported(SRC / "trace" / f"{name}.py")
    assert not {m for m in modules if m.startswith(("alpa_lite.core.mesh", "alpa_lite.cluster", "alpa_lite.costs"))}


def test_general_before_special_strategies_are_filtered_by_divisibility_alone():
    """Row: on n workers an op has the strategies of every other n, less those whose sizes n does not divide."""
    program: Program = trace(*settings("large")[:2], {}).program
    seen = 0
    for _, _, op in program.walk():
        free = tuple(False for _ in op.inputs)
        found = {n: strategies(op, n, free) for n in (2, 3, 5, 8, 16)}
        assert found[5] <= found[3] | found[2] and (UNUSED,) in found[5]
        for n, rows in found.items():
            splits = [i for (i,) in rows if i >= 0]
            assert all(op.rule.factors[i].size % n == 0 for i in splits)
            seen += len(splits)
        assert found[2] == found[8] == found[16]
    assert seen > 20


def strategies(op, n, free):
    rows = KnownStrategies().of(op.rule, device_mesh((n,)), unreduced_inputs=free).assignment
    return {tuple(map(int, row)) for row in np.atleast_2d(rows)}
