"""Copies of one node (repeated layers) as groups: what is done to all of them at once, or alike.

Message passing works on whole groups, which makes a sweep cheap. The *tied* problem, in which copies choose alike, has
one node per group and is small whatever the depth; its answer is an incumbent for the problem as given. Bounds are
never taken from it: they come from the untied problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.problem import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tie:
    """Groups of nodes and edges of a core. No two nodes of a group are neighbours.

    Attributes:
        group: per core node, its group; groups are numbered in the order of their first nodes.
        slot: per core node, its place in the group.
        members: core nodes of every group.
        edge_group: per core edge, its group.
        edge_slot: per core edge, its place in the group.
        edge_members: core edges of every edge group; all have the same matrix.
        ends: (left, right) groups of every edge group, left < right.
        flipped: per edge group, whether the left end of its core edges is in the right group.
    """

    group: list[int]
    slot: list[int]
    members: list[list[int]]
    edge_group: list[int]
    edge_slot: list[int]
    edge_members: list[list[int]]
    ends: list[tuple[int, int]]
    flipped: list[bool]

    @property
    def is_trivial(self) -> bool:
        """Whether every node is alone in its group."""
        return len(self.members) == len(self.group)


def tie(core: Core, classes: Array | None) -> Tie:
    """Groups nodes of equal class, costs and colour; the colours keep neighbours apart (layer after layer).

    Args:
        core: the core.
        classes: per original node; None = every node is alone.
    """
    if classes is None:
        return _alone(core)
    around: list[list[int]] = [[] for _ in core.unary]
    for a, b in zip(core.left, core.right, strict=True):
        around[b].append(a)
    kinds = classes[np.array(core.nodes, dtype=np.int64)].tolist()
    keys: dict[tuple[int, int, int], int] = {}
    group: list[int] = []
    for near, kind, number in zip(around, kinds, core.unary_ids, strict=True):
        taken = [group[j] for j in near]
        color = 0
        while keys.get((kind, number, color), -1) in taken:
            color += 1
        group.append(keys.setdefault((kind, number, color), len(keys)))
    edge_keys: dict[tuple[int, int, int], int] = {}
    edge_group = []
    for a, b, m in zip(core.left, core.right, core.matrix_ids, strict=True):
        edge_group.append(edge_keys.setdefault((group[a], group[b], m), len(edge_keys)))
    slot, members = _places(group, len(keys))
    edge_slot, edge_members = _places(edge_group, len(edge_keys))
    ends = [(a, b) for a, b, _ in edge_keys]
    return Tie(
        group=group,
        slot=slot,
        members=members,
        edge_group=edge_group,
        edge_slot=edge_slot,
        edge_members=edge_members,
        ends=[(min(pair), max(pair)) for pair in ends],
        flipped=[a > b for a, b in ends],
    )


def _alone(core: Core) -> Tie:
    """Every node and every edge is a group."""
    nodes, edges = range(core.num_nodes), range(len(core.costs))
    group = list(nodes)
    ends = [(group[a], group[b]) for a, b in zip(core.left, core.right, strict=True)]
    return Tie(
        group=group,
        slot=[0] * len(nodes),
        members=[[i] for i in nodes],
        edge_group=list(edges),
        edge_slot=[0] * len(edges),
        edge_members=[[e] for e in edges],
        ends=[(a, b) if a < b else (b, a) for a, b in ends],
        flipped=[a > b for a, b in ends],
    )


def _places(group: list[int], count: int) -> tuple[list[int], list[list[int]]]:
    members: list[list[int]] = [[] for _ in range(count)]
    slot = []
    for i, g in enumerate(group):
        slot.append(len(members[g]))
        members[g].append(i)
    return slot, members


def tied_core(core: Core, tied: Tie) -> Core:
    """One node per group and one edge per edge group, at the cost of all their members; memory as the copies use it."""
    made: dict[tuple[int, int, bool], tuple[int, Array]] = {}
    edges = []
    for members, flipped in zip(tied.edge_members, tied.flipped, strict=True):
        key = (core.matrix_ids[members[0]], len(members), flipped)
        if key not in made:
            matrix = core.costs[members[0]]
            made[key] = len(made), np.ascontiguousarray(matrix.T if flipped else matrix) * len(members)
        edges.append(made[key])
    memory = core.memory
    if memory is not None:
        memory = replace(memory, node=np.array(tied.group, dtype=np.int64)[memory.node])
    return replace(
        core,
        nodes=tuple(range(len(tied.members))),
        unary=tuple(core.unary[members[0]] * len(members) for members in tied.members),
        left=tuple(a for a, _ in tied.ends),
        right=tuple(b for _, b in tied.ends),
        costs=tuple(m for _, m in edges),
        unary_ids=tuple(range(len(tied.members))),
        matrix_ids=tuple(number for number, _ in edges),
        memory=memory,
    )
