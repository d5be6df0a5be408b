"""Choices that keep the memory limit: squeezing one that does not, and spending what a choice leaves over.

Both work on a core with finite costs (large numbers for what is forbidden) and keep the usage profile up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.repair import neighbours

_SQUEEZES = 60
_SPEND_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Span:
    """A node's usage over time: piecewise constant between ``cuts``.

    Attributes:
        lo, hi: first time and end of all pieces.
        cuts: first times of the pieces; the first is ``lo``.
        lengths: of the pieces.
        sizes: int64[states, pieces].
    """

    lo: int
    hi: int
    cuts: Array
    lengths: Array
    sizes: Array

    def at(self, time: int) -> Array | None:
        """Bytes of every state at one time; None where the node uses nothing."""
        if not self.lo <= time < self.hi:
            return None
        return self.sizes[:, int(np.searchsorted(self.cuts, time, side="right")) - 1]

    def change(self, old: int, new: int) -> Array:
        """Bytes more at every time from lo to hi."""
        return np.repeat(self.sizes[new] - self.sizes[old], self.lengths)


def _span(items: list[tuple[int, int, Array]]) -> _Span:
    bounds = np.unique([t for lo, hi, _ in items for t in (lo, hi)])
    sizes = np.zeros((len(items[0][2]), len(bounds) - 1), dtype=np.int64)
    for lo, hi, part in items:
        first, last = np.searchsorted(bounds, (lo, hi)).tolist()
        sizes[:, first:last] += part[:, None]
    return _Span(lo=int(bounds[0]), hi=int(bounds[-1]), cuts=bounds[:-1], lengths=np.diff(bounds), sizes=sizes)


class Fit:
    """A core's nodes, their neighbours and their usages, for moves that change one node at a time."""

    def __init__(self, core: Core, unary: Sequence[Array], costs: Sequence[Array]) -> None:
        assert core.memory is not None
        self.core, self.unary, self.costs, self.memory = core, unary, costs, core.memory
        self.around = neighbours(core)
        items: dict[int, list[tuple[int, int, Array]]] = {}
        memory = core.memory
        for node, lo, hi, start in zip(
            memory.node.tolist(), memory.lo.tolist(), memory.hi.tolist(), memory.start.tolist(), strict=True
        ):
            items.setdefault(node, []).append((lo, hi, memory.sizes[start : start + len(unary[node])]))
        self.spans = {node: _span(found) for node, found in items.items()}

    def node_costs(self, i: int, picks: Sequence[int]) -> Array:
        """Cost of every state of a node beside its neighbours' choices."""
        total = self.unary[i].copy()
        for e, j in self.around[i]:
            total += self.costs[e][:, picks[j]] if self.core.left[e] == i else self.costs[e][picks[j]]
        return total

    def move(self, i: int, state: int, picks: list[int], profile: Array) -> None:
        span = self.spans.get(i)
        if span is not None and state != picks[i]:
            profile[span.lo : span.hi] += span.change(picks[i], state)
        picks[i] = state

    def allows(self, i: int, state: int, picks: list[int], profile: Array) -> bool:
        """Whether the move keeps the limit, given that the choice does."""
        span = self.spans.get(i)
        if span is None:
            return True
        change = span.change(picks[i], state)
        return bool((profile[span.lo : span.hi] + change)[change > 0].max(initial=0) <= self.memory.limit)

    def squeeze(self, start: Sequence[int]) -> list[int] | None:
        """A choice that fits, from one that does not: at the fullest time, the cheapest bytes go first; None if stuck."""
        picks = list(start)
        profile = self.memory.profile(np.asarray(picks))
        for _ in range(_SQUEEZES):
            time = int(profile.argmax())
            if int(profile[time]) <= self.memory.limit:
                return picks
            live = {i: sizes for i, span in self.spans.items() if (sizes := span.at(time)) is not None}
            ranked = {i: self._smaller(i, sizes, picks) for i, sizes in live.items()}
            moved = False
            for _, i in sorted((rates[0][0], i) for i, rates in ranked.items() if rates):
                moved |= self._shrink(i, live[i], picks, profile)
                if int(profile[time]) <= self.memory.limit:
                    break
            if not moved:
                return None
        return None

    def _smaller(self, i: int, live: Array, picks: Sequence[int]) -> list[tuple[float, int]]:
        """(cost per byte saved, state) of the states that use fewer bytes, best first."""
        costs = self.node_costs(i, picks)
        saved = live[picks[i]] - live
        states = np.flatnonzero(saved > 0)
        return sorted(zip(((costs[states] - costs[picks[i]]) / saved[states]).tolist(), states.tolist(), strict=True))

    def _shrink(self, i: int, live: Array, picks: list[int], profile: Array) -> bool:
        """Moves a node to its best smaller state by which all times together are less overfull."""
        span, limit = self.spans[i], self.memory.limit
        over = profile[span.lo : span.hi] - limit
        before = np.maximum(over, 0).sum()
        for _, state in self._smaller(i, live, picks):
            if np.maximum(over + span.change(picks[i], state), 0).sum() < before:
                self.move(i, state, picks, profile)
                return True
        return False

    def spend(self, start: Sequence[int], wish: Sequence[int]) -> list[int]:
        """Improves a choice that fits, without leaving the limit: whole parts of a cheaper wish, then node by node."""
        picks = list(start)
        profile = self.memory.profile(np.asarray(picks))
        for part in self._differences(picks, wish):
            self._take(part, wish, picks, profile)
        for _ in range(_SPEND_ROUNDS):
            changed = False
            for i in range(len(picks)):
                costs = self.node_costs(i, picks)
                here = costs[picks[i]]
                for state in np.argsort(costs, kind="stable").tolist():
                    if not costs[state] < here * (1 - 1e-13):
                        break
                    if self.allows(i, state, picks, profile):
                        self.move(i, state, picks, profile)
                        changed = True
                        break
            if not changed:
                break
        return picks

    def _take(self, part: list[int], wish: Sequence[int], picks: list[int], profile: Array) -> None:
        """Gives a part of the nodes the states they have in the wish if that is cheaper and fits."""
        old = [picks[i] for i in part]
        cost = 0.0
        for i in part:  # node by node, so that edges inside the part count once
            costs = self.node_costs(i, picks)
            cost += float(costs[wish[i]] - costs[picks[i]])
            self.move(i, wish[i], picks, profile)
        if cost >= 0 or profile.max() > self.memory.limit:
            for i, state in zip(part, old, strict=True):
                self.move(i, state, picks, profile)

    def _differences(self, picks: Sequence[int], wish: Sequence[int]) -> list[list[int]]:
        """Connected parts on which two choices differ, in node order."""
        open_nodes = {i for i, (a, b) in enumerate(zip(picks, wish, strict=True)) if a != b}
        parts = []
        for first in sorted(open_nodes):
            if first not in open_nodes:
                continue
            open_nodes.discard(first)
            part, stack = [], [first]
            while stack:
                i = stack.pop()
                part.append(i)
                for _, j in self.around[i]:
                    if j in open_nodes:
                        open_nodes.discard(j)
                        stack.append(j)
            parts.append(sorted(part))
        return parts
