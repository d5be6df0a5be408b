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
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np

from alpa_lite.core.conversion import Conversion
from alpa_lite.core.program import Op, Program
from alpa_lite.costs.dim_order import reordered_stacks, reordering_ops
from alpa_lite.costs.facts import Facts, region_of
from alpa_lite.costs.fusion import fused_values, is_view, overwriting_ops
from alpa_lite.costs.late_order import BARRIER, barrier_group, late_order, order_in_loop
from alpa_lite.costs.overlap_order import Move, Schedule


class Order(StrEnum):
    """In which order a compiler runs the ops of a program."""

    PROGRAM = "program"
    LATE = "late"  # XLA:GPU with collectives
    BREADTH_FIRST = "breadth-first"  # XLA:CPU

    @property
    def on_cpu(self) -> bool:
        return self is Order.BREADTH_FIRST


class Interval(NamedTuple):
    """A temporary: alive at times [lo, hi). ``region`` is the path prefix of its program ("" outer, "12.0." a body).

    ``copy``: a second buffer of the value, whatever becomes of the first. ``updated``: a loop's state, written over that of the
    iteration before if nothing converts it (XLA:GPU).
    """

    region: str
    value: int
    lo: int
    hi: int
    copy: bool = False
    updated: bool = False


@dataclass(eq=False, slots=True)
class Timeline:
    """Times of a program.

    Attributes:
        start, end: per op path, its time and the time after its bodies.
        intervals: of all temporaries that lie in memory.
        num_times: length of the time axis.
        last_read: (region, value) -> end of life, for values with or without bytes.
        read_end: op path -> until when its operands must last (a fused op reads them where its result is read).
        made: (region, value) -> when it exists, for every value (XLA:CPU alone).
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
    facts = Facts(program) if facts is None else facts
    result = Timeline(order=order, fills_early=order.on_cpu or (schedule is not None and schedule.overlaps))
    _number(program, "", result, _ORDERS[order](program) if schedule is None else schedule.order, facts)
    result.num_times = max(result.num_times, 1)
    _live(program, "", 0, result.num_times, result, facts)
    return result if schedule is None else with_moves(result, schedule)


def with_moves(line: Timeline, schedule: Schedule) -> Timeline:
    """The same ops in the same order, conversions as ``schedule`` has them."""
    order, start, last = schedule.order, line.start, line.num_times - 1

    def time(place: int) -> int:
        return start[str(order[place])] if place < len(order) else last

    return replace(line, moves={move: (time(lo), time(hi)) for move, (lo, hi) in schedule.moves.items()})


def times_of(conversion: Conversion, line: Timeline) -> tuple[int, int]:
    """When a conversion starts and when it is done."""
    path, region = conversion.op, region_of(conversion.op)
    move = Move(path, conversion.value, conversion.target)
    if move in line.moves:
        return line.moves[move]
    time = line.start[path] if path in line.start else max(0, line.region_end[region] - 1)
    return time, time


def _number(program: Program, prefix: str, out: Timeline, order: Iterable[int], facts: Facts) -> None:
    inside = _breadth_first if out.order.on_cpu else order_in_loop
    ops, start, end, time = program.ops, out.start, out.end, out.num_times
    paths = _paths(program, prefix, facts)
    if not any(op.bodies for op in ops):
        ordered = [paths[index] for index in order]
        start.update(zip(ordered, range(time, time + len(ops)), strict=True))
        end.update(zip(ordered, range(time + 1, time + len(ops) + 1), strict=True))
        out.num_times = out.region_end[prefix] = time + len(ops)
        return
    for index in order:
        path = paths[index]
        start[path] = time
        time += 1
        if ops[index].bodies:
            out.num_times = time
            for b, body in enumerate(ops[index].bodies):
                _number(body, f"{path}.{b}.", out, facts.of(inside, body), facts)
            time = out.num_times
        end[path] = time
    out.num_times = out.region_end[prefix] = time


def _paths(program: Program, prefix: str, facts: Facts) -> list[str]:
    """Of the ops of a region."""
    names = facts.of(_names, program)
    return [prefix + name for name in names] if prefix else names


def _names(program: Program) -> list[str]:
    return [str(index) for index in range(len(program.ops))]


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
    carried: tuple[tuple[int, int], ...] = (),
) -> None:
    """Intervals of one region that runs during [lo, hi).

    ``stacked``: results that XLA:GPU writes out as they are made; ``carried``: (argument, result) of a loop's state.
    """
    gpu = not out.order.on_cpu
    fused = facts.of(fused_values, program, gpu=gpu, **({"stacked": stacked} if stacked else {}))
    lives = facts.of(_lives, program, gpu=gpu, stacked=stacked, outer=not prefix, carried=carried, fused=fused)
    paths = _paths(program, prefix, facts)
    begin = np.array([out.start[path] for path in paths], dtype=np.int64)
    end = np.array([out.end[path] for path in paths], dtype=np.int64)
    last = np.full(len(program.values), -1, dtype=np.int64)
    last[lives.results] = hi
    loops, begun = lives.begun
    np.maximum.at(last, begun, begin[loops])  # a loop goes on in the buffer that its carry starts in
    # A fused result is computed where it is read, and a view is its operand's buffer: operands must last until then.
    reader_end = np.where(lives.reuses, begin, end)
    for passing, passed, reading, read in lives.steps:
        np.maximum.at(reader_end, passing, last[passed])
        np.maximum.at(last, read, reader_end[reading])
    out.read_end.update(zip(paths, reader_end.tolist(), strict=True))
    if out.order.on_cpu:
        out.made.update({(prefix, v): lo for v in (*program.inputs, *program.constants)})
        finish = np.minimum(end, out.num_times - 1).tolist()
        out.made.update({(prefix, o): at for op, at in zip(program.ops, finish, strict=True) for o in op.outputs})
    makers, stored, stacks = lives.stored
    # What a scan stacks up is written into a buffer of zeros, which depends on nothing.
    made = np.where(stacks & out.fills_early, lo, begin[makers])
    gone = np.maximum(last[stored], begin[makers] + 1)
    updates, old, new = lives.updates
    updated = np.isin(stored, new[last[old] <= begin[updates]])  # nobody reads the old state later
    rows = zip(
        repeat(prefix), stored.tolist(), made.tolist(), gone.tolist(), repeat(False), updated.tolist(), strict=False
    )
    intervals = map(Interval._make, rows)
    done = 0
    for index, before, bodies in lives.bodies:
        out.intervals += islice(intervals, before - done)
        done = before
        for b, (body, written, state) in enumerate(bodies):
            path = f"{paths[index]}.{b}."
            _live(body, path, int(begin[index]) + 1, int(end[index]), out, facts, written, state)
    out.intervals += intervals
    if not out.order.on_cpu:
        copies = [(index, program.ops[index].outputs[0]) for index in facts.of(reordering_ops, program)]
        for index, value in [*copies, *facts.of(reordered_stacks, program)]:
            at = int(begin[index])
            out.intervals.append(Interval(prefix, value, at, at + 1, copy=True))
    if prefix:
        out.last_read.update({(prefix, v): t for v, t in enumerate(last.tolist()) if t >= 0})
    else:
        out.last_read.update(zip(lives.keys, last[lives.known].tolist(), strict=True))


_Body = tuple[Program, frozenset[int], tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Lives:
    """What the ops of a region do to the lives of values, whenever they run; pairs of arrays go together.

    Attributes:
        results: values that last as long as the region.
        reuses: per op, whether its result may lie where a dying operand did.
        steps: (ops, results that they pass on; ops, values that must last until these are done), readers before what they
            read: a result is passed on if it is computed where it is read, or is a view.
        begun: (loops, values that must last until they begin).
        stored: (ops, results with buffers, whether a loop stacks them up), in the order of the ops.
        updates: (ops, a loop's state, the next one), where an op may write the next over the last.
        bodies: of loops and branches: op, how many of ``stored`` come before, and each body with the results that are written
            out as they are made and with its (argument, result) pairs of state.
        known: values that are ever read or are results; ``keys``: the same as tensors of the whole program.
    """

    results: np.ndarray
    reuses: np.ndarray
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
    begun: tuple[np.ndarray, np.ndarray]
    stored: tuple[np.ndarray, np.ndarray, np.ndarray]
    updates: tuple[np.ndarray, np.ndarray, np.ndarray]
    bodies: list[tuple[int, int, list[_Body]]]
    known: np.ndarray
    keys: list[tuple[str, int]]


def _lives(
    program: Program,
    *,
    gpu: bool,
    stacked: frozenset[int],
    outer: bool,
    carried: tuple[tuple[int, int], ...],
    fused: tuple[bool, ...],
) -> _Lives:
    """Of a region; ``outer``: of the whole program, whose results have buffers of their own. The rest as of ``_live``."""
    outside = {*program.inputs, *program.constants, *(program.outputs if outer else ())}
    passed: list[list[int]] = []
    reads: list[list[int]] = []
    begun: list[tuple[int, int]] = []
    stored: list[tuple[int, int, bool]] = []
    bodies: list[tuple[int, int, list[_Body]]] = []
    for index, op in enumerate(program.ops):
        first, behind, view = op.num_consts, op.num_consts + op.num_carry, is_view(op)
        if op.bodies:
            bodies.append((index, len(stored), [_body(op, body, gpu=gpu) for body in op.bodies]))
        passed.append([o for o in op.outputs if o >= 0 and (fused[o] or view)])
        reads.append([i for i in (*op.inputs[:first], *op.inputs[behind:]) if i >= 0])
        begun += [(index, i) for i in op.inputs[first:behind] if i >= 0]
        stored += [
            (index, o, op.primitive == "scan" and position >= op.num_carry)
            for position, o in enumerate(op.outputs)
            if not (o < 0 or fused[o] or o in outside or view)
        ]
    results = [v for v in program.outputs if v >= 0 and v not in stacked]
    known = sorted({*results, *(i for values in reads for i in values), *(i for _, i in begun)})
    columns = np.array(stored, dtype=np.int64).reshape(-1, 3).T
    reuses = overwriting_ops(program, fused, gpu=gpu)
    before = {new: old for old, new in carried}
    updates = [
        (index, before[o], o)
        for index, op in enumerate(program.ops)
        for o in op.outputs
        if gpu and reuses[index] and o in before and before[o] in op.inputs
    ]
    update = np.array(updates, dtype=np.int64).reshape(-1, 3).T
    return _Lives(
        results=np.array(results, dtype=np.int64),
        reuses=np.array(reuses, dtype=bool),
        steps=_in_steps(passed, reads, len(program.values)),
        begun=_columns(begun),
        stored=(columns[0], columns[1], columns[2] > 0),
        updates=(update[0], update[1], update[2]),
        bodies=bodies,
        known=np.array(known, dtype=np.int64),
        keys=[("", v) for v in known],
    )


def _body(op: Op, body: Program, *, gpu: bool) -> _Body:
    """Of a loop or branch; for XLA:GPU with the results that it writes out as they are made, and with the state of a scan."""
    if op.primitive != "scan" or not gpu:
        return body, frozenset(), ()
    written = frozenset(body.outputs[op.num_carry :]) - {*body.outputs[: op.num_carry], *body.inputs, -1}
    return body, written, tuple(zip(body.inputs[op.num_consts :], body.outputs[: op.num_carry], strict=False))


def _in_steps(
    passed: Sequence[Sequence[int]], reads: Sequence[Sequence[int]], num_values: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """The ops' steps of ``_Lives``: those that pass nothing on first, then those whose results only these read, and so on."""
    depth = [0] * num_values  # of the readers of a value, the largest number of a step
    steps: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []
    for index in range(len(reads) - 1, -1, -1):
        step = max((depth[o] + 1 for o in passed[index]), default=0)
        while len(steps) <= step:
            steps.append(([], []))
        steps[step][0].extend([(index, o) for o in passed[index]])
        steps[step][1].extend([(index, i) for i in reads[index]])
        for i in reads[index]:
            depth[i] = max(depth[i], step)
    return [(*_columns(one), *_columns(other)) for one, other in steps]


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return first, second


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
