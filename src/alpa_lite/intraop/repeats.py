"""Finds repeated layers: nodes of the ILP whose surroundings look alike get one class.

Colour refinement (Weisfeiler-Leman): a node's colour starts as its cost array and is mixed, round by round, with the
colours of its neighbours and the matrices between them. After r rounds equal colours mean equal surroundings within r
edges. Equal cost arrays are one object (``pricing.py``), so identity is equality.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa_lite.intraop.problem import IntraOpProblem
from alpa_lite.intraop.slots import Slots

ROUNDS = 3  # more rounds tell layers near the ends apart and make the tied problem larger, for the same incumbents


def node_classes(problem: IntraOpProblem, rounds: int = ROUNDS) -> np.ndarray:
    """One class number per node, numbered by first appearance."""
    ids: dict[int, int] = {}
    nodes = [ids.setdefault(id(c), len(ids)) for c in problem.node_costs]
    return _classes(nodes, [(u, v, ids.setdefault(id(costs), len(ids))) for u, v, costs in problem.edges], rounds)


def slot_classes(slots: Slots, rounds: int = ROUNDS) -> np.ndarray:
    """The same for any prices of a graph, if all that share a slot have one price: slots stand for the arrays."""
    first = len(slots.node_slots)
    return _classes(slots.nodes, [(u, v, first + slot) for u, v, slot in slots.edges], rounds)


def _classes(nodes: Sequence[int], edges: Sequence[tuple[int, int, int]], rounds: int) -> np.ndarray:
    """By numbers of what nodes cost, and (node, node, number of what they cost together)."""
    colors = _mix(np.array(nodes, dtype=np.uint64))
    if edges:
        u, v, numbers = np.array(edges, dtype=np.int64).T
        matrix = _mix(numbers.astype(np.uint64))
        for _ in range(rounds):
            inbox = np.zeros(len(colors), dtype=np.uint64)
            np.add.at(inbox, u, _mix(matrix ^ _mix(colors[v] + np.uint64(1))))
            np.add.at(inbox, v, _mix(matrix ^ _mix(colors[u] + np.uint64(2))))
            colors = _mix(colors * np.uint64(3) + inbox)
    _, first, inverse = np.unique(colors, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64: spreads every input bit over the result."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
