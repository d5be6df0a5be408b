"""Submesh shapes, and the proof that any list of them with all devices can be placed, by trying lists."""

from __future__ import annotations

import numpy as np
import pytest

from alpa_lite.errors import SlicingError
from alpa_lite.interop import admissible_submeshes, place_submeshes


def test_shapes():
    assert admissible_submeshes(1, 8) == ((1, 1), (1, 2), (1, 4), (1, 8))
    assert admissible_submeshes(3, 8) == ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8))
    assert admissible_submeshes(8, 6) == ((1, 1), (1, 2), (1, 6), (2, 6), (4, 6), (8, 6))
    assert admissible_submeshes(2, 1) == ((1, 1), (2, 1))


@pytest.mark.parametrize(("hosts", "devices"), [(1, 1), (1, 8), (2, 4), (3, 8), (4, 6), (5, 12), (7, 3)])
def test_every_full_list_can_be_placed_without_overlap(hosts, devices):
    shapes = admissible_submeshes(hosts, devices)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        chosen, left = [], hosts * devices
        while left:
            fitting = [shape for shape in shapes if shape[0] * shape[1] <= left]
            chosen.append(fitting[rng.integers(len(fitting))])
            left -= chosen[-1][0] * chosen[-1][1]
        taken = np.zeros((hosts, devices), dtype=int)
        for shape, place in zip(chosen, place_submeshes(chosen, hosts, devices), strict=True):
            assert place.shape == shape
            rows = slice(place.first_host, place.first_host + shape[0])
            part = taken[rows, place.first_device : place.first_device + shape[1]]
            assert part.shape == shape
            part += 1
        assert (taken == 1).all()


def test_places_keep_the_order_given():
    places = place_submeshes([(1, 2), (1, 4), (1, 2)], 1, 8)
    assert [place.first_device for place in places] == [4, 0, 6]


def test_parts_of_one_host_may_have_any_size():
    places = place_submeshes([(1, 2), (1, 6)], 1, 8)
    assert [place.first_device for place in places] == [6, 0]
    places = place_submeshes([(1, 3), (1, 5), (2, 8)], 3, 8)
    assert [(place.first_host, place.first_device) for place in places] == [(2, 5), (2, 0), (0, 0)]


def test_bad_input():
    with pytest.raises(SlicingError, match=r"0x8 devices has no submeshes.*at least 1"):
        admissible_submeshes(0, 8)
    with pytest.raises(SlicingError, match=r"submesh 1x5 cannot be part.*take shapes from admissible_submeshes"):
        place_submeshes([(1, 5)], 1, 4)
    with pytest.raises(SlicingError, match="submesh 2x2 cannot be part"):
        place_submeshes([(2, 2)], 1, 4)
    with pytest.raises(SlicingError, match="submeshes have 6 devices, the cluster 1x8 has 8"):
        place_submeshes([(1, 4), (1, 2)], 1, 8)
    with pytest.raises(SlicingError, match=r"no host has room for the submesh 1x2 .*largest first"):
        place_submeshes([(1, 3), (1, 3), (1, 2)], 2, 4)
