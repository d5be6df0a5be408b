"""Exact answers for narrow cores without memory: nodes are eliminated one by one, tables over their neighbours remain.

Elimination picks the node that leaves the smallest table. All tables are known by what they are made of before any is made: those
that copies of a layer have in common are made and counted once, and a core that is too wide is refused at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.repeated import repeated

_TABLE_CAP = 4_000_000  # entries of one table, the eliminated node included
_MAX_DIMS = 30

# A sum of tables: per table its number, and the dims of the sum that are its own.
_Parts = tuple[tuple[int, tuple[int, ...]], ...]
# Per step of an elimination, its node, the node's neighbours then and the entries of the table.
_Scopes = list[tuple[int, tuple[int, ...], int]]


@dataclass(frozen=True, slots=True)
class _Order:
    """The eliminations.

    Attributes:
        steps: (node, neighbours then, number of the sum over both), in order.
        sums: (sizes, parts) of every sum, over a node and its neighbours; its minimum over the node is the next table,
            numbered on from those of nodes and edges.
    """

    steps: list[tuple[int, tuple[int, ...], int]]
    sums: list[tuple[tuple[int, ...], _Parts]]


def solve_narrow(
    unary: Sequence[Array],
    left: Sequence[int],
    right: Sequence[int],
    costs: Sequence[Array],
    *,
    max_entries: float = math.inf,
) -> list[int] | None:
    """A cheapest choice; None if some table would be too large. Ties go to the lowest state of the node decided last.

    Args:
        unary: costs per node, ``inf`` = forbidden.
        left, right, costs: end points and matrices of the edges.
        max_entries: of all different tables together. Tables of the same arrays in the same places are one.
    """
    given = repeated([*unary, *costs])
    tables = list(given.different)
    order = _order([len(c) for c in unary], left, right, given.numbers.tolist(), max_entries)
    if order is None:
        return None
    sums: list[Array] = []
    for shape, parts in order.sums:
        (number, dims), *others = parts
        table = _aligned(tables[number], dims, len(shape))  # grows to its size with what is added
        own = False
        for number, dims in others:
            part = _aligned(tables[number], dims, len(shape))
            if own:
                table += part
            else:
                table = table + part
                own = table.shape == shape
        sums.append(table)
        tables.append(np.minimum.reduce(table, axis=0))
    picks = [0] * len(unary)
    for node, scope, number in reversed(order.steps):
        picks[node] = int(sums[number][(slice(None), *[picks[i] for i in scope])].argmin())
    return picks


class KnownScopes:
    """In which order the nodes of the last core are eliminated; that of one with the same edges and sizes is the same."""

    def __init__(self) -> None:
        self._last: tuple[tuple[object, ...], _Scopes | None] | None = None

    def of(self, sizes: Sequence[int], left: Sequence[int], right: Sequence[int], max_entries: float) -> _Scopes | None:
        """As ``_scopes``."""
        key = tuple(sizes), tuple(left), tuple(right), max_entries
        last = self._last
        if last is None or last[0] != key:
            last = self._last = key, _scopes(sizes, left, right, max_entries)
        return last[1]


def is_narrow(
    unary: Sequence[Array],
    left: Sequence[int],
    right: Sequence[int],
    costs: Sequence[Array],
    max_entries: float,
    known: KnownScopes,
) -> bool:
    """Whether ``solve_narrow`` with this limit has an answer."""
    given = repeated([*unary, *costs]).numbers.tolist()
    return _order([len(c) for c in unary], left, right, given, max_entries, known) is not None


def _aligned(part: Array, dims: Sequence[int], num_dims: int) -> Array:
    """A table whose dims become those named, size 1 in all others."""
    rising = sorted(dims)
    if rising != list(dims):
        part = part.transpose(sorted(range(len(dims)), key=dims.__getitem__))
    if len(dims) == num_dims:
        return part
    shape = [1] * num_dims
    for dim, size in zip(rising, part.shape, strict=True):
        shape[dim] = size
    return part.reshape(shape)


def _order(
    sizes: Sequence[int],
    left: Sequence[int],
    right: Sequence[int],
    given: Sequence[int],
    max_entries: float,
    known_scopes: KnownScopes | None = None,
) -> _Order | None:
    """Nodes by what they leave, smallest first; None if a table, or all different ones together, would be too large.

    ``given`` are numbers of the tables of all nodes, then of all edges.
    """
    scopes = (known_scopes or KnownScopes()).of(sizes, left, right, max_entries)
    if scopes is None:
        return None
    num_given = max(given) + 1
    # Every factor is (nodes, number of its table); a node holds those that it is in, by the order of their making.
    held: list[dict[int, tuple[tuple[int, ...], int]]] = [{node: ((node,), given[node])} for node in range(len(sizes))]
    for factor, (a, b) in enumerate(zip(left, right, strict=True), start=len(sizes)):
        held[a][factor] = held[b][factor] = (a, b), given[factor]
    num_factors = len(given)
    known: dict[tuple[tuple[int, ...], _Parts], int] = {}
    steps: list[tuple[int, tuple[int, ...], int]] = []
    for node, scope, entries in scopes:
        dim = {j: d for d, j in enumerate((node, *scope))}
        factors = held[node]
        parts = tuple([(number, tuple([dim[j] for j in nodes])) for nodes, number in factors.values()])
        key = tuple([sizes[j] for j in dim]), parts
        found = known.get(key)
        if found is None:
            found = known[key] = len(known)
            max_entries -= entries
            if max_entries < 0:
                return None
        steps.append((node, scope, found))
        made = scope, num_given + found
        for j in scope:
            own = held[j]
            for factor in factors:
                own.pop(factor, None)
            own[num_factors] = made
        num_factors += 1
    return _Order(steps, list(known))


def _scopes(sizes: Sequence[int], left: Sequence[int], right: Sequence[int], max_entries: float) -> _Scopes | None:
    """The nodes in order; None if a table would be too large."""
    around: list[set[int]] = [set() for _ in sizes]
    for a, b in zip(left, right, strict=True):
        around[a].add(b)
        around[b].add(a)

    def weight(node: int) -> int:
        """Entries of the table that is left without it."""
        entries = 1
        for j in around[node]:
            entries *= sizes[j]
        return entries

    weights = {node: weight(node) for node in range(len(sizes))}
    waiting = [(w, node) for node, w in weights.items()]
    heapify(waiting)
    most = min(_TABLE_CAP, max_entries)
    scopes: _Scopes = []
    while waiting:
        left_over, node = heappop(waiting)
        if weights.get(node) != left_over:
            continue  # gone, or its table has changed since
        near, entries = around[node], left_over * sizes[node]
        if entries > most or len(near) >= _MAX_DIMS:
            return None
        del weights[node]
        scope = tuple(sorted(near))
        scopes.append((node, scope, entries))
        for j in scope:
            own = around[j]
            own |= near
            own.discard(j)
            own.discard(node)
            changed = weight(j)
            if changed != weights[j]:
                weights[j] = changed
                heappush(waiting, (changed, j))
    return scopes
