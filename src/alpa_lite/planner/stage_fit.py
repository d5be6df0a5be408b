"""The plan of one stage on one mesh that keeps the memory budget with all its microbatches in flight.

In: the stage as a task for one mesh, and what a plan of it takes. Out: the cheapest plan found that fits. In order:

1. the cheapest plan; it is the answer if it fits.
2. Plans under a rent (``stage_rent``) for what lies there while microbatches pass, which rises until one fits. Then corners
   of the hull of (bytes held, price) between that plan and the last that was too large: the rent at which both are equally dear
   finds the corner between them, if there is one. No plan under a rent needs a search under a limit, and where time goes into
   microbatches they cost hardly more.
3. Plans under a limit, lowered by what the last exceeds, if none of these fits or the hull promises that one is cheaper by
   ``_NEAR``. Rows of a limit take ten times as long as a rent, and on large problems find dearer plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.intraop.problem import IntraOpProblem
from alpa_lite.planner.budget import MeshResult, as_found
from alpa_lite.planner.one_mesh import MeshTask, plan_on_mesh
from alpa_lite.planner.rent import Held, with_rent
from alpa_lite.planner.stage_costs import StageCosts

_ROUNDS = 4  # under a limit
_NEAR = 0.01  # share of the price that a search under limits must promise
_RENTS = (0.003, 0.03, 0.3, 3.0)  # of all bytes of the cheapest plan together, as a share of its price
_CORNERS = 4  # of the hull that are looked for
_SAME = 1e-4  # prices at a rent that differ by no more are of one line of the hull
_GAIN = 0.002  # share of the price that a further corner must promise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """What a plan takes: its price, bytes at its peak, and bytes that a rent was charged for (inf without one)."""

    price: float
    size: float
    held: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFit:
    """What was found on one mesh.

    Attributes:
        fitting: the best plan within the budget with its costs; None if none was found.
        results: everything that was tried, in order.
        least_bytes: the smallest peak per device among them; inf without any plan.
    """

    fitting: tuple[MeshResult, StageCosts] | None
    results: tuple[MeshResult, ...]
    least_bytes: float


def fit_stage(
    task: MeshTask,
    cluster: Cluster,
    mesh: DeviceMesh,
    held_of: Callable[[Pricer], Held],
    costs_of: Callable[[MeshResult], StageCosts],
) -> StageFit:
    """Plan a stage on one mesh.

    Args:
        task: the stage; its ``budget`` is for the stage with everything in flight.
        cluster, mesh: its submesh, and its logical grid.
        held_of: what the choices hold while microbatches pass (``stage_rent``).
        costs_of: what a plan takes as a stage.

    Raises:
        PinError: the pins cannot hold on the mesh.
    """
    return _Fit(task, cluster, mesh, held_of, costs_of).run()


class _Fit:
    def __init__(
        self,
        task: MeshTask,
        cluster: Cluster,
        mesh: DeviceMesh,
        held_of: Callable[[Pricer], Held],
        costs_of: Callable[[MeshResult], StageCosts],
    ) -> None:
        self.task, self.cluster, self.mesh, self.held_of, self.costs_of = task, cluster, mesh, held_of, costs_of
        self.results: list[MeshResult] = []
        self.points: list[_Point] = []  # of each
        self.least = math.inf
        self.best: tuple[MeshResult, StageCosts] | None = None

    def run(self) -> StageFit:
        free = self.plan(math.inf)
        if free.realised is not None and self.best is None and self.raise_rent(free) > _NEAR:
            self.lower_limits(free)
        return StageFit(fitting=self.best, results=tuple(self.results), least_bytes=self.least)

    def raise_rent(self, free: MeshResult) -> float:
        """Plans under rents; returns which share of the price a plan between them may save."""
        unit = free.objective / max(1.0, self.least)
        over = self.points[-1]
        for share in _RENTS:
            fitting = self.at(share * unit, free)
            if fitting.size <= self.task.budget:
                break
            over = fitting
        else:
            return math.inf
        for _ in range(_CORNERS):
            if self.promised(over, fitting) <= _GAIN or not fitting.held < over.held < math.inf:
                break
            rent = (fitting.price - over.price) / (over.held - fitting.held)
            corner = self.at(rent, free)
            on_line = corner.price + rent * corner.held >= (1 - _SAME) * (fitting.price + rent * fitting.held)
            if corner.size <= self.task.budget:
                fitting = corner
            else:
                over = corner
            if on_line:
                break
        return self.promised(over, fitting)

    def promised(self, over: _Point, fitting: _Point) -> float:
        """The share of the price that the line between a plan that is too large and one that fits gains at the budget."""
        share = (self.task.budget - fitting.size) / (over.size - fitting.size)
        return share * (fitting.price - over.price) / over.price

    def at(self, rent: float, free: MeshResult) -> _Point:
        self.plan(math.inf, rent, bound=free.lower_bound)
        return self.points[-1]

    def plan(self, limit: float, rent: float = 0.0, bound: float = math.inf) -> MeshResult:
        """One plan; kept if it fits and is the best so far."""
        held: Held = {}

        def charged(pricer: Pricer, problem: IntraOpProblem) -> Sequence[np.ndarray]:
            nonlocal held
            held = self.held_of(pricer)
            return with_rent(problem, held, rent)

        task = replace(self.task, budget=limit, rent=charged if rent else None)
        result = plan_on_mesh(task, self.cluster, self.mesh)
        if result.realised is not None and rent:
            result = replace(as_found(result, bound), restricted=True)
        self.results.append(result)
        if result.realised is None or result.solution is None:
            self.points.append(_Point(price=math.inf, size=math.inf, held=math.inf))
            return result
        costs, choice = self.costs_of(result), result.solution.choice
        size = costs.memory.peak
        total = math.fsum(float(sizes[choice[node]]) for node, sizes in held.items()) if rent else math.inf
        self.points.append(_Point(price=result.objective, size=size, held=total))
        self.least = min(self.least, size)
        if size <= self.task.budget and self.is_better(result):
            self.best = result, costs
        return result

    def is_better(self, result: MeshResult) -> bool:
        return self.best is None or result.objective < self.best[0].objective

    def lower_limits(self, result: MeshResult) -> None:
        """The stage's program holds what it exchanges stacked over all microbatches; what is in flight is counted after."""
        limit = math.inf
        for _ in range(_ROUNDS):
            assert result.peak is not None
            excess = math.ceil(self.costs_of(result).memory.peak - self.task.budget)
            limit = min(limit, result.peak.profile.peak) - excess
            if excess <= 0 or limit <= 0:
                break
            result = self.plan(limit)
            if result.realised is None:
                break
