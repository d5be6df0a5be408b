"""What looks at many new arrays at once must say what looks at single ones say."""

from __future__ import annotations

import numpy as np

from alpa_lite.intraop.tables import Tables


def test_matrices_whose_corners_are_those_of_a_sum_are_looked_at_inside() -> None:
    rng = np.random.default_rng(0)
    tables, sums, others = Tables(), [], []
    for rows, columns in ((1, 1), (1, 5), (5, 1), (3, 4), (7, 2), (20, 30)):
        whole = rng.random((rows, columns)) + rng.random((rows, 1))
        whole[-1, -1] = whole[-1, 0] + whole[0, -1] - whole[0, 0]  # corners alone do not tell
        added = rng.random((rows, 1)) + rng.random((1, columns))
        for matrix in (whole, added, np.zeros((rows, columns)), np.full((rows, columns), np.inf)):
            is_sum = matrix is not whole or min(rows, columns) == 1
            (sums if is_sum and np.isfinite(matrix).all() else others).append(tables.intern(matrix))
    tables.closed()
    small = {n for n in others if tables.arrays[n].size <= 256}
    assert len(small) < len(others)
    assert small <= tables.whole and not tables.whole.intersection(sums)
    assert all(tables.split(n) is not None for n in sums)
    assert all(tables.split(n) is None for n in others)
