"""Groups of copies: never neighbours; the tied problem costs what the tied choice costs on the whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from alpa_lite.intraop.core import Core, extract_core
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.problem import evaluate
from alpa_lite.intraop.solve import solve
from alpa_lite.intraop.tie import Tie, tie, tied_core
from benchmarks.layered import layered


def layered_core(depth: int, *, memory: bool) -> tuple[Core, Tie, CostGraph]:
    problem = layered(depth, limit_fraction=0.9 if memory else None)
    graph = CostGraph(problem, memory=memory)
    presolve(graph)
    core = extract_core(graph)
    return core, tie(core, problem.classes), graph


def test_groups_hold_copies_that_are_no_neighbours() -> None:
    core, tied, _ = layered_core(5, memory=False)
    assert len(tied.members) < core.num_nodes / 3
    for a, b in zip(core.left, core.right, strict=True):
        assert tied.group[a] != tied.group[b]
    for number, members in enumerate(tied.members):
        assert {tied.group[i] for i in members} == {number}
        assert [tied.slot[i] for i in members] == list(range(len(members)))
        assert len({core.unary_ids[i] for i in members}) == 1
    for members, (left, right), flipped in zip(tied.edge_members, tied.ends, tied.flipped, strict=True):
        assert left < right
        assert len({core.matrix_ids[e] for e in members}) == 1
        for e in members:
            ends = (tied.group[core.left[e]], tied.group[core.right[e]])
            assert (ends[::-1] if flipped else ends) == (left, right)


def test_group_count_does_not_grow_with_depth() -> None:
    counts = [len(layered_core(depth, memory=False)[1].members) for depth in (4, 8)]
    assert counts[0] == counts[1]


def test_without_classes_every_node_is_alone() -> None:
    core, _, _ = layered_core(2, memory=False)
    alone = tie(core, None)
    assert alone.is_trivial
    assert alone.group == list(range(core.num_nodes))


@pytest.mark.parametrize("memory", [False, True])
def test_tied_choice_costs_and_weighs_the_same_on_the_whole(memory: bool) -> None:
    core, tied, _ = layered_core(3, memory=memory)
    small = tied_core(core, tied)
    rng = np.random.default_rng(0)
    for _ in range(20):
        picks = [int(rng.integers(len(c))) for c in small.unary]
        spread = [picks[g] for g in tied.group]
        assert small.cost(picks) == pytest.approx(core.cost(spread))
        if memory:
            assert small.memory is not None and core.memory is not None
            assert small.memory.profile(np.array(picks)).tolist() == core.memory.profile(np.array(spread)).tolist()


def test_parallel_edges_between_groups_stay_apart() -> None:
    """Two copies 0 and 1 joined to 2 and 3 both ways round, with two matrices."""
    ones, twos = np.full((2, 2), 1.0), np.array([[2.0, 0.0], [5.0, 2.0]])
    core = Core(
        nodes=(0, 1, 2, 3),
        unary=(np.zeros(2),) * 4,
        left=(0, 0, 1, 2),
        right=(2, 3, 3, 3),
        costs=(ones, twos, ones, twos),
        unary_ids=(0, 0, 0, 0),
        matrix_ids=(0, 1, 0, 1),
        memory=None,
        constant=0.0,
        whole=True,
    )
    tied = tie(core, np.array([0, 0, 1, 1]))
    assert tied.group[2] != tied.group[3]  # neighbours
    small = tied_core(core, tied)
    for picks in itertools.product(range(2), repeat=small.num_nodes):
        assert small.cost(picks) == core.cost([picks[g] for g in tied.group])


@pytest.mark.medium
def test_a_tied_answer_is_an_answer_and_its_bound_is_of_the_untied_problem() -> None:
    problem = layered(6)
    optimum = solve(problem)
    assert optimum.status == "optimal"
    cut = solve(problem, time_limit_s=0.3)
    assert evaluate(problem, cut.choice).objective == cut.objective >= optimum.objective * (1 - 1e-9)
    assert cut.lower_bound <= optimum.objective * (1 + 1e-9)
