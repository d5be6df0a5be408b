"""Fuser 1656: the rows of its table on "do these two shardings agree", each a test of that name.

``docs/sameness.md`` lists them; the exhaustive row stands in ``test_nvfuser_exhaustive.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from alpa_lite.analysis import (
    ShardingSpec,
    TensorLayout,
    UnsupportedPattern,
    needs_resharding,
    place_conversions,
    trace,
)
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.patterns import REFUSED, SUPPORTED, Pattern
from alpa_lite.errors import AlpaLiteError
from benchmarks import sameness_time
from tests.costs.pairs import CUBE, MESH, SQUARE, N, identity, judge, shapes
from tests.harness import RandomCosts, device_mesh


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
    roofline = Conversions(mesh=MESH, costs=cost_model("roofline", Cluster.parse("1x4:h100-sxm"), MESH))
    for before, after in (("[x,y]", "[y,x]"), ("[x.y,_]", "[y.x,_]")):
        steps = roofline.steps(ShardingSpec.parse(before), ShardingSpec.parse(after), SQUARE, 4)
        assert [step.kind for step in steps] == [CollectiveKind.COLLECTIVE_PERMUTE]


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
    assert pattern.name in verdict.reason and "tests/" in verdict.source


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


@pytest.mark.slow
def test_pairwise_cost():
    """Row: linear in the pairs. How many seconds 10,000 of them take is a matter of the machine: the benchmark prints it beside
    its target."""
    (small, small_s, _), (large, large_s, found) = (sameness_time.seconds(n, num_rounds=3) for n in (1_000, 10_000))
    assert large >= 9_990 and found > large / 2
    assert large_s / large < 1.5 * small_s / small


def test_insertion_before_or_after():
    """Row: add(t, t) converts once; a converted value is read by all its consumers; "after" is for one input, or forced."""
    program = trace(lambda t: t + t, *shapes(SQUARE))
    specs = {"0": "[x,_]", "out": "[_,x]"}
    (before,) = place_conversions(program, specs, MESH).conversions
    assert (before.side, before.value, before.readers) == ("before", 0, (("0", 0), ("0", 1)))
    assert [s.kind for s in before.steps] == [CollectiveKind.ALL_TO_ALL]
    (after,) = place_conversions(program, specs, MESH, place="after").conversions
    assert (after.side, after.value, after.readers) == ("after", 1, ())

    one_input = trace(lambda t: -t, *shapes(SQUARE))
    assert [c.side for c in place_conversions(one_input, specs, MESH).conversions] == ["after"]
    assert [c.side for c in place_conversions(one_input, specs, MESH, place="before").conversions] == ["before"]

    shared = trace(lambda t: (jnp.exp(t), jnp.tanh(t)), *shapes(SQUARE))
    specs = {"0": "[x,_]", "out/0": "[_,x]", "out/1": "[_,x]"}
    (only,) = place_conversions(shared, specs, MESH, place="before").conversions
    assert only.readers == (("0", 0), ("1", 0))
    assert only.time_s == place_conversions(shared, specs, MESH, place="before").time_s
