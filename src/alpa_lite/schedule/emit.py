"""Action table and step description to instruction lists.

Passes, in order: every read is traced to the program that makes the value (``_Flow``); values that are read on another mesh
become transfers, numbered in an order in which all can be carried out; each mesh's list is written with its transfers and
frees (``_write``).

- SEND stands right after the program that makes the value, so transfers leave in the order in which values are made.
- RECV stands before the RUN that precedes the first reader, so that the transfer goes on beside that RUN and its sender
  waits for nobody; earlier still where a value that leaves later is needed sooner, because both sides of a pair of meshes
  must name their transfers in the same order.
- FREE stands right after the last use on the mesh, a SEND included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule.actions import Action, ActionKind, Schedule
from alpa_lite.schedule.check import check_schedule
from alpa_lite.schedule.instructions import (
    BufferId,
    Free,
    Instruction,
    Instructions,
    MeshInstructions,
    Recv,
    Run,
    Send,
    Transfer,
    Zeros,
)
from alpa_lite.schedule.order import linear_order, places
from alpa_lite.schedule.step_check import PHASES, check_step
from alpa_lite.schedule.step_io import Buffer, Origin, StageIO, StepIO

AT_START = -1
"""Place of what is there before the first action of a mesh."""


def emit_instructions(schedule: Schedule, step: StepIO, *, prefetch: int = 1, checked: bool = False) -> Instructions:
    """The instruction lists of a step under a schedule.

    Args:
        schedule: what runs where in which order.
        step: what each of its programs reads and writes.
        prefetch: how many RUNs before its first reader a RECV stands at the latest. 0 holds memory for a shorter time, and
            a transfer then waits until the RUN before the reader is over.
        checked: the table has passed ``check_schedule``, as those of ``make_schedule`` have.

    Raises:
        ScheduleError: a table or a step that its verifier refuses, or values that cannot flow in the order of the table
            ("deadlock", "order").

    Example:
        >>> schedule = make_schedule("1f1b", 2, 1)
        >>> print(emit_instructions(schedule, chain_step(schedule)))
    """
    if not checked:
        check_schedule(schedule)
    check_step(schedule, step)
    flow = _Flow.of(schedule, step, prefetch)
    order = linear_order(schedule, lambda action: flow.needs[action])
    transfers = _number(flow, order)
    meshes = tuple(_write(flow, mesh, transfers) for mesh in range(schedule.num_meshes))
    return Instructions(name=schedule.name, meshes=meshes, transfers=tuple(transfers))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A value that one mesh has from another."""

    buffer: BufferId
    source: int
    destination: int
    made_at: int
    read_at: int


