"""The table of stage costs: which submeshes bound what a layer takes on larger ones."""

from __future__ import annotations

import pytest

import alpa_lite as al
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.collectives import MeshCosts
from alpa_lite.interop import admissible_submeshes
from alpa_lite.planner.stage_table import bounds_larger


def ring_s(cluster: al.Cluster, submesh: tuple[int, int]) -> float:
    """Seconds per byte of a ring through all devices of a submesh; 0 for one device."""
    part = al.Cluster.of(cluster.device.name, num_hosts=submesh[0], devices_per_host=submesh[1])
    count = part.num_devices
    mesh = DeviceMesh(shape=(count,), axis_names=("x",))
    beta = MeshCosts(cluster=part, mesh=mesh).linear(CollectiveKind.ALL_REDUCE, ("x",))[1]
    return beta * count / (2 * (count - 1)) if count > 1 else 0.0


@pytest.mark.parametrize(
    ("device", "bounding"), [("h100-sxm", {1, 2, 4, 8, 16}), ("v100-sxm2-16gb", {1, 8, 16}), ("cpu", {1, 2, 4, 8, 16})]
)
def test_a_submesh_bounds_those_whose_devices_exchange_no_faster(device: str, bounding: set[int]) -> None:
    """A part of a host that is wired in pairs may be slower than the whole; one device exchanges nothing."""
    cluster = al.Cluster.parse(f"2x8:{device}")
    submeshes = {hosts * devices: (hosts, devices) for hosts, devices in admissible_submeshes(2, 8)}
    assert {size for size in submeshes if bounds_larger(cluster, size)} == bounding
    took = {size: ring_s(cluster, submesh) for size, submesh in submeshes.items()}
    slower = {size for size in took if any(took[size] > 1.001 * took[other] for other in took if other > size)}
    assert slower.isdisjoint(bounding)
    assert bool(slower) == (len(bounding) < len(submeshes))
