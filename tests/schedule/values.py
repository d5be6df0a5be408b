"""Two ways to work a step out with symbols for values: as instruction lists, and as a plain loop over microbatches."""

from __future__ import annotations

from collections.abc import Iterable

from alpa_lite.schedule import ActionKind, Instructions, Origin, Schedule, StageIO, StepIO
from alpa_lite.schedule.instructions import BufferId, Free, Recv, Run, Send, Zeros

K = ActionKind
Values = dict[BufferId, int]


def apply(program: StageIO, microbatch: int | None, reads: Values, per_microbatch: set[str]) -> dict[str, int]:
    """New values of all that a program writes. Sums are exclusive-ors, so that the order of adding does not show."""
    written, sums = {p.name for p in program.writes}, program.kind not in (K.GRADSYNC, K.UPDATE)
    old = {b.name: value for b, value in reads.items()}
    inputs = tuple(sorted((n, v) for n, v in old.items() if not (sums and n in written)))
    new = {}
    for name in written:
        made = hash((program.stage, program.kind.value, microbatch, name, inputs))
        new[name] = made ^ old[name] if sums and name in old else made
    return new


def at(name: str, microbatch: int | None, per_microbatch: set[str]) -> BufferId:
    return BufferId(name, microbatch if name in per_microbatch else None)


def argument(buffer: BufferId) -> int:
    return hash(("argument", buffer.name, buffer.microbatch))


def execute(instructions: Instructions, step: StepIO, order: Iterable[tuple[int, int]]) -> list[Values]:
    """One driver issues the instructions in ``order``; per mesh what is left."""
    programs = {(p.stage, p.kind): p for p in step.programs}
    names = {b.name for b in step.buffers if b.per_microbatch}
    held: list[Values] = [{b: argument(b) for b in mesh.arguments} for mesh in instructions.meshes]
    wire: dict[int, int] = {}
    posted: list[dict[BufferId, int]] = [{} for _ in held]
    for mesh, place in order:
        instruction = instructions.meshes[mesh].instructions[place]
        if isinstance(instruction, Run):
            for buffer in instruction.reads:
                if buffer in posted[mesh]:
                    held[mesh][buffer] = wire.pop(posted[mesh].pop(buffer))
            action = instruction.action
            reads = {buffer: held[mesh][buffer] for buffer in instruction.reads}
            new = apply(programs[action.stage, action.kind], action.microbatch, reads, names)
            held[mesh] |= {at(name, action.microbatch, names): value for name, value in new.items()}
        elif isinstance(instruction, Send):
            wire[instruction.transfer] = held[mesh][instruction.buffer]
        elif isinstance(instruction, Recv):
            posted[mesh][instruction.buffer] = instruction.transfer
        elif isinstance(instruction, Zeros):
            held[mesh][instruction.buffer] = 0
        elif isinstance(instruction, Free):
            del held[mesh][instruction.buffer]
    assert not wire and not any(posted)
    return held


def plain_loop(schedule: Schedule, step: StepIO) -> Values:
    """The same without meshes and frees: each microbatch forward through all stages and back, then the sums, then the updates."""
    programs = {(p.stage, p.kind): p for p in step.programs}
    names = {b.name for b in step.buffers if b.per_microbatch}
    actions = {action for column in schedule.columns for action in column}
    values: Values = {}
    for b in step.buffers:
        for k in range(schedule.num_microbatches) if b.per_microbatch else (None,):
            if b.origin is not Origin.MADE:
                values[BufferId(b.name, k)] = argument(BufferId(b.name, k)) if b.origin is Origin.ARGUMENT else 0

    def run(kinds: Iterable[ActionKind], stages: Iterable[int], microbatch: int | None) -> None:
        seen = dict(values)
        for s in stages:
            for kind in kinds:
                if any((a.kind, a.stage, a.microbatch) == (kind, s, microbatch) for a in actions):
                    source = values if microbatch is not None else seen
                    ports = [at(p.name, microbatch, names) for p in programs[s, kind].reads]
                    reads = {b: source.get(b, values.get(b)) for b in ports}
                    new = apply(programs[s, kind], microbatch, reads, names)
                    values.update({at(name, microbatch, names): value for name, value in new.items()})

    stages = range(schedule.num_stages)
    for k in range(schedule.num_microbatches):
        run((K.F,), stages, k)
        run((K.RECOMPUTE, K.B, K.I, K.W), reversed(stages), k)
    run((K.GRADSYNC,), stages, None)
    run((K.UPDATE,), stages, None)
    return values