@dataclass(slots=True, kw_only=True)
class _Flow:
    """Who reads what from where.

    Attributes:
        homes: per name the meshes on which it is made or given; the first one sends it to others.
        needs: per action the actions that make what it reads.
        copies: per (buffer, destination) the value that is sent there.
        uses: per mesh and buffer the places of the actions that read or write it there.
    """

    schedule: Schedule
    buffers: dict[str, Buffer]
    programs: dict[tuple[int, ActionKind], StageIO]
    meshes: tuple[int, ...]
    homes: dict[str, tuple[int, ...]]
    at: dict[Action, tuple[int, int]]
    writers: dict[str, list[StageIO]]
    prefetch: int
    needs: dict[Action, tuple[Action, ...]] = field(default_factory=dict)
    copies: dict[tuple[BufferId, int], _Copy] = field(default_factory=dict)
    uses: list[dict[BufferId, list[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, schedule: Schedule, step: StepIO, prefetch: int) -> _Flow:
        writers: dict[str, list[StageIO]] = defaultdict(list)
        for program in step.programs:
            for port in program.writes:
                writers[port.name].append(program)
        meshes, homes = schedule.mesh_of_stage(), {}
        for buffer in step.buffers:
            stages = buffer.stages or tuple(program.stage for program in writers[buffer.name])
            homes[buffer.name] = tuple(meshes[stage] for stage in stages)
        flow = cls(
            schedule=schedule,
            buffers={buffer.name: buffer for buffer in step.buffers},
            programs={(program.stage, program.kind): program for program in step.programs},
            meshes=meshes,
            homes=homes,
            at=places(schedule.columns),
            writers=writers,
            prefetch=prefetch,
            uses=[defaultdict(list) for _ in schedule.columns],
        )
        for mesh, column in enumerate(schedule.columns):
            for place, action in enumerate(column):
                flow._trace(mesh, place, action)
        return flow

    def program(self, action: Action) -> StageIO:
        return self.programs[action.stage, action.kind]

    def instance(self, name: str, action: Action) -> BufferId:
        return BufferId(name, action.microbatch if self.buffers[name].per_microbatch else None)

    def _trace(self, mesh: int, place: int, action: Action) -> None:
        program, needs = self.program(action), []
        written = {port.name for port in program.writes}
        for name in (port.name for port in program.reads):
            buffer, makers = self.instance(name, action), self._makers(name, action, in_place=name in written)
            needs += makers
            self.uses[mesh][buffer].append(place)
            homes = self.homes[name]
            if mesh not in homes:
                made_at = max((self.at[maker][1] for maker in makers), default=AT_START)
                self._copy(buffer, homes[0], mesh, made_at, place, action)
        for name in written:
            self.uses[mesh][self.instance(name, action)].append(place)
        self.needs[action] = tuple(dict.fromkeys(needs))

    def _makers(self, name: str, action: Action, *, in_place: bool) -> list[Action]:
        """The actions that must be done before ``action`` can read the value that it is meant to read."""
        buffer, phase = self.buffers[name], PHASES[action.kind]
        if buffer.origin is Origin.MADE:
            microbatch = action.microbatch if buffer.per_microbatch else None
            found = [Action(writer.kind, writer.stage, microbatch) for writer in self.writers[name]]
            found = [maker for maker in found if maker in self.at]
            if len(found) != 1:
                raise ScheduleError(
                    f"{action} reads {str(self.instance(name, action))!r}, made by {' and '.join(map(str, found)) or 'nobody'} "
                    f"in the schedule {self.schedule.name!r}. A buffer is made once for each microbatch. Correct the "
                    "writes of its StageIO, or the schedule.",
                    "buffers",
                )
            return found
        makers: list[Action] = []
        for writer in self.writers[name]:
            if PHASES[writer.kind] < phase:
                last = PHASES[writer.kind] == max(PHASES[w.kind] for w in self.writers[name] if PHASES[w.kind] < phase)
                makers += self._instances(writer) if last else []
            elif not in_place and self.meshes[writer.stage] == self.meshes[action.stage]:
                self._check_not_changed(name, action, writer)
        return makers

    def _instances(self, program: StageIO) -> list[Action]:
        count = self.schedule.num_microbatches
        every = range(count) if program.kind.per_microbatch else (None,)
        return [action for k in every if (action := Action(program.kind, program.stage, k)) in self.at]

    def _check_not_changed(self, name: str, action: Action, writer: StageIO) -> None:
        """On its own mesh a buffer is changed in place after everybody has read the old value."""
        for change in self._instances(writer):
            if self.at[change][1] < self.at[action][1]:
                raise ScheduleError(
                    f"the schedule {self.schedule.name!r} runs {change} before {action} on mesh {self.at[action][0]}, but "
                    f"{action} reads {name!r}, which {change} changes in place. Who reads the old value runs first. Move "
                    f"{change} behind {action}.",
                    "order",
                )

    def _copy(self, buffer: BufferId, source: int, mesh: int, made_at: int, read_at: int, action: Action) -> None:
        known = self.copies.get((buffer, mesh))
        if known is None or (known.made_at == made_at and read_at < known.read_at):
            self.copies[buffer, mesh] = _Copy(
                buffer=buffer, source=source, destination=mesh, made_at=made_at, read_at=read_at
            )
        elif known.made_at != made_at:
            raise ScheduleError(
                f"{action} on mesh {mesh} reads {str(buffer)!r} after mesh {source} has changed it in place, and an earlier "
                "action of that mesh read the old value. A buffer is sent to a mesh once. Write the new value to a buffer "
                "with a name of its own in the StepIO.",
                "buffers",
            )

    def size(self, mesh: int) -> dict[str, int]:
        """Bytes per device of the buffers on a mesh: the largest of the layouts in which its programs have them."""
        sizes: dict[str, int] = {}
        for (stage, _), program in self.programs.items():
            for port in (*program.reads, *program.writes) if self.meshes[stage] == mesh else ():
                sizes[port.name] = max(port.size_bytes, sizes.get(port.name, 0))
        return sizes


def _number(flow: _Flow, order: Sequence[Action]) -> list[Transfer]:
    """Transfers in an order in which they can be carried out one by one: as their makers run."""
    turn = {flow.at[action]: k for k, action in enumerate(order)}
    sizes = [flow.size(mesh) for mesh in range(flow.schedule.num_meshes)]

    def key(copy: _Copy) -> tuple[int, int, int]:
        made = AT_START if copy.made_at == AT_START else turn[copy.source, copy.made_at]
        return made, turn[copy.destination, copy.read_at], copy.destination

    return [
        Transfer(
            id=number,
            buffer=copy.buffer,
            source=copy.source,
            destination=copy.destination,
            size_bytes=sizes[copy.destination].get(copy.buffer.name, 0),
        )
        for number, copy in enumerate(sorted(flow.copies.values(), key=key))
    ]


def _write(flow: _Flow, mesh: int, transfers: Sequence[Transfer]) -> MeshInstructions:
    """The list of one mesh."""
    column, uses = flow.schedule.columns[mesh], flow.uses[mesh]
    sends: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        if transfer.source == mesh:
            sends[flow.copies[transfer.buffer, transfer.destination].made_at].append(transfer)
    recvs = _recv_places(flow, mesh, transfers)
    arguments = _arguments(flow, mesh)
    given, kept = set(arguments), {buffer for buffer in {*arguments, *uses} if _is_kept(flow, mesh, buffer)}
    zeros, frees = defaultdict(list), defaultdict(list)
    for buffer in {**dict.fromkeys(arguments), **uses}:
        places_ = uses.get(buffer) or [AT_START]
        if flow.buffers[buffer.name].origin is Origin.ZEROS and mesh in flow.homes[buffer.name] and buffer not in given:
            zeros[min(places_)].append(buffer)
        if buffer not in kept:
            frees[max(places_)].append(buffer)

    def around(place: int, middle: Iterable[Instruction]) -> Iterable[Instruction]:
        yield from middle
        yield from (Send(t.id, t.buffer, t.destination) for t in sends[place])
        yield from (Free(buffer) for buffer in frees[place])

    instructions = [*around(AT_START, ())]
    for place, action in enumerate(column):
        instructions += (Recv(t.id, t.buffer, t.source) for t in recvs[place])
        instructions += (Zeros(buffer) for buffer in zeros[place])
        instructions += around(place, (_run(flow, action),))
    programs = [program for (stage, _), program in flow.programs.items() if flow.meshes[stage] == mesh]
    return MeshInstructions(
        instructions=tuple(instructions),
        arguments=arguments,
        kept=tuple(sorted(kept, key=str)),
        sizes=tuple(sorted(flow.size(mesh).items())),
        temporaries=tuple((f"{p.stage}{p.kind}", p.temporary_bytes) for p in programs if p.temporary_bytes),
    )


def _run(flow: _Flow, action: Action) -> Run:
    program = flow.program(action)
    reads, writes = (tuple(flow.instance(p.name, action) for p in ports) for ports in (program.reads, program.writes))
    return Run(action, reads, writes)


def _recv_places(flow: _Flow, mesh: int, transfers: Sequence[Transfer]) -> dict[int, list[Transfer]]:
    """Before which action each transfer to a mesh is received."""
    latest: dict[int, int] = {}
    found: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in reversed(transfers):
        if transfer.destination != mesh:
            continue
        wanted = max(flow.copies[transfer.buffer, mesh].read_at - flow.prefetch, 0)
        # Not behind a transfer of the same pair that leaves later.
        latest[transfer.source] = min(wanted, latest.get(transfer.source, wanted))
        found[latest[transfer.source]].append(transfer)
    return defaultdict(list, {place: some[::-1] for place, some in found.items()})


def _arguments(flow: _Flow, mesh: int) -> tuple[BufferId, ...]:
    found = []
    for name, buffer in flow.buffers.items():
        if any(flow.meshes[stage] == mesh for stage in buffer.stages):
            every = range(flow.schedule.num_microbatches) if buffer.per_microbatch else (None,)
            found += [BufferId(name, k) for k in every]
    return tuple(found)


def _is_kept(flow: _Flow, mesh: int, buffer: BufferId) -> bool:
    return flow.buffers[buffer.name].kept and mesh in flow.homes[buffer.name]
