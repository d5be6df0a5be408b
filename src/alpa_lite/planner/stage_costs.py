"""What one planned stage costs in a pipeline: seconds per pass and per step, and memory with microbatches in flight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from alpa_lite.core.program import Program
from alpa_lite.costs.cuts import Pair
from alpa_lite.costs.stage_cut import StageCut
from alpa_lite.costs.stage_memory import SubmeshPeak
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.part_memory import KnownParts, cut_stage, programs_own_bytes, stage_peak
from alpa_lite.schedule import InFlight
from alpa_lite.trace.stages import StageProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Of one stage under its plan.

    Attributes:
        forward_s, backward_s: of one microbatch, in the plan's unit.
        weight_s: the part of ``backward_s`` that is its weight half, where it is split.
        once_s: per step.
        residual_bytes: what a microbatch keeps from its forward to its backward pass, per device.
        halves_bytes: what a microbatch keeps, besides, from the first to the second half of its backward pass, per device.
        memory: with all microbatches in flight.
        own: per program of the stage, the bytes that it needs beside its arguments.
        cut: the stage under its plan.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    once_s: float
    residual_bytes: int
    halves_bytes: int
    memory: MemoryProfile
    own: Mapping[str, int] = field(default_factory=dict)
    cut: StageCut | None = None

    def with_flying(self, whole: MemoryProfile, flying: InFlight) -> StageCosts:
        """The same plan with so many microbatches in flight; ``whole`` has the totals of its state."""
        assert self.cut is not None
        return replace(self, memory=_memory(whole, stage_peak(self.cut, flying, self.own)))


def stage_costs(
    part: StageProgram,
    program: Program,
    result: MeshResult,
    flying: InFlight,
    *,
    on_cpu: bool,
    own: Mapping[str, int] | None = None,
    known: KnownParts | None = None,
) -> StageCosts:
    """Take a stage's result apart.

    Args:
        part, program: the stage.
        result: its plan, with ``realised`` and ``peak``.
        flying: microbatches in flight at most.
        on_cpu: whether XLA:CPU compiles it.
        own: as of the result, where they are known: they are the same whatever is in flight.
        known: of the program.
    """
    written, peak = result.realised, result.peak
    assert written is not None and peak is not None
    trips = program.ops[part.loop].trip_count
    forward, backward, weight, once = [], [], [], []
    second = part.weight_half if part.weight_half is not None else len(program.ops[part.loop].bodies[0].ops)
    forward_alone = part.num_forward == len(program.ops[part.loop].bodies[0].ops)
    prices = [*result.op_times, *((c.op, c.cost) for c in written.conversions)]
    for path, price in prices:
        parts = path.split(".")
        if forward_alone:  # what comes after the pass, taking results out of their stacks, counts as part of it
            forward.append(price)
        elif parts[0] != str(part.loop) or len(parts) == 1:
            once.append(price)
        elif parts[2] != "out" and int(parts[2]) < part.num_forward:
            forward.append(price)
        else:
            backward.append(price)
            if parts[2] != "out" and int(parts[2]) >= second:
                weight.append(price)
    cut = cut_stage(part, program, result.mesh, written)
    passes, received = cut.body.segments, set(cut.loop_inputs.received)
    later = {pair for segment in passes[1:] for pair in segment.reads}
    residual = _bytes(cut, cut.kept[0] | (received & later & set(passes[0].reads)))
    halves = _bytes(cut, cut.kept[1]) if len(passes) == 3 else 0
    own = programs_own_bytes(cut, program, on_cpu=on_cpu, known=known) if own is None else own
    memory = _memory(peak.profile, stage_peak(cut, flying, own))
    return StageCosts(
        forward_s=(math.fsum(forward) + result.penalty * forward_alone) / trips,
        backward_s=math.fsum(backward) / trips,
        weight_s=math.fsum(weight) / trips,
        once_s=math.fsum(once) + result.penalty * (not forward_alone),
        residual_bytes=residual,
        halves_bytes=halves,
        memory=memory,
        own=own,
        cut=cut,
    )


def _bytes(cut: StageCut, pairs: Iterable[Pair]) -> int:
    return sum(cut.size(pair, inside=True) for pair in pairs)


def _memory(whole: MemoryProfile, peak: SubmeshPeak) -> MemoryProfile:
    """The stage's peak and what it is made of; ``whole`` has the totals of its state."""
    state = whole.parameters + whole.optimizer_state
    memory = MemoryProfile(
        parameters=whole.parameters,
        optimizer_state=whole.optimizer_state,
        inputs=max(peak.state - state, 0),
        gradients=peak.gradients,
        activations=peak.residuals,
        temporaries=peak.own,
        constants=whole.constants,
        peak=max(peak.peak_bytes, state),
    )
    return replace(memory, peak=max(memory.peak, memory.constants))
