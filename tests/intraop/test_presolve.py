"""Presolve: what is left has the same optimum, and lifted answers score the same."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from alpa_lite.intraop.core import extract_core
from alpa_lite.intraop.graph import CostGraph, InfeasibleError
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.problem import Edge, IntraOpProblem, Usage, evaluate
from alpa_lite.intraop.tables import Tables, min_plus
from benchmarks.layered import layered
from tests.intraop.problems import brute_force, random_problem


@pytest.mark.parametrize("limited", [False, True])
def test_the_core_has_the_same_optimum(limited):
    left = 0
    for seed in range(150):
        problem = random_problem(seed, limited=limited)
        best, _ = brute_force(problem)
        graph = CostGraph(problem, memory=limited)
        try:
            presolve(graph)
        except InfeasibleError:
            assert math.isinf(best), seed
            continue
        core = extract_core(graph)
        left += core.num_nodes
        found = math.inf
        for picks in itertools.product(*(range(len(c)) for c in core.unary)):
            cost = core.cost(picks)
            if math.isinf(cost):
                continue
            choice = graph.lift(dict(zip(core.nodes, picks, strict=True)))
            score = evaluate(problem, choice)
            assert score.objective == pytest.approx(cost), seed
            if limited:
                assert core.fits(picks) == (score.peak_bytes <= problem.usage_limit), seed
            if core.fits(picks):
                found = min(found, cost)
        assert found == pytest.approx(best), seed
    assert left > 0 or not limited


def follower(k):
    return np.where(np.eye(k, dtype=bool), 0.0, np.inf)


def test_followers_merge_and_carry_their_memory():
    same = follower(3)
    problem = IntraOpProblem(
        node_costs=tuple(np.array([3.0, 1.0, 2.0]) for _ in range(4)),
        edges=tuple(Edge(u=i, v=i + 1, costs=same) for i in range(3)),
        usages=tuple(Usage(node=i, lo=i, hi=i + 1, size_bytes=np.array([5, 9, 7])) for i in range(4)),
        num_times=4,
        usage_limit=8,
    )
    graph = CostGraph(problem, memory=True)
    presolve(graph)
    core = extract_core(graph)
    assert core.num_nodes == 1
    assert len(core.unary[0]) == 3
    assert core.unary[0].tolist() == [12.0, 4.0, 8.0]
    assert [core.fits([x]) for x in range(3)] == [True, False, True]
    assert graph.lift({core.nodes[0]: 2}).tolist() == [2, 2, 2, 2]


def test_a_tree_is_solved_without_a_core():
    rng = np.random.default_rng(0)
    edges = tuple(Edge(u=int(rng.integers(0, i)), v=i, costs=rng.random((5, 5))) for i in range(1, 60))
    problem = IntraOpProblem(node_costs=tuple(rng.random(5) for _ in range(60)), edges=edges)
    graph = CostGraph(problem, memory=False)
    presolve(graph)
    assert not graph.alive()
    assert evaluate(problem, graph.lift({})).objective == pytest.approx(graph.constant())


def test_usages_below_the_limit_do_not_matter():
    usages = (Usage(node=0, lo=0, hi=1, size_bytes=np.array([1, 2])), Usage(node=1, lo=0, hi=1, size_bytes=np.array([3, 4])))
    problem = IntraOpProblem(node_costs=(np.zeros(2), np.zeros(2)), usages=usages, num_times=1, usage_limit=6)
    graph = CostGraph(problem, memory=True)
    presolve(graph)
    assert not graph.alive()


def test_equal_arrays_are_one_number_and_one_operation():
    tables = Tables()
    a, b = tables.intern(np.arange(4.0)), tables.intern(np.arange(4.0))
    assert a == b
    before = len(tables.arrays)
    first = tables.add(a, b)
    assert tables.add(a, b) == first
    assert len(tables.arrays) == before + 1


def test_separable_matrices_only():
    tables = Tables()
    a, b = np.array([0.0, 2.0, 5.0]), np.array([1.0, 7.0])
    split = tables.split(tables.intern(a[:, None] + b))
    assert split is not None
    rebuilt = tables.arrays[split[0]][:, None] + tables.arrays[split[1]]
    np.testing.assert_array_equal(rebuilt, a[:, None] + b)
    assert tables.split(tables.intern(np.array([[0.0, 1.0], [1.0, 0.0]]))) is None
    assert tables.split(tables.intern(np.array([[0.0, np.inf], [0.0, np.inf]]))) is None


def test_min_plus():
    rng = np.random.default_rng(1)
    a, b = rng.random((3, 4)), rng.random((4, 6))
    np.testing.assert_array_equal(min_plus(a, b), (a[:, :, None] + b[None]).min(1))


def test_repeated_layers_cost_presolve_little():
    problem = layered(32)
    start = time.perf_counter()
    graph = CostGraph(problem, memory=False)
    presolve(graph)
    assert time.perf_counter() - start < 3.0  # 0.1 s on an idle machine
    distinct = len(graph.tables.arrays)
    shallow = CostGraph(layered(8), memory=False)
    presolve(shallow)
    assert distinct <= 1.1 * len(shallow.tables.arrays)
