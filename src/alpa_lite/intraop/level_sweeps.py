"""Sweeps of ``messages.py`` level by level: few calls of numpy on long arrays, in place of a few for every node.

A node waits for none but those of its neighbours that are visited before it. Nodes with equally long chains of such neighbours
are a *level* and are done at once. Programs are wide: a core of 170 nodes has eleven levels, one of 1,400 (eight layers) too.

What a level reads and writes are lists of places in the one array of all costs and messages (``visits.py``). It takes
as long to make them as some five sweeps do, less than what sweeps group by group need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.visits import Edges, Slots

Places = NDArray[np.intp]

_MOST_ENTRIES = 1_000_000  # of the matrices of all edges; with more, copies that share a matrix are faster one by one
_FEWEST_NODES = 4  # of a level on average

_minimum: Any = np.minimum.reduceat  # numpy types its `out` as None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Level:
    """What a sweep does at one level.

    Its costs are per edge to a visited node, for every state here, those of all states there, behind one another.

    Attributes:
        sent: for each of the costs, the place of the message that comes off it.
        costs_from: where the states here start among them.
        heard: places of what comes of it, one per edge and state here; ``there``: the node at the other end.
        edges: where the edges to a visited node start among them.
        parts: places of what adds up to the cost of every state: the node's own first, and the messages to it.
        parts_from: where the states start among them.
        in_order: the same as columns, one per state, which end with the place of a 0 as often as they need.
        most: per state, into how many parts the node's cost goes.
        ahead: places of the messages of edges to nodes that come, one per edge and state here; ``states``: which state.
        nodes: where the nodes start among the states.
        stays: per node, the share of its cost that is sent nowhere.
        visited: its nodes, in the order of visits to levels.
    """

    sent: Places
    costs_from: Places
    heard: Places
    there: Places
    edges: Places
    parts: Places
    parts_from: Places
    in_order: Places
    most: Array
    ahead: Places
    states: Places
    nodes: Places
    stays: Array
    visited: slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Direction:
    """The levels of one direction, which know no costs.

    Attributes:
        edges: of all levels behind one another, in the order of their costs; and of how many costs each level is.
        levels: in their order.
        whole: all levels as if they were one, for what needs no order.
        groups: the nodes of all levels, behind one another, by group in the order of visits; and of how many nodes each is.
        first: per group, where its nodes begin among these.
    """

    edges: list[int]
    sizes: list[int]
    levels: list[_Level]
    whole: _Level
    groups: tuple[Places, list[int]]
    first: Places


class LevelSweeps:
    """Sweeps in both directions, which change ``values`` in place."""

    def __init__(
        self, values: Array, directions: tuple[_Direction, _Direction], costs: tuple[Sequence[Array], Sequence[Array]]
    ) -> None:
        """Forward and backward; ``costs``: per edge, for every state of the end that is visited last those of the other's."""
        self._values = values
        self._directions = dict(zip((True, False), directions, strict=True))
        self._costs = {forward: _joined(costs[not forward], d.edges) for forward, d in self._directions.items()}
        self._by_level = {
            forward: [self._costs[forward][a:b] for a, b in pairwise(np.cumsum([0, *d.sizes]).tolist())]
            for forward, d in self._directions.items()
        }
        self._room = np.empty(max((size for d in directions for size in d.sizes), default=0))

    def sweep(self, *, forward: bool, in_order: bool, bound: bool = True) -> float:
        """Returns the bound, without constant; 0 where nobody asks for it.

        ``in_order``: costs and bound are added up in the order of visits, group by group; the last digits differ else.
        """
        values: Any = self._values  # numpy types `out` of `take` as None
        direction, left = self._directions[forward], []
        for level, costs in zip(direction.levels, self._by_level[forward], strict=True):
            if len(costs):
                room = self._room[: len(costs)]
                values.take(level.sent, out=room, mode="clip")  # no place is out of range; "raise" would copy
                np.subtract(costs, room, out=room)
                values[level.heard] = _minimum(room, level.costs_from)
            if in_order:
                theta = np.add.reduce(values[level.in_order], axis=0)
            else:
                theta = np.add.reduceat(values[level.parts], level.parts_from)
            if len(level.ahead):
                values[level.ahead] -= (theta / level.most)[level.states]
            if bound:
                least = _minimum(theta, level.nodes)
                left.append(least * level.stays if in_order else least @ level.stays)
        if not (in_order and bound):
            return sum(map(float, left), 0.0)
        nodes, counts = direction.groups
        return _added_up(np.concatenate(left)[nodes], counts)

    def over(self) -> tuple[float, Array]:
        """The bound, without constant, and at the place of every state how much more any choice with it costs at least.

        That is what the state costs over the cheapest of its node, and on every edge the smallest rest of its row over the
        smallest of the edge.
        """
        values, own = self._values, self._directions[True].whole
        theta = np.add.reduceat(values[own.parts], own.parts_from)
        least = _minimum(theta, own.nodes)
        bound = float(least.sum())
        more = np.zeros_like(values)  # by place: of the state alone, and of the edge that it hears of
        over = np.zeros_like(values)
        place = own.parts[own.parts_from]
        more[place] = theta - _repeated(least, own.nodes, len(theta))
        for forward, direction in self._directions.items():
            whole, costs = direction.whole, self._costs[forward]
            if len(costs):
                rows = _minimum(costs - values[whole.sent], whole.costs_from) - values[whole.heard]
                least = _minimum(rows, whole.edges)
                bound += float(least.sum()) if forward else 0.0
                more[whole.heard] = rows - _repeated(least, whole.edges, len(rows))
        over[place] = np.add.reduceat(more[own.parts], own.parts_from)
        return bound, over

    def pick(self, *, forward: bool) -> tuple[Places, Places]:
        """A choice as ``Messages.pick`` says, of all nodes level by level, and where the nodes of each group begin.

        It is added up in the order of groups, and of equal states the first is taken.
        """
        direction = self._directions[forward]
        values = self._values.copy()
        picks = np.empty(sum(len(level.nodes) for level in direction.levels), dtype=np.intp)
        for level, costs in zip(direction.levels, self._by_level[forward], strict=True):
            values[level.heard] = costs[level.costs_from + picks[level.there]]
            seen = np.add.reduce(values[level.in_order], axis=0)
            least = np.flatnonzero(seen == _repeated(_minimum(seen, level.nodes), level.nodes, len(seen)))
            picks[level.visited] = least[np.searchsorted(least, level.nodes)] - level.nodes
        return picks, direction.first


