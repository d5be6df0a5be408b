"""Presolve of several problems at once, which differ in their costs alone: each operation is done on the arrays of all of them.

Programs on numbers of devices that divide the same sizes pose such problems. Most of presolve's time goes into calls of small
operations, which take the same time for all as for one. What an operation finds (that a state cannot be used, that a matrix
is a sum) must hold of all problems alike, or they part; so each gets the graph that it would have got alone, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from alpa_lite.intraop.graph import CostGraph, InfeasibleError
from alpa_lite.intraop.presolve import Rounds, reduce_nodes
from alpa_lite.intraop.problem import Array, IntraOpProblem
from alpa_lite.intraop.repeated import Repeated, RepeatedEdges, repeated, repeated_edges
from alpa_lite.intraop.tables import SUM_ERROR, PartError, Tables, content

_SMALL = 128  # mean entries of an array, above which the time goes into them and not into calls


class _Stacks(Tables):
    """Tables of arrays of equal shapes, one per problem: ``stacks`` hold them behind one another."""

    __slots__ = ()

    axis = 1

    def __init__(self) -> None:
        super().__init__()
        self.stacks = []

    def intern(self, array: Array) -> int:
        number = self._by_content.setdefault(content(array), len(self.stacks))
        if number == len(self.stacks):
            self.stacks.append(np.ascontiguousarray(array))
            self.arrays.append(self.stacks[-1][0])
        return number

    def _agreed(self, found: Array) -> Array:
        """What was found of every problem, which must be the same."""
        if not (found == found[0]).all():
            groups: dict[bytes, list[int]] = {}
            for place, own in enumerate(found):
                groups.setdefault(own.tobytes(), []).append(place)
            raise PartError(list(groups.values()))
        return np.asarray(found[0])

    def _intern_numbers(self, numbers: Array) -> int:
        """Of states, which are those of every problem."""
        return self.intern(np.stack([numbers] * len(self.stacks[0])))

    def is_open(self, a: int) -> bool:
        if a not in self._open:
            finite = np.isfinite(self.stacks[a])
            self._open[a] = bool(finite.size and (finite.all() or (finite.ndim == 3 and finite.any(2).all())))
            if self._open[a]:
                self.open.add(a)
        return self._open[a]

    def problems(self, count: int) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        copies = len(self.stacks[0])

        def each(array: Array) -> Array:
            return array.repeat(copies)

        def holds(mask: Array) -> Array:
            return np.asarray(mask.reshape(count, copies).all(axis=1))

        return each, holds

    def usable(self, v: int, matrices: tuple[int, ...]) -> int:
        key = ("usable", v, matrices)
        number = self._memo.get(key)
        if number is None:
            keep = np.isfinite(self.stacks[v])
            for m in matrices:
                keep &= np.isfinite(self.stacks[m]).any(2)
            states = self._agreed(keep)
            number = self._memo[key] = -1 if states.all() else self._intern_numbers(np.flatnonzero(states))
        return number

    def function(self, m: int) -> int:
        number = self._functions.get(m)
        if number is None:
            costs, number = self.stacks[m], -1
            size, one = costs[0].size, costs.shape[2] == 1
            starts = range(0, costs.size, size)
            if one or any(
                costs.item(i) == math.inf or costs.item(i + 1) == math.inf for i in starts
            ):  # else row 0 allows two
                finite = np.isfinite(costs)
                if self._agreed((finite.sum(2) == 1).all(1)):
                    number = self._intern_numbers(self._agreed(finite.argmax(2)))
            self._functions[m] = number
        return number

    def split(self, m: int) -> tuple[int, int] | None:
        if m not in self._parts:
            costs = self.stacks[m]
            largest = np.maximum(costs.max((1, 2)), -costs.min((1, 2)))
            with np.errstate(invalid="ignore"):  # of the differences of forbidden entries
                a, b = costs[:, :, 0], costs[:, 0] - costs[:, 0, :1]
                error = np.abs(costs - a[:, :, None] - b[:, None]).max((1, 2))
            is_sum = bool(self._agreed(np.isfinite(largest) & (error <= SUM_ERROR * largest)))
            self._parts[m] = (self.intern(a), self.intern(b)) if is_sum else None
            if not is_sum:
                self.whole.add(m)
        return self._parts[m]

    def least(self, v: int) -> Array:
        return np.asarray(self.stacks[v].min(1))

    def some(self, places: list[int]) -> _Stacks:
        """Those of some of the problems."""
        found = _Stacks()
        found.stacks += [stack[places] for stack in self.stacks]
        found.arrays += [stack[0] for stack in found.stacks]
        for number, stack in enumerate(found.stacks):
            found._by_content.setdefault(content(stack), number)
        for name in ("_memo", "_open", "_closed", "_parts", "_functions", "_sums", "joins", "transposes", "_taken"):
            setattr(found, name, getattr(self, name).copy())
        found.open, found.whole, found.loose = self.open.copy(), self.whole.copy(), self.loose.copy()
        found._looked_at = self._looked_at
        return found

    def of_problem(self, place: int) -> Tables:
        """The tables of one problem, with the numbers of the arrays here; equal arrays may have several."""
        found = Tables()
        found.arrays += [stack[place] for stack in self.stacks]
        found.open, found.whole, found.loose = self.open, self.whole, self.loose
        found._closed, found._looked_at = self._closed, self._looked_at
        return found


def reduced_together(problems: Sequence[IntraOpProblem]) -> list[CostGraph | None]:
    """The graphs of problems, without memory, after ``reduce_nodes``.

    None where a domain is empty, which ``solve`` explains, and of all if they differ in more than costs or are large.
    """
    found: list[CostGraph | None] = [None] * len(problems)
    stacked = _stacked(problems)
    if stacked is None:
        return found
    graph = CostGraph(stacked, memory=False, tables=_Stacks())
    left = [(list(range(len(problems))), graph, Rounds(set(graph.alive())))]
    while left:
        places, graph, rounds = left.pop()
        try:
            reduce_nodes(graph, rounds)
        except InfeasibleError:
            continue
        except PartError as parted:
            parts = zip(parted.groups, map(partial(_of_problems, graph), parted.groups), strict=True)
            left += [([places[p] for p in group], part, rounds.copy()) for group, part in parts]
            continue
        for number, place in enumerate(places):
            found[place] = graph if len(places) == 1 else _of_problem(graph, number)
    return found


def _of_problems(graph: CostGraph, places: list[int]) -> CostGraph:
    """Some of the problems, with nothing in common with others; of one problem its own tables."""
    assert isinstance(graph.tables, _Stacks)
    if len(places) == 1:
        found = _of_problem(graph, places[0])
        found.number_anew()
        return found
    found = copy.copy(graph)
    found.tables = graph.tables.some(places)
    found.unary, found.adjacent = list(graph.unary), [near and near.copy() for near in graph.adjacent]
    found.constants = [constant[places] for constant in graph.constants]
    found.usages, found.carries, found.log = list(graph.usages), list(graph.carries), list(graph.log)
    return found


def _stacked(problems: Sequence[IntraOpProblem]) -> IntraOpProblem | None:
    """A problem whose arrays are those of all."""
    nodes, edges = [repeated(p.node_costs) for p in problems], [repeated_edges(p.edges) for p in problems]
    if any(
        not np.array_equal(a, b)
        for n, e in zip(nodes[1:], edges[1:], strict=True)
        for a, b in (
            (n.numbers, nodes[0].numbers),
            (e.u, edges[0].u),
            (e.v, edges[0].v),
            (e.costs.numbers, edges[0].costs.numbers),
        )
    ):
        return None
    unary, matrices = _joined([n.different for n in nodes]), _joined([e.costs.different for e in edges])
    if unary is None or matrices is None:
        return None
    joined = RepeatedEdges(edges[0].u, edges[0].v, Repeated(edges[0].costs.numbers, matrices))
    return IntraOpProblem(node_costs=Repeated(nodes[0].numbers, unary), edges=joined)


def _joined(costs: Sequence[Sequence[Array]]) -> list[Array] | None:
    """Each array with those in its place in other problems, as views of one array; None if they are large or not alike."""
    shapes = [a.shape for a in costs[0]]
    if sum(a.size for a in costs[0]) > _SMALL * len(shapes):
        return None
    if any([a.shape for a in other] != shapes for other in costs[1:]) or any(
        a.dtype != np.float64 for c in costs for a in c
    ):
        return None
    flat = np.array([np.frombuffer(b"".join([a.tobytes() for a in some])) for some in costs])
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    parts = zip(shapes, [0, *ends], ends, strict=False)
    return [flat[:, begin:end].reshape(-1, *shape) for shape, begin, end in parts]


def _of_problem(graph: CostGraph, place: int) -> CostGraph:
    """One of the problems; until it is numbered anew, it shares what is the same in all."""
    assert isinstance(graph.tables, _Stacks)
    found = copy.copy(graph)
    found.tables = graph.tables.of_problem(place)
    found.constants = [float(c[place]) for c in graph.constants]
    return found
