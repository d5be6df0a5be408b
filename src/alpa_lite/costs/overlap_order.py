"""In which order XLA:GPU runs the ops of a decided plan, collectives included, as far as memory depends on it.

Its latency hiding scheduler (``xla/service/latency_hiding_scheduler.cc``) works from the results backwards. One collective is
in flight at a time. While it is, ops that are ready fill the time, those first that wait for most time of collectives; what a
product for a weight's gradient reads is thereby kept until some collective needs company. Without a collective in flight, ops
keep the order that they came in: that of the program, where updates of the state run as soon as they can
(``early_updates``). Times are those that XLA:GPU believes in (``estimated_time.py``). Steps with the barriers of
rematerialised layers are not for this: see ``late_order.py``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from alpa_lite.core.conversion import Conversion
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import step_size_bytes
from alpa_lite.costs.estimated_time import (
    LATENCY_SECONDS,
    LIBRARY_CALL_SECONDS,
    collective_seconds,
    kernel_seconds,
    matmul_seconds,
)
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.fusion import fused_values, is_view, joined_updates, joins_consumers
from alpa_lite.costs.split_matmul import local_matmul, readers_of
from alpa_lite.plan.records import OpDecision

_Layout = tuple[int, ShardingSpec]


def early_updates(program: Program) -> list[int]:
    """Indices of ops: the program's order, but elementwise ops that lead only to results follow at once on what they read.

    They write over the state that they update, so running them early frees the gradients.
    """
    results = set(program.outputs)
    readers: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(program.ops):
        for value in set(op.inputs):
            readers[value].append(index)
    moved = [False] * len(program.ops)
    for index in range(len(program.ops) - 1, -1, -1):
        op = program.ops[index]
        made = [o for o in op.outputs if o >= 0]
        used = all(o in results or readers[o] for o in made)
        moved[index] = (
            joins_consumers(op)
            and "jvp(" not in op.scope
            and bool(made)
            and used
            and all(moved[r] for o in made for r in readers[o])
        )
    order: list[int] = []
    missing = [len({i for i in op.inputs if i >= 0}) for op in program.ops]
    done = [False] * len(program.ops)

    def release(values: Sequence[int]) -> None:
        pending = list(values)
        while pending:
            for reader in readers[pending.pop()]:
                missing[reader] -= 1
                if not missing[reader] and moved[reader] and not done[reader]:
                    done[reader] = True
                    order.append(reader)
                    pending += {o for o in program.ops[reader].outputs if o >= 0}

    release([*dict.fromkeys([*program.inputs, *program.constants])])
    for index, op in enumerate(program.ops):
        if not moved[index] or not done[index]:
            done[index] = True
            order.append(index)
            release([*dict.fromkeys(o for o in op.outputs if o >= 0)])
    return order


class Move(NamedTuple):
    """Which conversion: the path of the op before which the plan has it, the tensor, its new layout."""

    op: str
    value: int
    target: ShardingSpec


@dataclass(frozen=True, slots=True)
class Schedule:
    """What runs when.

    Attributes:
        order: indices of the program's own ops.
        moves: per conversion of the program's own tensors, before which places in ``order`` it starts and is done.
        overlaps: whether there are collectives.
    """

    order: list[int]
    moves: dict[Move, tuple[int, int]]
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class _Ops:
    """What follows from the program alone: its own ops, without any conversions between them.

    Attributes:
        maker: value -> index of the op that makes it.
        reads: per op, indices of the ops that it reads from, rising.
        users: per op, how many ops read from it.
        position: per op, its place in ``early_updates``, or the latest of those that it needs.
        kernels: per op, a number that ops with equal kernels share; -1 of those that keep no device busy.
    """

    maker: dict[int, int]
    reads: list[list[int]]
    users: list[int]
    position: list[int]
    kernels: list[int]


def _ops_of(program: Program, *, fused: tuple[bool, ...]) -> _Ops:
    maker = {o: index for index, op in enumerate(program.ops) for o in op.outputs if o >= 0}
    reads = [sorted({maker[i] for i in op.inputs if i in maker}) for op in program.ops]
    users = [0] * len(reads)
    position = [0] * len(reads)
    for place, index in enumerate(early_updates(program)):
        position[index] = place
    kernels = []
    known: dict[tuple[object, ...], int] = {}
    for index, op in enumerate(program.ops):
        for read in reads[index]:
            users[read] += 1
            position[index] = max(position[index], position[read])
        free = op.bodies or is_view(op) or all(o < 0 or fused[o] for o in op.outputs)
        values = tuple(program.values[v] if v >= 0 else None for v in (*op.inputs, *op.outputs))
        kernels.append(-1 if free else known.setdefault((op.key, op.primitive, id(op.rule), values), len(known)))
    return _Ops(maker, reads, users, position, kernels)


@dataclass(slots=True)
class _Graph:
    """The program's own ops, then the conversions between them, by number.

    Attributes:
        num_ops: conversions are numbered from here on.
        cost: seconds, if there are collectives to fill.
        reads: numbers of what a node reads from.
        users: how many nodes read from a node.
        collective: whether a node is one.
        moves: which conversions.
        position: place of a node in the order that it came in, after all that it reads.
        depth: seconds of the collectives on the longest way to a node, with its own.
    """

    num_ops: int
    cost: list[float]
    reads: list[list[int]]
    users: list[int]
    collective: list[bool]
    moves: list[Move]
    position: list[int]
    depth: list[float]


def overlap_order(
    program: Program,
    mesh: DeviceMesh,
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    facts: Facts | None = None,
) -> Schedule:
    """When the ops of this program (not of its bodies) and the conversions between them run. ``facts``: of the program."""
    return _schedule(_graph(program, mesh, decisions, conversions, Facts(program) if facts is None else facts))


def _graph(
    program: Program,
    mesh: DeviceMesh,
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    facts: Facts,
) -> _Graph:
    ours = [d for d in decisions if "." not in d.path]
    mine = [c for c in conversions if "." not in c.op]
    known = facts.of(_ops_of, program, fused=facts.of(fused_values, program, gpu=True))
    num_ops = len(ours)
    collective = [False] * num_ops + [any(step.kind is not None for step in c.steps) for c in mine]
    if any(collective):
        cost = _op_seconds(program, facts, known.kernels, mesh, ours)
    else:  # there is no time to fill
        cost = [0.0] * num_ops
    graph = _Graph(
        num_ops=num_ops,
        cost=cost + [_conversion_seconds(c, program, mesh) for c in mine],
        reads=known.reads + [[] for _ in mine],
        users=known.users + [0] * len(mine),
        collective=collective,
        moves=[Move(c.op, c.value, c.target) for c in mine],
        position=known.position + [0] * len(mine),
        depth=[0.0] * (num_ops + len(mine)),
    )
    _insert(graph, program, ours, mine, known.maker, facts.of(readers_of, program))
    _deepen(graph)
    return graph


def _insert(
    graph: _Graph,
    program: Program,
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    maker: Mapping[int, int],
    readers: Mapping[int, Sequence[int]],
) -> None:
    """Joins conversions to what makes their tensors and to what reads them as they are converted; the rest reads on as it did."""
    layouts: dict[_Layout, int] = {}
    converted = {c.value for c in conversions}
    for value in converted & maker.keys():
        index = maker[value]
        layouts[value, decisions[index].results[program.ops[index].outputs.index(value)]] = index
    for number, conversion in enumerate(conversions, graph.num_ops):
        layouts.setdefault((conversion.value, conversion.target), number)
    for number, conversion in enumerate(conversions, graph.num_ops):
        source = layouts.get((conversion.value, conversion.source))
        if source is not None:
            graph.reads[number] = [source]
            graph.users[source] += 1
    for index in {reader for value in converted for reader in readers.get(value, ())}:
        op = program.ops[index]
        for read in graph.reads[index]:
            graph.users[read] -= 1
        read = set()
        for value, spec in zip(op.inputs, decisions[index].operands, strict=True):
            found = layouts.get((value, spec)) if value in converted else maker.get(value)
            if found is not None:
                read.add(found)
        graph.reads[index] = sorted(read)
        for number in read:
            graph.users[number] += 1


def _deepen(graph: _Graph) -> None:
    """Depths of all nodes, and the positions of conversions: those of the ops whose results they convert."""
    reads, depth, cost, position, num_ops = graph.reads, graph.depth, graph.cost, graph.position, graph.num_ops
    done = [False] * (len(reads) - num_ops)

    def finish(number: int) -> None:
        """Of a conversion, after those before it."""
        chain = []
        while number >= num_ops and not done[number - num_ops]:
            done[number - num_ops] = True
            chain.append(number)
            number = reads[number][0] if reads[number] else -1
        for c in reversed(chain):
            source = reads[c][0] if reads[c] else -1
            depth[c] = (depth[source] if source >= 0 else 0.0) + graph.collective[c] * cost[c]
            position[c] = position[source] if source >= 0 else 0

    if any(graph.collective):
        for index in range(num_ops):
            deepest = 0.0
            for read in reads[index]:
                if read >= num_ops:
                    finish(read)
                if depth[read] > deepest:
                    deepest = depth[read]
            depth[index] = deepest
    for number in range(num_ops, len(reads)):
        finish(number)


def _op_seconds(
    program: Program, facts: Facts, kernels: Sequence[int], mesh: DeviceMesh, decisions: Sequence[OpDecision]
) -> list[float]:
    """How long XLA:GPU believes that ops keep a device busy; layers that repeat are asked once."""
    known: dict[tuple[int, int, int], float] = {}
    found = []
    for op, kernel, decision in zip(program.ops, kernels, decisions, strict=True):
        if kernel < 0:  # other kernels do it on the way
            found.append(0.0)
            continue
        key = kernel, id(decision.operands), id(decision.results)
        seconds = known.get(key)
        if seconds is None:
            seconds = known[key] = _seconds(op, program, mesh, decision)
        found.append(seconds)
    for index in facts.of(joined_updates, program, fused=facts.of(fused_values, program, gpu=True)):
        found[index] = max(0.0, found[index] - LATENCY_SECONDS)
    return found


def _seconds(op: Op, program: Program, mesh: DeviceMesh, decision: OpDecision) -> float:
    if op.primitive == "conv_general_dilated":
        return LIBRARY_CALL_SECONDS
    product = local_matmul(op, program, decision.operands, mesh)
    if product is not None:
        return matmul_seconds(product)
    moved = sum(
        program.values[value].size_bytes / mesh.axes_size(spec.sharded_axes)
        for value, spec in zip((*op.inputs, *op.outputs), (*decision.operands, *decision.results), strict=True)
        if value >= 0
    )
    return kernel_seconds(moved)


def _conversion_seconds(conversion: Conversion, program: Program, mesh: DeviceMesh) -> float:
    value = program.values[conversion.value]
    return math.fsum(
        collective_seconds(
            step.kind, mesh.axes_size(step.axes), step_size_bytes(step, value.shape, value.itemsize, mesh)
        )
        for step in conversion.steps
        if step.kind is not None
    )


def _schedule(graph: _Graph) -> Schedule:
    """List scheduling from the end. A collective in flight ends (seen backwards) once its time has been filled."""
    depth, cost, reads, collective, num_ops = graph.depth, graph.cost, graph.reads, graph.collective, graph.num_ops
    # Deepest first, of these the last one in the order that nodes came in.
    by_rank = np.lexsort((-np.array(graph.position, dtype=np.int64), -np.array(depth))).tolist()
    rank = [0] * len(by_rank)
    for place, number in enumerate(by_rank):
        rank[number] = place
    left = graph.users
    ready: list[int] = []
    waiting: list[int] = []
    for number, count in enumerate(left):
        if not count:
            (waiting if collective[number] else ready).append(rank[number])
    heapify(ready)
    heapify(waiting)
    order: list[int] = []
    done: dict[Move, int] = {}
    starts: dict[Move, int] = {}
    clock, flying, lands = 0.0, -1, 0.0
    while ready or waiting or flying >= 0:
        if flying < 0 and waiting:
            flying = by_rank[heappop(waiting)]
            done[graph.moves[flying - num_ops]] = len(order)
            lands = clock + cost[flying]
            continue
        if flying >= 0 and (not ready or (clock >= lands and (waiting or depth[by_rank[ready[0]]] <= depth[flying]))):
            clock = max(clock, lands)
            number, flying = flying, -1
        else:
            number = by_rank[heappop(ready)]
            clock += cost[number]
        if number < num_ops:
            order.append(number)
        else:
            starts[graph.moves[number - num_ops]] = len(order)
            done.setdefault(graph.moves[number - num_ops], len(order))
        for read in reads[number]:
            left[read] -= 1
            if not left[read]:
                heappush(waiting if collective[read] else ready, rank[read])
    moves = {move: (len(order) - starts[move], len(order) - end) for move, end in done.items()}
    return Schedule(order[::-1], moves, any(collective))