def _repeated(values: Array, starts: Places, length: int) -> Array:
    """Each value from its start up to the next one's."""
    return np.repeat(values, np.diff(starts, append=length))


def _added_up(shares: Array, counts: Sequence[int]) -> float:
    """The sum of what groups of so many nodes add."""
    if len(counts) == len(shares):
        return float(np.cumsum(shares)[-1])  # one after the other; Python 3.12's `sum` makes up for what is rounded off
    total, begin = 0.0, 0
    for count in counts:
        total += float(shares[begin] if count == 1 else shares[begin : begin + count].sum())
        begin += count
    return total


def one_by_one_alike(unary: Sequence[Array], edges: Sequence[Edges]) -> bool:
    """Whether sweeps in order give the numbers of sweeps group by group: those first add up what several edges of one kind
    tell a node that is alone in its group."""
    return all(len(e.to_left) == 1 or (len(unary[e.left]) > 1 and len(unary[e.right]) > 1) for e in edges)


class KnownLevels:
    """The levels of the last core whose nodes are all alone: those of one with the same edges and as many states are the same."""

    def __init__(self) -> None:
        self._last: tuple[object, tuple[_Direction, _Direction] | None] | None = None

    def of(
        self, unary: Sequence[Array], edges: Sequence[Edges], make: Callable[[], tuple[_Direction, _Direction] | None]
    ) -> tuple[_Direction, _Direction] | None:
        """Arguments as of ``level_sweeps``; ``make`` depends on nothing else of them."""
        key = [u.shape for u in unary], [(e.left, e.right, e.left_at, e.right_at) for e in edges]
        last = self._last
        if last is None or last[0] != key:
            last = self._last = key, make()
        return last[1]


