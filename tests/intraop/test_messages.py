"""Message passing: every bound is below the optimum, and what a gap excludes is in no better choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from alpa_lite.intraop.core import extract_core, finite
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.problem import Edge, IntraOpProblem
from alpa_lite.intraop.tie import tie
from benchmarks.layered import layered


def loopy(seed, n=6, k=3, forbidden=0.15):
    rng = np.random.default_rng(seed)
    pairs = [p for p in itertools.combinations(range(n), 2) if rng.random() < 0.8]
    edges = []
    for u, v in pairs:
        costs = rng.random((k, k))
        costs[rng.random((k, k)) < forbidden] = np.inf
        costs[0, 0] = 1.0  # all zeros is always allowed
        edges.append(Edge(u=u, v=v, costs=costs))
    return extract_core(CostGraph(IntraOpProblem(node_costs=tuple(rng.random(k) for _ in range(n)), edges=tuple(edges)), memory=False))


def fresh(core, classes=None):
    unary, costs = finite(core)
    return Messages.zero(core, unary, costs, tie(core, classes))


def all_choices(core):
    return [(core.cost(p), p) for p in itertools.product(*(range(len(c)) for c in core.unary))]


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_and_exclusions_are_safe(seed):
    core = loopy(seed)
    messages = fresh(core)
    choices = all_choices(core)
    best = min(cost for cost, _ in choices)
    bounds = []
    for _ in range(10):
        messages.forward()
        bounds.append(messages.backward() + core.constant)
        assert bounds[-1] <= best + 1e-9
    assert bounds[-1] >= bounds[0] - 1e-9
    upper = best + 0.3
    gone, pairs = messages.excluded(core, upper - core.constant)
    for cost, picks in choices:
        if cost < upper - 1e-9:
            assert not any(mask[x] for mask, x in zip(gone, picks, strict=True))
            for e, mask in pairs.items():
                assert not mask[picks[core.left[e]], picks[core.right[e]]]


def test_the_bound_is_the_optimum_on_a_chain():
    rng = np.random.default_rng(3)
    edges = tuple(Edge(u=i, v=i + 1, costs=rng.random((4, 4))) for i in range(7))
    problem = IntraOpProblem(node_costs=tuple(rng.random(4) for _ in range(8)), edges=edges)
    core = extract_core(CostGraph(problem, memory=False))
    messages = fresh(core)
    for _ in range(3):
        messages.forward()
        bound = messages.backward()
    assert bound == pytest.approx(min(cost for cost, _ in all_choices(core)))


def test_copies_together_bound_as_well_as_one_by_one():
    problem = layered(3)
    graph = CostGraph(problem, memory=False)
    presolve(graph)
    core = extract_core(graph)
    grouped, single = fresh(core, problem.classes), fresh(core)
    assert len(grouped.unary) < 0.8 * len(single.unary)
    for messages in (grouped, single):
        for _ in range(40):
            messages.forward()
            value = messages.backward()
        assert messages.exact_bound() == pytest.approx(value, rel=1e-6)
    assert grouped.exact_bound() == pytest.approx(single.exact_bound(), rel=5e-3)
