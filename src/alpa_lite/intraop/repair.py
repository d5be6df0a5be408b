"""Local improvement of a choice on a core: one node at a time (iterated conditional modes), to a local optimum."""

from __future__ import annotations

from collections.abc import Sequence

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.problem import Array

_ROUNDS = 20


Neighbours = list[list[tuple[int, int]]]


def neighbours(core: Core) -> Neighbours:
    """Per node (edge, other end); edges to later nodes have the node as their left end."""
    around: list[list[tuple[int, int]]] = [[] for _ in core.unary]
    for e, (a, b) in enumerate(zip(core.left, core.right, strict=True)):
        around[a].append((e, b))
        around[b].append((e, a))
    return around


def improve(
    core: Core,
    unary: Sequence[Array],
    costs: Sequence[Array],
    picks: Sequence[int],
    around: Neighbours | None = None,
) -> list[int]:
    """A choice that no change of one node makes cheaper; ties keep the old state.

    Args:
        core: for its edges.
        unary, costs: its costs, with large finite numbers for forbidden entries.
        picks: where to start.
        around: the core's ``neighbours``, if they are known.
    """
    picks = list(picks)
    around = neighbours(core) if around is None else around
    left = core.left
    best: dict[tuple[int, ...], int] = {}  # by costs and choices around, which copies share
    dirty = set(range(len(picks)))
    for _ in range(_ROUNDS):
        changed: set[int] = set()
        for i in sorted(dirty):
            key = [id(unary[i]), picks[i]]
            for e, j in around[i]:
                key += id(costs[e]), picks[j] if left[e] == i else ~picks[j]
            found = best.get(tuple(key))
            if found is None:
                total = unary[i].copy()
                for e, j in around[i]:
                    total += costs[e][:, picks[j]] if left[e] == i else costs[e][picks[j]]
                least = int(total.argmin())
                found = best[tuple(key)] = least if total[least] < total[picks[i]] * (1 - 1e-13) else picks[i]
            if found != picks[i]:
                picks[i] = found
                changed.update(j for _, j in around[i])
        if not changed:
            break
        dirty = changed
    return picks
