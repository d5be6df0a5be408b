"""XLA's memory figures of a pipeline's programs, composed to a peak per stage (``costs/stage_memory.py``).

XLA knows one program at a time; what lies beside it follows from the schedule. Stages that share a submesh are counted together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite.costs.stage_memory import submesh_peak
from alpa_lite.lowering.stage import LoweredStage
from alpa_lite.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramBytes:
    """XLA's figures of one program per device: its arguments, and its peak with them."""

    argument_bytes: int
    peak_bytes: int

    @property
    def own_bytes(self) -> int:
        """What it needs beside its arguments."""
        return self.peak_bytes - self.argument_bytes


def program_bytes(compiled: Any) -> ProgramBytes:
    """Of a program compiled for local devices; the peak as in ``CompiledStep.peak_bytes``."""
    m = compiled.memory_analysis()
    peak = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
    return ProgramBytes(argument_bytes=int(m.argument_size_in_bytes), peak_bytes=int(peak))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The peak of one stage's submesh in bytes per device.

    Attributes:
        peak_bytes: ``held_bytes + own_bytes``, the largest over the step.
        predicted_bytes: the plan's.
        program: "forward", "update 0", ...: which one runs at the peak; with its stage where several share the submesh.
        held_bytes: what lies there then, the program's arguments included.
        own_bytes: what XLA needs for the program beside its arguments.
    """

    stage: int
    peak_bytes: int
    predicted_bytes: int
    program: str
    held_bytes: int
    own_bytes: int

    @property
    def ratio(self) -> float:
        """Predicted peak / composed peak."""
        return self.predicted_bytes / max(1, self.peak_bytes)


def stage_memory(
    stages: Sequence[LoweredStage],
    schedule: Schedule,
    programs: Mapping[tuple[int, str], ProgramBytes],
    predicted: Sequence[int],
) -> tuple[StageMemory, ...]:
    """One record per stage.

    Args:
        programs: by (stage, name of the part).
        predicted: peaks of the plan.
    """
    found: dict[int, StageMemory] = {}
    own = {key: figures.own_bytes for key, figures in programs.items()}
    for column in schedule.columns:
        cuts = {s: stages[s].cut for s in sorted({action.stage for action in column})}
        order = [
            (action.stage, number, action.microbatch)
            for action in column
            if action.microbatch is not None
            for number in stages[action.stage].passes_of(action.kind)
        ]
        peak = submesh_peak(cuts, order, own)
        for s in cuts:
            found[s] = StageMemory(
                stage=s,
                peak_bytes=peak.peak_bytes,
                predicted_bytes=predicted[s],
                program=peak.name if len(cuts) == 1 else f"{peak.name} of stage {peak.stage}",
                held_bytes=peak.held_bytes,
                own_bytes=peak.own,
            )
    return tuple(found[s] for s in range(len(stages)))
