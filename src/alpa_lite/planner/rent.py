"""A price on memory: the dearer a byte, the leaner the cheapest plan.

With a rent of r seconds per byte the cheapest choice lies on the lower hull of (time, memory): no other choice is both as fast
and as small. Rents are costs of nodes, so such a plan takes as long to find as the cheapest one; rows of a memory limit take
three to ten times as long.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from alpa_lite.intraop.problem import IntraOpProblem

Held = Mapping[int, np.ndarray]
"""Per node the bytes per device that each of its choices holds."""


def with_rent(problem: IntraOpProblem, held: Held, rent: float) -> list[np.ndarray]:
    """Node costs with ``rent`` seconds per step for every byte held; arrays that were shared stay shared."""
    made: dict[tuple[int, int], np.ndarray] = {}
    costs = list(problem.node_costs)
    for node, sizes in held.items():
        key = id(costs[node]), id(sizes)
        if key not in made:
            made[key] = costs[node] + rent * sizes
        costs[node] = made[key]
    return costs


def bytes_at(problem: IntraOpProblem, times: Collection[int]) -> Held:
    """What is held at any of these times, by the usages of the problem."""
    held: dict[int, np.ndarray] = {}
    for usage in problem.usages:
        if any(usage.lo <= time < usage.hi for time in times):
            held[usage.node] = held[usage.node] + usage.size_bytes if usage.node in held else usage.size_bytes
    return held
