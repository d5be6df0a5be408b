"""Lower bounds by message passing: sequential reweighted sweeps over the nodes (Kolmogorov's SRMP; on pairs, TRW-S).

A message m[e, i] moves cost from edge e to its end point i. For any messages

    bound = constant + sum_i min_x (c_i + sum_e m[e, i])(x) + sum_(i,j) min_xy (C - m[e, i] - m[e, j])(x, y)

is a lower bound (``exact_bound``); the sweeps only look for good messages. The gap between a known answer and the bound
then excludes states and pairs (``excluded``).

A sweep goes from group to group (``tie.py``): copies of one node are never neighbours, so all are done at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.tie import Tie

_CHUNK = 60_000  # entries of the scratch array of one minimum; more would leave the processor's cache
_MANY_COPIES = 8  # from which on equal messages are looked for
_ZERO = np.zeros(1, dtype=np.int64)


Slots = Array | slice


@dataclass(slots=True, kw_only=True, eq=False)
class _Edges:
    """The edges of one group: one matrix, and per edge its ends and messages.

    Attributes:
        left, right: groups of the ends, left < right.
        left_slots, right_slots: per edge, places of its ends in their groups; a slice where they follow one another.
        costs, flipped: the matrix and its transpose, shared by all groups with that matrix.
        to_left, to_right: messages, one row per edge.
    """

    left: int
    right: int
    left_slots: Slots
    right_slots: Slots
    costs: Array
    flipped: Array
    to_left: Array
    to_right: Array


class Messages:
    """Messages of one core, changed in place by the sweeps.

    Attributes:
        tied: groups of the core's nodes and edges.
        unary: per group [copies, states], costs without messages (with memory prices, if any).
    """

    __slots__ = ("_earlier", "_edges", "_later", "_most", "_share_earlier", "_share_later", "tied", "unary")

    def __init__(self, tied: Tie, unary: list[Array], edges: list[_Edges]) -> None:
        self.tied = tied
        self.unary = unary
        self._edges = edges
        self._earlier: list[list[_Edges]] = [[] for _ in unary]
        self._later: list[list[_Edges]] = [[] for _ in unary]
        num_earlier = [np.zeros((len(u), 1)) for u in unary]
        num_later = [np.zeros((len(u), 1)) for u in unary]
        for e in edges:
            self._later[e.left].append(e)
            self._earlier[e.right].append(e)
            _add_rows(num_later[e.left], e.left_slots, np.ones((len(e.to_left), 1)))
            _add_rows(num_earlier[e.right], e.right_slots, np.ones((len(e.to_right), 1)))
        self._most = [np.maximum(np.maximum(a, b), 1.0) for a, b in zip(num_earlier, num_later, strict=True)]
        self._share_earlier = [a / most for a, most in zip(num_earlier, self._most, strict=True)]
        self._share_later = [a / most for a, most in zip(num_later, self._most, strict=True)]

    @classmethod
    def zero(cls, core: Core, unary: Sequence[Array], costs: Sequence[Array], tied: Tie) -> Messages:
        """Messages that move nothing, on finite costs of the core's nodes and edges."""
        edges = []
        slot = tied.slot
        transposed: dict[int, Array] = {}
        for (left, right), flipped, members in zip(tied.ends, tied.flipped, tied.edge_members, strict=True):
            low, high = (core.right, core.left) if flipped else (core.left, core.right)
            matrix = costs[members[0]]
            turned = transposed.setdefault(id(matrix), np.ascontiguousarray(matrix.T))
            if flipped:
                matrix, turned = turned, matrix
            edges.append(
                _Edges(
                    left=left,
                    right=right,
                    left_slots=_slots([slot[low[e]] for e in members]),
                    right_slots=_slots([slot[high[e]] for e in members]),
                    costs=matrix,
                    flipped=turned,
                    to_left=np.zeros((len(members), matrix.shape[0])),
                    to_right=np.zeros((len(members), matrix.shape[1])),
                )
            )
        return cls(tied, _stacked(tied, unary), edges)

    def start_from(self, inner: Messages) -> None:
        """Gives every copy its share of the messages of the tied core, one edge of which stands for one group here."""
        for own, whole in zip(self._edges, inner._edges, strict=True):
            count = len(own.to_left)
            own.to_left = np.repeat(whole.to_left / count, count, axis=0)
            own.to_right = np.repeat(whole.to_right / count, count, axis=0)

    def set_unary(self, unary: Sequence[Array]) -> None:
        """Replaces the costs of the core's nodes; the messages stay."""
        self.unary = _stacked(self.tied, unary)

    def forward(self) -> float:
        """Sweeps from first to last group; returns the bound (without constant)."""
        total = 0.0
        for g, unary in enumerate(self.unary):
            theta = unary.copy()
            for e in self._earlier[g]:
                e.to_right = _least(e.costs, e.to_left)
                _add_rows(theta, e.right_slots, e.to_right)
            for e in self._later[g]:
                _add_rows(theta, e.left_slots, e.to_left)
            if self._later[g]:
                part = theta / self._most[g]
                for e in self._later[g]:
                    e.to_left = e.to_left - (part if len(part) == 1 else part[e.left_slots])
            total += _stays(theta, self._share_later[g])
        return total

    def backward(self) -> float:
        """As ``forward``, from last to first group."""
        total = 0.0
        for g in range(len(self.unary) - 1, -1, -1):
            theta = self.unary[g].copy()
            for e in self._later[g]:
                e.to_left = _least(e.flipped, e.to_right)
                _add_rows(theta, e.left_slots, e.to_left)
            for e in self._earlier[g]:
                _add_rows(theta, e.right_slots, e.to_right)
            if self._earlier[g]:
                part = theta / self._most[g]
                for e in self._earlier[g]:
                    e.to_right = e.to_right - (part if len(part) == 1 else part[e.right_slots])
            total += _stays(theta, self._share_earlier[g])
        return total

    def pick(self) -> list[int]:
        """A choice, group by group: what the chosen earlier nodes cost, and what the messages say of later ones."""
        picks: list[Array] = []
        for g, unary in enumerate(self.unary):
            seen = unary.copy()
            for e in self._earlier[g]:
                _add_rows(seen, e.right_slots, e.costs[picks[e.left][e.left_slots]])
            for e in self._later[g]:
                _add_rows(seen, e.left_slots, e.to_left)
            picks.append(seen.argmin(1))
        return [int(picks[g][s]) for g, s in zip(self.tied.group, self.tied.slot, strict=True)]

    def node_rests(self) -> list[Array]:
        """Costs of the core's nodes with all messages in."""
        rests = [u.copy() for u in self.unary]
        for e in self._edges:
            _add_rows(rests[e.left], e.left_slots, e.to_left)
            _add_rows(rests[e.right], e.right_slots, e.to_right)
        return [rests[g][s] for g, s in zip(self.tied.group, self.tied.slot, strict=True)]

    def edge_rests(self) -> list[Array]:
        """The matrices of the core's edges with their messages out."""
        groups = [e.costs - e.to_left[:, :, None] - e.to_right[:, None, :] for e in self._edges]
        turned = [g.transpose(0, 2, 1) if flip else g for g, flip in zip(groups, self.tied.flipped, strict=True)]
        return [turned[g][s] for g, s in zip(self.tied.edge_group, self.tied.edge_slot, strict=True)]

    def exact_bound(self) -> float:
        """The bound as the module docstring states it, without constant."""
        return sum(float(r.min()) for r in (*self.node_rests(), *self.edge_rests()))

    def excluded(self, core: Core, slack: float) -> tuple[list[Array], dict[int, Array]]:
        """What no choice within ``slack`` of the bound contains: per node a mask of states, per edge a mask of pairs.

        A state costs at least its rest over the smallest rest of its node, plus on every edge the smallest rest in its
        row over the smallest of the edge. Edges without such pairs are left out of the dictionary.
        """
        rests = self.node_rests()
        extra = [r - r.min() for r in rests]
        over: list[Array] = [x.copy() for x in extra]
        edges = [rest - rest.min() for rest in self.edge_rests()]
        for rest, a, b in zip(edges, core.left, core.right, strict=True):
            over[a] += rest.min(1)
            over[b] += rest.min(0)
        pairs = {}
        for e, (a, b) in enumerate(zip(core.left, core.right, strict=True)):
            mask = (edges[e] + extra[a][:, None] + extra[b] > slack) & np.isfinite(core.costs[e])
            if mask.any():
                pairs[e] = mask
        return [x > slack for x in over], pairs


