"""The plan of one stage on one mesh that keeps the memory budget with all its microbatches in flight.

In: the stage as a task for one mesh, and what a plan of it takes. Out: the cheapest plan found that fits. In order:

1. the cheapest plan; it is the answer if it fits.
2. Plans under a rent (``stage_rent``) for what lies there while microbatches pass, which rises until one fits. Then corners
   of the hull of (bytes held, price) between that plan and the last that was too large: the rent at which both are equally dear
   finds the corner between them, if there is one. No plan under a rent needs a search under a limit, and where time goes into
   microbatches they cost hardly more.
3. Where the hull promises that a plan between these two is cheaper by ``_NEAR``: mixtures of all plans found so far, in which
   every node chooses as in one of them, under limits between what the solver counts of the two. A rent makes equal layers
   choose alike; a mixture lets some of them be lean.
4. Where no rent fits, or a plan between the cheapest one and what fits promises as much: plans over all choices, under limits
   lowered by what the last exceeds, while they are cheaper by ``_NEAR``. They find what is close to the cheapest plan, as where
   little must be saved.

Every limit is one solve, and the number of solves is bounded; none is proven, as that took 50 s for a mixture of thousands of
nodes and found nothing cheaper. That all of them may take ``PlanOptions.time_limit_s`` together is a last resort: what fits by
then is the answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.intraop.problem import IntraOpProblem
from alpa_lite.planner.budget import MeshResult, as_found
from alpa_lite.planner.one_mesh import counted_bytes, plan_once
from alpa_lite.planner.posing import MeshTask
from alpa_lite.planner.rent import Held, with_rent
from alpa_lite.planner.stage_costs import StageCosts

_LOWERED = 4  # limits over all choices
_MIXED = 4  # limits of mixtures
_NEAR = 0.01  # share of the price that a plan under a limit must promise
_RENTS = (0.003, 0.03, 0.3, 3.0)  # of all bytes of the cheapest plan together, as a share of its price
_CORNERS = 4  # of the hull that are looked for
_SAME = 1e-4  # prices at a rent that differ by no more are of one line of the hull
_GAIN = 0.002  # share of the price that a further corner must promise
_LAST = 0.1  # of the time limit, that a solve gets at least: while nothing fits, the search goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """What a plan takes: its price, bytes at its peak, and bytes that a rent was charged for (inf without one)."""

    result: MeshResult
    price: float = math.inf
    size: float = math.inf
    held: float = math.inf

    @property
    def choice(self) -> np.ndarray:
        assert self.result.solution is not None
        return self.result.solution.choice


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFit:
    """What was found on one mesh.

    Attributes:
        fitting: the best plan within the budget with its costs; None if none was found. Where time ran out, its solution's
            ``limit_used`` is "time".
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
        self.points: list[_Point] = []  # of all plans, in order
        self.least = math.inf
        self.deadline = time.monotonic() + task.options.time_limit_s
        self.late = False  # whether it has cut something short
        self.best: tuple[MeshResult, StageCosts] | None = None

    def run(self) -> StageFit:
        free = self.plan()
        if free.price < math.inf and self.best is None:
            over, fitting = self.raise_rent(free)
            if fitting is not None:
                self.mix(over, fitting)
            self.lower_limits(free)
        best = self.best
        if best is not None and self.late:
            result, costs = best
            assert result.solution is not None
            best = replace(result, solution=replace(result.solution, limit_used="time")), costs
        results = tuple(point.result for point in self.points)
        return StageFit(fitting=best, results=results, least_bytes=self.least)

    def raise_rent(self, free: _Point) -> tuple[_Point, _Point | None]:
        """Plans under rents; returns two neighbours, one too large and one that fits, or None if none does."""
        unit = free.price / max(1.0, self.least)
        over = free
        for share in _RENTS if unit else ():  # shares of nothing are no rents
            fitting = self.plan(share * unit)
            if self.fits(fitting):
                break
            over = over if fitting.size == math.inf else fitting
        else:
            return over, None
        for _ in range(_CORNERS):
            looked_for = self.promises(over, fitting, _GAIN) and fitting.held < over.held < math.inf
            if not looked_for or self.is_late():
                break
            rent = (fitting.price - over.price) / (over.held - fitting.held)
            corner = self.plan(rent)
            on_line = corner.price + rent * corner.held >= (1 - _SAME) * (fitting.price + rent * fitting.held)
            if self.fits(corner):
                fitting = corner
            else:
                over = corner
            if on_line:
                break
        return over, fitting

    def promises(self, over: _Point, fitting: _Point, share: float) -> bool:
        """Whether the line between a plan that is too large and one that fits gains more than a share of the price at the budget.

        The price is that of the former; it may be 0, as where only what is sent counts and nothing is.
        """
        room = (self.task.budget - fitting.size) / (over.size - fitting.size)
        return room * (fitting.price - over.price) > share * over.price

    def lower_limits(self, over: _Point) -> None:
        """Plans over all choices, below the price of what fits, from one that does not.

        The stage's program holds what it exchanges stacked over all microbatches, so that the solver counts more than the
        stage takes; what must be saved is the same.
        """
        best = min(filter(self.fits, self.points), key=lambda point: point.price, default=None)
        if best is not None and not self.promises(over, best, _NEAR):
            return
        limit = self.counted(over)
        for _ in range(_LOWERED):
            limit -= max(1, math.ceil(over.size - self.task.budget))
            if limit <= 0 or (best is not None and ((1 + _NEAR) * over.price > best.price or self.is_late())):
                break
            found = self.plan(limit=limit)
            if self.fits(found) or found.size == math.inf:
                break
            over, limit = found, min(limit, self.counted(found))

    def mix(self, over: _Point, fitting: _Point) -> None:
        """Mixtures of all plans found, under limits between those of two: where the line between their sizes meets the budget.

        An end that stays counts half as much each time, so that the other does not creep.
        """
        among = [point.choice for point in self.points if point.size < math.inf]
        low, high, weights = self.counted(fitting), self.counted(over), [1.0, 1.0]
        for _ in range(_MIXED):
            if not self.promises(over, fitting, _NEAR) or self.is_late():
                break
            room, excess = self.task.budget - fitting.size, over.size - self.task.budget
            limit = math.floor(low + (high - low) * room * weights[0] / (room * weights[0] + excess * weights[1]))
            if not low < limit < high:
                break
            found = self.plan(limit=limit, among=among)
            if self.fits(found):
                low, fitting, weights = limit, found, [1.0, weights[1] / 2]
            elif found.price < fitting.price:
                high, over, weights = min(limit, self.counted(found)), found, [weights[0] / 2, 1.0]
            else:
                break  # what lower limits leave is dearer still

    def fits(self, point: _Point) -> bool:
        return point.size <= self.task.budget

    def is_late(self) -> bool:
        self.late |= time.monotonic() >= self.deadline
        return self.late

    def counted(self, point: _Point) -> int:
        """The peak by the solver's own count."""
        return counted_bytes(self.task, self.cluster, self.mesh, point.choice)

    def plan(self, rent: float = 0.0, *, limit: int | None = None, among: Sequence[np.ndarray] = ()) -> _Point:
        """One plan, without proof under a limit; kept if it fits and is the best so far."""
        held: Held = {}

        def charged(pricer: Pricer, problem: IntraOpProblem) -> Sequence[np.ndarray]:
            nonlocal held
            held = self.held_of(pricer)
            return with_rent(problem, held, rent)

        whole_s = self.task.options.time_limit_s
        options = replace(self.task.options, time_limit_s=max(_LAST * whole_s, self.deadline - time.monotonic()))
        task = replace(self.task, budget=math.inf, rent=charged if rent else None, options=options, proof=limit is None)
        result = plan_once(task, self.cluster, self.mesh, limit=limit, among=among)
        self.late |= result.solution is not None and result.solution.limit_used == "time"
        if result.realised is None or result.solution is None:
            self.points.append(_Point(result=result))
            return self.points[-1]
        if self.points:
            result = replace(as_found(result, self.points[0].result.lower_bound), restricted=True)
        costs = self.costs_of(result)
        size = costs.memory.peak
        point = _Point(result=result, price=result.objective, size=size)
        if rent:
            point = replace(point, held=math.fsum(float(s[point.choice[node]]) for node, s in held.items()))
        self.points.append(point)
        self.least = min(self.least, size)
        if self.fits(point) and (self.best is None or result.objective < self.best[0].objective):
            self.best = result, costs
        return point
