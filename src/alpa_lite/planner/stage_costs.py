"""What one planned stage costs in a pipeline: seconds per pass and per step, and memory with microbatches in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from alpa_lite.core.program import Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.planner.one_mesh import MeshResult
from alpa_lite.planner.realise import Realised
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
    """

    forward_s: float
    backward_s: float
    weight_s: float
    once_s: float
    residual_bytes: int
    halves_bytes: int
    memory: MemoryProfile


def stage_costs(part: StageProgram, program: Program, result: MeshResult, flying: InFlight) -> StageCosts:
    """Take a stage's result apart.

    Args:
        part, program: the stage.
        result: its plan, with ``realised`` and ``peak``.
        flying: microbatches in flight at most.
    """
    written, peak = result.realised, result.peak
    assert written is not None and peak is not None
    trips = program.ops[part.loop].trip_count
    forward, backward, weight, once = [], [], [], []
    second = part.weight_half if part.weight_half is not None else len(program.ops[part.loop].bodies[0].ops)
    prices = [*result.op_times, *((c.op, c.cost) for c in written.conversions)]
    for path, price in prices:
        parts = path.split(".")
        if parts[0] != str(part.loop) or len(parts) == 1:
            once.append(price)
        elif parts[2] != "out" and int(parts[2]) < part.num_forward:
            forward.append(price)
        else:
            backward.append(price)
            if parts[2] != "out" and int(parts[2]) >= second:
                weight.append(price)
    microbatches, first = flying.residuals, part.num_forward
    residual = _kept_bytes(part, program, written, result, range(first), first)
    halves = _kept_bytes(part, program, written, result, range(first, second), second)
    stacked = _stacked_bytes(part, program, written, result)
    # The stage's program holds what it exchanges stacked over all microbatches; a pipeline holds a few at a time.
    more = max(microbatches - 1, 0) * residual + max(flying.halves - 1, 0) * halves
    extra = more - stacked * (trips - microbatches) // trips
    profile = peak.profile
    memory = replace(
        profile,
        activations=profile.activations + more,
        inputs=max(profile.inputs - stacked, 0),
        peak=max(profile.peak + extra, profile.parameters + profile.optimizer_state),
    )
    memory = replace(memory, peak=max(memory.peak, *(size for name, size in memory.items() if name != "peak")))
    return StageCosts(
        forward_s=math.fsum(forward) / trips,
        backward_s=math.fsum(backward) / trips,
        weight_s=math.fsum(weight) / trips,
        once_s=math.fsum(once) + result.penalty,
        residual_bytes=residual,
        halves_bytes=halves,
        memory=memory,
    )


def _kept_bytes(
    part: StageProgram, program: Program, written: Realised, result: MeshResult, made: range, read_from: int
) -> int:
    """Bytes per device of the values, in their layouts, that ops of the loop's body from ``read_from`` on read of those in
    ``made`` for their microbatch. What is received counts as made by the forward pass."""
    loop, prefix = program.ops[part.loop], f"{part.loop}.0."
    body = loop.bodies[0]
    decisions = {d.path: d for d in written.decisions}
    have: set[tuple[int, ShardingSpec]] = set()
    if made.start == 0:
        tail = len(body.inputs) - sum(c.when == "loop" for c in part.received)
        stacks = zip(body.inputs[tail:], decisions[str(part.loop)].operands[tail:], strict=True)
        have = {(value, ShardingSpec(spec.dims[1:], spec.unreduced)) for value, spec in stacks}
    wanted: set[tuple[int, ShardingSpec]] = set()
    for index, op in enumerate(body.ops):
        decision = decisions[f"{prefix}{index}"]
        if index in made:
            have.update((v, s) for v, s in zip(op.outputs, decision.results, strict=True) if v >= 0)
        elif index >= read_from:
            wanted.update((v, s) for v, s in zip(op.inputs, decision.operands, strict=True) if v >= 0)
    for c in written.conversions:
        place = c.op.removeprefix(prefix)
        if c.op.startswith(prefix) and "." not in place:
            if place != "out" and int(place) in made:
                have.add((c.value, c.target))
            elif place == "out" or int(place) >= read_from:
                wanted.add((c.value, c.source))
    values = ((body.values[v], spec) for v, spec in have & wanted)
    return sum(spec.local_size_bytes(value.shape, value.itemsize, result.mesh) for value, spec in values)


def _stacked_bytes(part: StageProgram, program: Program, written: Realised, result: MeshResult) -> int:
    """Bytes per device of what is exchanged in the loop, stacked over all microbatches."""
    ends = list(zip(program.inputs[len(part.args) :], written.in_specs[len(part.args) :], part.received, strict=True))
    ends += zip(program.outputs[len(part.results) :], written.out_specs[len(part.results) :], part.sent, strict=True)
    return sum(
        spec.local_size_bytes(program.values[v].shape, program.values[v].itemsize, result.mesh)
        for v, spec, crossing in ends
        if crossing.when == "loop"
    )
