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
    for index in order:
        op, path = program.ops[index], f"{prefix}{index}"
        out.start[path] = out.num_times
        out.num_times += 1
        for b, body in enumerate(op.bodies):
            _number(body, f"{path}.{b}.", out, inside(body))
        out.end[path] = out.num_times
    out.region_end[prefix] = out.num_times


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
    fused = facts.of(fused_values, program, gpu=not out.order.on_cpu, stacked=stacked)
    last: dict[int, int] = {v: hi for v in program.outputs if v >= 0 and v not in stacked}
    for index in range(len(program.ops) - 1, -1, -1):
        op = program.ops[index]
        path = f"{prefix}{index}"
        reader_end = out.start[path] if reuses_operand(op, program, fused) else out.end[path]
        # A fused result is computed where it is read, and a view is its operand's buffer: operands must last until then.
        for o in op.outputs:
            if o >= 0 and (fused[o] or is_view(op)):
                reader_end = max(reader_end, last.get(o, 0))
        out.read_end[path] = reader_end
        carries = range(op.num_consts, op.num_consts + op.num_carry)
        for position, i in enumerate(op.inputs):
            if i >= 0:
                # A loop goes on in the buffer that its carry starts in.
                last[i] = max(last.get(i, 0), out.start[path] if position in carries else reader_end)
    outside = set(program.outputs) if not prefix else set()
    outside.update(program.inputs)
    outside.update(program.constants)
    out.made.update({(prefix, v): lo for v in (*program.inputs, *program.constants)})
    for index, op in enumerate(program.ops):
        path = f"{prefix}{index}"
        for b, body in enumerate(op.bodies):
            written: frozenset[int] = frozenset()
            if op.primitive == "scan" and not out.order.on_cpu:
                written = frozenset(body.outputs[op.num_carry :]) - {*body.outputs[: op.num_carry], *body.inputs, -1}
            _live(body, f"{path}.{b}.", out.start[path] + 1, out.end[path], out, facts, written)
        for position, o in enumerate(op.outputs):
            # What a scan stacks up is written into a buffer of zeros, which depends on nothing.
            stacks = op.primitive == "scan" and position >= op.num_carry
            begin = lo if stacks and out.fills_early else out.start[path]
            out.made[(prefix, o)] = min(out.end[path], out.num_times - 1)
            if o < 0 or fused[o] or o in outside or is_view(op):
                continue
            out.intervals.append(Interval(prefix, o, begin, max(last.get(o, 0), out.start[path] + 1)))
    if not out.order.on_cpu:
        for index in facts.of(reordering_ops, program):
            start = out.start[f"{prefix}{index}"]
            out.intervals.append(Interval(prefix, program.ops[index].outputs[0], start, start + 1, copy=True))
        for index, value in facts.of(reordered_stacks, program):
            start = out.start[f"{prefix}{index}"]
            out.intervals.append(Interval(prefix, value, start, start + 1, copy=True))
    out.last_read.update({(prefix, v): t for v, t in last.items()})


def peak_usage(sizes: Iterable[tuple[int, int, int]], num_times: int, base: int = 0) -> tuple[int, int, np.ndarray]:
    """(peak bytes, its time, bytes at every time) of (lo, hi, size) items on top of ``base``."""
    delta = np.zeros(num_times + 1, dtype=np.int64)
    for lo, hi, size in sizes:
        delta[lo] += size
        delta[min(hi, num_times)] -= size
    usage = np.cumsum(delta[:-1]) + base
    time = int(usage.argmax())
    return int(usage[time]), time, usage