def level_sweeps(
    values: Array, unary: Sequence[Array], edges: Sequence[Edges], known: KnownLevels | None = None
) -> LevelSweeps | None:
    """The sweeps over these groups ([copies, states]) and edges; None where levels are no faster."""
    counts, sides = [len(e.to_left) for e in edges], ([e.costs for e in edges], [e.flipped for e in edges])
    if sum(n * m.size for n, m in zip(counts, sides[0], strict=True)) > _MOST_ENTRIES:
        return None

    def make() -> tuple[_Direction, _Direction] | None:
        numbers = _numbers(len(unary), edges)
        if sum(map(len, unary)) < _FEWEST_NODES * (1 + max(0, *map(max, numbers))):
            return None
        shapes = np.array([u.shape for u in unary], dtype=np.intp).T
        left, right = _one_by_one(shapes[1], edges, counts)
        zero = len(values) - 1
        forward = _levels(shapes, range(len(unary)), numbers[0], left, right, zero)
        return forward, _levels(shapes, range(len(unary) - 1, -1, -1), numbers[1], right, left, zero)

    directions = make() if known is None or max(counts, default=1) > 1 else known.of(unary, edges, make)
    if directions is None:
        return None
    flat, flipped = ([m for a, n in zip(arrays, counts, strict=True) for m in [a] * n] for arrays in sides)
    return LevelSweeps(values, directions, (flipped, flat))


def _joined(costs: Sequence[Array], edges: Sequence[int]) -> Array:
    """Those of the edges, which are contiguous, behind one another."""
    parts: list[Any] = [costs[edge] for edge in edges]
    return np.frombuffer(b"".join(parts))


def _numbers(num_groups: int, edges: Sequence[Edges]) -> tuple[list[int], list[int]]:
    """The level of every group, forward and backward."""
    forward, backward = [0] * num_groups, [0] * num_groups
    ends = sorted({(e.left, e.right) for e in edges})  # left < right, so a group's own level is known when it is left
    for left, right in ends:
        forward[right] = max(forward[right], forward[left] + 1)
    for right, left in sorted([(right, left) for left, right in ends], reverse=True):
        backward[left] = max(backward[left], backward[right] + 1)
    return forward, backward


def _one_by_one(states: Places, edges: Sequence[Edges], counts: Sequence[int]) -> tuple[Places, Places]:
    """Of the left and of the right end of every edge: the group, which of its nodes, and where the message to it begins.

    ``states``: how many the nodes of each group have; ``counts``: of how many edges each of ``edges`` is.
    """
    each, number = np.arange(len(edges)), _runs(np.zeros(len(edges), dtype=np.intp), np.array(counts, dtype=np.intp))
    each = np.repeat(each, counts)

    def of(groups: list[int], slots: list[Slots], at: list[int]) -> Places:
        group = np.array(groups, dtype=np.intp)[each]
        slot = np.array([n for some in slots for n in _listed(some)], dtype=np.intp)
        return np.array([group, slot, np.array(at, dtype=np.intp)[each] + number * states[group]])

    return (
        of([e.left for e in edges], [e.left_slots for e in edges], [e.left_at for e in edges]),
        of([e.right for e in edges], [e.right_slots for e in edges], [e.right_at for e in edges]),
    )


def _listed(slots: Slots) -> Iterable[int]:
    return range(slots.start, slots.stop) if isinstance(slots, slice) else slots.tolist()


