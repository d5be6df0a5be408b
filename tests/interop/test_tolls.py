"""The toll on every stage that makes the bound of a fixed number of stages highest."""

from __future__ import annotations

import itertools

import numpy as np

from alpa_lite.interop.problem import Limits, cells_of, check_problem
from alpa_lite.interop.stage_dp import best_within
from alpa_lite.interop.sum_bounds import Counted, best_toll, grid_of, suffix_sums


def random_problem(seed: int, num_stages: int):
    """Stages on more devices have less time, and what they move costs some: many layers on few devices are dear."""
    rng = np.random.default_rng(seed)
    layers, sizes = 12, (1, 2, 4)
    span = np.maximum(np.arange(layers)[None, :] - np.arange(layers)[:, None] + 1, 1)[:, :, None, None]
    cost_s = span * rng.uniform(0.8, 1.2, (layers, layers, 3, 2)) / np.array(sizes)[:, None] ** 0.8
    tolerated = rng.integers(0, layers, cost_s.shape) if seed % 2 else np.full(cost_s.shape, layers)
    transfer_s = rng.uniform(0, 0.2, (layers - 1, 3, 3)) if seed % 3 else None
    more = {"once_s": None, "layer_stage": None, "stage_submeshes": None}
    return check_problem(cost_s, tolerated, sizes, 8, 4, transfer_s=transfer_s, num_stages=num_stages, **more)


def counted_of(problem) -> Counted:
    cells = cells_of(problem)
    grid = grid_of(problem, cells, cells.cost_s, Limits(), 1)
    return Counted(problem, grid, suffix_sums(grid, grid.tolerated), 0.0)


def test_no_toll_of_a_fine_grid_gives_a_higher_bound():
    raised = 0
    for seed, num_stages in itertools.product(range(5), (2, 4, 7)):
        problem = random_problem(seed, num_stages)
        plain, exact = counted_of(problem), best_within(problem, cells_of(problem), Limits())
        if exact is None:
            continue
        best = best_toll(plain, Limits())
        highest_s = max(plain.at(toll_s).bound_s for toll_s in np.linspace(-2, 2, 41))
        assert best.bound_s >= highest_s * (1 - 1e-3), (seed, num_stages)
        assert best.bound_s <= exact.sum_s * (1 + 1e-9), (seed, num_stages)
        raised += best.bound_s > 1.01 * plain.bound_s
    assert raised > 3


def test_memory_that_lets_all_other_layers_follow_is_not_looked_at():
    layers, sizes = 6, (1, 2)
    cost_s = np.ones((layers, layers, 2, 1))
    more = {"once_s": None, "transfer_s": None, "num_stages": None, "layer_stage": None, "stage_submeshes": None}
    for most, is_looked_at in ((layers - 1, False), (layers - 2, True)):
        problem = check_problem(cost_s, np.full(cost_s.shape, most), sizes, 4, 4, **more)
        cells = cells_of(problem)
        grid = grid_of(problem, cells, cells.cost_s, Limits(), 1)
        assert (grid.tolerated is not None) == is_looked_at
