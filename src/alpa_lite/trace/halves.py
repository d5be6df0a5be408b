"""A stage whose backward pass is split: what other stages wait for first (the input half), then the rest (the weight half).

The input half holds the backward ops that the cotangents need which the stage sends. Everything else, gradients of weights and
their sums, is the weight half. The first stage sends no cotangent: its input half is empty. A ``scan`` over layers makes both in
one op, which belongs to the input half as a whole.
"""

from __future__ import annotations

from dataclasses import replace

from alpa_lite._jax_compat import Literal
from alpa_lite.trace.flatten import FlatJaxpr
from alpa_lite.trace.stages import StageProgram


def split_backward(stage: StageProgram) -> StageProgram:
    """The same program with the ops of the loop's body in the order forward, input half, weight half."""
    loop = stage.flat.ops[stage.loop]
    body, first = loop.bodies[0], stage.num_forward
    early = _input_half(body, first, [body.outputs[j] for j in loop.params["sent"]])
    order = [*range(first), *sorted(early), *(i for i in range(first, len(body.ops)) if i not in early)]
    ordered = replace(loop, bodies=[replace(body, ops=[body.ops[i] for i in order])])
    ordered.all_outputs = loop.all_outputs
    ops = [ordered if op is loop else op for op in stage.flat.ops]
    return replace(stage, flat=replace(stage.flat, ops=ops), weight_half=first + len(early))


def _input_half(body: FlatJaxpr, first: int, sent: list[int]) -> set[int]:
    """Numbers of the ops from ``first`` on that the sent values need. What passes one barrier together stays together."""
    maker = {o: i for i, op in enumerate(body.ops) for o in op.outputs if o >= 0}
    together: dict[object, list[int]] = {}
    for i, op in enumerate(body.ops):
        if "group" in op.params:
            together.setdefault(op.params["group"], []).append(i)
    found: set[int] = set()
    left = [maker[value] for value in sent]
    while left:
        i = left.pop()
        if i < first or i in found:
            continue
        found.add(i)
        op = body.ops[i]
        left += [maker[v] for v in op.inputs if not isinstance(v, Literal) and v in maker]
        left += together.get(op.params.get("group"), [])
    return found
