"""Instruction lists to calls: what one thread issues, in the order in which the simulator plays the lists.

Nothing here waits. SEND enqueues copies; what arrives is put together right before the first RUN that reads it, so that no
device waits for a transfer in front of work that could go on; FREE drops the driver's reference, and JAX gives the memory back
when the last program that reads it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from alpa_lite.executor.loop_io import StageLoop
from alpa_lite.executor.measure import Recorder
from alpa_lite.executor.stage_run import StageRun, StageRunner
from alpa_lite.lowering.transfer import Arriving, Transfers
from alpa_lite.schedule import Action, ActionKind, Instructions
from alpa_lite.schedule.instructions import BufferId, Free, Instruction, Recv, Run, Send, Zeros


class StepState:
    """One step while it runs: the buffers of all submeshes, by number, and its stages."""

    __slots__ = ("buffers", "record", "runs", "updating")

    def __init__(self, num_buffers: int, runs: Sequence[StageRun], record: Recorder | None) -> None:
        self.buffers: list[Any] = [None] * num_buffers
        self.runs, self.record = runs, record
        self.updating: list[int] = []


Call = Callable[[StepState], None]


class Driver:
    """The calls of a step, made once per plan.

    Args:
        runners, loops: per stage.
        meshes: the submesh of each stage.
        instructions: what every submesh executes.
        order: (submesh, place in its list) of all instructions, each after those that it depends on.
        update: called with the state when a stage's loop is over, and with the stage's number, sums and rows.
    """

    def __init__(
        self,
        runners: Sequence[StageRunner],
        loops: Sequence[StageLoop],
        meshes: Sequence[int],
        instructions: Instructions,
        order: Sequence[tuple[int, int]],
        transfers: Transfers,
        update: Callable[[StepState, int, dict[int, Any], dict[int, list[Any]]], None],
    ) -> None:
        self.runners, self.loops, self.meshes, self.transfers, self.update = runners, loops, meshes, transfers, update
        self.numbers: dict[tuple[int, BufferId], int] = {}
        self.source_of = {f"x{value}": s for s, runner in enumerate(runners) for value in runner.sent}
        self.received: dict[int, int] = {}  # buffer -> transfer, until somebody reads it
        self.arrivals: dict[int, int] = {}
        self.made_by: dict[int, str] = {}
        self.calls: list[Call] = []
        self.given = [self._number(mesh, BufferId(f"w{stage}")) for stage, mesh in enumerate(meshes)]
        for mesh, place in order:
            call = self._call(mesh, instructions.meshes[mesh].instructions[place])
            self.calls += [call] if call else []

    def __call__(self, runs: Sequence[StageRun], record: Recorder | None = None) -> None:
        """Issue everything for one step whose stages are about to enter the loop."""
        state = StepState(len(self.numbers), runs, record)
        for number, run, loop in zip(self.given, runs, self.loops, strict=True):
            state.buffers[number] = [run.value(run.runner.given_of[pair]) for pair in loop.given]
        for call in self.calls:
            call(state)

    def _number(self, mesh: int, buffer: BufferId) -> int:
        return self.numbers.setdefault((mesh, buffer), len(self.numbers))

    def _call(self, mesh: int, instruction: Instruction) -> Call | None:
        match instruction:
            case Run(action):
                return self._update(mesh, action) if action.kind is ActionKind.UPDATE else self._run(mesh, action)
            case Send(transfer, buffer, destination):
                return self._send(mesh, transfer, buffer, destination)
            case Recv(transfer, buffer, _):
                self.received[self._number(mesh, buffer)] = transfer  # the first reader puts it together
                return None
            case Zeros(buffer):
                return self._zeros(mesh, buffer)
            case Free(buffer):
                return self._free(mesh, buffer)
        raise AssertionError(instruction)

    # -- RUN --------------------------------------------------------------------------------------------------------

    def _run(self, mesh: int, action: Action) -> Call | None:
        loop, runner = self.loops[action.stage], self.runners[action.stage]
        parts = [self._part(mesh, action, k) for k in loop.segments(action.kind) if runner.passes[k].segment.writes]
        if len(parts) < 2:
            return parts[0] if parts else None
        between = self._buffer(mesh, f"h{action.stage}", action.microbatch)

        def run(state: StepState) -> None:
            for part in parts:
                part(state)
            state.buffers[between] = None

        return run

    def _part(self, mesh: int, action: Action, segment: int) -> Call:
        """One function of a stage, for one microbatch."""
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        runner, loop = self.runners[stage], self.loops[stage]
        part, index, label = runner.passes[segment], runner.index(microbatch), str(action)
        reads = [(self._buffer(mesh, p.buffer, microbatch), p.position) for p in loop.reads[segment]]
        writes = [(self._buffer(mesh, name, microbatch), at) for name, at in loop.writes[segment].items()]
        landing = [n for n in dict.fromkeys(n for n, _ in reads) if n in self.received]
        for number in landing:
            self.arrivals[number] = self.received.pop(number)
        moved = [(k, s) for k, p in enumerate(loop.reads[segment]) if (s := self._other_layout(mesh, stage, p.buffer))]
        arrived = [self.arrivals[n] for n, _ in reads if n in self.arrivals]
        self.made_by |= {number: label for number, _ in writes}
        receive, move = self.transfers.receive, self.transfers.move

        def run(state: StepState) -> None:
            buffers, record = state.buffers, state.record
            for number in landing:
                buffers[number] = [receive(buffers[number])]
            given = [buffers[number][position] for number, position in reads]
            for k, sharding in moved:
                given[k] = move(given[k], sharding)
            if record is None:
                made = part.function(index, *given)
            else:
                *made, mark = part.marked(index, *given)
                record.ran(mesh, label, mark, arrived)
            for number, positions in writes:
                buffers[number] = [made[n] for n in positions]

        return run

    def _buffer(self, mesh: int, name: str, microbatch: int | None) -> int:
        return self._number(mesh, BufferId(name, None if name[0] in "wgai" else microbatch))

    def _other_layout(self, mesh: int, stage: int, name: str) -> Any:
        """The layout in which the stage wants a value that lies on its submesh in the layout of another stage."""
        if name[0] != "x" or self.source_of[name] == stage:
            return None
        wanted, lies = self.runners[stage].sharding_of_arrival(int(name[1:])), self._layout(mesh, name)
        return None if wanted == lies else wanted

    def _layout(self, mesh: int, name: str) -> Any:
        """How a value of the loop lies on a submesh: as it was made there, or as the first stage there wants it."""
        source, value = self.source_of[name], int(name[1:])
        if self.meshes[source] == mesh:
            runner = self.runners[source]
            results = runner.stage.body.results
            pair = results[len(results) - len(runner.sent) + list(runner.sent).index(value)]
            assert pair is not None
            return runner.layout(pair[1])
        reader = next(
            s for s, m in enumerate(self.meshes) if m == mesh and value in self.runners[s].arrival_of.values()
        )
        return self.runners[reader].sharding_of_arrival(value)

    def _update(self, mesh: int, action: Action) -> Call:
        stage = action.stage
        loop, update, given = self.loops[stage], self.update, self.given[stage]
        sums = [(self._number(mesh, BufferId(name)), numbers) for name, numbers in loop.sums.items()]
        every = range(self.runners[stage].num_microbatches)
        rows = [([self._number(mesh, BufferId(name, k)) for k in every], js) for name, js in loop.rows.items()]

        def run(state: StepState) -> None:
            buffers = state.buffers
            buffers[given] = None  # the loop was the last to read what was made for it
            added = {j: buffers[number][k] for number, numbers in sums for k, j in enumerate(numbers)}
            stacked = {j: [buffers[n][k] for n in numbers] for numbers, js in rows for k, j in enumerate(js)}
            update(state, stage, added, stacked)

        return run

    # -- everything else --------------------------------------------------------------------------------------------

    def _send(self, mesh: int, transfer: int, buffer: BufferId, destination: int) -> Call:
        source, target = self._number(mesh, buffer), self._number(destination, buffer)
        sharding, maker, send = (
            self._layout(destination, buffer.name),
            self.made_by.get(source, ""),
            self.transfers.send,
        )

        def run(state: StepState) -> None:
            pieces = state.buffers[target] = send(state.buffers[source][0], sharding)
            if state.record is not None:
                awaited = pieces.waves if isinstance(pieces, Arriving) else ()
                state.record.sent(transfer, mesh, destination, str(buffer), maker, awaited)

        return run

    def _zeros(self, mesh: int, buffer: BufferId) -> Call:
        number, stage = self._number(mesh, buffer), int(buffer.name[1:])
        carries = self.loops[stage].sums[buffer.name]

        def run(state: StepState) -> None:
            state.buffers[number] = [state.runs[stage].start(j) for j in carries]

        return run

    def _free(self, mesh: int, buffer: BufferId) -> Call:
        number = self._number(mesh, buffer)

        def run(state: StepState) -> None:
            state.buffers[number] = None

        return run
