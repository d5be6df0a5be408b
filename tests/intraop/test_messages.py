"""Message passing: the bound holds at all times, rises, and is met on trees; what is excluded is not needed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from alpa_lite.intraop.core import Core, extract_core, finite
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.tie import tie, tied_core
from alpa_lite.intraop.visits import least_of as least
from benchmarks.layered import layered


def random_core(seed: int, *, tree: bool = False, copies: bool = False) -> Core:
    """Dense little core, or a tree; with copies, nodes and edges share their costs."""
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(2, 6)), 3
    pairs = [(int(rng.integers(0, b)), b) for b in range(1, n)] if tree else list(itertools.combinations(range(n), 2))
    unary, matrix = rng.random(k) * 10, rng.random((k, k)) * 10
    matrix[rng.random((k, k)) < 0.2] = np.inf
    matrix[0, 0] = 1.0
    matrices = [matrix if copies else np.where(np.isinf(matrix), np.inf, rng.random((k, k)) * 10) for _ in pairs]
    return Core(
        nodes=tuple(range(n)),
        unary=tuple(unary if copies else rng.random(k) * 10 for _ in range(n)),
        left=tuple(a for a, _ in pairs),
        right=tuple(b for _, b in pairs),
        costs=tuple(matrices),
        unary_ids=tuple(0 if copies else i for i in range(n)),
        matrix_ids=tuple(0 if copies else i for i in range(len(pairs))),
        memory=None,
        constant=2.5,
        whole=False,
    )


def messages_of(core: Core, *, copies: bool = False) -> Messages:
    unary, costs = finite(core)
    return Messages.zero(core, unary, costs, tie(core, np.zeros(core.num_nodes) if copies else None))


def optimum(core: Core) -> float:
    return min(core.cost(p) for p in itertools.product(*(range(len(c)) for c in core.unary)))


@pytest.mark.parametrize("copies", [False, True])
def test_every_sweep_gives_a_valid_bound_and_says_which(copies: bool) -> None:
    for seed in range(40):
        core = random_core(seed, copies=copies)
        messages, best, last = messages_of(core, copies=copies), optimum(core), -math.inf
        for sweep in (messages.forward, messages.backward) * 8:
            value = sweep()
            assert value == pytest.approx(messages.exact_bound(), abs=1e-8), seed
            assert value + core.constant <= best + 1e-8, seed
            assert value >= last - 1e-8, seed
            last = value


@pytest.mark.parametrize("copies", [False, True])
def test_hastened_messages_give_valid_bounds(copies: bool) -> None:
    for seed in range(40):
        core = random_core(seed, copies=copies)
        messages, best, before = messages_of(core, copies=copies), optimum(core), 0.0
        for count in range(12):
            given = messages._values.copy()
            messages.hasten(0.5)
            assert (messages._values == given + (0.5 * (given - before) if count else 0.0)).all(), seed
            before = given
            value = messages.sweep()
            assert value == pytest.approx(messages.exact_bound(), abs=1e-8), seed
            assert value + core.constant <= best + 1e-8, seed


def test_trees_are_solved_to_the_optimum() -> None:
    for seed in range(40):
        core = random_core(seed, tree=True)
        messages = messages_of(core)
        for _ in range(6):
            messages.forward()
            value = messages.backward()
        assert value + core.constant == pytest.approx(optimum(core)), seed
        assert core.cost(messages.pick()) == pytest.approx(optimum(core)), seed
        messages.forward()
        assert core.cost(messages.pick(forward=False)) == pytest.approx(optimum(core)), seed


def test_copies_give_the_same_bounds_as_single_nodes_in_that_order() -> None:
    """Edges of a path 0-2-1-3: nodes of one group are not neighbours, so doing them at once changes nothing."""
    core = random_core(5, copies=True)
    rng = np.random.default_rng(1)
    matrix = rng.random((3, 3))
    unary = tuple(rng.random(3) for _ in range(2))
    core = Core(
        nodes=(0, 1, 2, 3),
        unary=(unary[0], unary[0], unary[1], unary[1]),
        left=(0, 1, 1),
        right=(2, 2, 3),
        costs=(matrix, matrix, matrix),
        unary_ids=(0, 0, 1, 1),
        matrix_ids=(0, 0, 0),
        memory=None,
        constant=0.0,
        whole=False,
    )
    alone = messages_of(core)
    grouped = Messages.zero(core, list(core.unary), core.costs, tie(core, np.array([0, 0, 1, 1])))
    assert len(grouped.unary) == 2
    for _ in range(4):
        assert grouped.forward() == pytest.approx(alone.forward(), abs=1e-12)
        assert grouped.backward() == pytest.approx(alone.backward(), abs=1e-12)
    assert grouped.pick() == alone.pick()
    assert grouped.pick(forward=False) == alone.pick(forward=False)


@pytest.mark.parametrize("copies", [False, True])
def test_exclusion_spares_every_choice_within_the_slack(copies: bool) -> None:
    excluded = 0
    for seed in range(40):
        core = random_core(seed, copies=copies)
        messages = messages_of(core, copies=copies)
        for _ in range(5):
            messages.forward()
            messages.backward()
        slack = 3.0
        bound = messages.exact_bound() + core.constant
        gone, pairs = messages.excluded(core, slack)
        for picks in itertools.product(*(range(len(c)) for c in core.unary)):
            if core.cost(picks) <= bound + slack - 1e-9:
                assert not any(mask[x] for mask, x in zip(gone, picks, strict=True)), seed
                assert not any(mask[picks[core.left[e]], picks[core.right[e]]] for e, mask in pairs.items()), seed
        excluded += sum(int(mask.sum()) for mask in gone) + sum(int(mask.sum()) for mask in pairs.values())
    assert excluded > 100


def test_edge_rests_keep_the_sides_of_the_core() -> None:
    """All costs are found again: node rests and edge rests of a choice add up to its cost, whatever the messages."""
    for seed in range(20):
        for copies in (False, True):
            core = random_core(seed, copies=copies)
            messages = messages_of(core, copies=copies)
            messages.forward()
            messages.backward()
            rests, rests_of_edges = messages.node_rests(), messages.edge_rests()
            for picks in itertools.product(*(range(len(c)) for c in core.unary)):
                cost = core.cost(picks)
                if math.isfinite(cost):
                    total = sum(float(r[x]) for r, x in zip(rests, picks, strict=True))
                    for e, (a, b) in enumerate(zip(core.left, core.right, strict=True)):
                        total += float(rests_of_edges[e][picks[a], picks[b]])
                    assert total + core.constant == pytest.approx(cost), seed


@pytest.mark.medium
def test_shares_of_the_tied_core_are_a_valid_start():
    problem = layered(4)
    graph = CostGraph(problem, memory=False)
    presolve(graph)
    core = extract_core(graph)
    unary, costs = finite(core)
    tied = tie(core, problem.classes)
    whole = tied_core(core, tied)
    inner = Messages.zero(whole, *finite(whole), tie(whole, None))
    for _ in range(30):
        inner.forward()
        inner.backward()
    started, fresh = (Messages.zero(core, unary, costs, tied) for _ in range(2))
    started.start_from(inner)
    assert started.exact_bound() > fresh.exact_bound()  # before any sweep of its own
    for messages in (started, fresh):
        for _ in range(60):
            messages.forward()
            value = messages.backward()
        assert messages.exact_bound() == pytest.approx(value, rel=1e-9)
    assert started.exact_bound() == pytest.approx(fresh.exact_bound(), rel=2e-3)


def test_equal_messages_of_copies_are_passed_once_with_the_same_result() -> None:
    rng = np.random.default_rng(3)
    costs = rng.random((4, 5))
    rows = rng.random((4, 4))
    messages = rows[[0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 1]]
    one_by_one = np.concatenate([least(costs, message[None]) for message in messages])
    assert np.array_equal(least(costs, messages), one_by_one)
