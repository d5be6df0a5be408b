"""Floating-point operations of flat ops."""

from __future__ import annotations

import math

import jax
import numpy as np

from alpa_lite._jax_compat import Literal, scan_layout
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp, flatten
from alpa_lite.trace.user_rules import operand_structs


def loop_layout(op: FlatOp) -> tuple[int, int, int]:
    """(number of constants, number of carries, trips) of a loop; trips are 1 where they are not known."""
    if op.name == "scan":
        return *scan_layout(op.params), op.params["length"]
    return 0, 0, 1


def op_flops(op: FlatOp, flat: FlatJaxpr) -> float:
    """Without those of its bodies; an elementwise op counts one per result element."""
    if op.bodies:
        return 0.0
    if op.name == "user_op":
        return total_flops(flatten(jax.make_jaxpr(op.params["op"].fn)(*operand_structs(op, flat))))
    out = [math.prod(flat.avals[o].shape) for o in op.all_outputs if hasattr(flat.avals[o], "shape")]
    ins = [math.prod(np.shape(i.val)) if isinstance(i, Literal) else math.prod(flat.avals[i].shape) for i in op.inputs]
    if op.name == "dot_general":
        (contract, _), _ = op.params["dimension_numbers"]
        lhs = flat.avals[op.inputs[0]].shape
        return 2.0 * out[0] * math.prod(lhs[d] for d in contract)
    if op.name == "conv_general_dilated":
        kernel = flat.avals[op.inputs[1]].shape
        out_features = kernel[op.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * out[0] * math.prod(kernel) / out_features
    if op.name.startswith("reduce") or op.name.startswith("cum") or op.name.startswith("arg"):
        return float(sum(ins))
    return float(sum(out))


def total_flops(flat: FlatJaxpr) -> float:
    """Of all ops, loops counted by their trips."""
    inside = (loop_layout(op)[2] * sum(map(total_flops, op.bodies)) + op_flops(op, flat) for op in flat.ops)
    return float(sum(inside))
