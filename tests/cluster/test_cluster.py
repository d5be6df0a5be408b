"""Clusters: text form, mesh shapes, which axes lie inside a host, and every message."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import ClusterError


def mesh(*shape: int) -> DeviceMesh:
    return DeviceMesh(shape=shape, axis_names=("x", "y", "z", "w")[: len(shape)])


@pytest.mark.parametrize("text", ["1x8:cpu", "8x8:h100-sxm", "4x8:v100-sxm2-16gb", "2x4:tpu-v5e"])
def test_text_form_round_trips(text):
    cluster = Cluster.parse(text)
    assert str(cluster) == text
    assert Cluster.parse(str(cluster)) == cluster


def test_parse_reads_hosts_before_devices():
    cluster = Cluster.parse(" 2x4:a100-80gb ")
    assert (cluster.num_hosts, cluster.devices_per_host, cluster.num_devices) == (2, 4, 8)
    assert cluster.device.name == "a100-80gb"


@pytest.mark.parametrize("text", ["", "8:h100-sxm", "8x8", "8x8:", "-1x8:cpu", "ax8:cpu", "1x8:cpu extra"])
def test_malformed_text_names_the_form_and_the_devices(text):
    with pytest.raises(ClusterError) as error:
        Cluster.parse(text)
    message = str(error.value)
    assert repr(text) in message
    assert "HOSTSxDEVICES_PER_HOST:DEVICE" in message
    assert "h200" in message
    assert "Cluster.parse" in message


def test_unknown_device_lists_known_ones_and_guesses():
    with pytest.raises(
        ClusterError, match=r"'h100' is not in the hardware table.*Did you mean 'h100-sxm'\?.*calibrate"
    ):
        Cluster.parse("1x8:h100")


def test_no_device_is_refused():
    with pytest.raises(
        ClusterError, match=r"0 hosts with 8 devices.*at least 1.*test_cluster.*Write the number of hosts first"
    ):
        Cluster.parse("0x8:cpu")


@pytest.mark.medium
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))
def test_mesh_candidates_are_all_ordered_factorisations(hosts, devices, num_axes):
    cluster = Cluster.of("cpu", num_hosts=hosts, devices_per_host=devices)
    found = cluster.mesh_candidates(num_axes)
    number = cluster.num_devices
    brute = {()}
    for _ in range(num_axes):
        brute = {(*shape, size) for shape in brute for size in range(1, number + 1)}
        brute = {shape for shape in brute if number % math.prod(shape) == 0}
    assert list(found) == sorted(shape for shape in brute if math.prod(shape) == number)
    without_ones = cluster.mesh_candidates(num_axes, min_axis_size=2)
    assert without_ones == tuple(shape for shape in found if min(shape) > 1)


def test_symmetric_shapes_are_dropped_on_one_host_only():
    assert Cluster.parse("1x8:cpu").mesh_candidates(2, up_to_symmetry=True) == ((1, 8), (2, 4))
    assert Cluster.parse("2x4:cpu").mesh_candidates(2, up_to_symmetry=True) == ((1, 8), (2, 4), (4, 2), (8, 1))


def test_mesh_of_no_axes_is_refused():
    with pytest.raises(ClusterError, match=r"mesh of 0 axes.*at least 1.*Give 1, 2 or 3"):
        Cluster.parse("1x8:cpu").mesh_candidates(0)


def test_earlier_axes_run_across_hosts():
    cluster = Cluster.parse("4x8:h100-sxm")

    def inside(grid):
        """Axes along which every group lies inside one host."""
        return tuple(axis for axis in grid.axis_names if cluster.group_extent(grid, (axis,))[0] == 1)

    assert inside(mesh(4, 8)) == ("y",)
    assert inside(mesh(8, 4)) == ("y",)
    assert inside(mesh(2, 2, 8)) == ("z",)
    assert inside(mesh(4, 2, 4)) == ("y", "z")
    assert inside(mesh(2, 4)) == ("x", "y")


@pytest.mark.parametrize(
    ("shape", "axes", "extent"),
    [
        ((4, 8), ("x",), (4, 1)),
        ((4, 8), ("y",), (1, 8)),
        ((4, 8), ("x", "y"), (4, 8)),
        ((8, 4), ("x",), (4, 2)),
        ((2, 16), ("y",), (2, 8)),
        ((2, 4), ("x", "y"), (1, 8)),
        ((4, 8), (), (1, 1)),
    ],
)
def test_group_extent(shape, axes, extent):
    assert Cluster.parse("4x8:h100-sxm").group_extent(mesh(*shape), axes) == extent


def test_mesh_larger_than_cluster_is_refused():
    with pytest.raises(
        ClusterError, match=r"\(x=4, y=4\) has 16 devices, the cluster 1x8:cpu has 8.*mesh_shape.*larger"
    ):
        Cluster.parse("1x8:cpu").check_mesh(mesh(4, 4))


def test_describe_tells_layout_device_and_links(golden):
    golden("cluster_describe", Cluster.parse("8x8:h100-sxm").describe() + Cluster.parse("1x8:cpu").describe())
