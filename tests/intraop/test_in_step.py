"""Problems that are reduced together must be what they would be alone, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from alpa_lite.intraop import in_step
from alpa_lite.intraop.core import Core, extract_core
from alpa_lite.intraop.graph import CostGraph, InfeasibleError
from alpa_lite.intraop.in_step import reduced_together
from alpa_lite.intraop.presolve import Rounds, presolve, reduce_nodes
from alpa_lite.intraop.problem import Edge, IntraOpProblem, scaled
from alpa_lite.intraop.solve import solve
from benchmarks.layered import layered
from tests.intraop.problems import random_problem


def alike(problem: IntraOpProblem, seed: int) -> IntraOpProblem:
    """Other costs in the same places: all differ by a factor, and one edge in what it adds to each entry.

    Every array is one of its own, so that some are equal here and not in ``problem``, or the other way round.
    """
    rng = np.random.default_rng(seed)
    factor, changed = float(rng.integers(1, 9)) if seed else 1.0, rng.integers(0, max(1, len(problem.edges)))
    edges = []
    for place, (u, v, costs) in enumerate(problem.edges):
        more = np.round(rng.random(costs.shape) * 4) if seed and place == changed else 0.0
        edges.append(Edge(u, v, costs * factor + more))
    return replace(problem, node_costs=tuple(costs * factor for costs in problem.node_costs), edges=tuple(edges))


def same_core(a: Core, b: Core) -> bool:
    """Also in which of their arrays are equal, and in what order those came up: sums go by that."""
    ids = [[*core.unary_ids, *core.matrix_ids] for core in (a, b)]
    order = [np.unique(found, return_inverse=True)[1].tolist() for found in ids]
    pairs = zip((*a.unary, *a.costs), (*b.unary, *b.costs), strict=True)
    return (
        (a.nodes, a.left, a.right, a.constant, a.whole) == (b.nodes, b.left, b.right, b.constant, b.whole)
        and all(x.tobytes() == y.tobytes() and x.shape == y.shape for x, y in pairs)
        and order[0] == order[1]
    )


@pytest.mark.medium
@pytest.mark.parametrize("block", range(4))
def test_graphs_are_those_of_each_problem_alone(block: int) -> None:
    together = 0
    for seed in range(block, 400, 4):
        problems = [alike(random_problem(seed, limited=False), step and seed + step) for step in (0, 1, 2, 0)]
        for problem, graph in zip(problems, reduced_together(problems), strict=True):
            alone = CostGraph(problem, memory=False)
            if graph is None:
                with pytest.raises(InfeasibleError):
                    presolve(alone)
                continue
            together += 1
            presolve(alone)
            presolve(graph, reduced=True)
            assert same_core(extract_core(alone), extract_core(graph)), seed
            picks = [dict.fromkeys(g.alive(), 0) for g in (alone, graph)]
            assert alone.lift(picks[0]).tolist() == graph.lift(picks[1]).tolist(), seed
    assert together > 40


@pytest.mark.medium
def test_equal_layers_are_solved_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where arrays get numbers in another order, copies are told apart otherwise, and sums differ in their last digits."""
    problem = layered(4)
    problems = [problem, *(scaled(problem, factor) for factor in (2.0, 3.0))]
    assert reduced_together(problems) == [None] * 3  # large arrays gain nothing
    monkeypatch.setattr(in_step, "_SMALL", 10_000)
    graphs = reduced_together(problems)
    for p, graph in zip(problems, graphs, strict=True):
        assert graph is not None
        alone, late = solve(p), solve(p, reduced=graph)
        assert late.choice.tolist() == alone.choice.tolist()
        assert (late.objective, late.lower_bound, late.trace) == (alone.objective, alone.lower_bound, alone.trace)
        assert (late.core_size, late.status) == (alone.core_size, alone.status)


def test_arrays_that_are_equal_in_one_problem_have_one_number_there() -> None:
    pairs = [(u, v) for v in range(5) for u in range(v)]
    own = np.random.default_rng(0).random((len(pairs), 3, 3))

    def dense(matrices: np.ndarray) -> IntraOpProblem:
        edges = tuple(Edge(u, v, costs) for (u, v), costs in zip(pairs, matrices, strict=True))
        return IntraOpProblem(node_costs=tuple(np.arange(3.0) + (i > 2) for i in range(5)), edges=edges)

    problems = [dense(own[[0] * len(pairs)]), dense(own), dense(own[[*range(5)] * 2])]
    graphs = reduced_together(problems)
    for problem, graph, different in zip(problems, graphs, (1, 10, 5), strict=True):
        assert graph is not None
        alone = CostGraph(problem, memory=False)
        reduce_nodes(alone, Rounds(set(alone.alive())))
        graph.number_anew()
        core = extract_core(graph)
        assert same_core(extract_core(alone), core) and len(core.costs) == len(pairs)
        assert len(set(core.matrix_ids)) == different


def chain(middle: list[list[float]], first: float = 0.0) -> IntraOpProblem:
    """A ring of four, too dense to be eliminated at once, one edge of which costs ``middle``; ``first``: of a state."""
    rng = np.random.default_rng(1)
    pairs = [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3), (1, 3)]
    edges = tuple(Edge(u, v, np.array(middle) if (u, v) == (0, 1) else rng.random((2, 2))) for u, v in pairs)
    return IntraOpProblem(node_costs=(np.array([first, 1.0]), *(rng.random(2) for _ in range(3))), edges=edges)


@pytest.mark.parametrize(
    "other",
    [
        chain([[0.0, 1.0], [2.0, 3.0]]),  # a sum
        chain([[0.0, np.inf], [np.inf, 0.0]]),  # a function
        chain([[0.0, 1.0], [np.inf, np.inf]]),  # no partner
        chain([[0.0, 1.0], [2.0, 4.0]], first=np.inf),  # no state
    ],
)
def test_problems_of_which_something_else_holds_part(other: IntraOpProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    parted, apart = [], in_step._of_problems

    def counted(graph: CostGraph, places: list[int]) -> CostGraph:
        parted.append(len(places))
        return apart(graph, places)

    monkeypatch.setattr(in_step, "_of_problems", counted)
    plain = chain([[0.0, 1.0], [2.0, 4.0]])
    for kinds, sizes in (("pp", []), ("oo", []), ("po", [1, 1]), ("opp", [1, 2]), ("popo", [2, 2])):
        problems = [scaled(plain if kind == "p" else other, place + 1.0) for place, kind in enumerate(kinds)]
        parted.clear()
        graphs = reduced_together(problems)
        assert sorted(parted) == sizes
        for problem, graph in zip(problems, graphs, strict=True):
            alone = CostGraph(problem, memory=False)
            reduce_nodes(alone, Rounds(set(alone.alive())))
            assert graph is not None
            graph.number_anew()
            assert same_core(extract_core(alone), extract_core(graph))


def test_problems_of_other_shapes_and_those_without_an_answer_are_left_alone() -> None:
    plain, wall = chain([[0.0, 1.0], [2.0, 4.0]]), chain(np.full((2, 2), np.inf).tolist())
    assert reduced_together([plain, replace(plain, edges=plain.edges[1:])]) == [None, None]
    assert reduced_together([plain, replace(plain, node_costs=(np.zeros(3), *plain.node_costs[1:]))]) == [None, None]
    whole = replace(plain, node_costs=(np.array([0, 1]), *plain.node_costs[1:]))
    assert reduced_together([plain, whole]) == [None, None]
    assert [graph is None for graph in reduced_together([wall, plain, wall, plain])] == [True, False, True, False]
