"""Eliminating what a gap leaves: the optimum of brute force, and when it is tried."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from alpa_lite.intraop import narrow, rest, search
from alpa_lite.intraop.core import extract_core
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.problem import Edge, IntraOpProblem
from alpa_lite.intraop.rest import prove_rest, rest_of
from alpa_lite.intraop.solve import solve
from alpa_lite.intraop.state import Search
from alpa_lite.intraop.tie import tie
from tests.intraop.problems import brute_force, random_problem


def started(problem: IntraOpProblem, sweeps: int, picks: list[int]) -> tuple[Search, Messages]:
    core = extract_core(CostGraph(problem, memory=False))
    found = Search.of(core, math.inf, math.inf)
    messages = Messages.zero(core, found.unary, found.costs, tie(core, None))
    for _ in range(sweeps):
        found.bound = messages.sweep() + core.constant
    if picks or not core.num_nodes:
        found.offer(picks)
    return found, messages


@pytest.mark.medium
def test_equals_brute_force_from_any_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "_GAP", math.inf)
    monkeypatch.setattr(rest, "_SHRUNK", math.inf)
    better = partly = 0
    for seed in range(150):
        problem = random_problem(seed, limited=False)
        best, _ = brute_force(problem)
        if math.isinf(best):
            continue
        core = extract_core(CostGraph(problem, memory=False))
        choices = itertools.product(*(range(len(c)) for c in core.unary))
        allowed = sorted((core.cost(c), list(c)) for c in choices if math.isfinite(core.cost(c)))
        dearer = [choice for cost, choice in allowed if cost > best + 1e-9][:1]  # so that the slack holds little else
        for sweeps, start in itertools.product((0, 1, 3), (*dearer, allowed[len(allowed) // 2][1])):
            found, messages = started(problem, sweeps, start)
            before = found.upper
            bound, over = messages.over(core)
            kept = sum(int((x <= found.upper - bound - core.constant).sum()) for x in over)
            assert prove_rest(found, messages), seed
            assert found.upper == found.bound == pytest.approx(best), seed
            assert found.picks is not None
            assert core.cost(found.picks) == found.upper, seed
            better += found.upper < before - 1e-9
            partly += found.upper < before - 1e-9 and kept < sum(map(len, core.unary))
    assert better > 300
    assert partly > 100  # where states were excluded and something cheaper was left


@pytest.mark.medium
def test_a_guess_proves_the_optimum_that_it_holds_and_else_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "_GAP", math.inf)
    monkeypatch.setattr(rest, "_SHRUNK", math.inf)
    proven = better = 0
    for seed in range(150):
        problem = random_problem(seed, limited=False)
        best, _ = brute_force(problem)
        if math.isinf(best):
            continue
        for guess in (0.0, 0.3, 0.9, 1.1, 3.0):
            found, messages = started(problem, 1, [])
            lacks = best - found.bound
            if lacks < 1e-6:
                continue
            assert prove_rest(found, messages, guess * lacks) == (guess > 1.0), seed
            assert found.bound <= best + 1e-9, seed
            if guess > 1.0:
                assert found.upper == found.bound == pytest.approx(best), seed
                proven += 1
            elif found.picks is not None:
                assert found.upper >= best - 1e-9, seed
                better += found.bound > best - lacks + 1e-9
    assert proven > 25
    assert better > 20


def test_what_is_left_has_the_costs_of_the_core() -> None:
    for seed in range(60):
        core = extract_core(CostGraph(random_problem(seed, limited=False), memory=False))
        rng = np.random.default_rng(seed)
        kept = [np.flatnonzero(rng.random(len(c)) < 0.6) for c in core.unary]
        kept = [states if len(states) else np.arange(1) for states in kept]
        left = rest_of(core, kept)
        costs = []
        for own in itertools.product(*(range(len(c)) for c in left.unary)):
            picks = [int(states[0]) for states in kept]
            for node, pick in zip(left.nodes, own, strict=True):
                picks[node] = int(kept[node][pick])
            total = sum(float(c[x]) for c, x in zip(left.unary, own, strict=True))
            edges = zip(left.left, left.right, left.costs, strict=True)
            costs.append((core.cost(picks), total + sum(float(m[own[a], own[b]]) for a, b, m in edges)))
        finite = [(whole, part) for whole, part in costs if math.isfinite(whole)]
        if left.nodes:  # up to what decided nodes cost among themselves, which no choice changes
            assert all(whole - part == pytest.approx(finite[0][0] - finite[0][1]) for whole, part in finite), seed
            single = any(len(states) == 1 for states in kept)
            assert single or all(math.isfinite(whole) == math.isfinite(part) for whole, part in costs), seed


def test_copies_share_what_is_left_of_them() -> None:
    problem = random_problem(5, limited=False)  # layers
    core = extract_core(CostGraph(problem, memory=False))
    core = replace(core, costs=(core.costs[0],) * len(core.costs))
    left = rest_of(core, [np.arange(len(c)) for c in core.unary])
    assert len(core.costs) > 1
    assert len(set(map(id, left.costs))) == 1


def test_a_core_too_wide_at_first_is_proven_by_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid, of which no table may be made before much of it is excluded; the whole solve needs nothing after that."""
    rng = np.random.default_rng(0)
    side, states = 8, 5
    nodes = tuple(rng.random(states) for _ in range(side * side))
    pairs = [(i, i + 1) for i in range(side * side) if i % side < side - 1]
    pairs += [(i, i + side) for i in range(side * (side - 1))]
    edges = tuple(Edge(u=u, v=v, costs=0.6 * rng.random((states, states))) for u, v in pairs)
    problem = IntraOpProblem(node_costs=nodes, edges=edges)
    expected = solve(problem)
    calls = []

    def counted(*args: object, **options: float) -> list[int] | None:
        calls.append(options["max_entries"])
        return narrow.solve_narrow(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "_QUICK_ENTRIES", 0)
    monkeypatch.setattr(search, "prove", None)
    monkeypatch.setattr(search, "_search_frontier", None)
    monkeypatch.setattr(rest, "solve_narrow", counted)
    found = solve(problem)
    assert calls
    assert (found.status, found.objective) == ("optimal", pytest.approx(expected.objective, rel=1e-9))
    assert found.gap < 1e-12


