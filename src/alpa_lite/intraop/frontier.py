"""Search along a frontier: exact where good messages leave little to search, a beam otherwise.

Nodes are decided one after another. Partial choices that agree on all nodes with undecided neighbours (the frontier) have
the same future, so of these only the cheapest goes on. The costs are those that messages leave (``proof.shifted``): none is
negative, so what a partial choice costs so far bounds what it will cost, and those above the slack are dropped. The better
the messages, the fewer remain: at a gap of a thousandth mostly some dozens, where a table over the frontier would have 10^12.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.problem import Array

_WIDEST = 4000  # partial choices at a time
_SPARE = 4  # times as many partial choices as a beam has mostly have enough frontiers to fill it


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        picks: the cheapest choice that was seen; None if there was none within the slack.
        complete: every choice within the slack was seen.
    """

    picks: list[int] | None
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """What is done when one node is decided.

    Attributes:
        node: the node.
        edges: (edge, row of its other end in the frontier, whether the node is the left end) to decided neighbours.
        kept: rows of the frontier that stay; ``gone`` are (row, node) of those that leave it.
        enters: whether the node itself has undecided neighbours.
    """

    node: int
    edges: list[tuple[int, int, bool]]
    kept: list[int]
    gone: list[tuple[int, int]]
    enters: bool


