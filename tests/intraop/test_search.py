"""Which steps a search takes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from alpa_lite.intraop import search
from alpa_lite.intraop.problem import Edge, IntraOpProblem
from alpa_lite.intraop.solve import solve


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
