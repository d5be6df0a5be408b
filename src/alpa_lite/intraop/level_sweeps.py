"""Sweeps of ``messages.py`` level by level: few calls of numpy on long arrays, in place of a few for every node.

A node waits for none but those of its neighbours that are visited before it. Nodes with equally long chains of such neighbours
are a *level* and are done at once. Programs are wide: a core of 170 nodes has eleven levels, one of 1,400 (eight layers) too.

What a level reads and writes are lists of places in the one array of all costs and messages (``visits.py``). It takes
as long to make them as some ten sweeps do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.visits import Edges, Slots, Visit

Places = NDArray[np.intp]

_MOST_ENTRIES = 1_000_000  # of the matrices of all edges; with more, copies that share a matrix are faster one by one
_FEWEST_NODES = 4  # of a level on average

_minimum: Any = np.minimum.reduceat  # numpy types its `out` as None
_take: Any = np.take


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Level:
    """What a sweep does at one level.

    Attributes:
        costs: per edge to a visited node, for every state here, those of all states there, behind one another.
        sent: for each of them, the place of the message that comes off it.
        costs_from: where the states here start among them.
        heard: places of what comes of it, one per edge and state here.
        parts: places of what adds up to the cost of every state: the node's own, and the messages to it.
        parts_from: where the states start among them.
        most: per state, into how many parts the node's cost goes.
        ahead: places of the messages of edges to nodes that come, one per edge and state here; ``states``: which state.
        nodes: where the nodes start among the states.
        stays: per node, the share of its cost that is sent nowhere.
    """

    costs: Array
    sent: Places
    costs_from: Places
    heard: Places
    parts: Places
    parts_from: Places
    most: Array
    ahead: Places
    states: Places
    nodes: Places
    stays: Array


class LevelSweeps:
    """Sweeps in both directions, which change ``values`` in place."""

    def __init__(self, values: Array, forward: Sequence[_Level], backward: Sequence[_Level]) -> None:
        self._values = values
        self._levels = {True: forward, False: backward}
        widest = max((len(level.costs) for level in (*forward, *backward)), default=0)
        self._room = np.empty(widest)

    def sweep(self, *, forward: bool) -> float:
        """Returns the bound, without constant."""
        values, total = self._values, 0.0
        for level in self._levels[forward]:
            if len(level.costs):
                room = self._room[: len(level.costs)]
                _take(values, level.sent, out=room, mode="clip")  # no place is out of range; "raise" would copy
                np.subtract(level.costs, room, out=room)
                values[level.heard] = _minimum(room, level.costs_from)
            theta = np.add.reduceat(values[level.parts], level.parts_from)
            if len(level.ahead):
                values[level.ahead] -= (theta / level.most)[level.states]
            total += float(_minimum(theta, level.nodes) @ level.stays)
        return total


def level_sweeps(
    values: Array, forward: Sequence[Visit], backward: Sequence[Visit], edges: Sequence[Edges]
) -> LevelSweeps | None:
    """The sweeps that these visits make; None where levels are no faster."""
    if sum(len(e.to_left) * e.costs.size for e in edges) > _MOST_ENTRIES:
        return None
    numbers = _numbers(forward), _numbers(backward)
    nodes = sum(len(visit.most) for visit in forward)
    if nodes < _FEWEST_NODES * (1 + max(0, *map(max, numbers))):
        return None
    one_by_one = _one_by_one(forward, edges)
    left, right = one_by_one[:3], one_by_one[3:]
    flat = [np.ravel(e.costs) for e in edges for _ in e.to_left]
    flipped = [np.ravel(e.flipped) for e in edges for _ in e.to_left]
    return LevelSweeps(
        values, _levels(forward, numbers[0], left, right, flipped), _levels(backward, numbers[1], right, left, flat)
    )


def _numbers(visits: Sequence[Visit]) -> list[int]:
    """The level of every group."""
    found = [0] * len(visits)
    for visit in visits:
        found[visit.group] = max((found[end.other] + 1 for end in visit.behind), default=0)
    return found


def _one_by_one(visits: Sequence[Visit], edges: Sequence[Edges]) -> Places:
    """Per edge the group at its left end, which of its nodes, and where the message to it begins; the same of its right end."""
    rows = []
    for e in edges:
        sizes = visits[e.left].num_states, visits[e.right].num_states
        ends = zip(_listed(e.left_slots), _listed(e.right_slots), strict=True)
        for number, (left, right) in enumerate(ends):
            to_left, to_right = e.left_at + number * sizes[0], e.right_at + number * sizes[1]
            rows.append((e.left, left, to_left, e.right, right, to_right))
    return np.array(rows, dtype=np.intp).reshape(-1, 6).T


def _listed(slots: Slots) -> Iterable[int]:
    return range(slots.start, slots.stop) if isinstance(slots, slice) else slots.tolist()


def _levels(
    visits: Sequence[Visit], numbers: Sequence[int], there: Places, here: Places, costs: Sequence[Array]
) -> list[_Level]:
    """The levels of one direction, all made at once and cut apart.

    Args:
        visits: in their order, and ``numbers``: the level of every group.
        there, here: the ends of all edges that are visited first and last, see ``_one_by_one``.
        costs: per edge, for every state here those of all states there.
    """
    visits = sorted(visits, key=lambda visit: numbers[visit.group])
    level = np.array([numbers[visit.group] for visit in visits])
    copies = np.array([len(visit.most) for visit in visits])
    states = np.array([visit.num_states for visit in visits])
    size, first, rank = (np.empty(len(visits), dtype=np.intp) for _ in range(3))  # by group
    groups = [visit.group for visit in visits]
    size[groups], first[groups], rank[groups] = states, _starts(copies * states), np.arange(len(visits))
    by_here, by_there = (np.argsort(rank[end[0]], kind="stable") for end in (here, there))

    def of(end: Places, order: Places) -> tuple[Places, Places, Places, Places]:
        """Level, number of states, first state and place of the message of the ends, in this order."""
        group, slot, at = end[:, order]
        return level[rank[group]], size[group], first[group] + slot * size[group], at

    behind_level, wide, to_state, heard_at = of(here, by_here)
    _, deep, _, sent_at = of(there, by_here)
    ahead_level, wide_ahead, from_state, ahead_at = of(there, by_there)
    lengths, heard = np.repeat(deep, wide), _runs(heard_at, wide)
    sent = _runs(np.repeat(sent_at, wide), lengths)
    ahead, ahead_states = _runs(ahead_at, wide_ahead), _runs(from_state, wide_ahead)
    own = _runs(np.array([visit.at for visit in visits], dtype=np.intp), copies * states)
    owners = np.concatenate([np.arange(len(own)), _runs(to_state, wide), ahead_states])
    parts = np.concatenate([own, heard, ahead])[np.argsort(owners, kind="stable")]
    num_parts = np.bincount(owners, minlength=len(own))
    all_costs = np.concatenate([costs[edge] for edge in by_here.tolist()]) if costs else np.zeros(0)
    most = np.repeat(np.concatenate([visit.most[:, 0] for visit in visits]), np.repeat(states, copies))
    stays = np.concatenate([np.zeros(len(v.most)) if v.stays is None else v.stays for v in visits])
    parts_from, costs_from, nodes = _starts(num_parts), _starts(lengths), _starts(np.repeat(states, copies))

    def cut(levels: Places, weights: Places) -> list[slice]:
        """Where each level is in arrays that hold so much of every visit or edge."""
        ends = np.cumsum(np.bincount(levels, weights, minlength=int(level[-1]) + 1)).astype(np.intp).tolist()
        return [slice(a, b) for a, b in pairwise([0, *ends])]

    entries, rows = cut(behind_level, deep * wide), cut(behind_level, wide)
    state, node, later = cut(level, copies * states), cut(level, copies), cut(ahead_level, wide_ahead)
    part = cut(np.repeat(level, copies * states), num_parts)
    return [
        _Level(
            costs=all_costs[entries[n]],
            sent=sent[entries[n]],
            costs_from=costs_from[rows[n]] - entries[n].start,
            heard=heard[rows[n]],
            parts=parts[part[n]],
            parts_from=parts_from[state[n]] - part[n].start,
            most=most[state[n]],
            ahead=ahead[later[n]],
            states=ahead_states[later[n]] - state[n].start,
            nodes=nodes[node[n]] - state[n].start,
            stays=stays[node[n]].copy(),
        )
        for n in range(int(level[-1]) + 1)
    ]


def _runs(starts: Places, lengths: Places) -> Places:
    """Rising numbers from each start on, so many of each."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(int(lengths.sum()))


def _starts(lengths: Places) -> Places:
    return np.cumsum(lengths) - lengths
