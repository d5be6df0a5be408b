"""Laws of the alpha-beta model of collectives, as properties over clusters, meshes and sizes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.cluster import Calibration, Cluster, Link, MeasuredCollective
from alpa_lite.cluster.hardware import device_names
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.collectives import MeshCosts, group_of
from alpa_lite.costs.conventions import RooflineCosts
from alpa_lite.costs.conversion import Conversions, step_price

K = CollectiveKind
kinds = st.sampled_from(list(K))
sizes = st.integers(0, 2**36)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Cluster, DeviceMesh, tuple[str, ...]]:
    """A cluster, a mesh over all of it, and axes with more than one device."""
    hosts, devices = draw(st.sampled_from([(1, 2), (1, 8), (2, 4), (4, 8), (8, 8), (3, 4), (4, 1)]))
    cluster = Cluster.of(draw(st.sampled_from(device_names())), num_hosts=hosts, devices_per_host=devices)
    shape = draw(st.sampled_from(cluster.mesh_candidates(draw(st.integers(1, 3)))))
    mesh = DeviceMesh(shape=shape, axis_names=("x", "y", "z")[: len(shape)])
    wide = [name for name, size in zip(mesh.axis_names, shape, strict=True) if size > 1]
    axes = mesh.sort_axes(draw(st.sets(st.sampled_from(wide), min_size=1)))
    return cluster, mesh, axes


def costs_of(cluster: Cluster, mesh: DeviceMesh) -> MeshCosts:
    return MeshCosts(cluster=cluster, mesh=mesh)


def slower(link: Link, factor: float) -> Link:
    return dataclasses.replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
        latency_s=link.latency_s * factor,
        setup_s=link.setup_s * factor,
    )


@pytest.mark.medium
@given(meshes(), kinds, sizes, sizes)
def test_monotone_in_bytes(where, kind, a, b):
    cluster, mesh, axes = where
    costs = costs_of(cluster, mesh)
    small, large = sorted((a, b))
    assert costs.time_s(kind, axes, small) <= costs.time_s(kind, axes, large)


@given(meshes(), kinds, sizes, st.floats(1, 100), st.sampled_from(["inside", "between"]))
@pytest.mark.medium
def test_never_cheaper_over_a_slower_link(where, kind, size, factor, which):
    cluster, mesh, axes = where
    worse = dataclasses.replace(cluster, **{which: slower(getattr(cluster, which), factor)})
    assert costs_of(worse, mesh).time_s(kind, axes, size) >= costs_of(cluster, mesh).time_s(kind, axes, size)


@pytest.mark.medium
@given(st.sampled_from(device_names()), st.sampled_from([2, 4, 8]), kinds, sizes)
def test_never_cheaper_across_hosts_than_inside_one(name, n, kind, size):
    cluster = Cluster.of(name, num_hosts=n, devices_per_host=n)
    costs = costs_of(cluster, DeviceMesh(shape=(n, n), axis_names=("x", "y")))
    assert costs.time_s(kind, ("x",), size) >= costs.time_s(kind, ("y",), size)


@given(meshes(), sizes)
@pytest.mark.medium
def test_all_reduce_is_reduce_scatter_and_all_gather(where, size):
    cluster, mesh, axes = where
    costs = costs_of(cluster, mesh)
    parts = costs.time_s(K.REDUCE_SCATTER, axes, size) + costs.time_s(K.ALL_GATHER, axes, size)
    assert costs.time_s(K.ALL_REDUCE, axes, size) == pytest.approx(parts, rel=1e-12)


@given(meshes(), st.integers(1, 2**36))
@pytest.mark.medium
def test_all_to_all_is_cheaper_than_all_gather_of_the_same_tensor(where, size):
    cluster, mesh, axes = where
    costs = costs_of(cluster, mesh)
    shard = size / mesh.axes_size(axes)  # an all-to-all is sized by one device's tile, an all-gather by the whole
    assert costs.time_s(K.ALL_TO_ALL, axes, shard) < costs.time_s(K.ALL_GATHER, axes, size)


@pytest.mark.medium
@given(meshes(), kinds, sizes)
def test_no_collective_is_free_and_its_slowest_link_bounds_it(where, kind, size):
    cluster, mesh, axes = where
    time = costs_of(cluster, mesh).time_s(kind, axes, size)
    assert time > 0
    # With every other link infinitely fast the slowest one remains, and it must not cost more than all of them.
    num_hosts, _ = cluster.group_extent(mesh, axes)
    free = Link(bandwidth_bytes_per_s=1e30, latency_s=0.0, setup_s=0.0)
    alone = dataclasses.replace(cluster, inside=free) if num_hosts > 1 else dataclasses.replace(cluster, between=free)
    slowest = costs_of(alone, mesh).time_s(kind, axes, size)
    assert 0 < slowest <= time


@given(meshes(), st.integers(1, 2**36))
@pytest.mark.medium
def test_a_gather_over_hosts_takes_at_least_what_must_cross_a_port(where, size):
    cluster, mesh, axes = where
    group = group_of(cluster, mesh, axes)
    if group.num_hosts * group.num_per_host != group.num_devices:
        return  # a group that is spread unevenly: the bound below counts devices per host
    outside = size * (group.num_hosts - 1) / group.num_hosts
    bound = outside / (group.port_bytes_per_s * group.num_per_host)
    assert costs_of(cluster, mesh).time_s(K.ALL_GATHER, axes, size) >= bound


@given(meshes(), kinds)
@pytest.mark.medium
def test_arrays_and_linear_form_agree_with_single_prices(where, kind):
    cluster, mesh, axes = where
    costs = costs_of(cluster, mesh)
    many = np.array([[0, 1], [4096, 2**30]])
    found = costs.time_s(kind, axes, many)
    alpha, beta = costs.linear(kind, axes)
    assert found.shape == many.shape
    for price, size in zip(found.ravel(), many.ravel(), strict=True):
        assert price == costs.time_s(kind, axes, int(size)) == alpha + beta * int(size)


@given(meshes(), kinds)
@pytest.mark.medium
def test_order_of_axes_does_not_matter(where, kind):
    cluster, mesh, axes = where
    costs = costs_of(cluster, mesh)
    assert costs.linear(kind, axes) == costs.linear(kind, axes[::-1])


def test_one_device_costs_nothing_and_an_unknown_axis_is_an_error():
    costs = costs_of(Cluster.parse("1x8:cpu"), DeviceMesh(shape=(1, 8), axis_names=("x", "y")))
    assert costs.time_s(K.ALL_REDUCE, ("x",), 2**20) == 0
    assert costs.time_s(K.ALL_REDUCE, (), 2**20) == 0
    assert costs.linear(K.ALL_REDUCE, ("x", "y")) == costs.linear(K.ALL_REDUCE, ("y",))
    with pytest.raises(KeyError, match="unknown mesh axis 'z'"):
        costs.linear(K.ALL_REDUCE, ("z",))


def test_devices_of_a_host_share_a_host_port():
    """8 groups of one device per host through one 3.125 GB/s port, against one group that has the port to itself."""
    cluster = Cluster.parse("4x8:v100-sxm2-16gb")
    shared = costs_of(cluster, DeviceMesh(shape=(4, 8), axis_names=("x", "y"))).linear(K.ALL_GATHER, ("x",))
    alone = costs_of(Cluster.parse("4x1:v100-sxm2-16gb"), DeviceMesh(shape=(4,), axis_names=("x",)))
    assert shared[1] == pytest.approx(8 * alone.linear(K.ALL_GATHER, ("x",))[1])
    together = costs_of(cluster, DeviceMesh(shape=(32,), axis_names=("x",))).linear(K.ALL_GATHER, ("x",))
    port = cluster.between.bandwidth_bytes_per_s
    assert together[1] == pytest.approx(31 / 32 / port)  # a ring over all devices crosses each port once


def test_worked_example_inside_one_h100_host():
    cluster = Cluster.parse("1x8:h100-sxm")
    time = costs_of(cluster, DeviceMesh(shape=(8,), axis_names=("x",))).time_s(K.ALL_REDUCE, ("x",), 2**30)
    wire = 2 * 7 / 8 * 2**30 / cluster.inside.bandwidth_bytes_per_s
    assert time == pytest.approx(wire + 2 * (cluster.inside.setup_s + 7 * cluster.inside.latency_s), rel=1e-12)


def test_groups_of_a_wired_host_get_the_rings_between_their_devices():
    """Pairs of neighbours have one or two links of six, and any two aligned neighbours may be meant."""
    cluster = Cluster.parse("1x8:v100-sxm2-16gb")
    link = cluster.inside.single_bytes_per_s

    def ring(cluster: Cluster, shape: tuple[int, ...], axes: tuple[str, ...]) -> float:
        mesh = DeviceMesh(shape=shape, axis_names=("x", "y")[: len(shape)])
        return group_of(cluster, mesh, axes).inside_bytes_per_s / link

    assert ring(cluster, (8,), ("x",)) == pytest.approx(6)
    assert ring(cluster, (2, 4), ("y",)) == pytest.approx(4)
    assert ring(cluster, (4, 2), ("x",)) == pytest.approx(2)
    assert ring(cluster, (4, 2), ("y",)) == ring(cluster, (2, 4), ("x",)) == pytest.approx(1)
    part = Cluster.parse("1x2:v100-sxm2-16gb")
    assert ring(part, (2,), ("x",)) == ring(cluster, (2,), ("x",)) == pytest.approx(1)
    hosts = Cluster.parse("2x8:v100-sxm2-16gb")
    assert ring(hosts, (2, 8), ("y",)) == pytest.approx(6)
    assert ring(hosts, (4, 4), ("x",)) == pytest.approx(1)  # two of each group in each host


def test_all_to_all_in_a_torus_travels_through_neighbours():
    mesh = DeviceMesh(shape=(16,), axis_names=("x",))
    torus = Cluster.of("tpu-v5e", num_hosts=2, devices_per_host=8)
    switch = dataclasses.replace(
        torus,
        inside=dataclasses.replace(torus.inside, topology="switch"),
        between=dataclasses.replace(torus.between, topology="switch"),
    )
    ratio = (
        costs_of(torus, mesh).linear(K.ALL_TO_ALL, ("x",))[1] / costs_of(switch, mesh).linear(K.ALL_TO_ALL, ("x",))[1]
    )
    assert ratio == pytest.approx(4)


def calibration_with(*measured: MeasuredCollective) -> Calibration:
    return Calibration(
        device_kind="cpu",
        num_devices=8,
        matmul_flops_per_s=(("f32", 1e10),),
        ramp_s=0.0,
        memory_bandwidth_bytes_per_s=1e9,
        launch_s=0.0,
        collectives=measured,
    )


def test_collectives_along_other_dims_cost_what_was_measured_of_them():
    kind = K.REDUCE_SCATTER
    first = MeasuredCollective(kind=kind, num_devices=8, alpha_s=1e-7, beta_s_per_byte=1e-11)
    inner = dataclasses.replace(first, beta_s_per_byte=4e-11, inner=True)
    cluster = Cluster.of("cpu", devices_per_host=8, calibration=calibration_with(first, inner))
    mesh = DeviceMesh(shape=(8,), axis_names=("x",))
    meshes = costs_of(cluster, mesh)
    assert meshes.inner_extra(kind, ("x",)) == pytest.approx((0.0, 3e-11))
    assert meshes.inner_extra(K.ALL_GATHER, ("x",)) == (0.0, 0.0)
    assert costs_of(Cluster.of("cpu", devices_per_host=8), mesh).inner_extra(kind, ("x",)) == (0.0, 0.0)
    costs = RooflineCosts(meshes=meshes)
    conversions = Conversions(mesh=mesh, costs=costs)
    partial = ShardingSpec(((), ()), ("x",))
    along = [ShardingSpec((("x",), ())), ShardingSpec(((), ("x",)))]
    prices = []
    for spec in along:
        (step,) = conversions.steps(partial, spec, (64, 64), 4)
        assert step.kind is kind
        prices.append(conversions.time_s(partial, spec, (64, 64), 4))
        assert step_price(step, (64, 64), 4, mesh, costs) == pytest.approx(prices[-1], rel=1e-7)
    assert prices == pytest.approx([1e-7 + 16384e-11, 1e-7 + 4 * 16384e-11], rel=1e-7)


def test_calibration_replaces_the_formula_inside_a_host():
    measured = MeasuredCollective(kind=K.ALL_REDUCE, num_devices=8, alpha_s=1e-4, beta_s_per_byte=7e-9)
    cluster = Cluster.of("cpu", num_hosts=2, devices_per_host=8, calibration=calibration_with(measured))
    costs = costs_of(cluster, DeviceMesh(shape=(2, 8), axis_names=("x", "y")))
    assert costs.linear(K.ALL_REDUCE, ("y",)) == pytest.approx((1e-4, 7e-9), rel=1e-12)
    table = costs_of(Cluster.of("cpu", num_hosts=2, devices_per_host=8), costs.mesh)
    assert costs.linear(K.ALL_GATHER, ("y",)) == table.linear(K.ALL_GATHER, ("y",))
    assert costs.linear(K.ALL_REDUCE, ("x",)) == table.linear(K.ALL_REDUCE, ("x",))
    small = costs_of(cluster, DeviceMesh(shape=(8, 2), axis_names=("x", "y"))).linear(K.ALL_REDUCE, ("y",))
    assert math.isclose(small[1], 7e-9 * (1 / 2) / (7 / 8))
