"""Elimination against brute force, and its refusal of wide cores."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from alpa_lite.intraop.core import extract_core
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.narrow import solve_narrow
from tests.intraop.problems import brute_force, random_problem


@pytest.mark.medium
def test_equals_brute_force():
    solved = 0
    for seed in range(120):
        problem = random_problem(seed, limited=False)
        core = extract_core(CostGraph(problem, memory=False))
        picks = solve_narrow(core.unary, core.left, core.right, core.costs)
        assert core.cost(picks) == pytest.approx(brute_force(problem)[0]), seed
        solved += 1
    assert solved == 120


def test_a_band_is_narrow_and_a_clique_is_not():
    rng = np.random.default_rng(0)
    unary = [rng.random(6) for _ in range(200)]
    band = [(i, j) for i in range(200) for j in range(i + 1, min(i + 4, 200))]
    left, right = zip(*band, strict=True)
    picks = solve_narrow(unary, left, right, [rng.random((6, 6)) for _ in band])
    assert picks is not None
    clique = list(itertools.combinations(range(12), 2))
    left, right = zip(*clique, strict=True)
    assert solve_narrow(unary[:12], left, right, [rng.random((6, 6)) for _ in clique]) is None


def test_ties_are_decided_the_same_way_every_time():
    costs = [np.zeros((3, 3)) for _ in range(3)]
    unary = [np.zeros(3) for _ in range(3)]
    assert solve_narrow(unary, (0, 1, 0), (1, 2, 2), costs) == [0, 0, 0]


def test_all_tables_together_may_be_capped():
    rng = np.random.default_rng(1)
    unary = [rng.random(4) for _ in range(30)]
    chain = [(i, i + 1) for i in range(29)]
    left, right = zip(*chain, strict=True)
    costs = [rng.random((4, 4)) for _ in chain]
    entries = 29 * 4 * 4 + 4  # a table over a node and its neighbour each, and the last node alone
    free = solve_narrow(unary, left, right, costs)
    assert free == solve_narrow(unary, left, right, costs, max_entries=entries)
    assert solve_narrow(unary, left, right, costs, max_entries=entries - 1) is None


def test_tables_of_copies_are_made_and_counted_once():
    rng = np.random.default_rng(2)
    one = [rng.random(5) for _ in range(4)], [(0, 1), (1, 2), (2, 3), (0, 3)]
    matrices = [rng.random((5, 5)) for _ in one[1]]

    def copies(count, *, share):
        unary = [c if share else c.copy() for _ in range(count) for c in one[0]]
        pairs = [(4 * k + a, 4 * k + b) for k in range(count) for a, b in one[1]]
        costs = [m if share else m.copy() for _ in range(count) for m in matrices]
        return unary, *zip(*pairs, strict=True), costs

    alone = solve_narrow(*copies(1, share=True))
    entries = 2 * 5**3 + 5**2 + 5  # a node with two neighbours twice, then one, then none
    assert solve_narrow(*copies(6, share=True), max_entries=entries) == alone * 6
    assert solve_narrow(*copies(6, share=True), max_entries=entries - 1) is None
    assert solve_narrow(*copies(6, share=False), max_entries=6 * entries) == alone * 6
    assert solve_narrow(*copies(6, share=False), max_entries=6 * entries - 1) is None
