"""What presolve left: finite stand-ins for forbidden entries, restriction, shifted costs, memory rows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from alpa_lite.intraop.core import Core, Memory, extract_core, finite, restrict
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.proof import shifted
from alpa_lite.intraop.tie import tie
from tests.intraop.problems import random_problem


def cores(count: int, *, limited: bool = True) -> list[Core]:
    """Cores of random problems, without presolve: all edges and usages are still there."""
    made = [CostGraph(random_problem(seed, limited=limited), memory=limited) for seed in range(count)]
    return [extract_core(graph) for graph in made]


def choices(core: Core) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(c)) for c in core.unary)))


def test_one_forbidden_entry_outweighs_all_allowed_ones() -> None:
    compared = 0
    for core in cores(30, limited=False):
        for sign in (1.0, -1.0):
            core = Core(
                **{f: getattr(core, f) for f in core.__slots__} | {"unary": tuple(sign * c for c in core.unary)}
            )
            if any(np.isneginf(c).any() for c in core.unary):
                continue
            unary, costs = finite(core)
            allowed, forbidden = [], []
            for picks in choices(core):
                total = sum(float(c[x]) for c, x in zip(unary, picks, strict=True))
                ends = zip(core.left, core.right, costs, strict=True)
                total += sum(float(m[picks[a], picks[b]]) for a, b, m in ends)
                (allowed if math.isfinite(core.cost(picks)) else forbidden).append(total)
            if allowed and forbidden:
                assert max(allowed) < min(forbidden)
                compared += 1
    assert compared > 10


def test_restriction_keeps_costs_and_memory_of_what_is_left() -> None:
    for seed, core in enumerate(cores(30)):
        rng = np.random.default_rng(seed)
        gone = [rng.random(len(c)) < 0.3 for c in core.unary]
        gone = [np.zeros_like(mask) if mask.all() else mask for mask in gone]
        pairs = {0: rng.random(core.costs[0].shape) < 0.2} if core.costs else {}
        small, kept = restrict(core, gone, pairs)
        for picks in choices(small):
            full = [int(k[x]) for k, x in zip(kept, picks, strict=True)]
            struck = any(mask[full[core.left[e]], full[core.right[e]]] for e, mask in pairs.items())
            assert small.cost(picks) == (math.inf if struck else pytest.approx(core.cost(full)))
            assert small.memory is not None and core.memory is not None
            assert small.memory.profile(np.array(picks)).tolist() == core.memory.profile(np.array(full)).tolist()


@pytest.mark.medium
def test_shifted_core_has_the_same_costs_and_the_bound_as_its_constant() -> None:
    compared = 0
    for core in cores(30, limited=False):
        unary, costs = finite(core)
        messages = Messages.zero(core, unary, costs, tie(core, None))
        for _ in range(5):
            messages.forward()
            messages.backward()
        if math.isinf(min(map(core.cost, choices(core)))):
            continue
        moved = shifted(core, messages)
        assert moved.constant <= min(map(core.cost, choices(core))) + 1e-6
        for picks in choices(core):
            assert moved.cost(picks) == pytest.approx(core.cost(picks), abs=1e-6)
        assert all(float(c.min()) >= 0 for c in (*moved.unary, *moved.costs))
        compared += 1
    assert compared > 10


def memory() -> Memory:
    return Memory(
        node=np.array([0, 1, 0]),
        lo=np.array([0, 1, 2]),
        hi=np.array([2, 3, 3]),
        start=np.array([0, 2, 4]),
        sizes=np.array([5, 1, 7, 2, 3, 3]),
        base=np.array([10, 0, 1]),
        limit=12,
    )


def test_memory_profile_and_rows() -> None:
    m = memory()
    assert m.profile(np.array([0, 1])).tolist() == [15, 7, 6]
    row, room = m.row(1, [2, 2])
    assert ({n: part.tolist() for n, part in row.items()}, room) == ({0: [5, 1], 1: [7, 2]}, 12)
    row, room = m.row(2, [2, 2])
    assert ({n: part.tolist() for n, part in row.items()}, room) == ({1: [7, 2], 0: [3, 3]}, 11)


def test_worst_times_are_peaks_above_the_limit() -> None:
    m = memory()
    profile = np.array([13, 11, 15, 14, 12, 20])
    assert m.worst_times(profile, 5, set()) == [5, 2, 0]
    assert m.worst_times(profile, 5, {5}) == [2, 0]
    assert m.worst_times(profile, 1, set()) == [5]
    assert m.worst_times(np.array([12, 0]), 5, set()) == []
