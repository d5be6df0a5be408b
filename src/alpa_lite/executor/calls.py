"""What the driver of a pipelined step does, written down: the same driver runs once on names in place of arrays.

In: the lowered stages of a plan. Out: ``Call``s in the order of the driver, and their form as CSV. Whoever has the programs can
carry them out (``load_stages.py``), without the step's jaxpr and without this package's schedules.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.executor.pipeline import PipelinedStep, pipelined_step
from alpa_lite.executor.stage_run import StageRunner
from alpa_lite.lowering.segments import Pair
from alpa_lite.lowering.stage import LoweredStage, StagePart
from alpa_lite.plan.plan import Plan
from alpa_lite.trace.program import value_of
from alpa_lite.trace.staged import StagedStep

_COLUMNS = ("call", "stage", "program", "microbatch", "reads", "writes", "spec", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One thing that the driver does. Values have names: "a0" is an argument of the step, "v0" anything else.

    Attributes:
        kind: "place" an argument on a stage's devices; "run" a program; "send" and "receive", halves of a transfer to a stage;
            "copy"; "stack" results of microbatches; "constant"; "return" a result of the step.
        stage: on whose devices ``writes`` are.
        program, microbatch: of "run".
        reads, writes: names, in the order of the program's arguments and results.
        spec: how what is written lies, where the program does not say; "" also for a constant that lies anywhere.
        value: of a constant: type and number as JSON. Of "return": the position among the results. Of "send": what is read, as
            ``sent_value`` takes it.
    """

    kind: str
    stage: int = 0
    program: str = ""
    microbatch: int = 0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    spec: str = ""
    value: str = ""


