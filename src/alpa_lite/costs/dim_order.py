"""Where XLA:GPU copies a tensor only to change the order of its dims in memory.

A transpose of a stored tensor is a relabelling: its readers walk the buffer in its own order. That works until an elementwise
op meets two large operands of different orders, as when the softmax of transposed scores meets the gradient of the
probabilities, which comes from another product: one of the two, or what they are joined to, is written once more. So is what
a loop stacks up in the order of its products if the loop that reads it has products of another order.
"""

from __future__ import annotations

from collections.abc import Sequence

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Conversion
from alpa_lite.core.program import Op, Program

_Order = tuple[int, ...]  # dims from the outermost to the innermost in memory, those of size 1 left out
_FREE = frozenset(["iota", "broadcast_in_dim"])  # computed where they are read, in any order
_PASSED_ON = frozenset(["reshape", "squeeze", "expand_dims", "transpose", "reduce_sum", "reduce_max", "reduce_min"])


def reordering_ops(program: Program) -> list[int]:
    """Indices of the ops of this program (not of its bodies) that join large operands of different orders."""
    return _walk(program, {})


def reordered_stacks(program: Program) -> list[tuple[int, int]]:
    """(Index of a loop, value) for what an earlier loop stacks up in an order that does not suit this one.

    XLA:GPU writes it once more before the loop.
    """
    stacked: dict[int, _Order] = {}
    found: list[tuple[int, int]] = []
    for index, op in enumerate(program.ops):
        if op.primitive != "scan":
            continue
        body, first = op.bodies[0], op.num_consts + op.num_carry
        orders: dict[int, _Order | None] = {}
        usual = len(_walk(body, orders))
        for value, inside in zip(op.inputs[first:], body.inputs[first:], strict=True):
            if value in stacked and len(_walk(body, {inside: stacked[value]})) > usual:
                found.append((index, value))
        for value, inside in zip(op.outputs[op.num_carry :], body.outputs[op.num_carry :], strict=True):
            order = orders.get(inside)
            if value >= 0 and order is not None and order != _default(body.values[inside].shape):
                stacked[value] = order
    return found


def is_turned(conversion: Conversion, program: Program) -> bool:
    """Whether a tensor was gathered along another dim than the innermost, and so lies row by row."""
    step = conversion.steps[-1]
    return step.kind is CollectiveKind.ALL_GATHER and step.source_dim < len(program.values[conversion.value].shape) - 1


def gathers_features(conversion: Conversion, program: Program) -> bool:
    """Whether a tensor was gathered along its innermost dim, and so lies feature by feature."""
    step = conversion.steps[-1]
    return step.kind is CollectiveKind.ALL_GATHER and step.source_dim == len(program.values[conversion.value].shape) - 1


def sums_rows(op: Op) -> bool:
    """Whether the op reduces outer dims and leaves the innermost one, as the gradients of a norm's scale and of a bias do."""
    if not op.primitive.startswith("reduce_") or op.inputs[0] < 0:
        return False
    kept = {factor for dim in op.rule.results[0] for factor in dim}
    dims = op.rule.operands[0]
    return bool(dims) and kept.issuperset(dims[-1])


def _walk(program: Program, orders: dict[int, _Order | None]) -> list[int]:
    """As ``reordering_ops``; ``orders`` may hold those of inputs and is filled."""
    found: list[int] = []
    given = {*program.inputs, *program.constants}
    for index, op in enumerate(program.ops):
        operands = [i for i in op.inputs if i >= 0]
        if op.primitive in _FREE:
            orders.update((o, None) for o in op.outputs if o >= 0)
        elif op.elementwise and op.outputs and op.outputs[0] >= 0:
            shape = program.values[op.outputs[0]].shape
            met = [i for i in operands if program.values[i].shape == shape]
            met.sort(key=lambda i: (i in given, -program.values[i].itemsize))  # masks are turned to suit what they mask
            known = [order for order in (_order_of(i, program, orders) for i in met) if order is not None]
            orders[op.outputs[0]] = known[0] if known else None
            if any(order != known[0] for order in known):
                found.append(index)
        elif op.primitive in _PASSED_ON and operands:
            orders[op.outputs[0]] = _passed_on(op, program, _order_of(operands[0], program, orders))
    return found


def _order_of(value: int, program: Program, orders: dict[int, _Order | None]) -> _Order | None:
    """None: any order will do."""
    return orders[value] if value in orders else _default(program.values[value].shape)


def _default(shape: Sequence[int]) -> _Order:
    return tuple(dim for dim, size in enumerate(shape) if size > 1)


def _passed_on(op: Op, program: Program, order: _Order | None) -> _Order | None:
    """The operand's order in the result's dims, or the default order where dims are split or joined."""
    if order is None or op.outputs[0] < 0:
        return None
    shape = program.values[op.outputs[0]].shape
    place = {factors: dim for dim, factors in enumerate(op.rule.results[0]) if shape[dim] > 1 and factors}
    moved = [place.get(op.rule.operands[0][dim], -1) for dim in order]
    kept = tuple(dim for dim in moved if dim >= 0)
    return kept if sorted(kept) == list(_default(shape)) else _default(shape)
