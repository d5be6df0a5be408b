"""How many microbatches a stage holds values for: what its memory is computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa_lite.schedule.actions import ActionKind, Column, Schedule

K = ActionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Peaks of one stage.

    Attributes:
        stage: index of the stage.
        inputs: microbatches whose inputs the stage has read and still needs: from F to the end of the backward.
        residuals: microbatches whose residuals it holds: from F, or from RECOMPUTE where there is one, to the end of B or W.
        halves: microbatches between I and W, for which it holds what the first half makes for the second.
    """

    stage: int
    inputs: int
    residuals: int
    halves: int = 0


def in_flight(schedule: Schedule) -> tuple[InFlight, ...]:
    """Peaks of every stage over its column; 0 where nothing is differentiated.

    A stage's actions are all in one column, so that the order of the column gives the counts, whatever the times are.
    """
    if not schedule.is_training:
        return tuple(InFlight(stage=stage, inputs=0, residuals=0) for stage in range(schedule.num_stages))
    peaks = {}
    for column in schedule.columns:
        inputs, residuals = _changes(column)
        for stage in {action.stage for action in column}:
            one = {stage: 1.0}
            halves = [(a.stage, 1 if a.kind is K.I else -1) for a in column if a.kind in (K.I, K.W)]
            counts = (round(_peak(changes, one)) for changes in (inputs, residuals, halves))
            peaks[stage] = InFlight(**dict(zip(("inputs", "residuals", "halves"), counts, strict=True)), stage=stage)
    return tuple(peaks[stage] for stage in range(schedule.num_stages))


def mesh_residuals(schedule: Schedule, sizes: Mapping[int, float] | None = None) -> tuple[float, ...]:
    """Per mesh the peak of the residuals of all its stages together.

    Args:
        sizes: bytes of one microbatch's residuals per stage; by default every stage counts 1.
    """
    if not schedule.is_training:
        return (0.0,) * schedule.num_meshes
    weights = sizes if sizes is not None else dict.fromkeys(range(schedule.num_stages), 1.0)
    return tuple(_peak(_changes(column)[1], weights) for column in schedule.columns)


def _changes(column: Column) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(stage, +1 or -1) of inputs and of residuals, in the order of the column."""
    again = {(a.stage, a.microbatch) for a in column if a.kind is K.RECOMPUTE}
    inputs, residuals = [], []
    for action in column:
        key = action.stage, action.microbatch
        if action.kind is K.F:
            inputs.append((action.stage, 1))
        if action.kind is (K.RECOMPUTE if key in again else K.F):
            residuals.append((action.stage, 1))
        if action.kind in (K.B, K.W):
            inputs.append((action.stage, -1))
            residuals.append((action.stage, -1))
    return inputs, residuals


def _peak(changes: list[tuple[int, int]], weights: Mapping[int, float]) -> float:
    held = peak = 0.0
    for stage, change in changes:
        held += change * weights.get(stage, 0.0)
        peak = max(peak, held)
    return peak
