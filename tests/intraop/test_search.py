"""Which steps a search takes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from alpa_lite.intraop import rest, search
from alpa_lite.intraop.core import extract_core, finite
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.known_shape import KnownShape
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.problem import Edge, IntraOpProblem
from alpa_lite.intraop.solve import _is_wide, solve
from alpa_lite.intraop.state import LARGE_GAP, Search
from alpa_lite.intraop.tie import tie
from tests.intraop.problems import brute_force


def cliques(kinds: list[int]) -> IntraOpProblem:
    """Five nodes all linked with one another, once per entry; equal entries are copies. Costs of nodes decide almost alone."""
    rng = np.random.default_rng(0)
    pairs = list(itertools.combinations(range(5), 2))
    made = {kind: (rng.random((5, 4)), 1e-3 * rng.random((len(pairs), 4, 4))) for kind in sorted(set(kinds))}
    nodes = {kind: [np.array(row) for row in own] for kind, (own, _) in made.items()}
    matrices = {kind: [np.array(m) for m in edges] for kind, (_, edges) in made.items()}
    return IntraOpProblem(
        node_costs=tuple(costs for kind in kinds for costs in nodes[kind]),
        edges=tuple(
            Edge(u=5 * n + a, v=5 * n + b, costs=matrices[kind][e])
            for n, kind in enumerate(kinds)
            for e, (a, b) in enumerate(pairs)
        ),
        classes=np.array([5 * kind + place for kind in kinds for place in range(5)]),
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps in their order, of cores that elimination may not decide."""
    steps: list[str] = []

    def counted(name: str) -> None:
        step = getattr(search, name)

        def recorded(*args: object, **options: object) -> object:
            steps.append(name)
            return step(*args, **options)

        monkeypatch.setattr(search, name, recorded)

    for name in ("_start_tied", "_settle_tied", "_sweep"):
        counted(name)
    monkeypatch.setattr(search, "_QUICK_ENTRIES", 0)
    monkeypatch.setattr("alpa_lite.intraop.presolve._dominated", lambda *_: set())
    return steps


def test_a_start_that_proves_the_answer_is_the_end(started: list[str]) -> None:
    problem = cliques([0] * 42)
    found = solve(problem)
    assert started == ["_start_tied", "_settle_tied", "_sweep"]  # the last one of the tied problem
    assert (found.status, found.tied) == ("optimal", True)
    one = solve(replace(cliques([0]), classes=None))
    assert found.objective == pytest.approx(42 * one.objective)
    assert found.lower_bound == pytest.approx(found.objective, rel=1e-6)


@pytest.mark.parametrize(("copies", "tied"), [(2, True), (1, False)])
def test_layers_are_tied_where_most_have_copies(copies: int, tied: bool, started: list[str]) -> None:
    pairs = [kind for kind in range(14) for _ in range(2)]
    problem = cliques([*pairs, *(20 + n // copies for n in range(14))])  # 105 or 140 groups of 210 nodes
    found = solve(problem)
    assert found.status == "optimal"
    assert ("_start_tied" in started) == tied


def test_the_bound_of_a_tied_start_holds(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as high as it may be, so that the next higher one is wrong."""
    bounds = []
    settle = search._settle_tied

    def recorded(of: Search, *args: object, **options: object) -> object:
        found = settle(of, *args, **options)  # type: ignore[arg-type]
        bounds.append(of.bound)
        return found

    monkeypatch.setattr(search, "_settle_tied", recorded)
    solve(cliques([0] * 42))
    best = 42 * brute_force(replace(cliques([0]), classes=None))[0]
    (bound,) = bounds
    assert bound <= best * (1 + 1e-12)
    assert bound == pytest.approx(best, rel=1e-9)


def grid(rows: int, columns: int, states: int = 5) -> IntraOpProblem:
    """Nodes that differ, joined to those beside and below them."""
    rng = np.random.default_rng(0)
    pairs = [(i, i + 1) for i in range(rows * columns) if i % columns < columns - 1]
    pairs += [(i, i + columns) for i in range((rows - 1) * columns)]
    return IntraOpProblem(
        node_costs=tuple(rng.random(states) for _ in range(rows * columns)),
        edges=tuple(Edge(u=u, v=v, costs=0.6 * rng.random((states, states))) for u, v in pairs),
    )


@pytest.mark.parametrize(
    ("shape", "compared"),
    [((8, 8), False), ((3, 20), True), ((8, 26), True), ((8, 8, 9), True)],
    ids=["wide", "narrow", "many nodes", "edges of many entries"],
)
def test_states_are_compared_but_for_what_messages_exclude(
    shape: tuple[int, ...], compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr("alpa_lite.intraop.presolve._dominated", lambda *_: looks.append(None) or set())
    graph = CostGraph(grid(*shape), memory=False)
    wide = presolve(graph, lambda left: _is_wide(left, KnownShape(), []))
    assert (bool(looks), wide) == (compared, not compared)
    looks.clear()
    presolve(CostGraph(grid(*shape), memory=False))
    assert looks


def test_thin_cores_are_proven_by_elimination_of_what_a_guess_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[list[int]] = []
    monkeypatch.setattr(Search, "try_from", lambda _, start, **__: tries.append(start))
    monkeypatch.setattr(rest, "_GAP", 1.0)  # as of a larger core
    found = solve(grid(8, 8))
    assert (found.status, len(found.trace)) == ("optimal", 1)
    assert not tries


def test_hastened_messages_need_half_the_sweeps() -> None:
    core = extract_core(CostGraph(grid(10, 10), memory=False))

    def bound(share: float, sweeps: int) -> float:
        messages = Messages.zero(core, *finite(core), tie(core, None))
        for _ in range(sweeps):
            messages.hasten(share)
            value = messages.sweep()
        return value

    assert bound(search._HASTE, 20) > bound(0.0, 30)


def test_sweeps_are_hastened_where_a_close_bound_of_a_large_core_is_wanted() -> None:
    core = extract_core(CostGraph(grid(10, 10), memory=False))

    def bound(large_gap: float) -> float:
        of_core = Search.of(core, math.inf, math.inf)
        of_core.large_gap = large_gap
        search._sweep(of_core, Messages.zero(core, *finite(core), tie(core, None)), 1e-6, small=False, most=12)
        return of_core.bound

    assert bound(LARGE_GAP / 4) > bound(LARGE_GAP)
