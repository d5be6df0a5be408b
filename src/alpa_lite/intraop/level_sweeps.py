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
from alpa_lite.intraop.visits import Visit

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
    lengths, sent, heard, ahead, states, nodes = (list[Places]() for _ in range(6))
    parts: list[tuple[Places, Places]] = []  # (state, place)
    shares: list[tuple[Array, Array]] = []  # (most, stays)
    first = 0  # state of the visit
    for visit in visits:
        copies, size = len(visit.most), visit.num_states
        here = (first + np.arange(copies * size)).reshape(copies, size)
        parts.append((here.ravel(), visit.at + np.arange(copies * size)))
        for end in visit.behind:
            count, (there, _) = len(end.heard), end.costs.shape
            costs += [np.ravel(end.costs, order="F")] * count
            lengths.append(np.full(count * size, there))
            messages = end.sent_at + np.arange(count * there).reshape(count, 1, there)
            sent.append(np.broadcast_to(messages, (count, size, there)).ravel())
            heard.append(end.heard_at + np.arange(count * size))
            parts.append(((here if end.slots is None else here[end.slots]).ravel(), heard[-1]))
        for end in visit.ahead:
            ahead.append(end.heard_at + np.arange(len(end.heard) * size))
            states.append((here if end.slots is None else here[end.slots]).ravel())
            parts.append((states[-1], ahead[-1]))
        stays = np.zeros(copies) if visit.stays is None else visit.stays
        shares.append((np.repeat(visit.most[:, 0], size), stays))
        nodes.append(here[:, 0])
        first += copies * size
    owners = np.concatenate([owner for owner, _ in parts])
    order = np.argsort(owners, kind="stable")
    return _Level(
        costs=np.concatenate(costs) if costs else np.zeros(0),
        sent=_joined(sent),
        costs_from=_starts(_joined(lengths)),
        heard=_joined(heard),
        parts=np.concatenate([place for _, place in parts])[order],
        parts_from=_starts(np.bincount(owners, minlength=first)),
        most=np.concatenate([most for most, _ in shares]),
        ahead=_joined(ahead),
        states=_joined(states),
        nodes=_joined(nodes),
        stays=np.concatenate([stays for _, stays in shares]),
    )


def _joined(places: Sequence[Places]) -> Places:
    return np.concatenate(places) if places else np.zeros(0, dtype=np.intp)


def _starts(lengths: Places) -> Places:
    return np.cumsum(lengths) - lengths
