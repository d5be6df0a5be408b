"""Whether two flat jaxprs compute the same: equal ops on equally numbered values, with equal literals and settings.

Unlike ``plan.identity.fingerprint`` this reads everything that is evaluated, learning rates included, so that one compiled
program may stand for both. Names and places in the user's source may differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alpa_lite._jax_compat import ClosedJaxpr, Jaxpr, Literal
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp

_MIRRORED = frozenset({"jaxpr", "cond_jaxpr", "body_jaxpr", "branches"})  # of ops with bodies: the bodies say the same


def same_flat(one: FlatJaxpr, other: FlatJaxpr) -> bool:
    """Whether both compute the same; False also where it cannot be told."""
    if one is other:
        return True
    return (
        one.inputs == other.inputs
        and one.constants.keys() == other.constants.keys()
        and len(one.ops) == len(other.ops)
        and _same_list(one.outputs, other.outputs)
        and _same_list(one.avals, other.avals)
        and all(_same(c, other.constants[v]) for v, c in one.constants.items())
        and all(map(_same_op, one.ops, other.ops))
    )


def _same_op(one: FlatOp, other: FlatOp) -> bool:
    keys = one.params.keys() - (_MIRRORED if one.bodies else frozenset())
    return (
        one.primitive is other.primitive
        and one.outputs == other.outputs
        and one.all_outputs == other.all_outputs
        and _same_list(one.inputs, other.inputs)
        and ("transpose(" in one.scope) == ("transpose(" in other.scope)  # gradients pass barriers, see lowering.lower
        and one.params.keys() == other.params.keys()
        and all(_same(one.params[k], other.params[k]) for k in keys)
        and len(one.bodies) == len(other.bodies)
        and all(map(same_flat, one.bodies, other.bodies))
    )


def _same_list(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Literal):
        return one.aval == other.aval and _same(one.val, other.val)
    if isinstance(one, ClosedJaxpr):
        return _same(one.jaxpr, other.jaxpr) and _same_list(one.consts, other.consts)
    if isinstance(one, Jaxpr):
        return str(one) == str(other)  # names variables in order, and holds no source
    if isinstance(one, (tuple, list)):
        return _same_list(one, other)
    if hasattr(one, "shape") and hasattr(one, "dtype") and not hasattr(one, "update"):
        return one.dtype == other.dtype and np.array_equal(np.asarray(one), np.asarray(other))
    return bool(one == other)
