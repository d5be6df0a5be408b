"""In which operands an op is linear, so that partial sums may pass through it unreduced; Shardy leaves that open."""

from __future__ import annotations

from typing import Any

import jax

from alpa_lite._jax_compat import Literal
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp

# Operand groups in which an op is linear; see OpShardingRule.linear.
_LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "mul": ((0,), (1,)),
    "div": ((0,),),
    "dot_general": ((0,), (1,)),
    "conv_general_dilated": ((0,), (1,)),
    "add": ((0, 1),),
    "add_any": ((0, 1),),
    "sub": ((0, 1),),
    "dynamic_update_slice": ((0, 1),),
    "scatter-add": ((0, 2),),
}
# Those linear in their first operand.
_LINEAR_FIRST = frozenset(
    [
        "neg",
        "transpose",
        "reshape",
        "broadcast_in_dim",
        "reduce_sum",
        "squeeze",
        "expand_dims",
        "slice",
        "copy",
        "copy_p",
        "rev",
        "cumsum",
        "dynamic_slice",
        "gather",
        "optimization_barrier",
        "pin",
    ]
)


def linear_groups(op: FlatOp, flat: FlatJaxpr) -> tuple[tuple[int, ...], ...]:
    """Groups of operands: the result is linear in those of a group taken together. See ``OpShardingRule.linear``."""
    name, inputs = op.name, op.inputs
    groups: tuple[tuple[int, ...], ...] = ()
    if not _is_linear(op, flat):
        return ()
    if name in _LINEAR_FIRST:
        groups = ((0,),)
    elif name in _LINEAR:
        groups = _LINEAR[name]
    elif name == "concatenate":
        groups = (tuple(range(len(inputs))),)
    elif name == "select_n":
        groups = (tuple(range(1, len(inputs))),)
    elif (name == "convert_element_type" and _widens(op, flat)) or (name == "pad" and is_zero(inputs[1])):
        groups = ((0,),)
    # A literal that takes part in a sum cannot be unreduced, except zero, which is a partial sum of zero.
    return tuple(
        tuple(i for i in g if not isinstance(inputs[i], Literal))
        for g in groups
        if all(is_zero(inputs[i]) for i in g if isinstance(inputs[i], Literal))
        and any(not isinstance(inputs[i], Literal) for i in g)
    )


def _is_linear(op: FlatOp, flat: FlatJaxpr) -> bool:
    """False for ops of the tables above whose parameters or types make them non-linear."""
    if is_bool(op, flat):  # truth values do not add up
        return False
    if op.name == "div":  # integers are rounded
        return bool(jax.numpy.issubdtype(flat.avals[op.all_outputs[0]].dtype, jax.numpy.inexact))
    if op.name == "gather" and op.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
        # Every device would contribute the fill value. NaN, the default for floats, and zero stay what they are.
        fill = op.params["fill_value"]
        return fill == 0 or (
            fill is None and bool(jax.numpy.issubdtype(flat.avals[op.all_outputs[0]].dtype, jax.numpy.inexact))
        )
    return True


def is_bool(op: FlatOp, flat: FlatJaxpr) -> bool:
    """Whether the first result holds truth values."""
    return str(getattr(flat.avals[op.all_outputs[0]], "dtype", "")) == "bool"


def is_zero(atom: Any) -> bool:
    """Whether an input of an op is the literal zero."""
    try:
        return isinstance(atom, Literal) and float(atom.val) == 0.0
    except (TypeError, ValueError):
        return False


def _widens(op: FlatOp, flat: FlatJaxpr) -> bool:
    """Rounding partial sums to fewer bits would change the result; widening a float does not."""
    if isinstance(op.inputs[0], Literal):
        return False
    old, new = flat.avals[op.inputs[0]].dtype, op.params["new_dtype"]
    try:
        return jax.numpy.issubdtype(old, jax.numpy.floating) and jax.numpy.promote_types(old, new) == new
    except jax.dtypes.TypePromotionError:  # of floats of 8 bits and fewer, which nothing is said of
        return False