def test_it_is_tried_where_the_gap_has_become_small_and_excludes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    chain = tuple(Edge(u=i, v=i + 1, costs=rng.random((6, 6))) for i in range(9))
    problem = IntraOpProblem(node_costs=tuple(rng.random(6) for _ in range(10)), edges=chain)
    core = extract_core(CostGraph(problem, memory=False))
    looks, calls = [], []
    state, messages = started(problem, 3, [0] * core.num_nodes)

    def over(*_: object) -> tuple[float, list[np.ndarray]]:
        looks.append(state.gap)
        return found

    def refused(*_: object, **__: object) -> None:
        calls.append(state.gap)

    monkeypatch.setattr(Messages, "over", over)
    monkeypatch.setattr(rest, "solve_narrow", refused)
    half = [np.array([0.0, 0.0, 0.0, math.inf, math.inf, math.inf]) for _ in core.unary]
    found = 0.0, half

    def tried(gap: float) -> tuple[int, int]:
        state.upper, state.bound = 1.0, 1.0 - gap
        assert not prove_rest(state, messages)
        return len(looks), len(calls)

    assert tried(2 * rest._GAP) == (0, 0)
    assert tried(rest._GAP / 2) == (1, 1)
    assert tried(0.9 * rest._GAP / 2) == (1, 1)  # hardly closer
    assert tried(0.1 * rest._GAP) == (2, 1)  # nothing more is excluded
    found = 0.0, [np.zeros(6) for _ in core.unary]
    state.rest_pairs = math.inf
    assert tried(0.01 * rest._GAP) == (3, 1)  # nothing at all is
