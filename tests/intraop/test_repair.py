"""Local improvement of a choice: it ends where no single change helps, and copies do not mislead it."""

from __future__ import annotations

import numpy as np
import pytest

from alpa_lite.intraop.core import Core, finite
from alpa_lite.intraop.repair import improve

K = 3


def core_of_copies(seed: int) -> Core:
    """Nodes of two kinds, all edges of one matrix, which some nodes see from the left and others from the right."""
    rng = np.random.default_rng(seed)
    count = 8
    kinds = [rng.integers(0, 5, K).astype(float) for _ in range(2)]
    matrix = rng.integers(0, 9, (K, K)).astype(float)
    numbers = rng.integers(0, 2, count).tolist()
    pairs = sorted({tuple(sorted(rng.choice(count, 2, replace=False).tolist())) for _ in range(12)})
    return Core(
        nodes=tuple(range(count)),
        unary=tuple(kinds[n] for n in numbers),
        left=tuple(a for a, _ in pairs),
        right=tuple(b for _, b in pairs),
        costs=(matrix,) * len(pairs),
        unary_ids=tuple(numbers),
        matrix_ids=(0,) * len(pairs),
        memory=None,
        constant=0.0,
        whole=True,
    )


@pytest.mark.parametrize("seed", range(30))
def test_no_single_change_makes_the_result_cheaper(seed: int) -> None:
    core = core_of_copies(seed)
    start = np.random.default_rng(seed).integers(0, K, core.num_nodes).tolist()
    picks = improve(core, *finite(core), start)
    assert core.cost(picks) <= core.cost(start)
    for node in range(core.num_nodes):
        for state in range(K):
            assert core.cost([*picks[:node], state, *picks[node + 1 :]]) >= core.cost(picks)
