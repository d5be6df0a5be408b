"""What a sweep of ``messages.py`` does at one group of nodes, as arrays that it changes in place.

All costs of nodes and all messages of a core are parts of one array; ``at`` says where each begins there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from alpa_lite.intraop.problem import Array

_CHUNK = 60_000  # entries of the scratch array of one minimum; more would leave the processor's cache
_MANY_COPIES = 8  # from which on equal messages are looked for

Slots = Array | slice


class Edges(NamedTuple):
    """The edges of one group: one matrix, and per edge its ends and messages.

    Attributes:
        left, right: groups of the ends, left < right.
        left_slots, right_slots: per edge, places of its ends in their groups; a slice where they follow one another.
        costs, flipped: the matrix and its transpose, shared by all groups with that matrix.
        to_left, to_right: messages, one row per edge; they change in place. Those to the right begin at ``right_at`` of all
            values, those to the left at ``left_at``.
    """

    left: int
    right: int
    left_slots: Slots
    right_slots: Slots
    costs: Array
    flipped: Array
    to_left: Array
    to_right: Array
    left_at: int
    right_at: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class End:
    """One end of an edge group, as the group of nodes there sees it.

    Attributes:
        other: the group at the other end.
        slots: per edge, the place of its node in the group; None if they are all nodes of the group in order.
        costs: the matrix, with the states of the group as columns.
        heard: messages to the group, from ``heard_at`` on.
        sent: messages to the other end, from ``sent_at`` on.
        room: where there are few edges, (matrix, ``sent``, scratch array, ``heard``), the first three shaped (states there,
            edges, states here); without the middle dim where there is one edge.
    """

    other: int
    slots: Slots | None
    costs: Array
    heard: Array
    sent: Array
    heard_at: int
    sent_at: int
    room: tuple[Array, Array, Array, Array] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visit:
    """What a sweep does at one group.

    Attributes:
        group: number of the group.
        at: where its costs begin.
        num_states: of each of its nodes.
        behind, ahead: ends of its edges to groups that were visited, and to those that come.
        most: (copies, 1) into how many parts a node's costs go.
        stays: per copy, the share of them that is sent nowhere; None if there is none.
    """

    group: int
    at: int
    num_states: int
    behind: list[End]
    ahead: list[End]
    most: Array
    stays: Array | None


def starts_of(unary: Sequence[Array]) -> list[int]:
    """Where the costs of each group begin, which lie behind one another."""
    found: list[int] = np.cumsum([0, *(u.size for u in unary)])[:-1].tolist()
    return found


def slots_of(places: list[int]) -> Slots:
    """A slice where they follow one another."""
    first = places[0]
    in_order = len(places) == 1 or places == list(range(first, first + len(places)))
    return slice(first, first + len(places)) if in_order else np.array(places)


def end_of(
    other: int,
    slots: Slots,
    copies: int,
    costs: Array,
    heard: tuple[Array, int],
    sent: tuple[Array, int],
    rooms: dict[tuple[int, ...], Array],
) -> End:
    """``copies`` of the group; messages with where they begin; ``rooms``: scratch arrays by shape, for all ends to share."""
    count, room = len(heard[0]), None
    if count == 1:
        shape = costs.shape
        if shape not in rooms:
            rooms[shape] = np.empty(shape)
        room = costs, sent[0].T, rooms[shape], heard[0][0]
    elif count < _MANY_COPIES and count * costs.size <= _CHUNK:
        shape = len(costs), count, costs.shape[1]
        if shape not in rooms:
            rooms[shape] = np.empty(shape)
        room = costs[:, None, :], sent[0].T[:, :, None], rooms[shape], heard[0]
    whole = isinstance(slots, slice) and slots.stop - slots.start == copies
    return End(
        other=other,
        slots=None if whole else slots,
        costs=costs,
        heard=heard[0],
        sent=sent[0],
        heard_at=heard[1],
        sent_at=sent[1],
        room=room,
    )


def visit_of(group: int, at: int, unary: Array, behind: list[End], ahead: list[End]) -> Visit:
    """``unary`` [copies, states] begins ``at``."""
    copies, num_states = unary.shape
    if copies == 1:
        most, stays = _alone(sum(len(end.heard) for end in behind), sum(len(end.heard) for end in ahead))
    else:
        most, stays = _shares(_num_edges(behind, copies), _num_edges(ahead, copies))
    return Visit(group=group, at=at, num_states=num_states, behind=behind, ahead=ahead, most=most, stays=stays)


@lru_cache(maxsize=1024)
def _alone(num_behind: int, num_ahead: int) -> tuple[Array, Array | None]:
    """As ``_shares``, of one copy."""
    return _shares(np.array([float(num_behind)]), np.array([float(num_ahead)]))


def _shares(num_behind: Array, num_ahead: Array) -> tuple[Array, Array | None]:
    """``most`` and ``stays`` of a visit."""
    most = np.maximum(np.maximum(num_behind, num_ahead), 1.0)
    stays = None if (most == num_ahead).all() else 1.0 - num_ahead / most
    return most[:, None], stays


def _num_edges(ends: list[End], copies: int) -> Array:
    """Per copy, at how many edges it is."""
    found = np.zeros(copies)
    for end in ends:
        slots = slice(None) if end.slots is None else end.slots
        if isinstance(slots, slice):
            found[slots] += 1.0
        else:
            np.add.at(found, slots, 1.0)
    return found


def least_of(costs: Array, messages: Array) -> Array:
    """``min_x costs[x, y] - messages[n, x]`` for every n, y."""
    count = len(messages)
    if count == 1:
        return np.minimum.reduce(costs - messages[0][:, None], axis=0)[None]
    if count >= _MANY_COPIES:
        # Copies in the middle have the same messages until, one layer per sweep, those of the ends have reached them.
        new = np.empty(count, dtype=bool)
        new[0] = True
        np.logical_or.reduce(messages[1:] != messages[:-1], axis=1, out=new[1:])
        which = np.cumsum(new) - 1
        if 2 * (int(which[-1]) + 1) <= count:
            return least_of(costs, messages[new])[which]
    step = max(1, _CHUNK // costs.size)
    if count <= step:
        return np.asarray(np.minimum.reduce(costs[:, None, :] - messages.T[:, :, None], axis=0))
    parts = range(0, count, step)
    return np.concatenate(
        [np.minimum.reduce(costs[:, None, :] - messages[p : p + step].T[:, :, None], axis=0) for p in parts]
    )