def _levels(
    shapes: Places,
    order: Sequence[int],
    numbers: Sequence[int],
    there: Places,
    here: Places,
    zero: int,
) -> _Direction:
    """The levels of one direction, all made at once and cut apart.

    Args:
        shapes: of the costs of all groups, which lie behind one another: copies, and states.
        order: of the visits to groups, and ``numbers``: the level of every group.
        there, here: the ends of all edges that are visited first and last, see ``_one_by_one``.
        zero: place of a 0.
    """
    groups = sorted(order, key=lambda group: numbers[group])
    level = np.array([numbers[group] for group in groups])
    copies, states = shapes[:, groups]
    size, first, first_node, rank = (np.empty(len(groups), dtype=np.intp) for _ in range(4))  # by group
    size[groups], first[groups], rank[groups] = states, _starts(copies * states), np.arange(len(groups))
    first_node[groups] = _starts(copies)
    by_here, by_there = (np.argsort(rank[end[0]], kind="stable") for end in (here, there))

    def of(end: Places, order: Places) -> tuple[Places, Places, Places, Places]:
        """Level, number of states, first state and place of the message of the ends, in this order."""
        group, slot, at = end[:, order]
        return level[rank[group]], size[group], first[group] + slot * size[group], at

    behind_level, wide, to_state, heard_at = of(here, by_here)
    _, deep, _, sent_at = of(there, by_here)
    others = np.repeat(first_node[there[0, by_here]] + there[1, by_here], wide)
    ahead_level, wide_ahead, from_state, ahead_at = of(there, by_there)
    lengths, heard = deep.repeat(wide), _runs(heard_at, wide)
    sent = _runs(sent_at.repeat(wide), lengths)
    ahead, ahead_states = _runs(ahead_at, wide_ahead), _runs(from_state, wide_ahead)
    own = _runs(_starts(shapes[0] * shapes[1])[groups], copies * states)
    owners = np.concatenate([np.arange(len(own)), _runs(to_state, wide), ahead_states])
    parts = np.concatenate([own, heard, ahead])[np.argsort(owners, kind="stable")]
    num_parts = np.bincount(owners, minlength=len(own))
    of_node, node_sizes = _starts(np.repeat(states, copies)), np.repeat(states, copies)
    num_behind, num_ahead = (
        np.bincount(np.searchsorted(of_node, begin), minlength=len(of_node)) for begin in (to_state, from_state)
    )
    most = np.maximum(np.maximum(num_behind, num_ahead), 1).astype(np.float64)
    stays = 1.0 - num_ahead / most
    parts_from, costs_from, edges_from = _starts(num_parts), _starts(lengths), _starts(wide)

    def cut(levels: Places, weights: Places) -> list[slice]:
        """Where each level is in arrays that hold so much of every visit or edge."""
        ends = np.cumsum(np.bincount(levels, weights, minlength=int(level[-1]) + 1)).astype(np.intp).tolist()
        return [slice(a, b) for a, b in pairwise([0, *ends])]

    entries, rows, ends = cut(behind_level, deep * wide), cut(behind_level, wide), cut(behind_level, np.ones_like(wide))
    state, node, later = cut(level, copies * states), cut(level, copies), cut(ahead_level, wide_ahead)
    part = cut(np.repeat(level, copies * states), num_parts)
    all_most, columns = np.repeat(most, node_sizes), _columns(parts, num_parts, zero)
    found = [
        _Level(
            sent=sent[entries[n]],
            costs_from=costs_from[rows[n]] - entries[n].start,
            heard=heard[rows[n]],
            there=others[rows[n]],
            edges=edges_from[ends[n]] - rows[n].start,
            parts=parts[part[n]],
            parts_from=parts_from[state[n]] - part[n].start,
            in_order=np.ascontiguousarray(columns[: int(num_parts[state[n]].max()), state[n]]),
            most=all_most[state[n]],
            ahead=ahead[later[n]],
            states=ahead_states[later[n]] - state[n].start,
            nodes=of_node[node[n]] - state[n].start,
            stays=stays[node[n]].copy(),
            visited=node[n],
        )
        for n in range(int(level[-1]) + 1)
    ]
    whole = _Level(
        sent=sent,
        costs_from=costs_from,
        heard=heard,
        there=others,
        edges=edges_from,
        parts=parts,
        parts_from=parts_from,
        in_order=columns,
        most=all_most,
        ahead=ahead,
        states=ahead_states,
        nodes=of_node,
        stays=stays,
        visited=slice(0, len(of_node)),
    )
    visited = rank[list(order)]
    places = _runs(first_node[list(order)], copies[visited])
    return _Direction(
        edges=by_here.tolist(),
        sizes=[part.stop - part.start for part in entries],
        levels=found,
        whole=whole,
        groups=(places, copies[visited].tolist()),
        first=first_node,
    )


def _columns(parts: Places, lengths: Places, rest: int) -> Places:
    """Runs of ``parts``, each a column that ends with ``rest``."""
    found = np.full((int(lengths.max()), len(lengths)), rest, dtype=np.intp)
    found[_runs(np.zeros_like(lengths), lengths), np.repeat(np.arange(len(lengths)), lengths)] = parts
    return found


def _runs(starts: Places, lengths: Places) -> Places:
    """Rising numbers from each start on, so many of each."""
    found: Places = (starts - _starts(lengths)).repeat(lengths)
    found += np.arange(len(found))
    return found


def _starts(lengths: Places) -> Places:
    return np.cumsum(lengths) - lengths
