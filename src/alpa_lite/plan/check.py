"""The verifier of plans: what must hold for every plan, whoever made it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan
    from alpa_lite.plan.records import Leaf, MemoryProfile, OpDecision, StagePlan

# The solver's bound may pass the objective by its own tolerance.
BOUND_TOLERANCE = 1e-6


def check_plan(plan: Plan, program: Program | None = None, stages: Sequence[Program] = ()) -> None:
    """Verifies a plan: specs fit meshes and shapes, bounds and memory are consistent, no op is decided twice.

    With a program also: every op is decided, paths are its paths, and every spec has its tensor's rank. ``stages`` are the
    programs of a pipeline's stages; else the first stage's is the whole program.

    Raises:
        AssertionError: naming the first fault; a plan of ours that fails is our mistake.
    """
    for fault in plan_faults(plan, program, stages):
        raise AssertionError(f"invalid plan: {fault}")


def plan_faults(plan: Plan, program: Program | None = None, stages: Sequence[Program] = ()) -> Iterator[str]:
    """Everything that is wrong with the plan, each a sentence with its place."""
    if not plan.stages:
        yield "it has no stage"
        return
    yield from _bound_faults(plan)
    for word, leaves in (("argument", plan.inputs), ("result", plan.outputs)):
        for path, count in Counter(leaf.path for leaf in leaves).items():
            if count > 1:
                yield f"{word} {path!r} occurs {count} times"
        for leaf in leaves:
            yield from _leaf_faults(leaf, word, plan)
    yield from _place_faults(plan.stages)
    for index, stage in enumerate(plan.stages):
        yield from (f"stage {index}: {fault}" for fault in _stage_faults(stage))
        for word, leaves in (("argument", stage.inputs), ("result", stage.outputs)):
            for leaf in leaves:
                yield from (f"stage {index}: {fault}" for fault in _leaf_faults(leaf, word, plan))
    if program is not None:
        if plan.input_paths != program.input_paths or plan.output_paths != program.output_paths:
            yield "its argument or result paths are not the program's"
        for stage, own in zip(plan.stages, stages or (program,), strict=True):
            yield from _program_faults(stage, own)


def _bound_faults(plan: Plan) -> Iterator[str]:
    if not math.isfinite(plan.objective) or not math.isfinite(plan.lower_bound):
        yield f"objective {plan.objective} and lower bound {plan.lower_bound} must be finite"
    elif plan.lower_bound > plan.objective + BOUND_TOLERANCE * max(1.0, abs(plan.objective)):
        yield f"the lower bound {plan.lower_bound} is above the objective {plan.objective}"


def _leaf_faults(leaf: Leaf, word: str, plan: Plan) -> Iterator[str]:
    where = f"{word} {leaf.path!r}"
    if not 0 <= leaf.stage < len(plan.stages):
        yield f"{where}: stage {leaf.stage} is not one of {len(plan.stages)}"
        return
    mesh = plan.stages[leaf.stage].mesh
    unknown = _unknown_axes(leaf.spec, mesh)
    if unknown:
        yield f"{where}: {leaf.spec} uses {unknown}, the mesh is {mesh}"
    elif leaf.spec.rank != len(leaf.value.shape):
        yield f"{where}: {leaf.spec} has rank {leaf.spec.rank}, the tensor is {leaf.value}"
    elif leaf.spec.unreduced:
        yield f"{where}: {leaf.spec} is unreduced"
    elif not leaf.spec.divides(leaf.value.shape, mesh):
        yield f"{where}: {leaf.value} does not divide as {leaf.spec} on {mesh}"


def _place_faults(stages: Sequence[StagePlan]) -> Iterator[str]:
    """Stages of a pipeline lie beside each other or share a whole submesh, each mesh inside its submesh."""
    if len(stages) == 1:
        return
    taken: dict[int, int] = {}
    for index, stage in enumerate(stages):
        size = math.prod(stage.submesh)
        if stage.mesh.num_devices > size:
            yield f"stage {index}: its mesh {stage.mesh} is larger than its submesh {stage.submesh}"
        own = range(stage.first_device, stage.first_device + size)
        if shared := [d for d in own if d in taken and _submesh(stages[taken[d]]) != _submesh(stage)]:
            yield f"stage {index}: device {shared[0]} belongs to stage {taken[shared[0]]} too"
        taken.update(dict.fromkeys(own, index))


def _submesh(stage: StagePlan) -> tuple[int, tuple[int, int]]:
    return stage.first_device, stage.submesh


def _stage_faults(stage: StagePlan) -> Iterator[str]:
    yield from _memory_faults(stage.memory)
    for path, count in Counter(d.path for d in stage.decisions).items():
        if count > 1:
            yield f"op {path} is decided {count} times"
    unknown_of: dict[int, tuple[str, ...]] = {}  # by identity: most ops have specs in common
    for decision in stage.decisions:
        for spec in (*decision.operands, *decision.results):
            if id(spec) not in unknown_of:
                unknown_of[id(spec)] = _unknown_axes(spec, stage.mesh)
            if unknown_of[id(spec)]:
                yield f"op {decision.path}: {spec} uses {unknown_of[id(spec)]}, the mesh is {stage.mesh}"
        if not (math.isfinite(decision.time_s) and decision.time_s >= 0):
            yield f"op {decision.path}: time {decision.time_s} is no duration"
    for conversion in stage.conversions:
        where = f"conversion of %{conversion.value} at op {conversion.op}"
        for spec in (conversion.source, *(step.after for step in conversion.steps)):
            if _unknown_axes(spec, stage.mesh):
                yield f"{where}: {spec} uses {_unknown_axes(spec, stage.mesh)}"
        if any(number >= len(stage.collectives) for number in conversion.collectives):
            yield f"{where}: it names a collective that the stage does not have"
    for c in stage.collectives:
        where = f"{c.kind} of {c.tensor or 'a tensor'} at op {c.op}"
        unknown = tuple(axis for axis in c.axes if axis not in stage.mesh.axis_names)
        if unknown or not c.axes:
            yield f"{where}: axes {c.axes} are not axes of {stage.mesh}"
        if c.size_bytes < 0 or c.count < 1 or not (math.isfinite(c.time_s) and c.time_s >= 0):
            yield f"{where}: size {c.size_bytes}, count {c.count}, time {c.time_s}"


def _memory_faults(memory: MemoryProfile) -> Iterator[str]:
    for name, size_bytes in memory.items():
        if size_bytes < 0:
            yield f"memory: {name} is {size_bytes}"
        elif size_bytes > memory.peak:
            yield f"memory: {name} of {size_bytes} is above the peak of {memory.peak}"


def _program_faults(stage: StagePlan, program: Program) -> Iterator[str]:
    decisions = {d.path: d for d in stage.decisions}
    ops = {path: (owner, op) for path, owner, op in program.walk()}
    for path in [p for p in ops if p not in decisions][:1]:
        yield f"op {path} ({ops[path][1].primitive}) is not decided"
    for path in [p for p in decisions if p not in ops][:1]:
        yield f"op {path} is decided but not in the program"
    for path, decision in decisions.items():
        if path in ops:
            yield from _rank_faults(decision, *ops[path])


def _rank_faults(decision: OpDecision, owner: Program, op: Op) -> Iterator[str]:
    for word, values, specs in (("operand", op.inputs, decision.operands), ("result", op.outputs, decision.results)):
        if len(values) != len(specs):
            yield f"op {decision.path} ({op.primitive}): {len(specs)} {word} specs for {len(values)} {word}s"
            continue
        for position, (value, spec) in enumerate(zip(values, specs, strict=True)):
            if value >= 0 and len(spec.dims) != len(owner.values[value].shape):
                yield f"op {decision.path} ({op.primitive}): {word} {position} is {owner.values[value]}, spec {spec}"


def _unknown_axes(spec: ShardingSpec, mesh: DeviceMesh) -> tuple[str, ...]:
    used: Iterable[str] = (*spec.sharded_axes, *spec.unreduced)
    return tuple(axis for axis in used if axis not in mesh.axis_names)
