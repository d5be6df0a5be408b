"""Presolve keeps the optimum, and lifts answers of the core to answers of the whole."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from alpa_lite.intraop import tables
from alpa_lite.intraop.core import extract_core
from alpa_lite.intraop.graph import CostGraph, InfeasibleError
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.problem import Edge, IntraOpProblem, Usage, evaluate
from benchmarks.layered import layered
from tests.intraop.problems import brute_force, random_problem


def graph_of(problem: IntraOpProblem, *, memory: bool = True) -> CostGraph:
    graph = CostGraph(problem, memory=memory)
    presolve(graph)
    return graph


@pytest.mark.medium
@pytest.mark.parametrize("block", range(4))
def test_core_and_problem_have_the_same_optimum(block: int) -> None:
    for seed in range(block, 160, 4):
        problem = random_problem(seed, limited=seed % 2 > 0)
        best, _ = brute_force(problem)
        try:
            graph = graph_of(problem, memory=problem.usage_limit is not None)
        except InfeasibleError:
            assert math.isinf(best), seed
            continue
        core = extract_core(graph)
        found = math.inf
        for picks in itertools.product(*(range(len(c)) for c in core.unary)):
            cost = core.cost(picks)
            if not math.isfinite(cost):
                continue
            choice = graph.lift(dict(zip(core.nodes, picks, strict=True)))
            score = evaluate(problem, choice)
            assert score.objective == pytest.approx(cost, abs=1e-9), seed
            if core.memory is not None and len(core.memory.base):
                limit = problem.usage_limit
                assert limit is not None
                assert core.fits(picks) == (score.peak_bytes <= limit), seed
            if core.fits(picks):
                found = min(found, cost)
        assert found == pytest.approx(best, abs=1e-9) or (math.isinf(found) and math.isinf(best)), seed


def test_empty_domain_names_the_neighbourhood() -> None:
    wall = np.full((2, 2), np.inf)
    problem = IntraOpProblem(node_costs=(np.zeros(2),) * 3, edges=(Edge(u=1, v=2, costs=wall),))
    with pytest.raises(InfeasibleError) as caught:
        graph_of(problem)
    assert set(caught.value.path) == {1, 2}


def test_chain_and_separable_edges_vanish() -> None:
    rng = np.random.default_rng(0)
    chain = [Edge(u=i, v=i + 1, costs=rng.random((3, 3))) for i in range(5)]
    apart = Edge(u=0, v=5, costs=np.add.outer(np.arange(3.0), np.array([5.0, 1.0, 2.0])))
    problem = IntraOpProblem(node_costs=tuple(rng.random(3) for _ in range(6)), edges=(*chain, apart))
    graph = graph_of(problem)
    assert graph.alive() == []
    assert graph.constant() == pytest.approx(brute_force(problem)[0])


def test_follower_joins_its_leader_with_its_memory() -> None:
    follow = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    usage = Usage(node=1, lo=0, hi=1, size_bytes=np.array([9, 1]))
    other = Usage(node=2, lo=0, hi=1, size_bytes=np.array([5, 2]))
    problem = IntraOpProblem(
        node_costs=(np.array([0.0, 3.0]), np.zeros(2), np.array([0.0, 2.0])),
        edges=(Edge(u=0, v=1, costs=follow),),
        usages=(usage, other),
        usage_limit=11,
        num_times=1,
    )
    core = extract_core(graph_of(problem))
    assert core.num_nodes == 2  # 0 and 1 are one
    assert core.memory is not None
    assert sorted(core.memory.profile(np.array(p))[0] for p in itertools.product(range(2), repeat=2)) == [3, 6, 11, 14]


def test_times_that_never_fill_up_do_not_count() -> None:
    usages = (
        Usage(node=0, lo=0, hi=1, size_bytes=np.array([3, 1])),
        Usage(node=1, lo=1, hi=2, size_bytes=np.array([30, 1])),
    )
    problem = IntraOpProblem(node_costs=(np.zeros(2), np.zeros(2)), usages=usages, usage_limit=10, num_times=2)
    graph = graph_of(problem)
    assert not graph.carries[0]
    assert 0 not in graph.alive()


def test_repeated_layers_cost_little_more() -> None:
    """Operations on equal arrays are remembered: the tables of 8 layers hold few more arrays than those of 4."""
    arrays = [len(graph_of(layered(depth), memory=False).tables.arrays) for depth in (4, 8)]
    assert arrays[1] < 1.2 * arrays[0], arrays


@pytest.mark.parametrize("at_once", [1, 40, 1 << 18])
def test_joins_in_parts_are_those_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_JOINED_AT_ONCE", at_once)
    a, b = np.random.default_rng(0).random((2, 7, 5))
    a[2, 3] = np.inf
    assert (tables.min_plus(a.T, b.T) == (a[:, :, None] + b.T).min(1)).all()


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e12])
def test_only_sums_are_split_and_only_rows_of_one_entry_are_functions(scale: float) -> None:
    known = tables.Tables()
    rows, columns = np.random.default_rng(1).random((2, 6)) * scale
    whole = rows[:, None] + columns
    parts = known.split(known.intern(whole))
    assert parts is not None
    assert np.allclose(known.arrays[parts[0]][:, None] + known.arrays[parts[1]], whole, rtol=1e-15)
    for place in ((5, 5), (2, 3), (0, 0)):
        for other in (1.001, 1e3, np.inf):
            changed = whole.copy()
            changed[place] *= other
            assert known.split(known.intern(changed)) is None, (place, other)
    single = np.where(np.eye(6, dtype=bool), whole, np.inf)
    assert known.arrays[known.function(known.intern(single))].tolist() == list(range(6))
    for place in ((0, 1), (4, 2)):
        several = single.copy()
        several[place] = scale
        assert known.function(known.intern(several)) == -1


def test_arrays_that_are_looked_at_together_are_told_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    known, others = tables.Tables(), tables.Tables()
    for round_ in range(3):
        for shape in [(1,), (5,), (1, 1), (1, 4), (4, 1), (3, 4), (4, 3)] * 12:
            costs = np.floor(rng.random(shape) * 9)
            if len(shape) == 2 and rng.random() < 0.4:
                costs = costs[:, :1] + costs[:1]
            known.intern(np.where(rng.random(shape) < rng.choice([0.0, 0.2, 0.7]), np.inf, costs))
            known.intern(np.arange(round_ * 9 + len(shape)))
        closed = known.closed()
        for number, array in enumerate(known.arrays):
            own = others.intern(array)
            assert (number in closed) != others.is_open(own)
            if array.ndim == 2:
                assert others.split(own) is None or number not in known.whole
                assert number not in known.loose or others.function(others.transpose(own)) < 0
    assert min(len(known.whole), len(known.loose), len(closed)) > 20
