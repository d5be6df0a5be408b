"""The proof in integers: finds what is cheaper than a bound, or proves that nothing is."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from alpa_lite.intraop.core import Core, extract_core
from alpa_lite.intraop.cpsat import IntegerResult, solve_whole
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.problem import Edge, IntraOpProblem, Usage


def whole_core(seed: int, *, limit: int | None = None, scale: int = 1) -> Core:
    rng = np.random.default_rng(seed)
    nodes = tuple(scale * 1000 + rng.integers(0, 9, 3).astype(float) for _ in range(5))
    edges = []
    for u, v in itertools.combinations(range(5), 2):
        costs = rng.integers(0, 9, (3, 3)).astype(float)
        costs[rng.random((3, 3)) < 0.15] = np.inf
        edges.append(Edge(u=u, v=v, costs=costs))
    usages = tuple(Usage(node=i, lo=i // 2, hi=3, size_bytes=rng.integers(1, 10, 3)) for i in range(5))
    problem = IntraOpProblem(
        node_costs=nodes, edges=tuple(edges), usages=usages if limit else (), usage_limit=limit, num_times=3
    )
    return extract_core(CostGraph(problem, memory=limit is not None))


def cheapest(core: Core) -> float:
    every = itertools.product(*(range(len(c)) for c in core.unary))
    return min((core.cost(p) for p in every if core.fits(p)), default=float("inf"))


def ask(core: Core, upper: float, hint: list[int] | None = None) -> IntegerResult:
    return solve_whole(core, round(upper - core.constant), hint, [], time.monotonic() + 20, 0)


@pytest.mark.medium
def test_finds_the_optimum_and_proves_it() -> None:
    for seed in range(12):
        for limit in (None, 24):
            core = whole_core(seed, limit=limit)
            best = cheapest(core)
            if best == float("inf"):
                assert ask(core, 10**6).proven and ask(core, 10**6).picks is None
                continue
            found = ask(core, best + 5)
            assert found.proven and found.picks is not None
            assert (core.cost(found.picks), core.fits(found.picks)) == (best, True)
            nothing = ask(core, best)
            assert nothing.proven and nothing.picks is None


def test_one_unit_in_a_million_million_is_seen() -> None:
    core = whole_core(3, scale=10**9)
    best = cheapest(core)
    assert ask(core, best).picks is None
    found = ask(core, best + 1).picks
    assert found is not None and core.cost(found) == best


def test_memory_rows_are_added_until_the_answer_fits() -> None:
    binding = 0
    for seed in range(12):
        core, free = whole_core(seed, limit=20), whole_core(seed)
        found = ask(core, 10**6).picks
        if found is not None:
            assert core.fits(found)
            binding += core.cost(found) > cheapest(free)
    assert binding >= 3


def test_a_hint_changes_nothing_but_the_way() -> None:
    core = whole_core(1)
    result = ask(core, 10**6, hint=[0] * core.num_nodes)
    assert result.picks is not None and core.cost(result.picks) == cheapest(core)


def test_no_time_is_no_proof() -> None:
    core = whole_core(1)
    result = solve_whole(core, 10**6, None, [], time.monotonic() - 1, 0)
    assert result.picks is None or core.fits(result.picks)
    assert result.bound <= cheapest(core)
