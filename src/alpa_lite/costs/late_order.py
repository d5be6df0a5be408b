"""The order in which XLA:GPU runs a program's ops, as far as memory depends on it.

Its latency hiding scheduler works backwards from the results (``xla/service/latency_hiding_scheduler.cc``) and minds memory
only near the device's limit: an op that nothing urgent waits for, such as the product for a weight's gradient, runs as late
as its reader allows, with all that it reads kept. The barriers of rematerialised layers bound that: lowering passes every
finished gradient through the next barrier (``lowering/lower.py``), so that none is left for the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from alpa_lite.core.program import Op, Program
from alpa_lite.costs.fusion import fused_values, is_reduction, is_view, overwriting_ops

BARRIER = "optimization_barrier"


def late_order(program: Program) -> list[int]:
    """Indices of the ops of this program (not of its bodies): depth first from each barrier and then from the results."""
    emit = _Emitter(program)
    last_read = {i: index for index, op in enumerate(program.ops) for i in op.inputs}
    last_read.update(dict.fromkeys(program.outputs, len(program.ops)))
    pending: list[int] = []
    index = 0
    while index < len(program.ops):
        op = program.ops[index]
        if op.primitive == BARRIER:
            group = barrier_group(program, index)
            index += len(group)
            emit.demand(i for member in group for i in member.inputs)
            emit.demand(value for value in pending if last_read.get(value, -1) >= index)
            emit.demand(o for member in group for o in member.outputs)
            pending = []
        else:
            if is_held_by_barriers(op, program):
                pending += op.outputs
            index += 1
    emit.demand(program.outputs)
    emit.rest()
    return emit.order


def order_in_loop(program: Program) -> list[int]:
    """``late_order`` of a loop's body, with every reduction right before an earlier elementwise op that walks the same tensor.

    XLA:GPU computes both in one kernel, which may write over the tensor (``multi_output_fusion.cc``): a loss that is summed up
    over logits does not keep them beside their gradient.
    """
    order = late_order(program)
    place = {index: p for p, index in enumerate(order)}
    fused = fused_values(program, gpu=True)
    overwriting = overwriting_ops(program, fused, gpu=True)
    maker = {o: index for index, op in enumerate(program.ops) for o in op.outputs if o >= 0}
    inside = {
        o for o, index in maker.items() if fused[o] or (is_view(op := program.ops[index]) and op.primitive != BARRIER)
    }
    stored: list[set[int]] = []  # per op, the tensors in memory that its kernel reads
    for op in program.ops:
        stored.append(set().union(*(stored[maker[i]] if i in inside else {i} for i in op.inputs if i >= 0)))
    writers: dict[int, list[int]] = defaultdict(list)
    for index in order:
        if overwriting[index]:
            walked = program.values[program.ops[index].outputs[0]].shape
            for value in stored[index]:
                if program.values[value].shape == walked:
                    writers[value].append(place[index])
    moved: dict[int, int] = {}
    for index in order:
        op = program.ops[index]
        if not is_reduction(op) or op.inputs[0] < 0:
            continue
        walked = program.values[op.inputs[0]].shape
        ready = max((place[maker[i]] for i in stored[index] if i in maker), default=-1)
        shared = (i for i in stored[index] if program.values[i].shape == walked)
        before = min((p for i in shared for p in writers[i] if ready < p < place[index]), default=-1)
        pending = [index] if before >= 0 else []
        while pending:
            at = pending.pop()
            if moved.get(at, place[at]) > before:
                moved[at] = before
                pending += [maker[i] for i in program.ops[at].inputs if i in inside]
    return sorted(order, key=lambda index: (moved.get(index, place[index]), index not in moved, place[index]))


def barriers_of(program: Program) -> tuple[int, ...]:
    """Indices of the barriers of this program (not of its bodies)."""
    return tuple(index for index, op in enumerate(program.ops) if op.primitive == BARRIER)


def has_barriers(program: Program) -> bool:
    return any(op.primitive == BARRIER for op in program.ops)


def is_held_by_barriers(op: Op, program: Program) -> bool:
    """Whether lowering passes the op's results through the next barrier: gradients, and numbers such as the loss."""
    return "transpose(" in op.scope or (op.outputs[:1] >= (0,) and not program.values[op.outputs[0]].shape)


def barrier_group(program: Program, index: int) -> list[Op]:
    """The barrier ops that stand together: one per tensor of one joint barrier."""
    group = []
    for op in program.ops[index:]:
        if op.primitive != BARRIER:
            break
        group.append(op)
    return group


class _Emitter:
    """Writes ops down after what they read. Operands from last to first: the newest chain runs first, side branches of
    older tensors after it, as backward passes are scheduled."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.maker = {o: index for index, op in enumerate(program.ops) for o in op.outputs if o >= 0}
        self.order: list[int] = []
        self.done = [False] * len(program.ops)

    def demand(self, values: Iterable[int]) -> None:
        """Everything that these values need, in the order given."""
        for value in values:
            if value in self.maker:
                self._visit(self.maker[value])

    def _visit(self, root: int) -> None:
        stack = [(root, False)]
        while stack:
            index, ready = stack.pop()
            if self.done[index]:
                continue
            if ready:
                self.done[index] = True
                self.order.append(index)
                continue
            stack.append((index, True))
            stack += [(self.maker[i], False) for i in self.program.ops[index].inputs if i in self.maker]

    def rest(self) -> None:
        """Ops that are kept for their effects alone."""
        self.order += [index for index, done in enumerate(self.done) if not done]
