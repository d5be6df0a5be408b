"""Conversions between specs: pairs run on 8 virtual devices, and laws of the price table.

The fast tests run at most 500 pairs, nearly all of them in tests/acceptance/test_redistribution.py; ``-m slow`` runs all.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions, step_size_bytes
from alpa_lite.costs.permutes import permutation
from alpa_lite.lowering.collectives import keep_on_first, run_step, tile_index
from benchmarks.conversion_pairs import all_pairs, one_per_class
from tests.compiling import QUICK_COMPILE
from tests.conversion_runs import check_conversions
from tests.harness import RandomCosts, device_mesh, jax_mesh
from tests.marks import slow_but

Pair = tuple[ShardingSpec, ShardingSpec]


def roofline(mesh: DeviceMesh, **settings: Any) -> Any:
    return cost_model("roofline", Cluster.parse(f"1x{mesh.num_devices}:cpu"), mesh, **settings)


def conversions(shape: tuple[int, ...], costs: Any = None) -> Conversions:
    mesh = device_mesh(shape)
    return Conversions(mesh=mesh, costs=costs or roofline(mesh))


def tile_of(x: jax.Array, spec: ShardingSpec, mesh: DeviceMesh) -> jax.Array:
    """This device's tile of a whole tensor, cut without the code under test; partial sums are multiples that add up."""
    for dim, axes in enumerate(spec.dims):
        size = x.shape[dim] // mesh.axes_size(axes)
        x = lax.dynamic_slice_in_dim(x, tile_index(axes, mesh) * size, size, dim)
    if spec.unreduced:
        n = mesh.axes_size(spec.unreduced)
        x = x * ((tile_index(spec.unreduced, mesh) + 1) * 2.0 / (n * (n + 1)))
    return x


def run_all(cases: list[tuple[Pair, tuple[Step, ...]]], shape: tuple[int, ...], mesh: DeviceMesh) -> list[float]:
    """Largest error on any device per conversion; all of them in one program, because compiling is what costs."""
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1

    def body(x: jax.Array) -> jax.Array:
        errors = []
        for (before, after), steps in cases:
            tile = tile_of(x, before, mesh)
            for step in steps:
                tile = run_step(tile, step, mesh)
            wanted = tile_of(x, ShardingSpec(after.dims), mesh)
            if after.unreduced:
                tile = lax.psum(tile, after.unreduced)
            errors.append(jnp.inf if tile.shape != wanted.shape else jnp.abs(tile - wanted).max())
        return lax.pmax(jnp.stack(errors), mesh.axis_names)

    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(body, mesh=jax_mesh(mesh), in_specs=(spec,), out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(run, compiler_options=QUICK_COMPILE)(whole)).tolist()


def reachable(made: Conversions, shape: tuple[int, ...]) -> list[Pair]:
    specs, table = made.space(len(shape)).specs, made.table(shape, 4)
    return [(specs[i], specs[j]) for i, j in np.argwhere(np.isfinite(table)) if i != j]


@pytest.mark.parametrize(("shape", "count"), [((8, 4), 11), ((4, 8, 8), 19)])
def test_numbers_of_reduced_specs_on_two_axes(shape, count):
    """(x,y) and (y,x) on one dim are two specs. All their pairs run in tests/acceptance/test_redistribution.py."""
    assert sum(not s.unreduced for s in conversions((2, 2)).space(len(shape)).specs) == count


def test_partial_sums_reach_everything_they_can():
    made, shape = conversions((2, 2)), (8, 4)
    pairs = [p for p in reachable(made, shape) if p[0].unreduced]
    assert set(pairs) == {p for p in all_pairs(made.mesh, 2) if p[0].unreduced and p[0] != p[1]}
    rng = np.random.default_rng(0)
    check_conversions(made, [pairs[i] for i in rng.choice(len(pairs), 3, replace=False)], shape)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("mesh", [(2,), (4,), (8,), (2, 2), (2, 4)])
