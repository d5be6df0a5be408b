"""Instruction lists and times to a timeline: makespan, idle share, peak memory, and whether the lists end at all.

The model. A mesh works its list off in order; a RUN starts when the RUN before it is over and all it reads has arrived. SEND
and RECV post their halves of a transfer at the moment at which the RUN before them is over. A transfer starts when both
halves are posted and the transfer before it on the same ordered pair of meshes is over; pairs do not disturb each other. A
freed buffer's memory is given back at once, or when its last transfer is over. All times follow from these maxima and sums,
so that the order in which this file looks at the meshes does not matter.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule import instructions as ins
from alpa_lite.schedule.actions import Action, ActionKind, Schedule
from alpa_lite.schedule.emit import emit_instructions
from alpa_lite.schedule.instruction_check import check_instructions
from alpa_lite.schedule.step_io import StepIO, chain_step
from alpa_lite.schedule.timeline import Event, Timeline

Durations = Mapping[tuple[int, ActionKind], float] | Callable[[Action], float]
"""Seconds per (stage, kind), or a function of the action."""

TransferTime = Callable[[ins.Transfer], float]
"""Seconds of one transfer; it names meshes, buffer and bytes."""


def simulate(
    instructions: ins.Instructions,
    durations_s: Durations,
    transfer_s: TransferTime | None = None,
    *,
    checked: bool = False,
) -> Timeline:
    """Plays instruction lists through.

    Args:
        instructions: what every mesh executes.
        durations_s: seconds of every RUN.
        transfer_s: seconds of a transfer; None for transfers that take no time.
        checked: ``check_instructions`` has passed already.

    Raises:
        ScheduleError: the lists are not sound (see ``check_instructions``), wait for each other ("deadlock"), or a duration is
            missing or no time ("durations").
    """
    if not checked:
        check_instructions(instructions)
    play = _Play(instructions, _duration_of(instructions.name, durations_s), transfer_s or (lambda transfer: 0.0))
    play.run()
    return play.timeline()


def simulate_schedule(
    schedule: Schedule,
    durations_s: Durations,
    transfer_s: TransferTime | None = None,
    step: StepIO | None = None,
    *,
    checked: bool = False,
) -> Timeline:
    """Plays an action table through, as the plain chain of stages that it is if ``step`` does not say more.

    ``checked``: the table has passed ``check_schedule``, as those of ``make_schedule`` have. Else as ``simulate``.
    """
    instructions = emit_instructions(schedule, chain_step(schedule) if step is None else step, checked=checked)
    # What is emitted is sound by construction; the tests check that.
    return simulate(instructions, durations_s, transfer_s, checked=True)


def _duration_of(name: str, durations_s: Durations) -> Callable[[Action], float]:
    def duration(action: Action) -> float:
        found = durations_s(action) if callable(durations_s) else durations_s.get((action.stage, action.kind))
        if found is None or not 0 <= found < float("inf"):
            raise ScheduleError(
                f"the simulation of {name!r} has no time for {action}: it got {found}. Seconds of at least 0 are allowed for "
                f"every stage and kind. They come from durations_s: add ({action.stage}, ActionKind.{action.kind.name}).",
                "durations",
            )
        return found

    return duration


@dataclass(slots=True)
class _Mesh:
    """How far one mesh is. ``awaited`` holds received buffers; what the mesh made itself is there in time anyway."""

    list: ins.MeshInstructions
    sizes: dict[str, int]
    temporaries: dict[str, int]
    at: int = 0
    clock_s: float = 0.0
    busy_s: float = 0.0
    awaited: dict[ins.BufferId, int] = field(default_factory=dict)
    freed: dict[ins.BufferId, tuple[float, int]] = field(default_factory=dict)
    memory: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Time, place in the list, 0 at a RUN's start or 1 at its end, bytes."""


