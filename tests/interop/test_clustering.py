"""Layer clustering equals brute force; forced and forbidden cuts hold."""

from __future__ import annotations

import numpy as np
import pytest

from alpa_lite.errors import SlicingError
from alpa_lite.interop import cluster_layers
from tests.interop.oracle import clusterings


@pytest.mark.parametrize("tolerance", [0.0, 0.1, 0.5, 3.0])
def test_equals_brute_force(tolerance):
    for seed in range(80):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(1, 12))
        flops = rng.integers(0, 6, size).astype(float) if seed % 2 else rng.random(size)
        cut_bytes = rng.integers(1, 4, size - 1).astype(float) if seed % 3 else rng.random(size - 1)
        cut_bytes[rng.random(size - 1) < 0.15] = np.inf
        possible = [cut for cut in range(1, size) if np.isfinite(cut_bytes[cut - 1])]
        count = int(rng.integers(1, min(6, len(possible) + 1) + 1))
        forced = sorted(rng.permutation(possible)[: int(rng.integers(0, count))].tolist()) if seed % 4 == 0 else []
        every = list(clusterings(flops, cut_bytes, count, forced))
        cap = max((1 + tolerance) * flops.sum() / count, min(load for _, load, _ in every))
        fewest, largest, _ = min((moved, load, cuts) for moved, load, cuts in every if load <= cap * (1 + 1e-9))
        found = cluster_layers(flops, cut_bytes, count, tolerance=tolerance, forced_cuts=forced)
        assert found.cut_bytes == pytest.approx(fewest, abs=1e-12)
        assert max(found.loads) == pytest.approx(largest, abs=1e-9)
        assert found.load_cap == pytest.approx(cap)
        assert set(forced) <= set(found.cuts)
        assert [sum(flops[a : b + 1]) for a, b in found.layers] == pytest.approx(list(found.loads))


def test_equal_layers_are_found_in_a_long_sequence():
    # 32 layers of 50 ops; inside a layer ten times more bytes cross than between layers.
    flops = np.tile(np.linspace(1, 2, 50), 32)
    cut_bytes = np.full(1599, 10.0)
    cut_bytes[49::50] = 1.0
    found = cluster_layers(flops, cut_bytes, 16)
    assert found.cuts == tuple(range(100, 1600, 100))
    assert found.cut_bytes == 15.0
    assert found.layers[0] == (0, 99)


def test_ties_in_bytes_are_balanced():
    found = cluster_layers(np.ones(12), np.ones(11), 3, tolerance=1.0)
    assert found.cuts == (4, 8)


def test_text(golden):
    golden("layer_clusters", str(cluster_layers([4, 1, 1, 4, 2, 2], [9, 2, 9, 1, 9], 3, tolerance=0.2)))


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        (([1, 2], [1, 1], 2), {}, "flops has 2 entries and cut_bytes has 2.*one cut fewer"),
        (([1, np.inf], [1], 2), {}, "must be finite"),
        (([1, np.nan], [1], 2), {}, "flops has the shape.*NaN"),
        (([1, 2], [-1], 2), {}, "cut_bytes has the shape.*negative"),
        (([1, 2, 3], [1, np.inf], 3), {}, "3 layers were asked of 3 ops with 1 allowed cuts.*1 to 2"),
        (([1, 2, 3], [1, 1], 0), {}, "0 layers"),
        (([1, 2, 3], [1, 1], 2), {"tolerance": -0.1}, "tolerance is -0.1.*0 or more"),
        (([1, 2, 3], [1, np.inf], 2), {"forced_cuts": [2]}, "forced_cuts holds 2.*must be finite"),
        (([1, 2, 3], [1, 1], 2), {"forced_cuts": [3]}, "forced_cuts holds 3.*from 1 to 2"),
        (([1, 2, 3], [1, 1], 2), {"forced_cuts": [1, 2]}, "2 forced cuts make at least 3 layers, and 2"),
    ],
)
def test_bad_input(arguments, more, words):
    with pytest.raises(SlicingError, match=words):
        cluster_layers(*arguments, **more)
