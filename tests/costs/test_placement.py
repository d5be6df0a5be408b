"""Conversions of an annotated program: once per tensor, shared, before or after the op, and enough for every op to run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.analysis import (
    Judge,
    PlacedConversions,
    Program,
    ShardingSpec,
    TensorLayout,
    UnsupportedPattern,
    follow,
    needs_resharding,
    place_conversions,
    trace,
)
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.tiles import check_tiles
from alpa_lite.errors import ArgumentsError
from benchmarks import sameness_time
from tests.harness import RandomCosts, device_mesh

MESH = device_mesh((2, 2))
SQUARE = (8, 8)


def traced(fn: Callable[..., Any], *all_shapes: tuple[int, ...]) -> Program:
    return trace(fn, *[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in all_shapes])


def check(program: Program, specs: Any, placement: PlacedConversions, mesh: Any = MESH) -> None:
    """Every op runs on what lies on its devices, reads only what is there by then, and results end as the specs say."""
    judge = Judge(program=program)
    layouts = {v: TensorLayout(spec=s, mesh=mesh) if isinstance(s, ShardingSpec) else s for v, s in specs.items()}
    there = {(v, layout) for v, layout in layouts.items() if v in program.inputs}
    done = list(placement.conversions)
    for index, op in enumerate(program.ops):
        path = str(index)
        while done and done[0].op == path and done[0].side == "before":
            first = done.pop(0)
            assert (first.value, first.source) in there
            there.add((first.value, first.target))
        reads = [placement.reads.get((path, i)) for i in range(len(op.inputs))]
        makes = [placement.makes.get((path, j)) for j in range(len(op.outputs))]
        if any(r is not None for r in reads):
            assert all((v, r) in there for v, r in zip(op.inputs, reads, strict=True) if r is not None)
            assert not any(differences for *_, differences in judge.compare(path, op, reads, makes))
        for value, made in zip(op.outputs, makes, strict=True):
            there.add((value, made or layouts[value]))
        while done and done[0].op == path and done[0].side == "after":
            first = done.pop(0)
            assert (first.value, first.source) in there
            there.add((first.value, first.target))
        assert all((v, layouts[v]) in there for v in op.outputs if v >= 0)
    assert not done


def test_two_inputs_with_other_layouts_are_converted_before_or_after_as_is_cheaper():
    program = traced(lambda a, b: a @ b, (8192, 8), (8, 8192))
    small = place_conversions(program, {"0": "[x,_]", "1": "[_,y]", "out": "[y,x]"}, MESH)
    assert [(c.side, c.value) for c in small.conversions] == [("before", 0), ("before", 1)]
    program = traced(lambda a, b: a @ b, (64, 4096), (4096, 64))
    large = place_conversions(program, {"0": "[_,x]", "1": "[x,_]", "out": "[_,_]"}, MESH)
    assert [(c.side, str(c.source.spec)) for c in large.conversions] == [("after", "[_,_]+{x}")]
    assert [s.kind for s in large.conversions[0].steps] == [CollectiveKind.ALL_REDUCE]
    forced = place_conversions(program, {"0": "[_,x]", "1": "[x,_]", "out": "[_,_]"}, MESH, place="before")
    assert [c.side for c in forced.conversions] == ["before", "before"] and forced.time_s > large.time_s


def test_same_pairs_need_no_conversion():
    program = traced(lambda a, b: jnp.tanh(a @ b), SQUARE, SQUARE)
    specs = follow(program, {"0": "[x,_]", "1": "[_,y]"}, MESH)
    assert all(v.same for v in needs_resharding(program, specs))
    assert place_conversions(program, specs).conversions == ()


def test_prices_and_steps_are_the_engines():
    engine = Conversions(mesh=MESH, costs=RandomCosts(3))
    program = traced(lambda t: -t, SQUARE)
    (made,) = place_conversions(program, {"0": "[x,y]", "out": "[y,_]"}, MESH, conversions=[engine]).conversions
    assert made.side == "after"
    before, after = made.source.spec, made.target.spec
    assert made.steps == engine.steps(before, after, SQUARE, 4)
    assert made.time_s == pytest.approx(engine.time_s(before, after, SQUARE, 4))


@pytest.mark.medium
@pytest.mark.parametrize("place", ["cheaper", "before", "after"])
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_become_runnable(place, seed):
    program = sameness_time.chain(120)
    specs = sameness_time.random_specs(program, seed)
    mesh = sameness_time.MESH
    engine = Conversions(mesh=mesh, costs=RandomCosts(seed))
    placement = place_conversions(program, specs, mesh, conversions=[engine], place=place)
    check(program, specs, placement, mesh)
    assert len({(c.value, c.target) for c in placement.conversions}) == len(placement.conversions)


@pytest.mark.medium
def test_the_cheaper_way_is_never_dearer_than_the_forced_ones():
    """Op by op: with several ops, the copies left for later readers differ."""
    specs = [s for s in Conversions(mesh=MESH, costs=RandomCosts(0)).space(2).specs if not s.unreduced]
    program = traced(lambda a, b: a @ b, SQUARE, SQUARE)
    rng = np.random.default_rng(0)
    cases = list(itertools.product(specs, repeat=3))
    for k in rng.choice(len(cases), 40, replace=False):
        a, b, out = cases[k]
        times = {
            place: place_conversions(
                program,
                {"0": a, "1": b, "out": out},
                MESH,
                conversions=[Conversions(mesh=MESH, costs=RandomCosts(int(k)))],
                place=place,
            ).time_s
            for place in ("cheaper", "before", "after")
        }
        assert times["cheaper"] <= min(times.values()) + 1e-15


def test_legalising_twice_changes_nothing():
    """A program that says what the placement found has nothing left to convert."""
    program = traced(lambda a, b: jnp.tanh(a @ b) + 1.0, SQUARE, SQUARE)
    specs = {0: "[_,x]", 1: "[x,y]", 2: "[y,_]", 3: "[y,x]", 4: "[x,_]"}
    first = place_conversions(program, specs, MESH)
    assert first.conversions
    judge = Judge(program=program)
    for index, op in enumerate(program.ops):
        reads = [first.reads.get((str(index), i)) for i in range(len(op.inputs))]
        makes = [first.makes.get((str(index), j)) for j in range(len(op.outputs))]
        assert not any(d for *_, d in judge.compare(str(index), op, reads, makes))
    matmul = traced(lambda a, b: a @ b, SQUARE, SQUARE)
    again = place_conversions(matmul, {0: first.reads["0", 0], 1: first.reads["0", 1], 2: first.makes["0", 0]})
    assert again.conversions == ()


def test_between_meshes_a_tensor_is_sent_once():
    program = traced(lambda t: (t + t, jnp.exp(t)), SQUARE)
    here = TensorLayout(spec=ShardingSpec.parse("[_,_]+{x}"), mesh=MESH)
    there = TensorLayout(spec=ShardingSpec.parse("[x,_]"), mesh=device_mesh((4,)), stage=1)
    joined, sent = place_conversions(program, {"0": here, "out/0": there, "out/1": there}).conversions
    assert joined.tiles is None and [s.kind for s in joined.steps] == [CollectiveKind.ALL_REDUCE]
    assert sent.tiles is not None and sent.target == there and len(sent.readers) == 3
    check_tiles(sent.tiles)
    assert sent.tiles.moved_bytes == 8 * 8 * 4 and "by sending 256 B, read by 0#0, 0#1, 1#0" in str(sent)


def test_partial_sums_over_an_axis_that_the_other_mesh_does_not_have():
    program = traced(lambda t: t + t, SQUARE)
    here = TensorLayout(spec=ShardingSpec.parse("[x,_]+{y}"), mesh=MESH)
    there = TensorLayout(spec=ShardingSpec.parse("[_,x]"), mesh=device_mesh((4,)), stage=1)
    joined, sent = place_conversions(program, {"0": here, "out": there}).conversions
    assert str(joined.target.spec) == "[x,_]" and sent.target == there


def test_a_shard_map_is_read_as_the_user_wrote_it():
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((1, 4), ("x", "y"), axis_types=types)
    split = jax.sharding.PartitionSpec(("x", "y"))
    program = traced(jax.shard_map(lambda t: t * 2, mesh=mesh, in_specs=split, out_specs=split), SQUARE)
    specs = follow(program, {"0": "[_,y]"}, device_mesh((1, 4)))
    (made,) = place_conversions(program, specs).conversions
    assert (made.side, str(made.target.spec), str(specs[1].spec)) == ("before", "[y,_]", "[y,_]")


def test_partial_sums_cannot_be_asked_for():
    program = traced(lambda a, b: a + b, SQUARE, SQUARE)
    with pytest.raises(UnsupportedPattern, match="whole to partial sums"):
        place_conversions(program, {"0": "[_,_]+{x}", "1": "[_,_]", "out": "[_,_]+{x}"}, MESH)
    (joined,) = place_conversions(program, {"0": "[_,_]+{x}", "1": "[_,_]", "out": "[_,_]"}, MESH).conversions
    assert (joined.side, joined.value) == ("before", 0)


def test_follow_takes_the_layout_of_the_operands():
    program = traced(lambda w, x: jnp.tanh(x @ w).sum(0), SQUARE, SQUARE)
    found = follow(program, {"0": "[_,y]", "1": "[x,_]"}, MESH)
    assert [str(found[op.outputs[0]].spec) for op in program.ops] == ["[x,y]", "[x,y]", "[y]"]
    last = needs_resharding(program, found)[-1]
    assert last.axes == ("x",) and last.patterns == ("reduction to whole",)
    assert follow(program, {}, MESH)[2].spec.is_replicated


def test_follow_makes_what_depends_on_nothing_where_it_is_read():
    program = traced(
        lambda x: x + jnp.full((8, 8), 2.0, x.dtype) + jax.lax.broadcasted_iota(x.dtype, (8, 8), 1), SQUARE
    )
    verdicts = needs_resharding(program, follow(program, {"0": "[x,y]"}, MESH))
    assert len(verdicts) == 4 and not verdicts.resharding


def test_follow_stays_on_the_devices_of_the_operands():
    program = traced(lambda x, y: jnp.exp(x) + y, SQUARE, SQUARE)
    there = TensorLayout(spec=ShardingSpec.parse("[_,y]"), mesh=MESH, stage=1)
    found = follow(program, {"0": there, "1": "[x,_]"}, MESH)
    assert [found[op.outputs[0]] for op in program.ops] == [there, there]


def test_bad_arguments():
    program = traced(lambda t: -t, SQUARE)
    with pytest.raises(ArgumentsError, match="place='early' is not known"):
        place_conversions(program, {"0": "[x,_]", "out": "[x,_]"}, MESH, place="early")
    with pytest.raises(ArgumentsError, match="`mesh` is not given"):
        follow(program, {})
