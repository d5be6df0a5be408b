"""Whether a stage of a pipeline keeps what its forward pass makes, or recomputes it in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from alpa_lite.errors import MemoryBudgetError
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.plan_step import is_limited
from alpa_lite.trace.remat_step import RecomputedStages
from alpa_lite.trace.staged import StagedStep

if TYPE_CHECKING:
    from alpa_lite.planner.joined_stages import PlannedStage


def plan_with_remat(
    plan: Callable[[StagedStep, RecomputedStages | None], Plan], again: RecomputedStages, chosen: str | tuple[str, ...]
) -> Plan:
    """The plan of a step on stages under ``PlanOptions.remat``.

    Args:
        plan: plans a step, with layers recomputed where that is needed, if it is given how.
        again: the step, kept and recomputed.
        chosen: the option.
    """
    if chosen in ("auto", "none"):
        return plan(again.kept, again if chosen == "auto" and again.remat.layers else None)
    made = plan(again.all, None)
    return replace(made, remat=again.remat) if again.remat.layers else made


def kept_or_recomputed(
    planned: Callable[[StagedStep, int], PlannedStage],
    step: StagedStep,
    recompute: RecomputedStages | None,
    number: int,
    found_recomputed: Collection[int] = (),
) -> PlannedStage:
    """A stage as it is; where the memory budget rules its cheapest plan out, recomputed if that fits or costs less.

    Stages that the search ``found_recomputed`` are so, if they fit.
    """
    if recompute is not None and number in found_recomputed:
        with suppress(MemoryBudgetError):
            return replace(planned(recompute.all, number), recomputed=True)
        recompute = None
    kept: PlannedStage | None = None
    refused: MemoryBudgetError | None = None
    try:
        kept = planned(step, number)
    except MemoryBudgetError as error:
        refused = error
    if recompute is None or (kept is not None and not is_limited(kept.result)):
        return _one_of(kept, refused)
    try:
        again = planned(recompute.all, number)
    except MemoryBudgetError as error:
        if kept is not None:
            return kept
        error.args = (
            f"{error}\n  tried: every layer of the stage kept, and every layer recomputed in the backward pass, for which the "
            "figures above hold.",
        )
        raise
    if kept is not None and kept.result.objective <= again.result.objective:
        return kept
    return replace(again, recomputed=True)


def _one_of(kept: PlannedStage | None, refused: MemoryBudgetError | None) -> PlannedStage:
    if kept is None:
        assert refused is not None
        raise refused
    return kept
