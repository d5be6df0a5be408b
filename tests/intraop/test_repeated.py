"""Problems of repeated arrays are the same problems as those of plain ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.problem import IntraOpProblem, check_problem, evaluate, scaled
from alpa_lite.intraop.repeated import Edge, Repeated, RepeatedEdges, repeated, repeated_edges
from alpa_lite.intraop.solve import solve
from tests.intraop.problems import random_problem


def _repeated(problem: IntraOpProblem) -> IntraOpProblem:
    return replace(problem, node_costs=repeated(problem.node_costs), edges=repeated_edges(problem.edges))


@pytest.mark.parametrize("seed", range(8))
def test_solved_scored_and_scaled_alike(seed: int):
    problem = random_problem(seed, limited=seed % 2 == 1)
    same = _repeated(problem)
    check_problem(same)
    one, other = solve(problem), solve(same)
    assert one.choice.tolist() == other.choice.tolist() and one.objective == other.objective
    rng = np.random.default_rng(seed)
    for choice in (*([one.choice] if len(one.choice) else []), [rng.integers(len(c)) for c in problem.node_costs]):
        assert evaluate(problem, choice) == evaluate(same, choice)
        assert evaluate(scaled(problem, 0.25), choice) == evaluate(scaled(same, 0.25), choice)


def test_presolve_numbers_arrays_alike():
    problem = random_problem(3, limited=False)
    graphs = [CostGraph(p, memory=False) for p in (problem, _repeated(problem))]
    for graph in graphs:
        presolve(graph)
    assert graphs[0].unary == graphs[1].unary and graphs[0].adjacent == graphs[1].adjacent
    assert graphs[0].log == graphs[1].log


@pytest.mark.parametrize("width", [3, 200])  # of which the latter is read entry by entry
def test_entries_of_each_array(width: int):
    rng = np.random.default_rng(0)
    arrays = Repeated(np.array([1, 0, 1]), [rng.random((2, width)), rng.random((3, width))])
    rows, columns = np.array([2, 1, 0]), np.array([0, width - 1, 2])
    expected = [a[r, c] for a, r, c in zip(arrays, rows, columns, strict=True)]
    assert arrays.entries(rows, columns) == expected
    with pytest.raises(IndexError):
        arrays.entries(np.array([0, 2, 0]), columns)  # the second has two rows


def test_a_wrong_matrix_is_named():
    nodes = Repeated(np.array([0, 0, 1]), [np.zeros(2), np.zeros(3)])
    costs = Repeated(np.array([0, 1]), [np.zeros((2, 2)), np.zeros((2, 2))])
    edges = RepeatedEdges(np.array([0, 1]), np.array([1, 2]), costs)
    with pytest.raises(AssertionError, match="edge 1-2"):
        check_problem(IntraOpProblem(node_costs=nodes, edges=edges))
    loop = RepeatedEdges(np.array([0]), np.array([0]), Repeated(np.array([0]), [np.zeros((2, 2))]))
    with pytest.raises(AssertionError, match="to itself"):
        check_problem(IntraOpProblem(node_costs=nodes, edges=loop))


def test_classes_of_unequal_domains_are_refused():
    problem = IntraOpProblem(node_costs=(np.zeros(2), np.zeros(3)), classes=np.array([4, 4]))
    with pytest.raises(AssertionError, match="class 4"):
        check_problem(problem)


def test_slices_and_single_items():
    matrix = np.eye(2)
    edges = repeated_edges((Edge(0, 1, matrix), Edge(1, 2, matrix)))
    assert len(edges.costs.different) == 1
    assert edges[1].u == 1 and edges[1].costs is matrix
    assert [e.v for e in edges[1:]] == [2]
    assert len(edges.costs[:1]) == 1
