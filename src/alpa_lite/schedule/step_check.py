"""The verifier of ``StepIO``: what a step says about its programs fits together and fits the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NoReturn

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule.actions import PER_STEP, ActionKind, Schedule
from alpa_lite.schedule.step_io import Buffer, Origin, StageIO, StepIO

PHASES: Mapping[ActionKind, int] = dict.fromkeys(ActionKind, 0) | {
    ActionKind.GRADSYNC: 1,
    ActionKind.UPDATE: 2,
}
"""Microbatches, then the gradients' synchronisation, then the update: a buffer that is changed in place has one value after
each, and a program that only reads it sees the value of the phase before."""


def check_step(schedule: Schedule, step: StepIO) -> None:
    """Checks a step against a schedule.

    1. Every action has one program, and every name one buffer and one origin.
    2. A made buffer is written by one stage and not in place; by several programs only if they take turns over the
       microbatches, such as B and I of a stage that splits some backwards. Zeros and arguments are changed in place only, on
       their own mesh, once per phase; zeros are summed up by at least one program.
    3. What is done once per step touches no buffer of a single microbatch, and a microbatch changes no such buffer in place.
    4. A sum that is not finished is read by nobody else.

    Raises:
        ScheduleError: with ``problem`` "programs" or "buffers".
    """
    buffers = {buffer.name: buffer for buffer in step.buffers}
    if len(buffers) < len(step.buffers):
        names = [buffer.name for buffer in step.buffers]
        _refuse(
            f"two buffers called {next(n for n in names if names.count(n) > 1)!r}", "Names are unique", "rename one"
        )
    _check_programs(schedule, step)
    for program in step.programs:
        _check_program(program, buffers)
    meshes = schedule.mesh_of_stage()
    readers: dict[str, list[StageIO]] = {name: [] for name in buffers}
    writers: dict[str, list[StageIO]] = {name: [] for name in buffers}
    for program in step.programs:
        for found, ports in ((readers, program.reads), (writers, program.writes)):
            for port in ports:
                found[port.name].append(program)
    for name, buffer in buffers.items():
        _check_writers(buffer, readers[name], writers[name], meshes)


def _check_programs(schedule: Schedule, step: StepIO) -> None:
    present = Counter((program.stage, program.kind) for program in step.programs)
    wanted = {(action.stage, action.kind): action for column in schedule.columns for action in reversed(column)}
    for (stage, kind), count in present.items():
        if count > 1:
            _programs(stage, kind, count, str(wanted.get((stage, kind), "no action")))
    for (stage, kind), action in wanted.items():
        if not present[stage, kind]:
            _programs(stage, kind, 0, str(action))


def _programs(stage: int, kind: ActionKind, count: int, action: str) -> NoReturn:
    raise ScheduleError(
        f"the step has {count} programs for {kind} of stage {stage}. Every stage and kind of the schedule has one. The "
        f"schedule asks for it at {action}: describe it with StageIO(stage={stage}, kind=ActionKind.{kind.name}, ...), or "
        "leave such actions out of the schedule.",
        "programs",
    )


def _check_program(program: StageIO, buffers: Mapping[str, Buffer]) -> None:
    for port in (*program.reads, *program.writes):
        if port.name not in buffers:
            _refuse(f"{program} with the buffer {port.name!r}", "Every name has a Buffer", "add it to StepIO.buffers")
    for port in (*program.reads, *program.writes) if program.kind in PER_STEP else ():
        if buffers[port.name].per_microbatch:
            _refuse(
                f"{program}, which runs once per step, with {port.name!r}, of which there is one per microbatch",
                "It reads and writes buffers that exist once",
                "sum the value up into a buffer of zeros first",
            )
    reads = {port.name for port in program.reads}
    for port in program.writes:
        buffer, in_place = buffers[port.name], port.name in reads
        if in_place and buffer.per_microbatch:
            _refuse(
                f"{program} that changes {port.name!r}@microbatch in place",
                "Only sums and state are",
                "write a new name",
            )
        if not in_place and buffer.origin is not Origin.MADE:
            _refuse(
                f"{program} that writes {buffer.origin} {port.name!r} unread",
                "Such are changed in place",
                "read it too",
            )
        if not in_place and not buffer.per_microbatch and program.kind not in PER_STEP:
            _refuse(
                f"{program} that writes {port.name!r} anew for every microbatch, though it exists once",
                "What exists once is summed up in place",
                "make it a buffer of zeros, or one per microbatch",
            )


def _check_writers(buffer: Buffer, readers: list[StageIO], writers: list[StageIO], meshes: tuple[int, ...]) -> None:
    name = buffer.name
    in_place = [p for p in writers if p in readers]
    if buffer.origin is Origin.MADE:
        if len({(p.stage, PHASES[p.kind]) for p in writers}) != 1 or in_place:
            words = " and ".join(map(str, writers)) or "nobody"
            _refuse(f"{name!r}, written by {words}", "A made buffer is written by one stage, not in place", "rename it")
        return
    if buffer.origin is Origin.ZEROS and not any(PHASES[p.kind] == 0 for p in in_place):
        _refuse(
            f"{name!r}, zeros that no program adds to", "Zeros are summed up per microbatch", "read and write it in B"
        )
    homes = {meshes[stage] for stage in buffer.stages}
    for program in in_place:
        homes.add(meshes[program.stage])
        if len(homes) > 1:
            _refuse(
                f"{name!r}, which {program} changes on mesh {meshes[program.stage]}, though it is on {sorted(homes)}",
                "What changes in place is on one mesh",
                "give each mesh a buffer of its own and add them up in one program",
            )
    for phase in (1, 2):
        if len(same := [p for p in in_place if PHASES[p.kind] == phase]) > 1:
            _refuse(f"{name!r}, changed by {same[0]} and {same[1]}", "Each phase changes it once", "merge the programs")
    sums = any(PHASES[p.kind] == 0 for p in in_place)
    for program in readers if sums else ():
        if PHASES[program.kind] == 0 and program not in in_place:
            _refuse(
                f"{program} that reads the sum {name!r} before it is whole",
                "Sums are read by GRADSYNC and UPDATE",
                "read what is added to it instead",
            )


def _refuse(given: str, allowed: str, do: str) -> NoReturn:
    raise ScheduleError(f"the step has {given}. {allowed}. It is in the StepIO: {do}.", "buffers")