def calls_csv(calls: Sequence[Call]) -> str:
    """With a header; ``parse_calls`` reads it back."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for c in calls:
        names = " ".join(c.reads), " ".join(c.writes)
        microbatch = c.microbatch if c.kind == "run" else ""
        writer.writerow((c.kind, c.stage, c.program, microbatch, *names, c.spec, c.value))
    return text.getvalue()


def parse_calls(text: str) -> tuple[Call, ...]:
    """What ``calls_csv`` wrote."""
    rows = csv.DictReader(io.StringIO(text))
    return tuple(
        Call(
            kind=row["call"],
            stage=int(row["stage"]),
            program=row["program"],
            microbatch=int(row["microbatch"] or 0),
            reads=tuple(row["reads"].split()),
            writes=tuple(row["writes"].split()),
            spec=row["spec"],
            value=row["value"],
        )
        for row in rows
    )


class SentValue(NamedTuple):
    """What a "send" reads: so that a process that does not hold it knows what arrives. ``stage`` is where it lies."""

    dtype: str
    shape: tuple[int, ...]
    spec: str
    stage: int


def sent_value(call: Call) -> SentValue:
    """What a "send" reads."""
    dtype, shape, spec, stage = json.loads(call.value)
    return SentValue(dtype, tuple(shape), spec, stage)


def constant_of(call: Call) -> np.ndarray:
    """The value of a "constant"."""
    dtype, value = json.loads(call.value)
    return np.asarray(value, np.dtype(dtype))


def driver_calls(staged: StagedStep, plan: Plan, stages: Sequence[LoweredStage]) -> tuple[PipelinedStep, list[Call]]:
    """The step of a plan over names, and everything that its driver does in one step, in order."""
    notes = _Notes(plan)
    meshes = [None] * len(stages)  # where things are is written down as a stage
    step = pipelined_step(staged, plan, stages, meshes, make_runner=_NotingRunner, transfers=notes)
    for position, name in enumerate(step([f"a{number}" for number in range(len(plan.inputs))])):
        notes.calls.append(Call(kind="return", reads=(name,), value=str(position)))
    return step, notes.calls


class _Notes:
    """In place of ``Transfers``: takes names, gives new ones, and writes down what was asked. A layout is a stage and a spec."""

    def __init__(self, plan: Plan) -> None:
        self.calls: list[Call] = []
        self.count = 0
        values = (leaf.value for leaf in plan.inputs)
        self.types: dict[str, tuple[str, tuple[int, ...]]] = {f"a{i}": (v.dtype, v.shape) for i, v in enumerate(values)}
        self.lies: dict[str, tuple[str, int]] = {}  # spec and stage of what is put somewhere

    def note(self, kind: str, stage: int, reads: Sequence[str] = (), num_results: int = 1, **rest: Any) -> list[str]:
        names = tuple(f"v{self.count + k}" for k in range(num_results))
        self.count += num_results
        self.calls.append(Call(kind=kind, stage=stage, reads=tuple(reads), writes=names, **rest))
        return list(names)

    def place(self, value: Any, layout: tuple[int, str]) -> str:
        if isinstance(value, str):
            return self.like(self.note("place", layout[0], (value,), spec=layout[1])[0], value, layout)
        return self.constant(value, *layout)

    def like(self, name: str, value: str, layout: tuple[int, str]) -> str:
        """The name of what has the type of another value, in a layout."""
        self.types[name], self.lies[name] = self.types[value], (layout[1], layout[0])
        return name

    def made(self, names: Sequence[str], parts: Sequence[tuple[Any, ShardingSpec]], avals: Any, stage: int) -> None:
        """What a program of a stage made: values of a region, in layouts."""
        for name, (value, spec) in zip(names, parts, strict=True):
            found = value_of(avals[value])
            self.types[name], self.lies[name] = (found.dtype, found.shape), (str(spec), stage)

    def constant(self, value: Any, stage: int, spec: str = "") -> str:
        array = np.asarray(value)
        name = self.note("constant", stage, spec=spec, value=json.dumps([array.dtype.name, array.tolist()]))[0]
        self.types[name], self.lies[name] = (array.dtype.name, array.shape), (spec, stage)
        return name

    def move(self, value: str, layout: tuple[int, str]) -> str:
        return self.receive(self.send(value, layout))

    def send(self, value: str, layout: tuple[int, str]) -> tuple[str, int]:
        read = json.dumps([*self.types[value], *self.lies[value]])
        name = self.note("send", layout[0], (value,), spec=layout[1], value=read)[0]
        return self.like(name, value, layout), layout[0]

    def receive(self, sent: tuple[str, int]) -> str:
        spec, stage = self.lies[sent[0]]
        return self.like(self.note("receive", sent[1], (sent[0],))[0], sent[0], (stage, spec))


@dataclass(frozen=True, slots=True)
class _NotedPart:
    """In place of a ``StagePart``: its function writes down that it was called."""

    part: StagePart
    stage: int
    notes: _Notes

    @property
    def segment(self) -> Any:
        return self.part.segment

    @property
    def results(self) -> tuple[Pair, ...]:
        return self.part.results

    def function(self, index: int, *given: str) -> list[str]:
        count = len(self.results)
        if not count:
            return []
        names = self.notes.note("run", self.stage, given, count, program=self.part.name, microbatch=index)
        self.notes.made(names, self.results, self.part.region.flat.avals, self.stage)
        return names


class _NotingRunner(StageRunner):
    """A stage whose values are names."""

    def __init__(
        self, number: int, place: int, stage: LoweredStage, parts: Sequence[StagePart], mesh: Any, notes: Any
    ) -> None:
        self.notes = notes
        noted: list[Any] = [_NotedPart(part, number, notes) for part in parts]
        super().__init__(number, place, stage, noted, mesh, notes)

    def index(self, number: int) -> int:
        return number

    def layout(self, spec: ShardingSpec) -> tuple[int, str]:
        return self.number, str(spec)

    def copy(self, array: str) -> str:
        spec, stage = self.notes.lies[array]
        return self.notes.like(self.notes.note("copy", self.number, (array,))[0], array, (stage, spec))

    def literal(self, value: Any) -> str:
        return self.notes.constant(value, self.number)

    @property
    def stacks(self) -> dict[int, Callable[[Sequence[str]], str]]:
        specs = self.stage.lowering.decisions[f"{self.program.loop}"].results
        return {j: partial(self._stack, str(spec)) for j, spec in enumerate(specs)}

    def _stack(self, spec: str, rows: Sequence[str]) -> str:
        name = self.notes.note("stack", self.number, rows, spec=spec)[0]
        dtype, shape = self.notes.types[rows[0]]
        self.notes.types[name], self.notes.lies[name] = (dtype, (len(rows), *shape)), (spec, self.number)
        return name
