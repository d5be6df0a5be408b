"""Exact reductions of the cost graph before any solver sees it.

In the order in which they are tried:

1. ``_filter``: arc consistency, states without a usable partner go.
2. ``_separate``: an edge with ``C[x, y] = a[x] + b[y]`` becomes node costs.
3. ``_merge``: a node whose choice is determined by a neighbour's (a function of it) joins that neighbour.
4. ``_eliminate``: a node of degree 0, 1 or 2 whose choice no memory row sees is minimised out: nothing, a node cost, or
   an edge between its neighbours remains.
5. ``_dominated``: a state that another state beats whatever the neighbours choose goes (Goldstein's criterion, with
   usages).
6. ``trim_usages``: times that cannot exceed the limit, and usages that no critical time sees, do not count.

Rounds work on nodes that the same round has not touched yet, so copies of one layer go through the same operations on
the same arrays and the tables answer from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from alpa_lite.intraop.graph import CostGraph, InfeasibleError, interval_sums
from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.tables import PartError

_JOIN_CAP = 8_000_000  # work of one elimination, k_i * k_j * k_l
_SMALL_EDGE = 4096  # an edge of this many entries may always arise


def presolve(graph: CostGraph, enough: Callable[[CostGraph], bool] | None = None, *, reduced: bool = False) -> bool:
    """Shrinks the graph in place until nothing applies.

    Args:
        graph: changed in place.
        enough: asked before states are first compared, whether what is left by then will do.
        reduced: whether ``reduce_nodes`` has been done.

    Returns:
        Whether ``enough`` said so.

    Raises:
        InfeasibleError: a domain became empty.
    """
    changed = set(graph.alive())  # since dominance was looked at
    dirty = set() if reduced else set(changed)
    while True:
        rounds = Rounds(dirty)
        reduce_nodes(graph, rounds)
        changed |= rounds.seen
        dirty = trim_usages(graph) if graph.limit is not None else set()
        if not dirty and enough is not None:
            if enough(graph):
                return True
            enough = None
        if reduced and graph.alive():
            graph.number_anew()
            reduced = False
        if not dirty:
            # Usages may have been trimmed of nodes that keep others.
            dirty = _dominated(graph, changed if graph.limit is None else set(graph.alive()))
            changed = set(dirty)
        if not dirty:
            return False


@dataclass(slots=True)
class Rounds:
    """What rounds have still to look at, so that they may go on, on a copy of the graph, where they were cut short.

    Attributes:
        dirty: nodes of the next round.
        queue, again: of arc consistency in it, those that are left, and those that are to be looked at again.
        nodes, touched, later: of the round itself, those that are left, and those of the round that follows.
        seen: nodes that were looked at.
    """

    dirty: set[int]
    queue: list[int] | None = None
    again: set[int] = field(default_factory=set)
    nodes: list[int] | None = None
    touched: set[int] = field(default_factory=set)
    later: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)

    def copy(self) -> Rounds:
        sets = (self.dirty.copy(), self.again.copy(), self.touched.copy(), self.later.copy(), self.seen.copy())
        dirty, again, touched, later, seen = sets
        return replace(self, dirty=dirty, again=again, touched=touched, later=later, seen=seen)


def reduce_nodes(graph: CostGraph, rounds: Rounds) -> None:
    """Rounds until nothing but comparing states applies.

    Raises:
        InfeasibleError: a domain became empty.
        PartError: the graph is that of several problems (``in_step.py``); ``rounds`` say where they part.
    """
    while rounds.dirty:
        if rounds.nodes is None:
            _filter(graph, rounds)
            rounds.seen |= rounds.dirty
            rounds.nodes = sorted(rounds.dirty)
        _round(graph, rounds)
        rounds.dirty, rounds.nodes = rounds.later | rounds.touched, None
        rounds.touched, rounds.later = set(), set()


def _filter(graph: CostGraph, rounds: Rounds) -> None:
    """Arc consistency from the dirty nodes on; nodes that lose states, and their neighbours, become dirty."""
    dirty = rounds.dirty
    unary, adjacent, usable, is_open = graph.unary, graph.adjacent, graph.tables.usable, graph.tables.is_open
    opened = graph.tables.open
    closed = graph.tables.closed()
    around = chain.from_iterable(map(dict.values, map(adjacent.__getitem__, dirty)))
    if rounds.queue is None:
        if not closed or (closed.isdisjoint(map(unary.__getitem__, dirty)) and closed.isdisjoint(around)):
            return
        rounds.queue = sorted(dirty)
    while rounds.queue:
        i, left = -1, iter(rounds.queue)
        try:
            for i in left:
                if unary[i] < 0 or (unary[i] in opened and opened.issuperset(adjacent[i].values())):
                    continue
                if is_open(unary[i]) and all(map(is_open, adjacent[i].values())):
                    continue
                index = usable(unary[i], tuple(sorted(set(adjacent[i].values()))))
                if index < 0:
                    continue
                if not graph.tables.arrays[index].size:
                    raise InfeasibleError(i, (i, *adjacent[i]))
                graph.keep_states(i, index)
                rounds.again.update(adjacent[i])
                dirty.add(i)
        except PartError:
            rounds.queue = [i, *left]
            raise
        dirty |= rounds.again
        rounds.queue, rounds.again = sorted(rounds.again), set()
    rounds.queue = None


def _round(graph: CostGraph, rounds: Rounds) -> None:
    """One round over the nodes that are left of it."""
    assert rounds.nodes is not None
    i, left, touched = -1, iter(rounds.nodes), rounds.touched
    unary, adjacent, carries = graph.unary, graph.adjacent, graph.carries
    whole, loose = graph.tables.whole, graph.tables.loose
    try:
        for i in left:
            if unary[i] < 0:
                continue
            if i in touched:
                rounds.later.add(i)
                continue
            if not whole.issuperset(adjacent[i].values()):
                _separate(graph, i, touched)
            if not loose.issuperset(adjacent[i].values()) and (merged := _merge(graph, i)):
                touched |= merged
            elif not carries[i] and len(adjacent[i]) <= 2:
                touched |= _eliminate(graph, i)
    except PartError:
        rounds.nodes = [i, *left]
        if i in touched:  # by itself, as some edges had been split
            touched.remove(i)
            rounds.later.add(i)
        raise


def _separate(graph: CostGraph, i: int, touched: set[int]) -> None:
    tables = graph.tables
    for j, m in list(graph.adjacent[i].items()):
        if m in tables.whole:
            continue
        parts = tables.split(m)
        if parts is not None:
            graph.unary[i] = tables.add(graph.unary[i], parts[0])
            graph.unary[j] = tables.add(graph.unary[j], parts[1])
            graph.drop_edge(i, j)
            touched |= {i, j}


def _merge(graph: CostGraph, i: int) -> set[int]:
    """Merges the node into the first neighbour that determines it."""
    tables, adjacent = graph.tables, graph.adjacent
    for j, own in adjacent[i].items():
        if own in tables.loose:
            continue
        m = adjacent[j][i]
        f = tables.function(m)
        if f < 0:
            tables.loose.add(own)
            continue
        graph.unary[j] = tables.follow(graph.unary[j], m, graph.unary[i], f)
        graph.drop_edge(i, j)
        touched = {j}
        for other, n in list(adjacent[i].items()):
            graph.drop_edge(i, other)
            graph.add_edge(j, other, tables.take(n, f))
            touched.add(other)
        graph.carries[j] |= graph.carries[i]
        graph.remove(i, "function", j, f)
        return touched
    return set()


def _eliminate(graph: CostGraph, i: int) -> set[int]:
    """For a node that carries no memory, of at most two neighbours."""
    # Most nodes of a program go this way, so that calls of small functions would be half of presolve.
    tables, adjacent, unary = graph.tables, graph.adjacent, graph.unary
    v, neighbours = unary[i], tuple(adjacent[i].items())
    if len(neighbours) == 2:
        (j, m), (k, n) = neighbours
        near, other = adjacent[j], adjacent[k]
        if not _worthwhile(tables.arrays, v, unary[j], unary[k], k in near):
            return set()
        del near[i], other[i]
        joined = tables.joins.get((v, m, n))
        if joined is None:
            joined = tables.join(v, m, n)
        if k in near:
            joined = tables.add(near[k], joined)
        turned = tables.transposes.get(joined)
        near[k], other[j] = joined, tables.transpose(joined) if turned is None else turned
        touched = {j, k}
    elif neighbours:
        ((j, m),) = neighbours
        del adjacent[j][i]
        unary[j] = tables.add(unary[j], tables.fold(v, m))
        touched = {j}
    else:
        graph.constants.append(tables.least(v))
        touched = set()
    adjacent[i] = {}
    unary[i] = -1
    graph.log.append(("pick", i, v, neighbours))
    return touched


def _worthwhile(arrays: list[Array], v: int, near: int, other: int, joined: bool) -> bool:
    """Whether to minimise out a node between two others, given by numbers of their costs; ``joined``: by an edge."""
    a, b, c = len(arrays[v]), len(arrays[near]), len(arrays[other])
    if a * b * c > _JOIN_CAP:
        return False
    return joined or b * c <= _SMALL_EDGE or b * c <= 2 * a * (b + c)


def _dominated(graph: CostGraph, changed: set[int]) -> set[int]:
    """Drops dominated states of nodes that changed since it was last done, and their neighbours'; returns what changes."""
    dirty: set[int] = set()
    unary, adjacent, undominated = graph.unary, graph.adjacent, graph.tables.undominated
    known: dict[tuple[int, ...], int] = {}  # of copies, whose edges are in one order
    with np.errstate(invalid="ignore"):  # of the differences of forbidden entries
        for i in graph.alive():
            if i not in changed and i not in dirty:
                continue
            near = adjacent[i]
            usages = tuple(sorted({n for _, _, n in graph.usages[i]})) if graph.usages[i] else ()
            key = (unary[i], *near.values(), -1, *usages)
            index = known.get(key)
            if index is None:
                index = known[key] = undominated(unary[i], tuple(sorted(near.values())), usages)
            if index >= 0:
                graph.keep_states(i, index)
                dirty.add(i)
                dirty.update(near)
    return dirty


def trim_usages(graph: CostGraph) -> set[int]:
    """Drops usages that no critical time sees; returns the nodes that became free of memory.

    A time is critical if the largest choices together exceed the limit there.
    """
    assert graph.limit is not None
    freed = graph.refresh_usages()
    arrays = graph.tables.arrays
    items = [(lo, hi, int(arrays[n].max()), i) for i, usages in enumerate(graph.usages) for lo, hi, n in usages]
    if not items:
        return freed
    table = np.array(items, dtype=np.int64)
    critical = interval_sums(table, len(graph.base)) + graph.base > graph.limit
    before = np.concatenate([[0], np.cumsum(critical)])
    idle = before[table[:, 1]] == before[table[:, 0]]
    for i in np.unique(table[idle, 3]).tolist():
        # The usage no longer counts, and need not: these times can never be too full.
        graph.usages[i] = tuple(item for item in graph.usages[i] if before[item[1]] > before[item[0]])
        graph.carries[i] = bool(graph.usages[i])
        if not graph.usages[i]:
            freed.add(i)
    return freed
