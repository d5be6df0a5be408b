"""What presolve left, as plain arrays for the solvers, and its memory use over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from alpa_lite.intraop.graph import CostGraph, interval_sums
from alpa_lite.intraop.problem import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """Usages of the core.

    Attributes:
        node, lo, hi: one entry per usage item.
        start: position of the item's first state in ``sizes``.
        sizes: int64, all size vectors behind one another.
        base: bytes per time that no choice changes.
        limit: bytes.
    """

    node: Array
    lo: Array
    hi: Array
    start: Array
    sizes: Array
    base: Array
    limit: int

    def profile(self, picks: Array) -> Array:
        """Bytes live at every time."""
        if not len(self.base):
            return self.base
        sizes = self.sizes[self.start + np.asarray(picks)[self.node]] if len(self.node) else self.node
        return self.base + interval_sums(np.stack([self.lo, self.hi, sizes], 1), len(self.base))

    def row(self, time: int, sizes: Sequence[int]) -> tuple[dict[int, Array], int]:
        """Per node the bytes of its states at one time, and what the choices may use there (limit less base)."""
        found: dict[int, Array] = {}
        for item in np.flatnonzero((self.lo <= time) & (time < self.hi)).tolist():
            node, start = int(self.node[item]), int(self.start[item])
            part = self.sizes[start : start + sizes[node]]
            found[node] = found[node] + part if node in found else part
        return found, self.limit - int(self.base[time])

    def worst_times(self, profile: Array, count: int, known: set[int]) -> list[int]:
        """Local peaks above the limit, worst first, at most ``count``, none of them known."""
        over = profile > self.limit
        if not over.any():
            return []
        edges = np.flatnonzero(np.diff(np.concatenate([[False], over, [False]])))
        times = []
        for lo, hi in edges.reshape(-1, 2).tolist():
            pieces = max(1, min(4, (hi - lo) // 16))
            cuts = np.linspace(lo, hi, pieces + 1).astype(int).tolist()
            times += [a + int(profile[a:b].argmax()) for a, b in pairwise(cuts)]
        times = [t for t in dict.fromkeys(times) if t not in known]
        return sorted(times, key=lambda t: (-int(profile[t]), t))[:count]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Core:
    """A problem on nodes 0..n-1 in the order of the original nodes.

    Attributes:
        nodes: original node of every core node.
        unary: cost vectors.
        left, right: end points of every edge, left < right.
        costs: matrix of every edge, rows = states of ``left``.
        unary_ids, matrix_ids: numbers in the tables; equal numbers mean equal arrays.
        memory: usages; None if memory is ignored.
        constant: cost that no choice changes.
        whole: all costs are whole numbers, so every objective is one.
    """

    nodes: tuple[int, ...]
    unary: tuple[Array, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    costs: tuple[Array, ...]
    unary_ids: tuple[int, ...]
    matrix_ids: tuple[int, ...]
    memory: Memory | None
    constant: float
    whole: bool

    @property
    def num_nodes(self) -> int:
        return len(self.unary)

    @property
    def num_pairs(self) -> int:
        """Entries of all edge matrices."""
        return sum(m.size for m in self.costs)

    def cost(self, picks: Sequence[int]) -> float:
        """Objective of a choice."""
        total = self.constant + sum(float(c[x]) for c, x in zip(self.unary, picks, strict=True))
        edges = zip(self.left, self.right, self.costs, strict=True)
        return total + sum(float(m[picks[a], picks[b]]) for a, b, m in edges)

    def fits(self, picks: Sequence[int]) -> bool:
        """Whether a choice keeps the memory limit."""
        if self.memory is None or not len(self.memory.base):
            return True
        return bool(self.memory.profile(np.asarray(picks)).max() <= self.memory.limit)


def extract_core(graph: CostGraph) -> Core:
    """The core of a presolved graph."""
    nodes = graph.alive()
    position = {i: p for p, i in enumerate(nodes)}
    arrays = graph.tables.arrays
    triples = [(position[i], position[j], m) for i in nodes for j, m in graph.adjacent[i].items() if i < j]
    triples.sort()
    unary_ids, matrix_ids = tuple(graph.unary[i] for i in nodes), tuple(m for _, _, m in triples)
    return Core(
        nodes=tuple(nodes),
        unary=tuple(arrays[v] for v in unary_ids),
        left=tuple(a for a, _, _ in triples),
        right=tuple(b for _, b, _ in triples),
        costs=tuple(arrays[m] for m in matrix_ids),
        unary_ids=unary_ids,
        matrix_ids=matrix_ids,
        memory=None if graph.limit is None else _memory(graph, position),
        constant=graph.constant(),
        whole=all(_is_whole(arrays[n]) for n in {*unary_ids, *matrix_ids}) and float(graph.constant()).is_integer(),
    )


def _memory(graph: CostGraph, position: dict[int, int]) -> Memory:
    assert graph.limit is not None
    items = [(position[i], lo, hi, n) for i in position for lo, hi, n in graph.usages[i]]
    starts: dict[int, int] = {}
    parts, total = [], 0
    for *_, n in items:
        if n not in starts:
            starts[n] = total
            parts.append(graph.tables.arrays[n])
            total += len(parts[-1])
    table = np.array([(p, lo, hi, starts[n]) for p, lo, hi, n in items], dtype=np.int64).reshape(-1, 4)
    sizes = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    columns = {"node": table[:, 0], "lo": table[:, 1], "hi": table[:, 2], "start": table[:, 3]}
    return Memory(**columns, sizes=sizes, base=graph.base.copy(), limit=graph.limit)


def _is_whole(costs: Array) -> bool:
    finite = costs[np.isfinite(costs)]
    return bool((finite == np.rint(finite)).all())


def finite(core: Core) -> tuple[list[Array], tuple[Array, ...]]:
    """Costs with a large number in place of inf, above anything that allowed choices can add up to."""
    arrays = {id(a): a for a in (*core.unary, *core.costs)}
    flat = np.concatenate([np.ravel(a) for a in arrays.values()]) if arrays else np.zeros(0)
    allowed = np.isfinite(flat)
    top = float(np.max(np.abs(flat), where=allowed, initial=1.0))
    # One forbidden entry must outweigh all allowed ones together.
    flat[~allowed] = 2 * top * (core.num_nodes + len(core.costs) + 1)
    made, begin = {}, 0
    for number, array in arrays.items():
        made[number] = flat[begin : begin + array.size].reshape(array.shape)
        begin += array.size
    return [made[id(c)] for c in core.unary], tuple(made[id(m)] for m in core.costs)


def restrict(core: Core, gone: Sequence[Array], pairs: dict[int, Array]) -> tuple[Core, list[Array]]:
    """The core without some states (masks per node) and pairs (masks per edge); also the states that are left."""
    kept = [np.flatnonzero(~mask) for mask in gone]
    unary = tuple(c[k] for c, k in zip(core.unary, kept, strict=True))
    costs = []
    for e, (a, b) in enumerate(zip(core.left, core.right, strict=True)):
        matrix = core.costs[e]
        if e in pairs:
            matrix = np.where(pairs[e], np.inf, matrix)
        costs.append(matrix[np.ix_(kept[a], kept[b])])
    memory = core.memory
    if memory is not None:
        parts = [memory.sizes[s + kept[n]] for s, n in zip(memory.start.tolist(), memory.node.tolist(), strict=True)]
        lengths = np.array([0, *map(len, parts)], dtype=np.int64)
        sizes = np.concatenate(parts) if parts else memory.sizes[:0]
        memory = replace(memory, start=np.cumsum(lengths)[:-1], sizes=sizes)
    numbers = tuple(range(len(unary)))
    small = replace(
        core,
        unary=unary,
        costs=tuple(costs),
        unary_ids=numbers,
        matrix_ids=tuple(range(len(costs))),
        memory=memory,
    )
    return small, kept
