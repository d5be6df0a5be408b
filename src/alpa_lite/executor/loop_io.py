"""What the passes of lowered stages read and write, as a ``StepIO`` for instruction lists.

The values of a stage that live and die together are one buffer, a list of arrays:

- ``w0``: what its passes read of before the loop: weights, the batch;
- ``x7``: a value that another stage reads;
- ``r0`` and ``q0``: kept from the forward pass for the backward pass, or for its weight half; ``h0``: from one half to the other;
- ``g0``: sums that the backward pass adds to (``a0``: the forward pass, ``i0``: the input half);
- ``y0``: results per microbatch, by the pass that makes them (``l0``: forward, ``j0``: the input half).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alpa_lite.executor.stage_run import StageRunner
from alpa_lite.lowering.segments import Pair
from alpa_lite.schedule import ActionKind, Buffer, Origin, Port, Schedule, StageIO, StepIO
from alpa_lite.trace.program import value_of

K = ActionKind


class Place(NamedTuple):
    """A place in a buffer."""

    buffer: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoop:
    """How one stage keeps the values of its loop.

    Attributes:
        given: pairs that ``w`` holds, in order.
        sums: per buffer of sums the numbers of the loop's results; ``rows`` the same of stacked ones.
        reads: per segment, where each value that it reads lies, in the order of the segment.
        writes: per segment, the buffers that it makes: for each the positions among the function's results.
        crossings: buffers of values that other stages make or read.
    """

    number: int
    given: tuple[Pair, ...]
    sums: Mapping[str, tuple[int, ...]]
    rows: Mapping[str, tuple[int, ...]]
    reads: tuple[tuple[Place, ...], ...]
    writes: tuple[Mapping[str, tuple[int, ...]], ...]
    crossings: frozenset[str]

    def segments(self, kind: ActionKind) -> tuple[int, ...]:
        """What an action runs, in order: a whole backward pass that is cut elsewhere runs both halves."""
        return {K.F: (0,), K.I: (1,), K.W: (2,), K.B: tuple(range(1, len(self.reads)))}[kind]

    @classmethod
    def of(cls, number: int, runner: StageRunner) -> StageLoop:
        segments = [part.segment for part in runner.passes]
        results = runner.stage.body.results
        first = len(results) - len(runner.sent)
        held: dict[Pair, Place] = {pair: Place(f"w{number}", k) for k, pair in enumerate(runner.given_of)}
        held |= {pair: Place(f"x{value}", 0) for pair, value in runner.arrival_of.items()}
        sums: dict[str, list[int]] = {}
        rows: dict[str, list[int]] = {}
        writes: list[dict[str, tuple[int, ...]]] = []
        last = len(segments) - 1
        for k, part in enumerate(runner.passes):
            made: dict[str, list[int]] = {}
            at = {pair: n for n, pair in enumerate(part.results)}
            for j, pair in enumerate(results):
                if pair not in at:
                    continue
                if j < runner.num_carry:
                    found, name = sums, f"{'a' if k == 0 else 'g' if k == last else 'i'}{number}"
                elif j < first:
                    found, name = rows, f"{'l' if k == 0 else 'y' if k == last else 'j'}{number}"
                else:
                    found, name = {}, f"x{list(runner.sent)[j - first]}"
                found.setdefault(name, []).append(j)
                made.setdefault(name, []).append(at[pair])
            for pair, n in at.items():
                readers = [r for r in range(k + 1, len(segments)) if pair in segments[r].reads]
                if readers:
                    name = f"{'h' if k else 'r' if readers[-1] == 1 else 'q'}{number}"
                    held[pair] = Place(name, len(made.get(name, ())))
                    made.setdefault(name, []).append(n)
            writes.append({name: tuple(numbers) for name, numbers in made.items()})
        places = {j: Place(name, k) for name, numbers in sums.items() for k, j in enumerate(numbers)}
        held |= {pair: places[j] for pair, j in runner.carry_of.items() if j in places}
        return cls(
            number=number,
            given=tuple(runner.given_of),
            sums={name: tuple(numbers) for name, numbers in sums.items()},
            rows={name: tuple(numbers) for name, numbers in rows.items()},
            reads=tuple(tuple(held[pair] for pair in segment.reads) for segment in segments),
            writes=tuple(writes),
            crossings=frozenset(f"x{value}" for value in (*runner.sent, *runner.arrival_of.values())),
        )


def loop_step(runners: Sequence[StageRunner], loops: Sequence[StageLoop], schedule: Schedule) -> StepIO:
    """The programs that the actions of ``schedule`` run, with their buffers and sizes per device."""
    wanted = sorted({(action.stage, action.kind) for column in schedule.columns for action in column})
    programs = tuple(_program(runners[stage], loops[stage], kind) for stage, kind in wanted)
    used = {port.name: program.stage for program in programs for port in (*program.reads, *program.writes)}
    return StepIO(buffers=tuple(_buffer(name, stage) for name, stage in used.items()), programs=programs)


def _buffer(name: str, stage: int) -> Buffer:
    match name[0]:
        case "w":
            return Buffer(name=name, origin=Origin.ARGUMENT, per_microbatch=False, stages=(stage,), kept=True)
        case "g" | "a" | "i":
            return Buffer(name=name, origin=Origin.ZEROS, per_microbatch=False)
    return Buffer(name=name, kept=name[0] in "ylj")


def _program(runner: StageRunner, loop: StageLoop, kind: ActionKind) -> StageIO:
    if kind is K.UPDATE:
        weights = (f"w{loop.number}",) if loop.given else ()
        reads, writes = {*weights, *loop.sums}, set(weights)
    else:
        numbers = loop.segments(kind)
        writes = {name for k in numbers for name in loop.writes[k]}
        reads = {place.buffer for k in numbers for place in loop.reads[k]} | (writes & set(loop.sums))
        inside = f"h{loop.number}"  # from one half to the other, within a whole backward pass
        if kind is K.B:
            reads, writes = reads - {inside}, writes - {inside}
    sizes = _sizes(runner, loop)

    def ports(names: Iterable[str]) -> tuple[Port, ...]:
        return tuple(Port(name, sizes.get(name, 0)) for name in sorted(names))

    return StageIO(stage=loop.number, kind=kind, reads=ports(reads), writes=ports(writes))


def _sizes(runner: StageRunner, loop: StageLoop) -> dict[str, int]:
    """Bytes per device of the stage's buffers; what it reads of before the loop is counted by the plan, not here."""
    avals, mesh = runner.stage.body.flat.avals, runner.stage.lowering.mesh

    def size(pair: Pair) -> int:
        value = value_of(avals[pair[0]])
        return pair[1].local_size_bytes(value.shape, value.itemsize, mesh)

    found = {f"x{value}": size(pair) for pair, value in runner.arrival_of.items()}
    for part, written in zip(runner.passes, loop.writes, strict=True):
        for name, numbers in written.items():
            found[name] = sum(size(part.results[n]) for n in numbers)
    return found
