"""What one problem hands on to the next: the same answer bit for bit, with less work where cores have one shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alpa_lite.intraop import level_sweeps, narrow, search
from alpa_lite.intraop.known_shape import KnownShape
from alpa_lite.intraop.problem import Edge, IntraOpProblem
from alpa_lite.intraop.solve import solve


def problem_of(costs: int, states: int, edges: int = 0, num_nodes: int = 90) -> IntraOpProblem:
    """Four neighbours to each node, so that presolve leaves all; ``costs`` and ``edges`` are seeds."""
    place = np.random.default_rng(edges).permutation(num_nodes).tolist()
    pairs = [(place[i], place[(i + step) % num_nodes]) for i in range(num_nodes) for step in (1, 9)]
    rng = np.random.default_rng(costs)
    joined = tuple(
        Edge(u=min(pair), v=max(pair), costs=0.3 * rng.random((states, states))) for pair in sorted(map(sorted, pairs))
    )
    return IntraOpProblem(node_costs=tuple(rng.random(states) for _ in range(num_nodes)), edges=joined)


def test_problems_one_after_the_other_are_solved_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        make: Callable[..., Any] = getattr(module, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            made[name] += 1
            return make(*args, **options)

        monkeypatch.setattr(module, name, wrapped)

    monkeypatch.setattr(search, "_QUICK_ENTRIES", 0)  # as of cores that are too wide for elimination at once
    counted(level_sweeps, "_levels")
    counted(narrow, "_scopes")
    shape, rested = KnownShape(), 0
    # What is new of each: all, costs, states, states, costs, edges, nodes.
    cases = [(problem_of(0, 4), 1), (problem_of(1, 4), 0), (problem_of(2, 3), 1), (problem_of(3, 4), 1)]
    cases += [(problem_of(4, 4), 0), (problem_of(5, 4, edges=1), 1), (problem_of(6, 4, num_nodes=80), 1)]
    for number, (problem, new) in enumerate(cases):
        made.clear()
        alone = solve(problem)
        before = made.copy()
        assert before["_levels"] == 2, number  # forward and backward
        made.clear()
        handed = solve(problem, shape=shape)
        assert made["_levels"] == 2 * new, number
        assert made["_scopes"] == before["_scopes"] - (not new), number  # the rest of it has a shape of its own
        assert handed.choice.tolist() == alone.choice.tolist(), number
        assert (handed.objective, handed.lower_bound) == (alone.objective, alone.lower_bound), number
        assert (handed.status, handed.trace) == (alone.status, alone.trace), number
        rested += before["_scopes"] > 1
    assert rested  # some answers came by elimination of the rest