def _stacked(tied: Tie, unary: Sequence[Array]) -> list[Array]:
    return [np.stack([unary[i] for i in members]) for members in tied.members]


# The arrays here are small, and there are thousands of them in every sweep: what counts is the number of calls of numpy, so
# reductions are called without the methods around them, and rows that stand alone are not indexed.
_minimum = np.minimum.reduce


def _least(costs: Array, messages: Array) -> Array:
    """``min_x costs[x, y] - messages[n, x]`` for every n, y."""
    count = len(messages)
    if count == 1:
        return _minimum(costs - messages[0][:, None], axis=0)[None]
    if count >= _MANY_COPIES:
        # Copies in the middle have the same messages until, one layer per sweep, those of the ends have reached them.
        differs = np.logical_or.reduce(messages[1:] != messages[:-1], axis=1)
        first = np.concatenate([_ZERO, np.flatnonzero(differs) + 1])
        if 2 * len(first) <= count:
            return np.repeat(_least(costs, messages[first]), np.diff(first, append=count), axis=0)
    step = max(1, _CHUNK // costs.size)
    if count <= step:
        return np.asarray(_minimum(costs[:, None, :] - messages.T[:, :, None], axis=0))
    parts = range(0, count, step)
    return np.concatenate([_minimum(costs[:, None, :] - messages[p : p + step].T[:, :, None], axis=0) for p in parts])


def _slots(places: list[int]) -> Slots:
    first = places[0]
    in_order = places == list(range(first, first + len(places)))
    return slice(first, first + len(places)) if in_order else np.array(places)


def _add_rows(target: Array, rows: Slots, values: Array) -> None:
    """``target[rows[n]] += values[n]``; a row may occur several times."""
    if len(target) == 1:
        target += values if len(values) == 1 else values.sum(0)
    elif isinstance(rows, slice):
        target[rows] += values
    else:
        np.add.at(target, rows, values)


def _stays(theta: Array, sent: Array) -> float:
    """The smallest costs that stay when these shares are sent."""
    if len(theta) == 1:
        return float(_minimum(theta[0]) * (1.0 - sent[0, 0]))
    return float((_minimum(theta, axis=1) * (1.0 - sent[:, 0])).sum())
