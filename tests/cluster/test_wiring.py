"""Rings through devices that are wired in pairs: against enumeration, and the known ones of a hybrid cube mesh."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.cluster import Cluster
from alpa_lite.cluster.hardware import read_device
from alpa_lite.cluster.wiring import Wiring, disjoint_rings
from alpa_lite.errors import ClusterError

V100 = read_device("v100-sxm2-16gb")[1]
LINK = 25e9 * 0.8  # one NVLink at the table's efficiency


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    size = draw(st.integers(2, 5))
    links = [[0] * size for _ in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        links[a][b] = links[b][a] = draw(st.integers(0, 2))
    return tuple(map(tuple, links))


def enumerated(wiring: Wiring) -> int:
    """The largest multiset of rings whose edges together are no more than the links."""
    size = len(wiring)
    edges = [
        Counter(frozenset(edge) for edge in itertools.pairwise((0, *rest, 0)))
        for rest in itertools.permutations(range(1, size))
        if size == 2 or rest[0] < rest[-1]
    ]
    if size == 2:
        return wiring[0][1]
    for count in range(4, 0, -1):
        for rings in itertools.combinations_with_replacement(edges, count):
            used = sum(rings, Counter())
            if all(number <= wiring[min(edge)][max(edge)] for edge, number in used.items()):
                return count
    return 0


@given(wirings())
@pytest.mark.medium
def test_most_rings_equal_enumeration(wiring):
    assert disjoint_rings(wiring, tuple(range(len(wiring)))) == enumerated(wiring)


def test_a_square_with_diagonals_has_one_ring():
    square = tuple(tuple(int(a != b) for b in range(4)) for a in range(4))
    assert disjoint_rings(square, (0, 1, 2, 3)) == 1


def test_six_links_of_every_v100_are_wired():
    assert [sum(row) for row in V100.wiring] == [6] * 8
    assert V100.single_bytes_per_s == pytest.approx(LINK)


@pytest.mark.parametrize(
    ("devices", "links_per_direction"),
    [
        ((0, 1), 1),  # one NVLink
        ((2, 3), 2),
        ((0, 4), 2),  # to the other half of the host
        ((0, 2, 4, 6), 2),  # one ring, both ways
        ((0, 1, 2, 3), 4),
        ((0, 1, 2, 3, 4, 5, 6, 7), 6),  # all links
    ],
)
def test_rings_of_a_hybrid_cube_mesh(devices, links_per_direction):
    assert V100.ring_bytes_per_s(devices) == pytest.approx(links_per_direction * LINK)


def test_without_a_ring_the_detour_is_left():
    assert V100.ring_bytes_per_s((0, 5)) == V100.pair_bytes_per_s(0, 5) == V100.detour_bytes_per_s < LINK
    assert V100.ring_bytes_per_s((0, 1, 2, 3, 4)) == V100.detour_bytes_per_s  # 4 hangs on 0 alone


def test_an_exchange_waits_for_the_worst_linked_pair():
    assert V100.exchange_bytes_per_s((0, 1)) == pytest.approx(LINK)
    assert V100.exchange_bytes_per_s((0, 1, 2, 3)) == pytest.approx(3 * LINK)  # a third over the single link
    assert V100.exchange_bytes_per_s(tuple(range(8))) == pytest.approx(
        7 / 3 * V100.detour_bytes_per_s
    )  # 3 have no link


def test_more_devices_than_wired_are_refused():
    with pytest.raises(
        ClusterError, match=r"16 devices per host .* has 8 devices, linked in pairs.*'2x8:v100-sxm2-16gb'"
    ):
        Cluster.parse("1x16:v100-sxm2-16gb")


def test_mesh_shapes_of_a_wired_host_are_not_symmetric():
    assert (4, 2) in Cluster.parse("1x8:v100-sxm2-16gb").mesh_candidates(2, up_to_symmetry=True)
    assert (4, 2) not in Cluster.parse("1x8:h100-sxm").mesh_candidates(2, up_to_symmetry=True)