def test_every_pair(mesh, rank):
    """All ordered pairs, partial sums as source too, by explicit collectives and by XLA."""
    made = conversions(mesh)
    pairs = [pair for pair in all_pairs(made.mesh, rank) if pair[0] != pair[1]]
    check_conversions(made, pairs, (8, 16, 8, 8)[:rank])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_one_pair_of_every_class_on_three_axes(rank):
    made = conversions((2, 2, 2))
    pairs = [pair for pair in one_per_class(made.mesh, rank) if pair[0] != pair[1]]
    check_conversions(made, pairs, (8, 16, 8, 8)[:rank])


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shape"), [((2, 2, 2), (8, 16)), ((2, 4), (8, 8, 8)), ((2, 2, 2), (8,))])
def test_many_samples_on_larger_meshes(mesh, shape):
    made = conversions(mesh, RandomCosts(7))
    pairs = reachable(made, shape)
    rng = np.random.default_rng(7)
    check_conversions(made, [pairs[i] for i in rng.choice(len(pairs), min(600, len(pairs)), replace=False)], shape)


@pytest.mark.medium
@pytest.mark.parametrize("mesh", slow_but({(4,), (2, 4)}, [(4,), (2, 4), (2, 2, 2)]))
def test_every_single_step_does_what_it_says(mesh):
    made, shape = conversions(mesh), (8, 16)
    steps = made.space(2).steps
    rng = np.random.default_rng(0)
    chosen = [steps[i] for i in rng.choice(len(steps), min(60, len(steps)), replace=False)]
    errors = run_all([((s.before, s.after), (s,)) for s in chosen], shape, made.mesh)
    wrong = [f"{s.kind} {s.axes} {s.before}->{s.after}" for s, e in zip(chosen, errors, strict=True) if e > 1e-3]
    assert not wrong, wrong


def test_a_wrong_step_is_noticed():
    made = conversions((2, 2))
    x, y = ShardingSpec.parse("[x,_]"), ShardingSpec.parse("[y,_]")
    (step,) = made.steps(x, y, (8, 4), 4)
    assert step.kind is CollectiveKind.COLLECTIVE_PERMUTE
    assert run_all([((x, y), ())], (8, 4), made.mesh)[0] > 1
    assert run_all([((x, y), (step,))], (8, 4), made.mesh)[0] == 0


