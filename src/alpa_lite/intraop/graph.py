"""The graph that presolve shrinks, and the log that turns an answer on what is left into an answer on the whole.

Every step of the log is undone in reverse order; states are numbered as they were when the step was taken.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from alpa_lite.intraop.problem import Array, IntraOpProblem, as_float
from alpa_lite.intraop.repeated import repeated, repeated_edges
from alpa_lite.intraop.tables import Tables

UsageItem = tuple[int, int, int]  # lo, hi, number of the size vector


class InfeasibleError(Exception):
    """Presolve emptied a domain; ``node`` is where, ``path`` the nodes of its neighbourhood."""

    def __init__(self, node: int, path: tuple[int, ...]) -> None:
        super().__init__(f"node {node} has no usable strategy")
        self.node = node
        self.path = path


class CostGraph:
    """Mutable working graph.

    Attributes:
        tables: interned arrays.
        unary: per node the number of its cost vector; -1 once the node is gone.
        adjacent: per node {neighbour: number of the matrix with this node's states as rows}.
        usages: per node its usage items as they were when the log had ``epoch`` steps (``refresh_usages`` makes them
            current), the smallest size taken out (it is in ``base``); empty if memory is ignored.
        carries: per node whether its choice may change the memory in use.
        base: bytes per time that no choice changes.
        limit: bytes; None if memory is ignored.
        constants: cost parts that no choice changes, as ``Tables.least`` says them.
    """

    __slots__ = ("adjacent", "base", "carries", "constants", "epoch", "limit", "log", "tables", "unary", "usages")

    def __init__(self, problem: IntraOpProblem, *, memory: bool, tables: Tables | None = None) -> None:
        self.tables = tables or Tables()
        intern = self.tables.intern_object
        nodes, edges = repeated(problem.node_costs), repeated_edges(problem.edges)
        numbers: list[int] = nodes.numbers.tolist()
        found = {number: intern(nodes.different[number], as_float) for number in dict.fromkeys(numbers)}
        self.unary = list(map(found.__getitem__, numbers))
        self.adjacent: list[dict[int, int]] = [{} for _ in self.unary]
        pairs: list[tuple[int, int] | None] = [None] * len(
            edges.costs.different
        )  # numbers of a matrix and its transpose
        adjacent = self.adjacent
        for u, v, kind in zip(edges.u.tolist(), edges.v.tolist(), edges.costs.numbers.tolist(), strict=True):
            pair = pairs[kind]
            if pair is None:
                number = intern(edges.costs.different[kind], as_float)
                pair = pairs[kind] = number, self.tables.transpose(number)
            near = adjacent[u]
            if v in near:
                self.add_edge(u, v, pair[0])
            else:
                near[v], adjacent[v][u] = pair
        self.usages: list[tuple[UsageItem, ...]] = [()] * len(self.unary)
        self.carries = [False] * len(self.unary)
        self.epoch = 0
        self.base = np.zeros(problem.num_times, dtype=np.int64)
        self.limit = problem.usage_limit if memory else None
        self.constants: list[Any] = []
        self.log: list[tuple[Any, ...]] = []
        if memory:
            self._add_usages(problem)

    def _add_usages(self, problem: IntraOpProblem) -> None:
        if problem.base_usage is not None:
            self.base += problem.base_usage
        items: dict[int, list[UsageItem]] = {}
        for u in problem.usages:
            if u.lo < u.hi:
                number = self.tables.intern_object(u.size_bytes, lambda a: np.asarray(a, dtype=np.int64))
                items.setdefault(u.node, []).append((u.lo, u.hi, number))
        self._set_usages(items)

    def _set_usages(self, items: dict[int, list[UsageItem]]) -> None:
        """Replaces the usages of some nodes; equal intervals are added up, what is constant moves to ``base``."""
        tables, fixed = self.tables, []
        for node, found in items.items():
            sums: dict[tuple[int, int], int] = {}
            for lo, hi, n in found:
                old = sums.get((lo, hi))
                sums[lo, hi] = n if old is None else tables.add(old, n)
            kept = []
            for (lo, hi), n in sums.items():
                low, n = tables.excess(n)
                if low:
                    fixed.append((lo, hi, low))
                if n >= 0:
                    kept.append((lo, hi, n))
            self.usages[node] = tuple(kept)
            self.carries[node] = bool(kept)
        if fixed:
            self.base += interval_sums(np.array(fixed, dtype=np.int64), len(self.base))

    def refresh_usages(self) -> set[int]:
        """Brings usages up to date with the log; returns nodes that turned out to be free of memory."""
        tables = self.tables
        maps: dict[int, int] = {}  # per node: index list from today's states of its root to its states at the epoch
        roots: dict[int, int] = {}
        for step in reversed(self.log[self.epoch :]):
            kind, i = step[0], step[1]
            if kind == "keep":
                maps[i] = tables.take(step[2], maps[i]) if i in maps else step[2]
            elif kind == "function":
                j, f = step[2], step[3]
                maps[i] = tables.take(f, maps[j]) if j in maps else f
                roots[i] = roots.get(j, j)
        self.epoch = len(self.log)
        moved = [i for i in sorted(maps) if self.usages[i]]
        items: dict[int, list[UsageItem]] = {}
        for i in moved:
            root = roots.get(i, i)
            if root not in items:
                items[root] = [] if root in maps else list(self.usages[root])
            items[root] += [(lo, hi, tables.take(n, maps[i])) for lo, hi, n in self.usages[i]]
        for i in moved:
            self.usages[i] = ()
        self._set_usages(items)
        return {i for i in items if not self.usages[i]}

    def number_anew(self) -> None:
        """Gives equal arrays one number; what was shared with other graphs is this one's own from then on (``in_step.py``)."""
        if self.tables.knows_content:
            return
        self.tables, numbers = self.tables.numbered()
        self.unary = [v if v < 0 else numbers[v] for v in self.unary]
        self.adjacent = [near and {j: numbers[m] for j, m in near.items()} for near in self.adjacent]
        self.usages, self.carries, self.log = list(self.usages), list(self.carries), list(self.log)

    def add_edge(self, i: int, j: int, m: int) -> None:
        """Adds a matrix (rows: i) to the edge between two nodes."""
        tables = self.tables
        old = self.adjacent[i].get(j)
        if old is not None:
            m = tables.add(old, m)
        self.adjacent[i][j] = m
        self.adjacent[j][i] = tables.transpose(m)

    def drop_edge(self, i: int, j: int) -> None:
        del self.adjacent[i][j]
        del self.adjacent[j][i]

    def keep_states(self, i: int, index: int) -> None:
        """Drops the states of a node that are not in the index list."""
        tables = self.tables
        self.unary[i] = tables.take(self.unary[i], index)
        adjacent, near = self.adjacent, self.adjacent[i]
        for j, m in near.items():
            near[j], adjacent[j][i] = tables.take_both(m, index)
        self.log.append(("keep", i, index))

    def remove(self, i: int, *step: Any) -> None:
        """Takes out a node whose edges are gone already; ``step`` says how to find its choice again."""
        assert not self.adjacent[i]
        self.log.append((*step[:1], i, *step[1:]))
        self.unary[i] = -1
        self.carries[i] = False

    def alive(self) -> list[int]:
        return [i for i, v in enumerate(self.unary) if v >= 0]

    def constant(self) -> float:
        return math.fsum(self.constants)

    def lift(self, picks: dict[int, int]) -> Array:
        """The choice on the original nodes, from a choice on the nodes that are alive."""
        arrays, pick, known = self.tables.arrays, self.tables.pick, self.tables.picks
        out = [0] * len(self.unary)
        for i, x in picks.items():
            out[i] = int(x)
        for step in reversed(self.log):
            kind, i = step[0], step[1]
            if kind == "pick":  # ("pick", i, vector, ((neighbour, matrix), ...))
                if len(near := step[3]) == 2:  # as most are
                    (j, m), (k, n) = near
                    around = m, out[j], n, out[k]
                    found = known.get((step[2], around))
                    out[i] = pick(step[2], around) if found is None else found
                else:
                    out[i] = pick(step[2], tuple(x for j, m in near for x in (m, out[j])))
            elif kind == "keep":
                out[i] = int(arrays[step[2]][out[i]])
            else:  # ("function", i, of node, index list)
                out[i] = int(arrays[step[3]][out[step[2]]])
        return np.array(out, dtype=np.int64)


def interval_sums(items: Array, num_times: int) -> Array:
    """Sum of rows (lo, hi, size) at every time."""
    steps = np.zeros(num_times + 1, dtype=np.int64)
    np.add.at(steps, items[:, 0], items[:, 2])
    np.subtract.at(steps, items[:, 1], items[:, 2])
    return np.cumsum(steps[:-1])
