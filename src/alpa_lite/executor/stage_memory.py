"""What a stage's devices hold while a pipelined step runs: XLA's figures of each program and the buffers that lie beside it.

In: the lowered stages, the schedule, and per program what XLA says it needs. Out: per stage the largest sum over the step of

- what lies on the submesh when the program starts: weights, optimiser state, the batch, sums of gradients, residuals of the
  microbatches in flight, values for later rounds of the update; and
- what the program makes beside its arguments: XLA's arguments + results + temporaries - aliased, less the arguments.

The order is that of the submesh's column in the schedule; stages that share a submesh are counted together. A value that is
received counts from its first reader on, one that is sent until its program ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite.lowering.segments import CutRegion, Pair
from alpa_lite.lowering.stage import LoweredStage
from alpa_lite.schedule import Schedule
from alpa_lite.trace.program import value_of


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
    for column in schedule.columns:
        own = sorted({action.stage for action in column})
        walk = _Walk({s: _Held(stages[s]) for s in own}, programs)
        for stage in own:
            walk.outer(stage, 0)
        for action in column:
            if action.microbatch is not None:
                for number in stages[action.stage].passes_of(action.kind):
                    walk.run_pass(action.stage, number, action.microbatch)
        for stage in own:
            walk.held[stage].end_loop()
        for number in range(1, len(stages[own[0]].outer.segments)):
            for stage in own:
                walk.outer(stage, number)
        held, own_bytes, (stage, name) = walk.peak
        label = name if len(own) == 1 else f"{name} of stage {stage}"
        for s in own:
            found[s] = StageMemory(
                stage=s,
                peak_bytes=held + own_bytes,
                predicted_bytes=predicted[s],
                program=label,
                held_bytes=held,
                own_bytes=own_bytes,
            )
    return tuple(found[s] for s in range(len(stages)))


class _Walk:
    """The stages of one submesh in the order in which they run."""

    def __init__(self, held: dict[int, _Held], programs: Mapping[tuple[int, str], ProgramBytes]) -> None:
        self.held, self.programs = held, programs
        self.peak = (0, 0, (0, ""))

    def run(self, stage: int, name: str) -> None:
        held = sum(one.size() for one in self.held.values())
        own = self.programs[stage, name].own_bytes
        if held + own > self.peak[0] + self.peak[1]:
            self.peak = (held, own, (stage, name))

    def outer(self, stage: int, number: int) -> None:
        one = self.held[stage]
        one.arrive(number)
        self.run(stage, one.stage.parts[number].name)
        one.made(number)
        if number == 0:
            one.start_loop()

    def run_pass(self, stage: int, number: int, microbatch: int) -> None:
        one = self.held[stage]
        one.receive(number, microbatch)
        self.run(stage, one.stage.passes[number].name)
        one.passed(number, microbatch)


class _Held:
    """What one stage has on its devices, in bytes per device."""

    def __init__(self, stage: LoweredStage) -> None:
        self.stage = stage
        region, program = stage.outer, stage.program
        inputs = list(zip(region.flat.inputs, stage.in_specs, strict=True))
        self.given = set(inputs[: len(program.args)])
        self.arrivals = dict(zip(inputs[len(program.args) :], program.received, strict=True))
        self.outer_pairs = set(self.given) | {p for p, c in self.arrivals.items() if c.when == "start"}
        self.loop_bytes = 0
        self.microbatches: dict[int, set[Pair]] = {}
        self.rows = 0

    def size(self) -> int:
        """All of it now."""
        passing = sum(self._bytes(self.stage.body, pairs) for pairs in self.microbatches.values())
        return self._bytes(self.stage.outer, self.outer_pairs) + self.loop_bytes + passing + self.rows

    def _bytes(self, region: CutRegion, pairs: Iterable[Pair]) -> int:
        values = ((value_of(region.flat.avals[v]), spec) for v, spec in pairs)
        mesh = self.stage.lowering.mesh
        return sum(spec.local_size_bytes(value.shape, value.itemsize, mesh) for value, spec in values)

    def arrive(self, number: int) -> None:
        """What segment ``number`` reads of other stages."""
        self.outer_pairs |= set(self.stage.outer.segments[number].reads) & self.arrivals.keys()

    def made(self, number: int) -> None:
        """Segment ``number`` has run; what nothing reads any more is gone, but the caller's arguments."""
        wanted = self.stage.wanted_after(number)
        given = self.given - set(self.stage.freed(number))
        self.given = given
        made = self.outer_pairs | set(self.stage.outer.segments[number].writes)
        self.outer_pairs = given | {pair for pair in made if pair in wanted}

    def start_loop(self) -> None:
        """Sums take the buffers of the zeros they start from, where nothing else reads these."""
        self.outer_pairs -= self.stage.moved_starts
        self.loop_bytes = self._bytes(self.stage.body, self.stage.loop_inputs.carries)

    def receive(self, number: int, microbatch: int) -> None:
        pairs = self.microbatches.setdefault(microbatch, set())
        pairs |= {pair for pair in self.stage.body.segments[number].reads if pair in self.stage.loop_inputs.received}

    def passed(self, number: int, microbatch: int) -> None:
        body, carries = self.stage.body, len(self.stage.loop_inputs.carries)
        made = set(body.segments[number].writes)
        self.microbatches[microbatch] |= self.stage.kept_after(number)
        last = len(body.results) - sum(c.when == "loop" for c in self.stage.program.sent)
        self.rows += self._bytes(body, made & set(body.results[carries:last]))
        if number + 1 == len(body.segments):
            del self.microbatches[microbatch]

    def end_loop(self) -> None:
        """Sums and stacked results are what later segments read."""
        self.loop_bytes = self.rows = 0
        specs = self.stage.lowering.decisions[f"{self.stage.program.loop}"].results
        made = {(v, s) for v, s in zip(self.stage.loop.outputs, specs, strict=True) if v >= 0}
        wanted = self.stage.wanted_after_loop
        self.outer_pairs = self.given | {pair for pair in self.outer_pairs | made if pair in wanted}
