"""Sweeps of ``messages.py`` level by level: few calls of numpy on long arrays, in place of a few for every node.

A node waits for none but those of its neighbours that are visited before it. Nodes with equally long chains of such neighbours
are a *level* and are done at once. Programs are wide: a core of 170 nodes has eleven levels, one of 1,400 (eight layers) too.

What a level reads and writes are lists of places in the one array of all costs and messages (``visits.py``). It takes
as long to make them as some ten sweeps do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.visits import End, Visit

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


def level_sweeps(values: Array, forward: Sequence[Visit], backward: Sequence[Visit]) -> LevelSweeps | None:
    """The sweeps that these visits make; None where levels are no faster."""
    entries = sum(len(end.heard) * end.costs.size for visit in forward for end in visit.behind)
    if entries > _MOST_ENTRIES:
        return None
    levels = _levels_of(forward), _levels_of(backward)
    nodes = sum(len(visit.most) for visit in forward)
    if nodes < _FEWEST_NODES * max(map(len, levels)):
        return None
    return LevelSweeps(values, [_level(level) for level in levels[0]], [_level(level) for level in levels[1]])


def _levels_of(visits: Iterable[Visit]) -> list[list[Visit]]:
    number: dict[int, int] = {}
    levels: list[list[Visit]] = []
    for visit in visits:
        level = max((number[end.other] + 1 for end in visit.behind), default=0)
        number[visit.group] = level
        if level == len(levels):
            levels.append([])
        levels[level].append(visit)
    return levels


def _level(visits: Sequence[Visit]) -> _Level:
    costs: list[Array] = []
    behind: list[
        tuple[int, int, int, int, int]
    ] = []  # per edge: states there and here, where it sends, hears, first state
    ahead: list[tuple[int, int, int]] = []  # states, where it hears, first state
    nodes: list[int] = []
    first = 0  # state of the visit
    for visit in visits:
        copies, size = len(visit.most), visit.num_states
        for end in visit.behind:
            there = len(end.costs)
            costs += [np.ravel(end.costs, order="F")] * len(end.heard)
            for edge, slot in enumerate(_numbers(end, copies)):
                behind.append(
                    (there, size, end.sent_at + edge * there, end.heard_at + edge * size, first + slot * size)
                )
        for end in visit.ahead:
            for edge, slot in enumerate(_numbers(end, copies)):
                ahead.append((size, end.heard_at + edge * size, first + slot * size))
        nodes += range(first, first + copies * size, size)
        first += copies * size
    there, size, sent_at, heard_at, to_state = np.array(behind, dtype=np.intp).reshape(-1, 5).T
    size_ahead, ahead_at, from_state = np.array(ahead, dtype=np.intp).reshape(-1, 3).T
    own_at, own_size = np.array([(v.at, len(v.most) * v.num_states) for v in visits], dtype=np.intp).T
    lengths, heard = np.repeat(there, size), _runs(heard_at, size)
    places_ahead, states = _runs(ahead_at, size_ahead), _runs(from_state, size_ahead)
    owners = np.concatenate([np.arange(first), _runs(to_state, size), states])
    order = np.argsort(owners, kind="stable")
    sizes = np.repeat([v.num_states for v in visits], [len(v.most) for v in visits])
    return _Level(
        costs=np.concatenate(costs) if costs else np.zeros(0),
        sent=_runs(np.repeat(sent_at, size), lengths),
        costs_from=_starts(lengths),
        heard=heard,
        parts=np.concatenate([_runs(own_at, own_size), heard, places_ahead])[order],
        parts_from=_starts(np.bincount(owners, minlength=first)),
        most=np.repeat(np.concatenate([visit.most[:, 0] for visit in visits]), sizes),
        ahead=places_ahead,
        states=states,
        nodes=np.array(nodes, dtype=np.intp),
        stays=np.concatenate([np.zeros(len(v.most)) if v.stays is None else v.stays for v in visits]),
    )


def _numbers(end: End, copies: int) -> Iterable[int]:
    """Per edge, which copy is at this end."""
    if end.slots is None:
        return range(copies)
    return range(end.slots.start, end.slots.stop) if isinstance(end.slots, slice) else end.slots.tolist()


def _runs(starts: Places, lengths: Places) -> Places:
    """Rising numbers from each start on, so many of each."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(int(lengths.sum()))


def _starts(lengths: Places) -> Places:
    return np.cumsum(lengths) - lengths