class _Play:
    def __init__(
        self, instructions: ins.Instructions, duration_s: Callable[[Action], float], transfer_s: TransferTime
    ) -> None:
        self.instructions, self.duration_s, self.transfer_s = instructions, duration_s, transfer_s
        self.meshes = [_Mesh(each, dict(each.sizes), dict(each.temporaries)) for each in instructions.meshes]
        self.transfers = {transfer.id: transfer for transfer in instructions.transfers}
        self.sent_s: dict[int, float] = {}
        self.received_s: dict[int, float] = {}
        self.over_s: dict[int, float] = {}
        self.posted: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.free_s: dict[tuple[int, int], float] = defaultdict(float)
        self.last_sent_s: dict[tuple[int, ins.BufferId], float] = {}
        self.events: list[Event] = []
        self.order: list[tuple[float, int, int, int]] = []
        self.waiting = deque(range(len(self.meshes)))

    def run(self) -> None:
        while self.waiting:
            self._advance(self.waiting.popleft())
        if any(mesh.at < len(mesh.list.instructions) for mesh in self.meshes):
            raise self._stuck()

    def _advance(self, number: int) -> None:
        """Works one list off until it ends or waits for a transfer whose end is not known yet."""
        mesh = self.meshes[number]
        instructions = mesh.list.instructions
        while mesh.at < len(instructions):
            instruction, at = instructions[mesh.at], mesh.at
            if isinstance(instruction, ins.Run):
                awaited = [mesh.awaited[buffer] for buffer in instruction.reads if buffer in mesh.awaited]
                if any(transfer not in self.over_s for transfer in awaited):
                    return
                start = max([mesh.clock_s, *(self.over_s[transfer] for transfer in awaited)])
                self._run(number, mesh, instruction, start)
                self.order.append((start, len(self.order), number, at))
                mesh.at += 1
                continue
            size = mesh.sizes.get(instruction.buffer.name, 0)
            self.order.append((mesh.clock_s, len(self.order), number, at))
            mesh.at += 1
            if isinstance(instruction, ins.Send):
                self.sent_s[instruction.transfer] = mesh.clock_s
                self.posted[number, instruction.destination].append(instruction.transfer)
                self._settle(number, instruction.destination)
            elif isinstance(instruction, ins.Recv):
                mesh.memory.append((mesh.clock_s, at, 0, size))
                mesh.awaited[instruction.buffer] = instruction.transfer
                self.received_s[instruction.transfer] = mesh.clock_s
                self._settle(instruction.source, number)
            elif isinstance(instruction, ins.Zeros):
                mesh.memory.append((mesh.clock_s, at, 0, size))
            elif isinstance(instruction, ins.Free):
                mesh.freed[instruction.buffer] = (mesh.clock_s, at)
                mesh.awaited.pop(instruction.buffer, None)

    def _run(self, number: int, mesh: _Mesh, run: ins.Run, start: float) -> None:
        duration = self.duration_s(run.action)
        mesh.clock_s = start + duration
        mesh.busy_s += duration
        temporary = mesh.temporaries.get(f"{run.action.stage}{run.action.kind}", 0)
        made = sum(mesh.sizes.get(buffer.name, 0) for buffer in run.writes if buffer not in run.reads)
        mesh.memory += [(start, mesh.at, 0, made + temporary), (mesh.clock_s, mesh.at, 1, -temporary)]
        self.events.append(Event(number, start, mesh.clock_s, str(run.action)))

    def _settle(self, source: int, destination: int) -> None:
        """Gives times to the transfers of a pair whose halves are both posted, in the order of their SENDs."""
        posted = self.posted[source, destination]
        while posted and posted[0] in self.received_s:
            transfer = self.transfers[posted.popleft()]
            ready = max(self.sent_s[transfer.id], self.received_s[transfer.id], self.free_s[source, destination])
            over = ready + self.transfer_s(transfer)
            self.free_s[source, destination] = self.over_s[transfer.id] = over
            key = source, transfer.buffer
            self.last_sent_s[key] = max(over, self.last_sent_s.get(key, 0.0))
            if over > ready:
                self.events.append(Event(source, ready, over, str(transfer.buffer), lane=f"to mesh {destination}"))
            if destination not in self.waiting:
                self.waiting.append(destination)

    def timeline(self) -> Timeline:
        makespan = max((event.end_s for event in self.events), default=0.0)
        busy = tuple(mesh.busy_s for mesh in self.meshes)
        return Timeline(
            name=self.instructions.name,
            makespan_s=makespan,
            busy_s=busy,
            peak_bytes=tuple(self._peak(number) for number in range(len(self.meshes))),
            events=tuple(sorted(self.events, key=lambda event: (event.mesh, event.lane, event.start_s, event.end_s))),
            order=tuple((mesh, at) for _, _, mesh, at in sorted(self.order)),
        )

    def _peak(self, number: int) -> int:
        mesh = self.meshes[number]
        changes = list(mesh.memory)
        for buffer, (time_s, at) in mesh.freed.items():
            time_s = max(time_s, self.last_sent_s.get((number, buffer), 0.0))
            changes.append((time_s, at, 0, -mesh.sizes.get(buffer.name, 0)))
        held = peak = sum(mesh.sizes.get(buffer.name, 0) for buffer in mesh.list.arguments)
        for *_, change in sorted(changes):
            held += change
            peak = max(peak, held)
        return peak

    def _stuck(self) -> ScheduleError:
        """Who waits for whom, up to the mesh that is met again."""
        number = next(k for k, mesh in enumerate(self.meshes) if mesh.at < len(mesh.list.instructions))
        seen: dict[int, int] = {}
        words: list[str] = []
        while number not in seen:
            seen[number] = len(words)
            mesh = self.meshes[number]
            run = mesh.list.instructions[mesh.at]
            assert isinstance(run, ins.Run)
            waits = (mesh.awaited[buffer] for buffer in run.reads if buffer in mesh.awaited)
            transfer = self.transfers[next(t for t in waits if t not in self.over_s)]
            words.append(
                f"mesh {number} waits at RUN {run.action} (instruction {mesh.at + 1}) for {transfer.buffer} "
                f"from mesh {transfer.source} (#{transfer.id})"
            )
            number = transfer.source
        cycle = "; ".join(words[seen[number] :])
        return ScheduleError(
            f"the instructions of {self.instructions.name!r} are a deadlock: {cycle}. Lists are allowed if every RUN's "
            "transfers are sent by what can run before it. Move one of these SENDs, or what makes its buffer, up.",
            "deadlock",
        )
