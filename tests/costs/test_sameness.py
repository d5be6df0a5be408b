"""Laws of the sameness analysis, and what users give and read. The acceptance rows stand in ``tests/acceptance``."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.analysis import (
    Program,
    ShardingSpec,
    TensorLayout,
    needs_resharding,
    trace,
)
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.patterns import REFUSED, SUPPORTED, Change, Side
from alpa_lite.errors import ArgumentsError
from alpa_lite.intraop.strategies import KnownStrategies
from benchmarks import sameness_time
from tests.costs.pairs import MESH, SQUARE, identity, judge, shapes
from tests.harness import RandomCosts, device_mesh


@pytest.mark.parametrize(
    ("fn", "ins", "specs", "out"),
    [
        (lambda x: jnp.sum(x, 0), [SQUARE], ["[x,_]"], "[_]+{x}"),
        (jnp.matmul, [SQUARE, SQUARE], ["[y,x]", "[x,_]"], "[y,_]+{x}"),
        (jnp.matmul, [SQUARE, SQUARE], ["[_,x.y]", "[x.y,_]"], "[_,_]+{x,y}"),
        (jnp.add, [SQUARE, SQUARE], ["[_,y]+{x}", "[_,y]+{x}"], "[_,y]+{x}"),
        (jnp.multiply, [SQUARE, SQUARE], ["[_,_]+{x}", "[_,_]"], "[_,_]+{x}"),
        (jnp.multiply, [SQUARE, SQUARE], ["[_,_]", "[_,_]+{x}"], "[_,_]+{x}"),
    ],
    ids=["sum", "matmul", "matmul of two axes", "add", "mul", "mul the other way"],
)
def test_partial_sums_that_the_op_makes_or_passes_on(fn, ins, specs, out):
    assert all(v.same for v in judge(fn, ins, specs, out))


@pytest.mark.parametrize(
    ("fn", "ins", "specs", "out", "same"),
    [
        (jnp.matmul, [SQUARE, SQUARE], ["[_,x.y]", "[y.x,_]"], "[_,_]+{x,y}", [True, False]),
        (jnp.matmul, [SQUARE, SQUARE], ["[_,x]", "[_,_]"], "[_,_]+{x}", [True, False]),
        (jnp.multiply, [SQUARE, SQUARE], ["[_,_]+{x}", "[_,_]+{x}"], "[_,_]+{x}", [True, False]),
        (jnp.exp, [SQUARE], ["[_,_]+{x}"], "[_,_]", [False]),
        (lambda x: jnp.max(x, 0), [SQUARE], ["[x,_]"], "[_]", [False]),
    ],
    ids=["other order", "half of a contraction", "product of partial sums", "non-linear", "maximum"],
)
def test_partial_sums_that_would_be_wrong(fn, ins, specs, out, same):
    """Judged with all operands of the op in view: what fits pair by pair may be wrong together."""
    assert [v.same for v in judge(fn, ins, specs, out)] == same


def test_patterns_prints_each_once_and_every_change_is_of_one():
    text = str(al.analysis.patterns())
    assert all(text.count(f"\n{p.name}  ") == 1 for p in (*SUPPORTED, *REFUSED))
    flags = list(itertools.product((False, True), repeat=5))
    for have, need in itertools.product(Side, Side):
        for result_split, same_dim, swapped, other_mesh, same_tiles in flags:
            change = Change(
                have=have,
                need=need,
                result_split=result_split,
                same_dim=same_dim,
                swapped=swapped,
                other_mesh=other_mesh,
                same_tiles=same_tiles,
            )
            assert sum(p.applies(change) for p in SUPPORTED) <= 1, change


@pytest.mark.medium
def test_the_work_is_counted_once_per_pair(monkeypatch):
    """Linear by construction: the number of places looked at grows as the number of pairs."""
    from alpa_lite.costs.factor_map import FactorMap

    calls = [0]
    original = FactorMap.places

    def counted(self: FactorMap, *args: Any) -> Any:
        calls[0] += 1
        return original(self, *args)

    monkeypatch.setattr(FactorMap, "places", counted)
    found = []
    for size in (240, 2_400):
        program = sameness_time.chain(size)
        calls[0] = 0
        pairs = len(needs_resharding(program, sameness_time.random_specs(program), sameness_time.MESH))
        found.append(calls[0] / pairs)
    assert found[1] == pytest.approx(found[0], rel=0.1)


def test_every_strategy_of_the_planner_is_proven_the_same():
    """What the planner runs without communication inside of an op, the analysis must call the same: 0 false alarms."""

    def step(w: jax.Array, u: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            hidden = jax.nn.relu(x @ w)
            scores = (hidden @ u).reshape(4, 2, 4, 2).transpose(0, 2, 1, 3)
            return (jax.nn.log_softmax(scores) ** 2).sum()

        return w - 0.1 * jax.grad(loss)(w)

    program = trace(step, *shapes((8, 16), (16, 8), (8, 8)))
    engine = Conversions(mesh=device_mesh((2, 2)), costs=RandomCosts(0))
    checked = 0
    for path, _, op in program.walk():
        strategies = KnownStrategies().of(op.rule, engine.mesh, unreduced_inputs=(True,) * len(op.inputs))
        for k in range(len(strategies)):
            if strategies.reduce_axes[k]:
                continue  # its all-reduce (max) is inside of the op
            tensors = (*op.inputs, *op.outputs)
            numbers = [int(s[k]) for s in (*strategies.operands, *strategies.results)]
            dims = (*op.rule.operands, *op.rule.results)
            layouts = [
                TensorLayout(spec=engine.space(len(d)).specs[n], mesh=engine.mesh) if v >= 0 else None
                for v, n, d in zip(tensors, numbers, dims, strict=True)
            ]
            cut = len(op.inputs)
            judge = al.analysis.Judge(program=program)
            for i, j, differences in judge.compare(path, op, layouts[:cut], layouts[cut:]):
                assert not differences, (
                    f"{path} {op.primitive} {op.rule} {list(map(str, layouts))}: {differences} ({i}, {j})"
                )
                checked += 1
    assert checked > 500


def test_a_shard_map_is_compared_with_its_own_layout():
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def fn(a: jax.Array) -> jax.Array:
        return jax.shard_map(lambda y: y * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(a)

    program = trace(fn, *shapes(SQUARE))
    assert [op.primitive for op in program.ops] == ["shard_map"]
    assert needs_resharding(program, {"0": "[x,_]", "out": "[x,_]"}, MESH)[0].same
    assert needs_resharding(program, {"0": "[x,_]", "out": "[_,x]"}, MESH)[0].patterns == ("all-to-all",)
    assert needs_resharding(program, {"0": "[x,y]", "out": "[_,_]"}, MESH)[0].axes == ("y", "x")


def test_specs_may_be_written_in_many_ways():
    program = trace(jnp.matmul, *shapes(SQUARE, SQUARE))
    layout = TensorLayout(spec=ShardingSpec.parse("[x,_]"), mesh=MESH)
    for spec in ("[x,_]", P("x", None), [("x",), ()], ShardingSpec.parse("[x,_]"), layout):
        assert all(v.same for v in needs_resharding(program, {"0": spec, 1: "[_,_]", "out": spec}, MESH))
    short = needs_resharding(program, {"0": P("x"), "1": P(), "out": P("x")}, MESH)
    assert all(v.same for v in short)


def test_axes_of_size_one_never_matter():
    program = trace(identity, *shapes(SQUARE))
    mesh = device_mesh((1, 4))
    (verdict,) = needs_resharding(program, {"0": "[x.y,_]", "out": "[y,x]"}, mesh)
    assert verdict.same


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"0": "[x,_]"}, r"specs says nothing of 1 tensors: %1: float32\[8,8\].*follow"),
        ({"0": "[x]", "out": "[_,_]"}, r"\[x\] of rank 1; %0 is float32\[8,8\] of rank 2"),
        ({"0": "[z,_]", "out": "[_,_]"}, r"names the axis 'z'. The mesh has \(x=2, y=2\)"),
        ({"0": "x,_", "out": "[_,_]"}, r"specs\['0'\] is 'x,_', which is no spec"),
        ({"0": 3, "out": "[_,_]"}, r"specs\['0'\] is 3, which is no spec"),
        ({"0/w": "[_,_]"}, r"the key '0/w', which is no tensor.*out, 0"),
        ({7: "[_,_]"}, r"the key 7, which is no tensor of the program"),
        ({"0": "[x,_]", 0: "[y,_]"}, r"gives %0 twice"),
    ],
)
def test_specs_that_do_not_fit(specs, message):
    program = trace(identity, *shapes(SQUARE))
    with pytest.raises(ArgumentsError, match=message):
        needs_resharding(program, specs, MESH)


def test_specs_without_a_mesh():
    program = trace(identity, *shapes(SQUARE))
    with pytest.raises(ArgumentsError, match="`mesh` is not given"):
        needs_resharding(program, {"0": "[x,_]", "out": "[x,_]"})


def test_verdicts_print_what_differs_and_where():
    verdicts = judge(lambda a, b: a @ b, [SQUARE, SQUARE], ["[x,_]", "[_,x]"], "[x,_]")
    lines = str(verdicts).splitlines()
    assert lines[0] == "1 of 2 pairs need resharding"
    assert lines[1].startswith("0 dot_general %1 -> %2: resharding: x: split on dim 1, needed whole (all-gather)  at ")
    assert [v.operand for v in verdicts.resharding] == [1] and len(verdicts) == 2
    assert verdicts[0].reason == "proven from the op's sharding rule"


def test_what_is_no_program_is_refused():
    with pytest.raises(
        ArgumentsError, match=r"was given <function identity.*al\.analysis\.trace\(fn, \*args\).*test_sameness"
    ):
        al.analysis.needs_resharding(identity, {})


def test_the_program_type_is_public():
    assert isinstance(trace(identity, *shapes(SQUARE)), Program)
    assert np.array_equal(sorted(al.__dir__()), al.__dir__()) and "analysis" in al.__dir__()
