"""The search along a frontier against brute force: exact within its slack, and honest about what it did not see."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from alpa_lite.intraop.core import Core, extract_core, finite
from alpa_lite.intraop.frontier import Frontier, _cheapest
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.proof import shifted
from alpa_lite.intraop.tie import tie
from tests.intraop.problems import random_problem

ENOUGH = 10**6


def cores() -> list[Core]:
    """Random cores with an allowed choice, and the costs that a few sweeps leave."""
    made = []
    for seed in range(60):
        core = extract_core(CostGraph(random_problem(seed, limited=False), memory=False))
        if math.isinf(cheapest(core)):
            continue
        messages = Messages.zero(core, *finite(core), tie(core, None))
        for _ in range(3):
            messages.forward()
            messages.backward()
        made.append(shifted(core, messages))
    return made


def cheapest(core: Core) -> float:
    return min(core.cost(picks) for picks in itertools.product(*(range(len(c)) for c in core.unary)))


def test_a_complete_search_finds_the_cheapest_choice() -> None:
    solved = 0
    for seed, core in enumerate(cores()):
        found = Frontier(core).search(core, 1e6, work=ENOUGH)
        assert found.complete
        assert found.picks is not None, seed
        assert core.cost(found.picks) == pytest.approx(cheapest(core), abs=1e-9), seed
        solved += len(core.costs) > 3
    assert solved > 20


def test_nothing_is_found_below_the_cheapest_choice_and_it_is_found_at_its_price() -> None:
    for seed, core in enumerate(cores()):
        excess = cheapest(core) - core.constant
        if excess > 1e-3:
            below = Frontier(core).search(core, excess * 0.999, work=ENOUGH)
            assert (below.picks, below.complete) == (None, True), seed
            assert Frontier(core).search(core, excess * 1.001, work=ENOUGH).picks is not None, seed


def test_a_beam_says_that_it_has_not_seen_everything() -> None:
    rng = np.random.default_rng(0)
    clique = list(itertools.combinations(range(6), 2))
    core = Core(
        nodes=tuple(range(6)),
        unary=tuple(rng.random(4) for _ in range(6)),
        left=tuple(a for a, _ in clique),
        right=tuple(b for _, b in clique),
        costs=tuple(rng.random((4, 4)) for _ in clique),
        unary_ids=tuple(range(6)),
        matrix_ids=tuple(range(len(clique))),
        memory=None,
        constant=0.0,
        whole=False,
    )
    frontier = Frontier(core)
    exact = frontier.search(core, 100.0, work=ENOUGH)
    assert exact.complete
    beam = frontier.search(core, 100.0, work=0, beam=2)
    assert not beam.complete
    assert beam.picks is not None and exact.picks is not None
    assert core.cost(beam.picks) >= core.cost(exact.picks)
    assert frontier.search(core, 100.0, work=10) == type(beam)(picks=None, complete=False)  # no beam: it ends there
    assert frontier.search(core, 100.0, work=0, beam=2) == beam


def test_of_equal_frontiers_the_first_of_the_cheapest_stays_and_a_beam_gets_the_same_ones() -> None:
    rng = np.random.default_rng(3)
    for spread in (3, 40, 500):
        costs, marks = rng.integers(0, 50, 500).astype(float), rng.integers(0, spread, 500).astype(np.uint64)
        least: dict[int, int] = {}
        for i, (cost, mark) in enumerate(zip(costs.tolist(), marks.tolist(), strict=True)):
            if mark not in least or cost < costs[least[mark]]:
                least[mark] = i
        every = sorted(least.values())
        assert _cheapest(costs, marks).tolist() == every
        for most in (5, 20):
            some = _cheapest(costs, marks, most).tolist()
            wanted = sorted(every, key=lambda i: (costs[i], i))[:most]
            assert set(wanted) <= set(some) <= set(every)
            assert len(some) > most or some == every
