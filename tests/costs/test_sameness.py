"""The acceptance rows of Fuser #1656, one test each, and the laws of the analysis. The exhaustive row: test_sameness_oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.analysis import (
    Program,
    ShardingSpec,
    TensorLayout,
    UnsupportedPattern,
    Verdicts,
    needs_resharding,
    trace,
)
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.patterns import REFUSED, SUPPORTED, Change, Pattern, Side
from alpa_lite.errors import AlpaLiteError, ArgumentsError
from alpa_lite.intraop.strategies import enumerate_strategies
from benchmarks import sameness_time
from tests.harness import RandomCosts, device_mesh

MESH = device_mesh((2, 2))
N = 8


def shapes(*all_shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in all_shapes]


def judge(fn: Callable[..., Any], ins: list[tuple[int, ...]], specs: list[str], out: str) -> Verdicts:
    """Verdicts of a function of one op."""
    program = trace(fn, *shapes(*ins))
    assert len(program.ops) == 1, program
    return needs_resharding(program, {str(i): s for i, s in enumerate(specs)} | {"out": out}, MESH)


def identity(x: jax.Array) -> jax.Array:
    return lax.optimization_barrier(x)


SQUARE = (N, N)
CUBE = (N, N, N)


@pytest.mark.parametrize(("left", "right", "out"), [("[_]", "[_]", "[x]"), ("[x]", "[x]", "[_]")])
def test_both_directions_checked(left, right, out):
    """Row: an add of which only the result, or only the operands are split."""
    verdicts = judge(jnp.add, [(N,), (N,)], [left, right], out)
    assert [v.same for v in verdicts] == [False, False]
    assert all(v.axes == ("x",) for v in verdicts)


def test_missing_mapping_handled():
    """Row: select or squeeze into the split dim is a resharding, into another dim is not."""

    def selected(dim: int, spec: str, cut: str, out: str) -> list[bool]:
        program = trace(lambda x: lax.index_in_dim(x, 3, dim, keepdims=False), *shapes(SQUARE))
        assert [op.primitive for op in program.ops] == ["slice", "squeeze"]
        return [v.same for v in needs_resharding(program, {"0": spec, 1: cut, "out": out}, MESH)]

    assert selected(0, "[x,_]", "[_,_]", "[_]") == [False, True]
    assert selected(1, "[x,_]", "[x,_]", "[x]") == [True, True]
    assert selected(0, "[_,x]", "[_,x]", "[x]") == [True, True]
    (verdict,) = judge(lambda x: x[:4], [SQUARE], ["[x,_]"], "[x,_]")
    assert verdict.patterns == ("unmapped dim",) and "does not map" in verdict.reason


@pytest.mark.parametrize(
    ("fn", "ins", "specs", "out"),
    [
        (identity, [SQUARE], ["[x,_]"], "[x,_]"),
        (identity, [SQUARE], ["[_,_]"], "[_,_]"),
        (lambda x: jnp.sum(x, 0), [SQUARE], ["[_,x]"], "[x]"),
        (lambda x: jnp.sum(x, 0), [SQUARE], ["[_,_]"], "[_]"),
        (jnp.add, [SQUARE, SQUARE], ["[x,y]", "[x,y]"], "[x,y]"),
        (jnp.add, [SQUARE, SQUARE], ["[_,_]", "[_,_]"], "[_,_]"),
        (lambda x: lax.broadcast_in_dim(x, SQUARE, (1,)), [(N,)], ["[_]"], "[x,_]"),
        (lambda x: lax.broadcast_in_dim(x, SQUARE, (1,)), [(N,)], ["[y]"], "[x,y]"),
        (jnp.matmul, [SQUARE, SQUARE], ["[x,_]", "[_,_]"], "[x,_]"),
        (lambda x: x.reshape(2, 4, N), [SQUARE], ["[x,_]"], "[x,_,_]"),
        (lambda x: x.reshape(N * N), [SQUARE], ["[x,_]"], "[x]"),
        (lambda x: x.reshape(N * N, N), [CUBE], ["[x.y,_,_]"], "[x.y,_]"),
    ],
    ids=[
        *("set", "set whole", "sum", "sum whole", "add", "add whole", "broadcast", "broadcast with a split dim"),
        *("matmul M", "outer split", "outer merge", "outer merge of two axes"),
    ],
)
def test_named_cases_of_the_cpp_suite_that_are_the_same(fn, ins, specs, out):
    assert all(v.same for v in judge(fn, ins, specs, out))


@pytest.mark.parametrize(
    ("fn", "ins", "specs", "out", "differ"),
    [
        (identity, [SQUARE], ["[x,_]"], "[_,x]", [("x",)]),
        (identity, [SQUARE], ["[x,_]"], "[y,_]", [("x", "y")]),
        (lambda x: jnp.sum(x, 0), [SQUARE], ["[x,_]"], "[_]", [("x",)]),
        (jnp.add, [SQUARE, SQUARE], ["[x,_]", "[_,_]"], "[x,_]", [(), ("x",)]),
        (jnp.add, [SQUARE, SQUARE], ["[x,_]", "[y,_]"], "[x,_]", [(), ("x", "y")]),
        (jnp.matmul, [SQUARE, SQUARE], ["[_,_]", "[_,x]"], "[_,_]", [(), ("x",)]),
        (lambda x: x[3:4], [SQUARE], ["[x,_]"], "[_,_]", [("x",)]),
        (lambda x: x.reshape(2, 4, N), [SQUARE], ["[x,_]"], "[_,x,_]", [("x",)]),
        (lambda x: x.reshape(N * N), [SQUARE], ["[_,x]"], "[x]", [("x",)]),
    ],
    ids=[
        "other dim",
        "other axis",
        "sum",
        "mixed inputs",
        "mixed axes",
        "matmul N",
        "select",
        "inner split",
        "inner merge",
    ],
)
def test_named_cases_of_the_cpp_suite_that_are_a_resharding(fn, ins, specs, out, differ):
    assert [v.axes for v in judge(fn, ins, specs, out)] == differ


def test_named_cases_of_the_cpp_suite_on_another_mesh():
    program = trace(jnp.add, *shapes(SQUARE, SQUARE))
    here = TensorLayout(spec=ShardingSpec.parse("[x,_]"), mesh=MESH)
    there = TensorLayout(spec=here.spec, mesh=MESH, stage=1)
    verdicts = needs_resharding(program, {"0": here, "1": there, "out": there})
    assert [v.patterns for v in verdicts] == [("send tile by tile",), ()]
    reshaped = TensorLayout(spec=ShardingSpec.parse("[z,_]"), mesh=device_mesh((1, 1, 4)))
    assert not needs_resharding(program, {"0": here, "1": here, "out": reshaped})[0].same


@pytest.mark.parametrize(
    ("before", "after", "axes"),
    [("[x,y]", "[_,y]", ("x",)), ("[x,y]", "[x,_]", ("y",)), ("[y,_]", "[y.x,_]", ("x",)), ("[_,y]", "[x,y]", ("x",))],
)
def test_named_cases_of_the_cpp_suite_in_two_dims(before, after, axes):
    """A change on x only is reported on x only."""
    (verdict,) = judge(identity, [SQUARE], [before], after)
    assert verdict.axes == axes


def test_two_axes_at_once():
    """Row: every pair of specs in two dims is judged, each axis by itself, and converted by a priced sequence."""
    engine = Conversions(mesh=MESH, costs=RandomCosts(0))
    specs = [s for s in engine.space(2).specs if not s.unreduced]
    program = trace(identity, *shapes(SQUARE))
    swapped = 0
    for before, after in itertools.product(specs, specs):
        (verdict,) = needs_resharding(program, {"0": before, "out": after}, MESH)
        steps = engine.steps(before, after, SQUARE, 4)
        assert verdict.same == (before == after) == (not steps)
        moved = {a for step in steps for a in step.axes}
        assert set(verdict.axes) <= moved
        swapped += verdict.patterns == ("axis swap", "axis swap")
    assert swapped == 2  # [x,y] and [y,x]
    (verdict,) = needs_resharding(program, {"0": "[x.y,_]", "out": "[y.x,_]"}, MESH)
    assert verdict.patterns == ("axis order", "axis order")


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


EXAMPLE_OPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": identity,
    "sum": lambda x: jnp.sum(x, 0),
    "slice": lambda x: x[:4],
}


@pytest.mark.parametrize("pattern", SUPPORTED, ids=lambda p: p.name)
def test_list_of_supported_patterns(pattern: Pattern):
    """Row: every line of the table has a passing example."""
    program = trace(EXAMPLE_OPS[pattern.example.op], *shapes(SQUARE))
    result = TensorLayout(spec=ShardingSpec.parse(pattern.example.result), mesh=MESH, stage=int(pattern.other_mesh))
    (verdict,) = needs_resharding(program, {"0": pattern.example.operand, "out": result}, MESH)
    assert not verdict.same
    assert pattern.name == verdict.patterns[0] and "x" in verdict.differences[0].axes
    assert pattern.name in verdict.reason and "test_sameness" in verdict.source


def _loop(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, y: y * 2, x)


def _own_layout(x: jax.Array) -> jax.Array:
    mesh = jax.sharding.AbstractMesh((4,), ("z",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(lambda y: y * 2, mesh=mesh, in_specs=P("z"), out_specs=P("z"))(x)


NON_ROWS: dict[str, tuple[Any, list[tuple[int, ...]], list[Any], Any]] = {
    "whole to partial sums": (identity, [SQUARE], ["[_,_]"], "[_,_]+{x}"),
    "partial sums through a non-linear op": (jnp.exp, [SQUARE], ["[_,_]+{x}"], "[_,_]+{x}"),
    "partial sums on another mesh": (
        identity,
        [SQUARE],
        ["[_,_]"],
        TensorLayout(spec=ShardingSpec.parse("[_,_]+{x}"), mesh=MESH, stage=1),
    ),
    "tile across factors": (lambda x: x.reshape(3, 2, 4), [(6, 4)], ["[x,_]"], "[_,_,_]"),
    "uneven tiles": (identity, [(6, 3)], ["[_,x]"], "[_,_]"),
    "control flow": (_loop, [SQUARE], ["[x,_]"], "[x,_]"),
    "shard_map of another mesh": (_own_layout, [SQUARE], ["[x,_]"], "[x,_]"),
}


@pytest.mark.parametrize("name", [r.name for r in REFUSED])
def test_list_of_supported_patterns_refuses(name: str):
    """Row: every non-row has an error that names the pattern, and has the four parts."""
    fn, ins, specs, out = NON_ROWS[name]
    with pytest.raises(UnsupportedPattern, match=name) as caught:
        judge(fn, ins, specs, out)
    assert caught.value.pattern == name and isinstance(caught.value, AlpaLiteError)
    message = str(caught.value)
    assert " lies as " in message or "specs['" in message or "the program has" in message
    assert " At " in message and "al.analysis.patterns()" in message and "not support" in message


def test_stated_assumptions():
    """Row: an unsupported split or merge raises, instead of a guess; a supported one beside it does not."""
    program = trace(lambda x: x.reshape(3, 2, 4), *shapes((6, 4)))
    with pytest.raises(UnsupportedPattern, match=r"dim 0 consists of the factors 3 \* 2.*'tile across factors'"):
        needs_resharding(program, {"0": "[y,_]", "out": "[_,_,_]"}, MESH)
    program = trace(lambda x: x.reshape(2, 3, 4), *shapes((6, 4)))
    assert needs_resharding(program, {"0": "[y,_]", "out": "[y,_,_]"}, MESH)[0].same


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
@pytest.mark.medium
def test_pairwise_cost():
    """Row: linear in the pairs, 10,000 of them in less than a second of one core (CPU time; the benchmark prints both)."""
    (small, small_s, _), (large, large_s, found) = (sameness_time.seconds(n, num_rounds=3) for n in (1_000, 10_000))
    assert large >= 9_990 and found > large / 2
    assert large_s < 1.0
    assert large_s / large < 1.5 * small_s / small


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
        strategies = enumerate_strategies(op.rule, engine.mesh, engine, unreduced_inputs=(True,) * len(op.inputs))
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


def test_the_program_type_is_public():
    assert isinstance(trace(identity, *shapes(SQUARE)), Program)
    assert np.array_equal(sorted(al.__dir__()), al.__dir__()) and "analysis" in al.__dir__()
