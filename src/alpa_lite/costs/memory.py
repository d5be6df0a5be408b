"""Liveness: when each tensor lies in memory, and the peak that follows. Byte-true for a plan, linear for the ILP.

Time is the position in execution order, loop and branch bodies included (the body of op t follows t). XLA's accounting is
followed: arguments and results have buffers of their own for the whole step (a donated argument shares its result's);
everything else is temporary and lives from the op that makes it to its last reader. Values that fusion never stores
(``fusion.py``) have no bytes, but keep their operands alive until they are read themselves.

XLA:GPU hides collectives behind side branches, which run late for that (``late_order.py`` for the ILP and for steps with
barriers, ``overlap_order.py`` for other decided plans); else it runs about in program order, which needs little memory. In
loops, what is carried to the next iteration comes first, and what is stacked up, such as weights' gradients, after it.
XLA:CPU runs them breadth first, to keep its threads busy: every op as soon as its operands exist, so what depends on
arguments and constants alone is made at the start. For CPU this is what the ILP bounds; the profile of a decided plan
follows XLA:CPU instruction by instruction (``buffers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from alpa_lite.core.program import Op, Program
from alpa_lite.costs.dim_order import reordered_stacks, reordering_ops
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.fusion import fused_values, is_view, reuses_operand
from alpa_lite.costs.late_order import BARRIER, barrier_group, late_order
from alpa_lite.costs.overlap_order import Move, Schedule


class Order(StrEnum):
    """In which order a compiler runs the ops of a program."""

    PROGRAM = "program"
    LATE = "late"  # XLA:GPU with collectives
    BREADTH_FIRST = "breadth-first"  # XLA:CPU

    @property
    def on_cpu(self) -> bool:
        return self is Order.BREADTH_FIRST


@dataclass(frozen=True, slots=True)
class Interval:
    """A temporary: alive at times [lo, hi). ``region`` is the path prefix of its program ("" outer, "12.0." a body).

    ``copy``: a second buffer of the value, whatever becomes of the first.
    """

    region: str
    value: int
    lo: int
    hi: int
    copy: bool = False


@dataclass(eq=False, slots=True)
class Timeline:
    """Times of a program.

    Attributes:
        start, end: per op path, its time and the time after its bodies.
        intervals: of all temporaries that lie in memory.
        num_times: length of the time axis.
        last_read: (region, value) -> end of life, for values with or without bytes.
        read_end: op path -> until when its operands must last (a fused op reads them where its result is read).
        made: (region, value) -> when it exists, for every value.
        region_end: path prefix of a program -> time after its last op.
        order: in which ops run.
        fills_early: buffers of zeros are filled at the start (XLA:CPU; XLA:GPU with collectives, as nothing waits for them).
        moves: when conversions start and are done, if not when their reader runs.
    """

    order: Order
    fills_early: bool = False
    moves: dict[Move, tuple[int, int]] = field(default_factory=dict)
    made: dict[tuple[str, int], int] = field(default_factory=dict)

    start: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    num_times: int = 0
    last_read: dict[tuple[str, int], int] = field(default_factory=dict)
    read_end: dict[str, int] = field(default_factory=dict)
    region_end: dict[str, int] = field(default_factory=dict)


def timeline(
    program: Program,
    order: Order = Order.PROGRAM,
    schedule: Schedule | None = None,
    facts: Facts | None = None,
) -> Timeline:
    """Times and temporaries of a whole program.

    ``schedule``: when its own ops run, if ``order`` does not tell. ``facts``: of the program, if some are known.
    """
    result = Timeline(order=order, fills_early=order.on_cpu or (schedule is not None and schedule.overlaps))
    _number(program, "", result, _ORDERS[order](program) if schedule is None else schedule.order)
    result.num_times = max(result.num_times, 1)
    _live(program, "", 0, result.num_times, result, Facts(program) if facts is None else facts)
    return result if schedule is None else with_moves(result, schedule)


def with_moves(line: Timeline, schedule: Schedule) -> Timeline:
    """The same ops in the same order, conversions as ``schedule`` has them."""
    times = [line.start[str(index)] for index in schedule.order] + [line.num_times - 1]
    return replace(line, moves={move: (times[lo], times[hi]) for move, (lo, hi) in schedule.moves.items()})


def _number(program: Program, prefix: str, out: Timeline, order: Iterable[int]) -> None:
    inside = _breadth_first if out.order.on_cpu else late_order
    ops, start, end, time = program.ops, out.start, out.end, out.num_times
    for index in order:
        path = f"{prefix}{index}"
        start[path] = time
        time += 1
        if ops[index].bodies:
            out.num_times = time
            for b, body in enumerate(ops[index].bodies):
                _number(body, f"{path}.{b}.", out, inside(body))
            time = out.num_times
        end[path] = time
    out.num_times = out.region_end[prefix] = time


def _breadth_first(program: Program) -> list[int]:
    """Ops by the number of stored results on the longest way to them; fused ops go with what they read, and what passes a
    joint barrier waits for all of it."""
    fused = fused_values(program)
    depth: dict[int, int] = {}
    level: list[int] = []
    group: Sequence[Op] = ()
    for index, op in enumerate(program.ops):
        if op.primitive != BARRIER:
            group = [op]
        elif not group or group[0].primitive != BARRIER:
            group = barrier_group(program, index)
        level.append(max((depth.get(i, 0) for member in group for i in member.inputs), default=0))
        free = is_view(op) or all(o < 0 or fused[o] for o in op.outputs)
        depth.update((o, level[-1] + (not free)) for o in op.outputs if o >= 0)
    return sorted(range(len(level)), key=level.__getitem__)


_ORDERS: dict[Order, Callable[[Program], Iterable[int]]] = {
    Order.PROGRAM: lambda program: range(len(program.ops)),
    Order.LATE: late_order,
    Order.BREADTH_FIRST: _breadth_first,
}


def _live(
    program: Program,
    prefix: str,
    lo: int,
    hi: int,
    out: Timeline,
    facts: Facts,
    stacked: frozenset[int] = frozenset(),
) -> None:
    """Intervals of one region that runs during [lo, hi). ``stacked``: results that XLA:GPU writes out as they are made."""
    # Work per value is in lists, which programs with thousands of values notice.
    last: list[int] = [-1] * len(program.values)
    for value in program.outputs:
        if value >= 0 and value not in stacked:
            last[value] = hi
    lives = facts.of(_lives, program, gpu=not out.order.on_cpu, stacked=stacked, outer=not prefix)
    start, end, read_end = out.start, out.end, out.read_end
    for op in reversed(lives):
        path = prefix + op.name
        begin = start[path]
        reader_end = begin if op.reuses else end[path]
        # A fused result is computed where it is read, and a view is its operand's buffer: operands must last until then.
        for o in op.passed:
            reader_end = max(reader_end, last[o])
        read_end[path] = reader_end
        for i in op.reads:
            if last[i] < reader_end:
                last[i] = reader_end
        for i in op.carried:  # a loop goes on in the buffer that its carry starts in
            last[i] = max(last[i], begin)
    made, latest = out.made, out.num_times - 1
    made.update({(prefix, v): lo for v in (*program.inputs, *program.constants)})
    for op in lives:
        path = prefix + op.name
        begin, finish = start[path], min(end[path], latest)
        for b, (body, written) in enumerate(op.bodies):
            _live(body, f"{path}.{b}.", begin + 1, end[path], out, facts, written)
        for o in op.outputs:
            made[prefix, o] = finish
        for o, stacks in op.stored:
            # What a scan stacks up is written into a buffer of zeros, which depends on nothing.
            from_zeros = stacks and out.fills_early
            out.intervals.append(Interval(prefix, o, lo if from_zeros else begin, max(last[o], begin + 1)))
    if not out.order.on_cpu:
        for index in facts.of(reordering_ops, program):
            start = out.start[f"{prefix}{index}"]
            out.intervals.append(Interval(prefix, program.ops[index].outputs[0], start, start + 1, copy=True))
        for index, value in facts.of(reordered_stacks, program):
            start = out.start[f"{prefix}{index}"]
            out.intervals.append(Interval(prefix, value, start, start + 1, copy=True))
    out.last_read.update({(prefix, v): t for v, t in enumerate(last) if t >= 0})


@dataclass(frozen=True, slots=True)
class _Life:
    """What one op does to the lives of values, whenever it runs.

    Attributes:
        name: its index, as text.
        reuses: its result may lie where a dying operand did.
        passed: results that are computed where they are read, or are views.
        reads: values that must last until it is done; ``carried``: until it begins.
        outputs: all results that exist.
        stored: results with buffers, and whether a loop stacks them up.
        bodies: of a loop or branch, each with the results that are written out as they are made.
    """

    name: str
    reuses: bool
    passed: tuple[int, ...]
    reads: tuple[int, ...]
    carried: tuple[int, ...]
    outputs: tuple[int, ...]
    stored: tuple[tuple[int, bool], ...]
    bodies: tuple[tuple[Program, frozenset[int]], ...]


def _lives(program: Program, *, gpu: bool, stacked: frozenset[int], outer: bool) -> list[_Life]:
    """Of every op of a region; ``outer``: of the whole program, whose results have buffers of their own."""
    fused = fused_values(program, gpu=gpu, stacked=stacked)
    outside = {*program.inputs, *program.constants, *(program.outputs if outer else ())}
    found = []
    for index, op in enumerate(program.ops):
        first, behind, view = op.num_consts, op.num_consts + op.num_carry, is_view(op)
        carried = op.inputs[first:behind]
        bodies = []
        for body in op.bodies:
            written: frozenset[int] = frozenset()
            if op.primitive == "scan" and gpu:
                written = frozenset(body.outputs[op.num_carry :]) - {*body.outputs[: op.num_carry], *body.inputs, -1}
            bodies.append((body, written))
        found.append(
            _Life(
                name=str(index),
                reuses=reuses_operand(op, program, fused),
                passed=tuple(o for o in op.outputs if o >= 0 and (fused[o] or view)),
                reads=tuple(i for i in (*op.inputs[:first], *op.inputs[behind:]) if i >= 0),
                carried=tuple(i for i in carried if i >= 0),
                outputs=op.outputs,
                stored=tuple(
                    (o, op.primitive == "scan" and position >= op.num_carry)
                    for position, o in enumerate(op.outputs)
                    if not (o < 0 or fused[o] or o in outside or view)
                ),
                bodies=tuple(bodies),
            )
        )
    return found


def peak_usage(
    lo: Sequence[int], hi: Sequence[int], sizes: Sequence[int], num_times: int, base: int = 0
) -> tuple[int, int]:
    """(peak bytes, its time) of ``sizes[i]`` bytes at times [``lo[i]``, ``hi[i]``) on top of ``base``."""
    delta, bytes_ = np.zeros(num_times + 1, dtype=np.int64), np.array(sizes, dtype=np.int64)
    np.add.at(delta, np.array(lo, dtype=np.int64), bytes_)
    np.subtract.at(delta, np.minimum(np.array(hi, dtype=np.int64), num_times), bytes_)
    usage = np.cumsum(delta[:-1]) + base
    time = int(usage.argmax())
    return int(usage[time]), time
