"""Exact answers for narrow cores without memory: nodes are eliminated one by one, tables over their neighbours remain.

Elimination picks the node whose table is smallest; the largest table is known before any is made, so a core that is too
wide is refused at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from alpa_lite.intraop.problem import Array

_TABLE_CAP = 2_000_000  # entries of one table, the eliminated node included
_MAX_DIMS = 30


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
        max_entries: of all tables together.
    """
    sizes = [len(c) for c in unary]
    order = _order(sizes, left, right, max_entries)
    if order is None:
        return None
    # Every factor is (nodes, table); a node's bucket holds the factors whose first node in the order it is.
    rank = [0] * len(order)
    for position, node in enumerate(order):
        rank[node] = position
    buckets: list[list[tuple[tuple[int, ...], Array]]] = [[((i,), c)] for i, c in enumerate(unary)]
    for a, b, m in zip(left, right, costs, strict=True):
        buckets[a if rank[a] < rank[b] else b].append(((a, b), m))
    joined: list[tuple[int, tuple[int, ...], Array]] = []
    for node in order:
        inside = {i for nodes, _ in buckets[node] for i in nodes}
        inside.discard(node)
        scope = tuple(sorted(inside, key=rank.__getitem__))
        axes = {i: dim for dim, i in enumerate((node, *scope))}
        (nodes, part), *others = buckets[node]
        table = _aligned(part, [axes[i] for i in nodes], len(axes))  # grows to its size with what is added
        for nodes, part in others:
            table = table + _aligned(part, [axes[i] for i in nodes], len(axes))
        joined.append((node, scope, table))
        if scope:
            buckets[scope[0]].append((scope, np.minimum.reduce(table, axis=0)))
    picks = [0] * len(unary)
    for node, scope, table in reversed(joined):
        picks[node] = int(table[(slice(None), *(picks[i] for i in scope))].argmin())
    return picks


def _aligned(part: Array, dims: Sequence[int], num_dims: int) -> Array:
    """A factor's table whose dims become those named, size 1 in all others."""
    if len(dims) == num_dims == 1 or list(dims) == list(range(num_dims)):
        return part
    if any(a > b for a, b in pairwise(dims)):
        order = sorted(range(len(dims)), key=dims.__getitem__)
        part, dims = part.transpose(order), [dims[d] for d in order]
    shape = [1] * num_dims
    for dim, size in zip(dims, part.shape, strict=True):
        shape[dim] = size
    return part.reshape(shape)


def _order(sizes: Sequence[int], left: Sequence[int], right: Sequence[int], max_entries: float) -> list[int] | None:
    """Nodes by smallest table first; None if a table, or all of them together, would be too large."""
    around: list[set[int]] = [set() for _ in sizes]
    for a, b in zip(left, right, strict=True):
        around[a].add(b)
        around[b].add(a)

    def weight(node: int) -> int:
        entries = sizes[node]
        for j in around[node]:
            entries *= sizes[j]
        return entries

    weights = {node: weight(node) for node in range(len(sizes))}
    waiting = [(w, node) for node, w in weights.items()]
    heapify(waiting)
    order: list[int] = []
    while waiting:
        entries, node = heappop(waiting)
        if weights.get(node) != entries:
            continue  # gone, or its table has changed since
        max_entries -= entries
        if entries > _TABLE_CAP or len(around[node]) >= _MAX_DIMS or max_entries < 0:
            return None
        del weights[node]
        order.append(node)
        near = around[node]
        for j in near:
            around[j] |= near
            around[j].discard(j)
            around[j].discard(node)
        for j in near:
            changed = weight(j)
            if changed != weights[j]:
                weights[j] = changed
                heappush(waiting, (changed, j))
    return order
