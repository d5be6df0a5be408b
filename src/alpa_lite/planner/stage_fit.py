"""The plan of one stage on one mesh that keeps the memory budget with all its microbatches in flight.

In: the stage as a task for one mesh, and what a plan of it takes. Out: the cheapest plan found that fits. In order:

1. the cheapest plan; it is the answer if it fits.
2. Plans under a rent (``stage_rent``) for what lies there while microbatches pass, which rises until one fits and is
   then lowered once. They need no search under a limit, and where time goes into microbatches they cost hardly more.
3. If they fit not, or cost more than ``_NEAR`` above the cheapest plan: plans under a limit, lowered by what the last exceeds.
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
_RENTS = (0.003, 0.03, 0.3)  # of all bytes of the cheapest plan together, as shares of its price
_NEAR = 0.01  # share of the cheapest plan's price


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
        self.least = math.inf
        self.best: tuple[MeshResult, StageCosts] | None = None

    def run(self) -> StageFit:
        free = self.plan(math.inf)
        if free.realised is not None and self.best is None:
            self.raise_rent(free)
            if self.best is None or self.best[0].objective > (1 + _NEAR) * free.objective:
                self.lower_limits(free)
        return StageFit(fitting=self.best, results=tuple(self.results), least_bytes=self.least)

    def raise_rent(self, free: MeshResult) -> None:
        unit = free.objective / max(1.0, self.least)
        for number, share in enumerate(_RENTS):
            self.plan(math.inf, share * unit, bound=free.lower_bound)
            if self.best is None:
                continue
            if number and self.best[0].objective > (1 + _NEAR) * free.objective:
                self.plan(math.inf, math.sqrt(share * _RENTS[number - 1]) * unit, bound=free.lower_bound)
            break

    def plan(self, limit: float, rent: float = 0.0, bound: float = math.inf) -> MeshResult:
        """One plan; kept if it fits and is the best so far."""

        def charged(pricer: Pricer, problem: IntraOpProblem) -> Sequence[np.ndarray]:
            return with_rent(problem, self.held_of(pricer), rent)

        task = replace(self.task, budget=limit, rent=charged if rent else None)
        result = plan_on_mesh(task, self.cluster, self.mesh)
        if result.realised is not None and rent:
            result = replace(as_found(result, bound), restricted=True)
        self.results.append(result)
        if result.realised is not None:
            costs = self.costs_of(result)
            self.least = min(self.least, costs.memory.peak)
            if costs.memory.peak <= self.task.budget and self.is_better(result):
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
