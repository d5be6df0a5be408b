"""Tile plans between meshes: every byte once, moved on NumPy tiles, load shared among replicas, replicas kept near."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import SpecSpace
from alpa_lite.costs.tiles import Placement, TilePlan, check_tiles, move_tiles, plan_tiles, slices
from alpa_lite.errors import SpecError
from alpa_lite.lowering.lower import partition_spec
from tests.harness import device_mesh

MESHES = ((1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 2, 2))


def specs(mesh: DeviceMesh, rank: int) -> list[ShardingSpec]:
    return [s for s in SpecSpace(mesh=mesh, rank=rank).specs if not s.unreduced]


def placement(spec: ShardingSpec, mesh: DeviceMesh, first: int = 0) -> Placement:
    return Placement(spec=spec, mesh=mesh, devices=tuple(range(first, first + mesh.num_devices)))


def check(plan: TilePlan) -> None:
    """Moves a tensor of distinct numbers and compares every tile with what its device should hold."""
    check_tiles(plan)
    whole = np.arange(np.prod(plan.shape)).reshape(plan.shape)
    before = {d: whole[slices(box)] for d, box in plan.before.boxes(plan.shape).items()}
    after = move_tiles(plan, before)
    assert set(after) == set(plan.after.devices)
    for device, box in plan.after.boxes(plan.shape).items():
        np.testing.assert_array_equal(after[device], whole[slices(box)])


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(("source", "target"), list(itertools.product([(2,), (4,), (2, 2)], repeat=2)))
def test_all_pairs_of_small_meshes(source, target, rank):
    """Disjoint devices (0.. and 8..), and overlapping ones (0.. and 1..)."""
    one, other = device_mesh(source), device_mesh(target)
    shape = (8, 4)[:rank]
    for before, after, first in itertools.product(specs(one, rank), specs(other, rank), (8, 1)):
        check(plan_tiles(shape, 4, placement(before, one), placement(after, other, first)))


@settings(max_examples=60)
@given(data=st.data(), rank=st.integers(0, 4), first=st.sampled_from((0, 3, 16)))
@pytest.mark.medium
def test_random_pairs_up_to_rank_4(data, rank, first):
    one, other = (device_mesh(data.draw(st.sampled_from(MESHES))) for _ in range(2))
    before, after = (data.draw(st.sampled_from(specs(mesh, rank))) for mesh in (one, other))
    plan = plan_tiles((8,) * rank, 2, placement(before, one), placement(after, other, first))
    check(plan)
    assert plan == plan_tiles((8,) * rank, 2, placement(before, one), placement(after, other, first))


def test_boxes_are_those_of_jax():
    mesh = device_mesh((2, 2, 2))
    for spec in specs(mesh, 2):
        sharding = jax.sharding.NamedSharding(
            jax.make_mesh(mesh.shape, mesh.axis_names, axis_types=(jax.sharding.AxisType.Auto,) * 3),
            partition_spec(spec),
        )
        theirs = {d.id: index for d, index in sharding.devices_indices_map((8, 16)).items()}
        for device, box in placement(spec, mesh).boxes((8, 16)).items():
            assert box == tuple(s.indices(n)[:2] for s, n in zip(theirs[device], (8, 16), strict=True))


def test_same_placement_moves_nothing():
    mesh = device_mesh((2, 4))
    for spec in specs(mesh, 2):
        plan = plan_tiles((8, 8), 4, placement(spec, mesh), placement(spec, mesh))
        assert plan.moved_bytes == 0
        assert len(plan.transfers) == 8


def test_replicas_share_the_load():
    one, other = device_mesh((4,)), device_mesh((8,))
    whole, split = ShardingSpec.parse("[_]"), ShardingSpec.parse("[x]")
    plan = plan_tiles((64,), 4, placement(whole, one), placement(split, other, 8))
    assert set(plan.sent_bytes().values()) == {64}  # 8 pieces of 32 bytes from 4 devices
    plan = plan_tiles((64,), 4, placement(split, one), placement(whole, other, 8))
    assert set(plan.sent_bytes().values()) == {8 * 64}  # no choice: each source holds another quarter


def test_a_replica_on_the_same_host_sends():
    mesh = device_mesh((4,))
    whole = ShardingSpec.parse("[_]")
    receivers = Placement(spec=whole, mesh=mesh, devices=(4, 5, 6, 7))
    plan = plan_tiles((8,), 4, placement(whole, mesh), receivers, host_of=lambda d: d % 2)
    assert all(t.source % 2 == t.target % 2 for t in plan.transfers)
    assert set(plan.sent_bytes().values()) == {32}
    by_table = plan_tiles((8,), 4, placement(whole, mesh), receivers, host_of={d: d % 2 for d in range(8)})
    assert by_table == plan


def test_a_receiver_that_holds_the_piece_keeps_it():
    mesh = device_mesh((4,))
    whole, split = ShardingSpec.parse("[_]"), ShardingSpec.parse("[x]")
    assert plan_tiles((8,), 4, placement(whole, mesh), placement(split, mesh)).moved_bytes == 0
    gather = plan_tiles((8,), 4, placement(split, mesh), placement(whole, mesh))
    assert gather.moved_bytes == 4 * 3 * 8  # each of 4 devices receives 3 of the 4 pieces


def test_text():
    mesh = device_mesh((2,))
    plan = plan_tiles(
        (4,), 4, placement(ShardingSpec.parse("[x]"), mesh), placement(ShardingSpec.parse("[_]"), mesh, 1)
    )
    assert str(plan) == (
        "[4] x 4 B: [x] on (x=2) -> [_] on (x=2), 24 B moved\n"
        "  0 -> 1  [0:2]  8 B\n  1 -> 1  [2:4]  8 B  stays\n  0 -> 2  [0:2]  8 B\n  1 -> 2  [2:4]  8 B\n"
    )


@pytest.mark.parametrize(
    "change", ["drop", "twice", "instead", "wrong source", "unknown target", "wrong place", "bytes"]
)
def test_the_verifier_notices(change):
    mesh = device_mesh((2,))
    plan = plan_tiles(
        (4,), 4, placement(ShardingSpec.parse("[x]"), mesh), placement(ShardingSpec.parse("[_]"), mesh, 4)
    )
    first, *rest = plan.transfers
    broken = {
        "drop": rest,
        "twice": [first, first, *rest],
        "instead": [first, first, *rest[1:]],
        "unknown target": [dataclasses.replace(first, target=7), *rest],
        "wrong source": [dataclasses.replace(first, source=1), *rest],
        "wrong place": [dataclasses.replace(first, target_box=((2, 4),)), *rest],
        "bytes": [dataclasses.replace(first, size_bytes=4), *rest],
    }[change]
    check_tiles(plan)
    with pytest.raises(AssertionError):
        check_tiles(dataclasses.replace(plan, transfers=tuple(broken)))


def test_sizes_that_do_not_divide_are_refused():
    mesh = device_mesh((4,))
    split, whole = ShardingSpec.parse("[x]"), ShardingSpec.parse("[_]")
    with pytest.raises(ValueError, match="dim 0 of size 10 does not divide over axes"):
        plan_tiles((10,), 4, placement(whole, mesh), placement(split, mesh, 4))


def test_placements_are_checked():
    mesh = device_mesh((2,))
    with pytest.raises(SpecError, match=r"needs 2 different ids.*give one per device"):
        Placement(spec=ShardingSpec.parse("[x]"), mesh=mesh, devices=(0, 0))
    with pytest.raises(SpecError, match=r"Partial sums stay on their mesh.*reduce over x first"):
        Placement(spec=ShardingSpec.parse("[_]+{x}"), mesh=mesh, devices=(0, 1))
