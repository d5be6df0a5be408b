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
from typing import Any

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.tie import Tie

_CHUNK = 60_000  # entries of the scratch array of one minimum; more would leave the processor's cache
_MANY_COPIES = 8  # from which on equal messages are looked for


Slots = Array | slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Edges:
    """The edges of one group: one matrix, and per edge its ends and messages.

    Attributes:
        left, right: groups of the ends, left < right.
        left_slots, right_slots: per edge, places of its ends in their groups; a slice where they follow one another.
        costs, flipped: the matrix and its transpose, shared by all groups with that matrix.
        to_left, to_right: messages, one row per edge; they change in place.
    """

    left: int
    right: int
    left_slots: Slots
    right_slots: Slots
    costs: Array
    flipped: Array
    to_left: Array
    to_right: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _End:
    """One end of an edge group, as the group of nodes there sees it.

    Attributes:
        slots: per edge, the place of its node in the group; None if they are all nodes of the group in order.
        costs: the matrix, with the states of the group as columns.
        heard: messages to the group.
        sent: messages to the other end.
        room: where there are few edges, (matrix, ``sent``, scratch array, ``heard``), the first three shaped (states there,
            edges, states here); without the middle dim where there is one edge.
    """

    slots: Slots | None
    costs: Array
    heard: Array
    sent: Array
    room: tuple[Array, Array, Array, Array] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Visit:
    """What a sweep does at one group.

    Attributes:
        group: number of the group.
        behind, ahead: ends of its edges to groups that were visited, and to those that come.
        most: (copies, 1) into how many parts a node's costs go.
        stays: per copy, the share of them that is sent nowhere; None if there is none.
    """

    group: int
    behind: list[_End]
    ahead: list[_End]
    most: Array
    stays: Array | None


class Messages:
    """Messages of one core, changed in place by the sweeps.

    Attributes:
        tied: groups of the core's nodes and edges.
        unary: per group [copies, states], costs without messages (with memory prices, if any).
    """

    __slots__ = ("_backward", "_edges", "_edges_to", "_forward", "tied", "unary")

    def __init__(self, tied: Tie, unary: list[Array], edges: list[_Edges]) -> None:
        self.tied = tied
        self.unary = unary
        self._edges = edges
        self._edges_to: list[list[_Edges]] = [[] for _ in unary]  # from earlier groups
        earlier: list[list[_End]] = [[] for _ in unary]
        later: list[list[_End]] = [[] for _ in unary]
        rooms: dict[tuple[int, ...], Array] = {}
        for e in edges:
            copies = len(unary[e.left]), len(unary[e.right])
            later[e.left].append(_end(e.left_slots, copies[0], e.flipped, e.to_left, e.to_right, rooms))
            self._edges_to[e.right].append(e)
            earlier[e.right].append(_end(e.right_slots, copies[1], e.costs, e.to_right, e.to_left, rooms))
        groups = range(len(unary))
        self._forward = [_visit(g, len(unary[g]), earlier[g], later[g]) for g in groups]
        self._backward = [_visit(g, len(unary[g]), later[g], earlier[g]) for g in reversed(groups)]

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
            own.to_left[...] = whole.to_left / count
            own.to_right[...] = whole.to_right / count

    def set_unary(self, unary: Sequence[Array]) -> None:
        """Replaces the costs of the core's nodes; the messages stay."""
        self.unary = _stacked(self.tied, unary)

    def forward(self) -> float:
        """Sweeps from first to last group; returns the bound (without constant)."""
        return self._sweep(self._forward)

    def backward(self) -> float:
        """As ``forward``, from last to first group."""
        return self._sweep(self._backward)

    def _sweep(self, visits: list[_Visit]) -> float:
        total = 0.0
        for visit in visits:
            theta = self.unary[visit.group].copy()
            for end in visit.behind:
                if end.room is None:
                    end.heard[...] = _least(end.costs, end.sent)
                else:
                    matrix, sent, scratch, heard = end.room
                    _subtract(matrix, sent, scratch)
                    _minimum(scratch, 0, None, heard)
                if end.slots is None:
                    _add(theta, end.heard, theta)
                else:
                    _add_rows(theta, end.slots, end.heard)
            for end in visit.ahead:
                if end.slots is None:
                    _add(theta, end.heard, theta)
                else:
                    _add_rows(theta, end.slots, end.heard)
            if visit.ahead:
                part = theta / visit.most
                for end in visit.ahead:
                    _subtract(end.heard, part if end.slots is None else part[end.slots], end.heard)
            if visit.stays is not None:
                least = _minimum(theta, 1)
                total += float(least[0] * visit.stays[0] if len(least) == 1 else (least * visit.stays).sum())
        return total

    def pick(self) -> list[int]:
        """A choice, group by group: what the chosen earlier nodes cost, and what the messages say of later ones."""
        picks: list[Array] = []
        for visit in self._forward:
            seen = self.unary[visit.group].copy()
            for e in self._edges_to[visit.group]:
                _add_rows(seen, e.right_slots, e.costs[picks[e.left][e.left_slots]])
            for end in visit.ahead:
                _add_rows(seen, slice(0, len(seen)) if end.slots is None else end.slots, end.heard)
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
_minimum: Any = np.minimum.reduce  # numpy types its `out` as None
_add, _subtract = np.add, np.subtract


def _least(costs: Array, messages: Array) -> Array:
    """``min_x costs[x, y] - messages[n, x]`` for every n, y."""
    count = len(messages)
    if count == 1:
        return _minimum(costs - messages[0][:, None], axis=0)[None]
    if count >= _MANY_COPIES:
        # Copies in the middle have the same messages until, one layer per sweep, those of the ends have reached them.
        new = np.empty(count, dtype=bool)
        new[0] = True
        np.logical_or.reduce(messages[1:] != messages[:-1], axis=1, out=new[1:])
        which = np.cumsum(new) - 1
        if 2 * (int(which[-1]) + 1) <= count:
            return _least(costs, messages[new])[which]
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


def _end(
    slots: Slots, copies: int, costs: Array, heard: Array, sent: Array, rooms: dict[tuple[int, ...], Array]
) -> _End:
    """``copies`` of the group; ``rooms``: scratch arrays by shape, for all ends to share."""
    count, room = len(heard), None
    if count == 1 or (count < _MANY_COPIES and count * costs.size <= _CHUNK):
        shape = len(costs), count, costs.shape[1]
        if shape not in rooms:
            rooms[shape] = np.empty(shape)
        room = costs[:, None, :], sent.T[:, :, None], rooms[shape], heard
        if count == 1:
            room = costs, sent.T, rooms[shape][:, 0], heard[0]
    whole = isinstance(slots, slice) and slots.stop - slots.start == copies
    return _End(slots=None if whole else slots, costs=costs, heard=heard, sent=sent, room=room)


def _visit(group: int, copies: int, behind: list[_End], ahead: list[_End]) -> _Visit:
    num_behind, num_ahead = _num_edges(behind, copies), _num_edges(ahead, copies)
    most = np.maximum(np.maximum(num_behind, num_ahead), 1.0)
    stays = None if (most == num_ahead).all() else 1.0 - num_ahead / most
    return _Visit(group=group, behind=behind, ahead=ahead, most=most[:, None], stays=stays)


def _num_edges(ends: list[_End], copies: int) -> Array:
    """Per copy, at how many edges it is."""
    found = np.zeros(copies)
    for end in ends:
        slots = slice(None) if end.slots is None else end.slots
        if isinstance(slots, slice):
            found[slots] += 1.0
        else:
            np.add.at(found, slots, 1.0)
    return found
