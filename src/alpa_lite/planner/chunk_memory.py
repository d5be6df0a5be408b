"""Memory of submeshes on which several stages (chunks) lie.

A chunk that waits keeps its state, its sums of gradients and the residuals of its microbatches in flight; what one of them needs
while it runs comes on top, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from alpa_lite.errors import MemoryBudgetError
from alpa_lite.planner.stage_costs import StageCosts
from alpa_lite.schedule import InFlight, Schedule, mesh_residuals

if TYPE_CHECKING:
    from alpa_lite.planner.joined_stages import PlannedStage

_ROUNDS = 4  # of planning stages that do not fit side by side

PlanAll = Callable[[Sequence[float]], list["PlannedStage"]]
"""Plans every stage, each with its own limit in bytes per device."""


def within_budget(
    plan_all: PlanAll, schedule: Schedule, flying: Sequence[InFlight], budget: float, source: str
) -> list[PlannedStage]:
    """The stages, planned so that those of each submesh fit ``budget`` bytes per device together.

    Where they do not, each is planned again with less, in proportion to what it takes.

    Raises:
        MemoryBudgetError: no such plans were found.
    """
    limits, at = [math.inf] * schedule.num_stages, schedule.mesh_of_stage()
    least = math.inf
    for _ in range(_ROUNDS):
        try:
            stages = plan_all(limits)
        except MemoryBudgetError:
            if not math.isfinite(least):
                raise
            break
        own = [stage.costs.memory.peak for stage in stages]
        peaks = submesh_peaks(schedule, [stage.costs for stage in stages], flying)
        if max(peaks) <= budget or schedule.num_meshes == schedule.num_stages:
            return [
                replace(stage, costs=replace(stage.costs, memory=replace(stage.costs.memory, peak=peaks[mesh])))
                for stage, mesh in zip(stages, at, strict=True)
            ]
        least = min(least, max(peaks))
        whole = [sum(size for size, mesh in zip(own, at, strict=True) if mesh == m) for m in range(schedule.num_meshes)]
        for s, mesh in enumerate(at):
            if peaks[mesh] > budget:
                limits[s] = min(limits[s], own[s] * (1 - (peaks[mesh] - budget) / whole[mesh]))
    shared = max(at.count(mesh) for mesh in at)
    raise MemoryBudgetError(
        f"no plans were found with which up to {shared} stages of {schedule.name!r} fit on one submesh together: the smallest "
        f"peak found is {least:,.0f} bytes, the budget {budget:,.0f} per device. At {source}. Give fewer stages per submesh, "
        "jax.checkpoint around layers, or a larger memory_budget_bytes."
    )


def submesh_peaks(schedule: Schedule, costs: Sequence[StageCosts], flying: Sequence[InFlight]) -> list[int]:
    """Per submesh the peak of all its stages together, in bytes per device.

    Args:
        schedule: which stages share a submesh, and in which order they run.
        costs: per stage, with its own microbatches in flight.
        flying: per stage, as ``in_flight`` counts.

    For stages s of a submesh: ``sum(kept_s) + max over time of sum(in flight_s * residual_s) + max(running_s)``.
    """
    at = schedule.mesh_of_stage()
    residuals = mesh_residuals(schedule, {s: float(one.residual_bytes) for s, one in enumerate(costs)})
    peaks = []
    for mesh in range(schedule.num_meshes):
        own = [s for s in range(schedule.num_stages) if at[s] == mesh]
        if len(own) == 1:
            peaks.append(costs[own[0]].memory.peak)
            continue
        kept = [_kept(costs[s]) for s in own]
        held = [flying[s].residuals * costs[s].residual_bytes for s in own]
        alone = [costs[s].memory.peak - size for s, size in zip(own, held, strict=True)]
        kept = [k + flying[s].halves * costs[s].halves_bytes for s, k in zip(own, kept, strict=True)]
        running = max(max(a - k, 0) for a, k in zip(alone, kept, strict=True))
        peaks.append(sum(kept) + round(residuals[mesh]) + running)
    return peaks


def _kept(costs: StageCosts) -> int:
    """What lies there while another stage of the submesh runs, residuals aside."""
    m = costs.memory
    return m.parameters + m.optimizer_state + m.inputs + m.outputs + m.constants + m.gradients
