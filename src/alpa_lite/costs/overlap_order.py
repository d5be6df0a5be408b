"""In which order XLA:GPU runs the ops of a decided plan, collectives included, as far as memory depends on it.

Its latency hiding scheduler (``xla/service/latency_hiding_scheduler.cc``) works from the results backwards. One collective is
in flight at a time. While it is, ops that are ready fill the time, those first that wait for most time of collectives; what a
product for a weight's gradient reads is thereby kept until some collective needs company. Without a collective in flight, ops
keep the order that they came in: that of the program, where updates of the state run as soon as they can
(``early_updates``). Times are those that XLA:GPU believes in (``estimated_time.py``). Steps with the barriers of
rematerialised layers are not for this: see ``late_order.py``.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
from alpa_lite.costs.split_matmul import local_matmul
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


@dataclass(slots=True)
class _Node:
    """An op (``index`` >= 0) or a conversion."""

    index: int
    cost: float
    is_collective: bool = False
    move: Move | None = None
    reads: list[int] = field(default_factory=list)
    users: int = 0
    depth: float = 0.0
    position: int = 0


def overlap_order(
    program: Program,
    mesh: DeviceMesh,
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    facts: Facts | None = None,
) -> Schedule:
    """When the ops of this program (not of its bodies) and the conversions between them run. ``facts``: of the program."""
    nodes = _graph(program, mesh, decisions, conversions, Facts(program) if facts is None else facts)
    for node in nodes:
        for read in node.reads:
            nodes[read].users += 1
    for number in _topological(nodes):
        node = nodes[number]
        node.depth = max((nodes[r].depth for r in node.reads), default=0.0) + node.is_collective * node.cost
        node.position = max(node.position, max((nodes[r].position for r in node.reads), default=0))
    return _schedule(nodes)


def _graph(
    program: Program,
    mesh: DeviceMesh,
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    facts: Facts,
) -> list[_Node]:
    ours = {int(d.path): d for d in decisions if "." not in d.path}
    mine = [c for c in conversions if "." not in c.op]
    if any(step.kind is not None for c in mine for step in c.steps):
        nodes = [_Node(i, _seconds(op, program, facts, mesh, ours[i])) for i, op in enumerate(program.ops)]
    else:  # there is no time to fill
        nodes = [_Node(i, 0.0) for i in range(len(program.ops))]
    for position, index in enumerate(facts.of(early_updates, program)):
        nodes[index].position = position
    maker: dict[_Layout, int] = {}
    for index in range(len(program.ops)):
        for value, spec in zip(program.ops[index].outputs, ours[index].results, strict=True):
            maker[(value, spec)] = index
    for conversion in mine:
        maker.setdefault((conversion.value, conversion.target), len(nodes))
        moves = any(step.kind is not None for step in conversion.steps)
        move = Move(conversion.op, conversion.value, conversion.target)
        nodes.append(_Node(-1, _conversion_seconds(conversion, program, mesh), is_collective=moves, move=move))
    for number, conversion in enumerate(mine, len(program.ops)):
        source = maker.get((conversion.value, conversion.source))
        nodes[number].reads = [] if source is None else [source]
    for index, op in enumerate(program.ops):
        read = {maker[key] for key in zip(op.inputs, ours[index].operands, strict=True) if key in maker}
        nodes[index].reads = sorted(read)
    for index in facts.of(joined_updates, program):
        nodes[index].cost = max(0.0, nodes[index].cost - LATENCY_SECONDS)
    return nodes


def _seconds(op: Op, program: Program, facts: Facts, mesh: DeviceMesh, decision: OpDecision) -> float:
    """How long XLA:GPU believes that an op keeps a device busy; nothing for what other kernels do on the way."""
    fused = facts.of(fused_values, program, gpu=True)
    if op.bodies or is_view(op) or all(o < 0 or fused[o] for o in op.outputs):
        return 0.0
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


def _topological(nodes: Sequence[_Node]) -> list[int]:
    missing = [len(node.reads) for node in nodes]
    users: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        for read in node.reads:
            users[read].append(number)
    order = [number for number, count in enumerate(missing) if not count]
    for number in order:
        for user in users[number]:
            missing[user] -= 1
            if not missing[user]:
                order.append(user)
    return order


def _schedule(nodes: Sequence[_Node]) -> Schedule:
    """List scheduling from the end. A collective in flight ends (seen backwards) once its time has been filled."""
    left = [node.users for node in nodes]
    ready: list[tuple[float, int, int]] = []
    waiting: list[tuple[float, int, int]] = []
    order: list[int] = []
    done: dict[Move, int] = {}
    starts: dict[Move, int] = {}
    clock, flying, lands = 0.0, -1, 0.0

    def offer(number: int) -> None:
        node = nodes[number]
        heapq.heappush(waiting if node.is_collective else ready, (-node.depth, -node.position, number))

    def place(number: int) -> None:
        node = nodes[number]
        if node.move is None:
            order.append(node.index)
        else:
            starts[node.move] = len(order)
            done.setdefault(node.move, len(order))
        for read in node.reads:
            left[read] -= 1
            if not left[read]:
                offer(read)

    for number, count in enumerate(left):
        if not count:
            offer(number)
    while ready or waiting or flying >= 0:
        if flying < 0 and waiting:
            flying = heapq.heappop(waiting)[2]
            move = nodes[flying].move
            assert move is not None
            done[move] = len(order)
            lands = clock + nodes[flying].cost
        elif flying >= 0 and (not ready or (clock >= lands and (waiting or -ready[0][0] <= nodes[flying].depth))):
            clock = max(clock, lands)
            place(flying)
            flying = -1
        else:
            number = heapq.heappop(ready)[2]
            clock += nodes[number].cost
            place(number)
    moves = {move: (len(order) - starts[move], len(order) - end) for move, end in done.items()}
    return Schedule(order[::-1], moves, any(node.is_collective for node in nodes))
