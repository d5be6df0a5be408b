"""Classes of nodes: copies of a layer meet, what differs is kept apart."""

from __future__ import annotations

import numpy as np

from alpa_lite.intraop.problem import Edge, IntraOpProblem, check_problem
from alpa_lite.intraop.repeats import node_classes
from benchmarks.layered import layered


def chain(costs: list[np.ndarray], matrix: np.ndarray) -> IntraOpProblem:
    edges = tuple(Edge(u=i, v=i + 1, costs=matrix) for i in range(len(costs) - 1))
    return IntraOpProblem(node_costs=tuple(costs), edges=edges)


def test_inner_nodes_of_a_chain_are_copies_and_its_ends_are_not() -> None:
    same, matrix = np.zeros(2), np.ones((2, 2))
    classes = node_classes(chain([same] * 10, matrix), rounds=2).tolist()
    assert len(set(classes[2:8])) == 1
    assert len({classes[0], classes[1], classes[2]}) == 3


def test_costs_and_direction_tell_nodes_apart() -> None:
    a, b, matrix = np.zeros(2), np.ones(2), np.ones((2, 2))
    classes = node_classes(chain([a, b, a, b], matrix), rounds=0).tolist()
    assert classes == [0, 1, 0, 1]
    pair = IntraOpProblem(node_costs=(a, a), edges=(Edge(u=0, v=1, costs=matrix),))
    assert len(set(node_classes(pair).tolist())) == 2  # one is the tail, the other the head


def test_matrices_tell_nodes_apart() -> None:
    a, one, two = np.zeros(2), np.ones((2, 2)), np.full((2, 2), 2.0)
    edges = (Edge(u=0, v=1, costs=one), Edge(u=2, v=3, costs=two))
    classes = node_classes(IntraOpProblem(node_costs=(a,) * 4, edges=edges)).tolist()
    assert len(set(classes)) == 4


def test_layers_share_classes_at_any_depth() -> None:
    counts = {depth: len(set(node_classes(layered(depth)).tolist())) for depth in (8, 12)}
    assert counts[8] == counts[12]
    problem = layered(8)
    assert counts[8] < problem.num_nodes / 2


def test_classes_of_one_number_have_equal_domains() -> None:
    problem = layered(3)
    check_problem(IntraOpProblem(node_costs=problem.node_costs, edges=problem.edges, classes=node_classes(problem)))
