"""A price on memory: the dearer a byte, the leaner the cheapest plan.

With a rent of r seconds per byte the cheapest choice lies on the lower hull of (time, memory): no other choice is both as fast
and as small. Rents are costs of nodes, so such a plan takes as long to find as the cheapest one; rows of a memory limit take
three to ten times as long.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from alpa_lite.intraop.problem import IntraOpProblem, evaluate

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


def bytes_at_peak(problem: IntraOpProblem, choice: np.ndarray) -> Held:
    """What is held at the time at which ``choice`` holds most, by the usages of the problem."""
    time = evaluate(problem, choice).peak_time
    held: dict[int, np.ndarray] = {}
    for usage in problem.usages:
        if usage.lo <= time < usage.hi:
            held[usage.node] = held[usage.node] + usage.size_bytes if usage.node in held else usage.size_bytes
    return held