class Frontier:
    """The order in which the nodes of one core are decided."""

    def __init__(self, core: Core) -> None:
        self._around: list[list[tuple[int, int, bool]]] = [[] for _ in core.unary]
        for e, (a, b) in enumerate(zip(core.left, core.right, strict=True)):
            self._around[a].append((e, b, True))
            self._around[b].append((e, a, False))
        order = self._order([math.log(len(c)) for c in core.unary])
        self._steps = self._schedule(order)
        sizes = np.array([len(c) for c in core.unary])
        self._first = np.cumsum([0, *sizes]).tolist()
        self._marks = _spread(np.arange(int(sizes.sum()), dtype=np.uint64))

    def _order(self, weight: Sequence[float]) -> list[int]:
        """Next comes the neighbour of decided nodes that lets the frontier grow least."""
        count = len(weight)
        waiting = [len(near) for near in self._around]  # undecided neighbours
        decided = [False] * count
        order: list[int] = []
        fringe: dict[int, float] = {}  # undecided neighbours of decided nodes, and by how much the frontier would grow

        def update(i: int) -> None:
            leaves = sum(weight[j] for _, j, _ in self._around[i] if decided[j] and waiting[j] == 1)
            fringe[i] = (weight[i] if waiting[i] else 0.0) - leaves

        starts = iter(sorted(range(count), key=lambda i: (len(self._around[i]), i)))
        while len(order) < count:
            fallback = None if fringe else next(i for i in starts if not decided[i])
            node = min(fringe, key=lambda i: (fringe[i], i)) if fallback is None else fallback
            fringe.pop(node, None)
            decided[node] = True
            order.append(node)
            near = [j for _, j, _ in self._around[node]]
            for j in near:
                waiting[j] -= 1
            changed = {j for j in near if not decided[j]}
            for j in (node, *near):  # about to leave the frontier with their last neighbour
                if decided[j] and waiting[j] == 1:
                    changed.update(k for _, k, _ in self._around[j] if not decided[k])
            for j in changed:
                update(j)
        return order

    def _schedule(self, order: Sequence[int]) -> list[_Step]:
        rank = {node: r for r, node in enumerate(order)}
        last = [max([rank[i], *(rank[j] for _, j, _ in near)]) for i, near in enumerate(self._around)]
        steps: list[_Step] = []
        rows: list[int] = []
        for r, node in enumerate(order):
            place = {j: row for row, j in enumerate(rows)}
            edges = [(e, place[j], is_left) for e, j, is_left in self._around[node] if rank[j] < r]
            gone = [(row, j) for row, j in enumerate(rows) if last[j] <= r]
            kept = [row for row, j in enumerate(rows) if last[j] > r]
            steps.append(_Step(node=node, edges=edges, kept=kept, gone=gone, enters=last[node] > r))
            rows = [rows[row] for row in kept] + [node] * (last[node] > r)
        return steps

    def search(self, core: Core, slack: float, *, work: int, beam: int = 0) -> Found:
        """The cheapest choice that costs at most ``slack`` over the core's constant.

        Args:
            core: of the same nodes and edges as this frontier's, no cost negative.
            slack: what a choice may cost.
            work: partial choices in all; more, and only a beam goes on.
            beam: how many go on then at a time; 0 = the search ends.
        """
        states = np.zeros((0, 1), dtype=np.intp)
        costs, marks = np.zeros(1), np.zeros(1, dtype=np.uint64)
        back: list[tuple[Array, Array]] = []
        complete = True
        for step in self._steps:
            total = costs[:, None] + core.unary[step.node]
            for e, row, is_left in step.edges:
                total += (core.costs[e].T if is_left else core.costs[e])[states[row]]
            parent, state = np.nonzero(total <= slack)
            costs = total[parent, state]
            marks = self._marked(step, states, marks, parent, state)
            if step.gone or not step.enters:
                chosen = _cheapest(costs, marks, beam if work < 0 else 0)
                parent, state, costs, marks = parent[chosen], state[chosen], costs[chosen], marks[chosen]
            work -= len(costs)
            most = _WIDEST if work >= 0 else beam
            if len(costs) > most:
                complete = False
                chosen = np.sort(np.argsort(costs, kind="stable")[:most])
                parent, state, costs, marks = parent[chosen], state[chosen], costs[chosen], marks[chosen]
            if not len(costs):
                return Found(picks=None, complete=complete)
            states = states[step.kept][:, parent] if step.gone else states[:, parent]
            if step.enters:
                states = np.concatenate([states, state[None]])
            back.append((parent, state))
        return Found(picks=self._picks(back, int(costs.argmin())), complete=complete)

    def _marked(self, step: _Step, states: Array, marks: Array, parent: Array, state: Array) -> Array:
        """A number for every partial choice that depends on its frontier alone.

        Two frontiers of one number would be taken for one; with 64 bits the chance of that is below 1e-9 in a search.
        """
        for row, j in step.gone:
            marks = marks - self._marks[states[row] + self._first[j]]
        marks = marks[parent]
        return marks + self._marks[state + self._first[step.node]] if step.enters else marks

    def _picks(self, back: Sequence[tuple[Array, Array]], best: int) -> list[int]:
        picks = [0] * len(self._steps)
        for step, (parent, state) in zip(reversed(self._steps), reversed(back), strict=True):
            picks[step.node] = int(state[best])
            best = int(parent[best])
        return picks


def _cheapest(costs: Array, marks: Array, most: int = 0) -> Array:
    """The first of the cheapest of equal marks, in the order of the partial choices.

    Where only ``most`` of them are wanted: more than these, the cheapest of all, if there are more.
    """
    if 0 < _SPARE * most < len(costs):
        near = np.flatnonzero(costs <= np.partition(costs, _SPARE * most)[_SPARE * most])
        chosen = near[_cheapest(costs[near], marks[near])]
        if len(chosen) > most:
            return chosen
    order = np.argsort(marks)
    found = marks[order]
    begins = np.ones(len(order), dtype=bool)
    np.not_equal(found[1:], found[:-1], out=begins[1:])
    starts = np.flatnonzero(begins)
    if len(starts) == len(order):
        return np.arange(len(order))
    ordered = costs[order]
    least = np.minimum.reduceat(ordered, starts)[np.cumsum(begins) - 1]
    return np.sort(np.minimum.reduceat(np.where(ordered == least, order, len(order)), starts))


def _spread(x: Array) -> Array:
    """Numbers whose sums tell sets apart (splitmix64)."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