@pytest.mark.medium
@pytest.mark.parametrize("mesh", [(4,), (2, 4), (2, 2, 2)])
def test_the_table_is_the_sum_of_the_steps(mesh):
    made, shape, itemsize = conversions(mesh), (16, 32), 4
    for before, after in reachable(made, shape):
        total, spec = 0.0, before
        for step in made.steps(before, after, shape, itemsize):
            assert step.before == spec
            spec = step.after
            if step.kind is not None:
                size = step_size_bytes(step, shape, itemsize, made.mesh)
                total += made.costs.collective(step.kind, made.mesh.sort_axes(set(step.axes)), size)
        assert spec == after
        assert made.time_s(before, after, shape, itemsize) == pytest.approx(total, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mesh", [(2, 4), (2, 2, 2)])
def test_no_detour_is_cheaper(mesh, seed):
    table = conversions(mesh, RandomCosts(seed)).table((8, 16), 4)
    through = (table[:, :, None] + table[None, :, :]).min(axis=1)
    finite = np.isfinite(table)
    assert (np.diag(table)[np.isfinite(np.diag(table))] == 0).all()
    assert (table[finite] <= through[finite] * (1 + 1e-9) + 1e-10).all()


@pytest.mark.parametrize(("mesh", "rank"), [((8,), 4), ((2, 4), 1), ((2, 4), 3), ((2, 4), 4), ((2, 2, 2), 2)])
def test_only_slices_and_doing_nothing_are_free(mesh, rank):
    made = conversions(mesh)
    specs, table = made.space(rank).specs, made.table((8, 16, 8, 8)[:rank], 4)
    for (i, before), (j, after) in itertools.product(enumerate(specs), enumerate(specs)):
        extends = all(new[: len(old)] == old for old, new in zip(before.dims, after.dims, strict=True))
        sliced = before.unreduced == after.unreduced and extends
        assert (table[i, j] == 0) == sliced, f"{before} -> {after} costs {table[i, j]}"


def test_a_permute_cuts_the_part_that_is_wanted():
    """[x,_] on (2,4) holds each half four times: the four holders send an eighth each, all different."""
    made, shape = conversions((2, 4)), (8, 16)
    before, after = ShardingSpec.parse("[x,_]"), ShardingSpec.parse("[y,x]")
    (step,) = made.steps(before, after, shape, 4)
    assert step.kind is CollectiveKind.COLLECTIVE_PERMUTE
    assert step_size_bytes(step, shape, 4, made.mesh) == 8 * 16 * 4 // 8
    pairs, parts = permutation(before, after, made.mesh)
    assert sorted(target for _, target in pairs) == sorted(source for source, _ in pairs) == list(range(8))
    assert len({(source // 4, part) for (source, _), part in zip(pairs, parts, strict=True)}) == 8
    assert run_all([((before, after), (step,))], shape, made.mesh) == [0]


@pytest.mark.parametrize("shape", [(64, 64), (24, 56), (1000, 3000)])
def test_of_equally_dear_ways_the_shortest_is_taken(shape):
    mesh = device_mesh((2, 4))
    made = Conversions(mesh=mesh, costs=cost_model("ring", Cluster.parse("1x8:cpu"), mesh))
    for before in ("[x.y,_]", "[_,y.x]"):
        (step,) = made.steps(ShardingSpec.parse(before), ShardingSpec.replicated(2), shape, 4)
        assert set(step.axes) == {"x", "y"}


def test_a_permute_names_the_axes_that_it_crosses():
    """All of them change a dim that z splits, but tiles may travel along other axes only."""
    steps = {(str(s.before), str(s.after)): s for s in conversions((2, 2, 2)).space(1).steps}
    assert steps["[x.y.z]", "[y.x.z]"].axes == ("x", "y")
    assert steps["[x.y.z]", "[x.z.y]"].axes == ("y", "z")
    assert steps["[x.y.z]", "[z.x.y]"].axes == ("x", "y", "z")


def test_of_equally_dear_gathers_the_larger_is_along_the_first_dim():
    made = conversions((2, 2))
    for before in ("[x,y]", "[y,x]"):
        steps = made.steps(ShardingSpec.parse(before), ShardingSpec.replicated(2), (8, 8), 4)
        assert [s.source_dim for s in steps] == [1, 0]


def test_cheapest_sequences_are_the_known_ones():
    made, shape = conversions((2, 4)), (64, 64)

    def kinds(before: str, after: str) -> list[str]:
        steps = made.steps(ShardingSpec.parse(before), ShardingSpec.parse(after), shape, 4)
        return [str(s.kind or "slice") for s in steps]

    assert kinds("[x,_]", "[x,_]") == []
    assert kinds("[_,_]", "[x,y]") == ["slice", "slice"]
    assert kinds("[x,_]", "[_,_]") == ["all-gather"]
    assert set(kinds("[x.y,_]", "[_,_]")) == {"all-gather"}
    assert kinds("[x,_]", "[_,x]") == ["all-to-all"]
    assert kinds("[x,_]+{y}", "[x,_]") == ["all-reduce"]
    assert kinds("[x,_]+{y}", "[x,y]") == ["reduce-scatter"]
    assert kinds("[_,_]+{y}", "[_,_]") == ["all-reduce"]
    assert kinds("[x.y,_]", "[y.x,_]") == ["collective-permute"]


def test_replicated_to_split_is_free_and_partial_sums_are_not():
    made = conversions((2, 4))
    replicated, split = ShardingSpec.replicated(2), ShardingSpec.parse("[x,y]")
    assert made.time_s(replicated, split, (8, 8), 4) == 0
    assert made.time_s(split, replicated, (8, 8), 4) > 0
    assert made.time_s(ShardingSpec.parse("[_,_]+{x}"), replicated, (8, 8), 4) > 0


def test_nothing_converts_to_a_spec_that_does_not_divide():
    made, shape = conversions((2, 4)), (6, 8)
    specs, table = made.space(2).specs, made.table(shape, 4)
    for i, spec in enumerate(specs):
        if not spec.divides(shape, made.mesh):
            assert np.isinf(table[i]).all() and np.isinf(table[:, i]).all()
    assert sum(s.divides(shape, made.mesh) for s in specs) < len(specs)
    with pytest.raises(ValueError, match="no conversion"):
        made.steps(ShardingSpec.replicated(2), ShardingSpec.parse("[y,_]"), shape, 4)


def test_an_empty_dim_is_never_split():
    made = conversions((2, 4))
    valid = made.space(2).valid((0, 8))
    assert {s.dims[0] for s, ok in zip(made.space(2).specs, valid, strict=True) if ok} == {()}


def test_a_forbidden_collective_is_not_used():
    mesh = device_mesh((2, 4))
    made = Conversions(mesh=mesh, costs=roofline(mesh, forbid=("all-to-all", "collective-permute")))
    steps = made.steps(ShardingSpec.parse("[x,_]"), ShardingSpec.parse("[_,x]"), (8, 8), 4)
    assert [s.kind for s in steps] == [CollectiveKind.ALL_GATHER, None]


def test_axes_of_size_one_never_appear():
    made = conversions((1, 4))
    assert all("x" not in s.sharded_axes + s.unreduced for s in made.space(2).specs)


def test_a_replicated_tensor_becomes_partial_sums_that_add_up():
    mesh = device_mesh((2, 4))

    def body(x: jax.Array) -> jax.Array:
        return lax.psum(keep_on_first(x, ("x", "y"), mesh), ("x", "y"))

    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(body, mesh=jax_mesh(mesh), in_specs=(spec,), out_specs=spec, check_vma=False)
    x = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(run)(x), x)


def test_slices_of_integers_survive_xla():
    """XLA's simplifier loses a multiplication between two dynamic slices if the second takes one integer."""
    mesh = device_mesh((2, 4))
    first, second = (
        Step(kind=None, axes=(a,), target_dim=0, before=ShardingSpec.parse(b), after=ShardingSpec.parse(c))
        for a, b, c in (("x", "[_]", "[x]"), ("y", "[x]", "[x.y]"))
    )

    def body(n: jax.Array) -> jax.Array:
        return run_step(run_step(n, first, mesh) * 3, second, mesh)

    whole, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(("x", "y"))
    run = jax.shard_map(body, mesh=jax_mesh(mesh), in_specs=(whole,), out_specs=split, check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(np.arange(8, dtype=np.int32)), np.arange(8) * 3)


def test_cuts_of_integers_survive_xla():
    """The same in a permute that cuts."""
    mesh = device_mesh((2, 4))
    texts = ("[_]", "[x]", "[y.x]")
    first, second = (
        Step(kind=kind, axes=axes, target_dim=0, before=ShardingSpec.parse(b), after=ShardingSpec.parse(c))
        for kind, axes, b, c in (
            (None, ("x",), *texts[:2]),
            (CollectiveKind.COLLECTIVE_PERMUTE, ("x", "y"), *texts[1:]),
        )
    )

    def body(n: jax.Array) -> jax.Array:
        return run_step(run_step(n, first, mesh) * 3, second, mesh)

    whole, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(("y", "x"))
    run = jax.shard_map(body, mesh=jax_mesh(mesh), in_specs=(whole,), out_specs=split, check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(np.arange(8, dtype=np.int32)), np.arange(8) * 3)
