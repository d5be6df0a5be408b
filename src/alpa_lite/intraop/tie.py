"""The tied problem: copies of one node (repeated layers) choose alike. Small whatever the depth.

Its answer is an incumbent for the problem as given. Bounds are never taken from it: they come from the untied problem.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.problem import Array


@dataclass(frozen=True, slots=True, eq=False)
class Tie:
    """Groups of nodes and edges of a core.

    Attributes:
        group: per core node, its group.
        edge_group: per core edge, its group.
        flipped: per core edge, whether its group has the ends the other way round.
        members: nodes per group.
        edge_members: edges per edge group.
        ends: (left, right) groups of every edge group, left < right.
        sample, edge_sample: one node and one edge of each group.
    """

    group: list[int]
    edge_group: list[int]
    flipped: list[bool]
    members: list[int]
    edge_members: list[int]
    ends: list[tuple[int, int]]
    sample: list[int]
    edge_sample: list[int]


def tie(core: Core, classes: Array) -> Tie:
    """Group nodes of equal class, costs and colour; the colours keep neighbours apart (layer after layer)."""
    keys: dict[tuple[int, int, int], int] = {}
    around: list[list[int]] = [[] for _ in core.unary]
    for a, b in zip(core.left, core.right, strict=True):
        around[a].append(b)
        around[b].append(a)
    group: list[int] = []
    members: list[int] = []
    sample: list[int] = []
    for i, original in enumerate(core.nodes):
        taken = {group[j] for j in around[i] if j < i}
        color = 0
        while keys.get((int(classes[original]), core.unary_ids[i], color), -1) in taken:
            color += 1
        number = keys.setdefault((int(classes[original]), core.unary_ids[i], color), len(keys))
        if number == len(members):
            members.append(0)
            sample.append(i)
        members[number] += 1
        group.append(number)
    edge_keys: dict[tuple[int, int, int, bool], int] = {}
    edge_group, flipped, edge_members, ends, edge_sample = [], [], [], [], []
    for e, (a, b) in enumerate(zip(core.left, core.right, strict=True)):
        flip = group[a] > group[b]
        low, high = (group[b], group[a]) if flip else (group[a], group[b])
        number = edge_keys.setdefault((low, high, core.matrix_ids[e], flip), len(edge_keys))
        if number == len(edge_members):
            edge_members.append(0)
            ends.append((low, high))
            edge_sample.append(e)
        edge_members[number] += 1
        edge_group.append(number)
        flipped.append(flip)
    return Tie(group, edge_group, flipped, members, edge_members, ends, sample, edge_sample)


def tied_messages(unary: list[Array], costs: tuple[Array, ...], tied: Tie) -> Messages:
    """Zero messages of the tied problem: costs of all members summed."""
    nodes = [unary[i] * n for i, n in zip(tied.sample, tied.members, strict=True)]
    matrices = tuple(
        (np.ascontiguousarray(costs[e].T) if tied.flipped[e] else costs[e]) * n
        for e, n in zip(tied.edge_sample, tied.edge_members, strict=True)
    )
    return Messages.zero(nodes, tuple(a for a, _ in tied.ends), tuple(b for _, b in tied.ends), matrices)

