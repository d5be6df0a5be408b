"""Sharding rules of ours, each with its reason, for the ops that Shardy has none for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax

from alpa_lite._jax_compat import Jaxpr, Literal, partitionable_threefry
from alpa_lite.core.rule import Factor, FactorKind, OpShardingRule
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.linearity import is_bool, is_zero, linear_groups

_UNSHARDED = {
    "rng_bit_generator": "its stream depends on the whole shape",
    "random_seed": "keys are scalars",
    "random_wrap": "keys are scalars",
    "random_unwrap": "keys are scalars",
    "random_split": "keys are scalars",
    "random_fold_in": "keys are scalars",
    "random_gamma": "its loop draws a data-dependent number of bits",
    "top_k": "Shardy gives chlo.top_k no rule",
    "pallas_call": "a custom kernel; its access pattern is unknown",
    "shard_map": "laid out by the user's own shard_map",
    "custom_call": "its access pattern is unknown",
    "ffi_call": "its access pattern is unknown",
    "pure_callback": "a host callback sees whole arrays",
    "io_callback": "a host callback sees whole arrays",
    "debug_callback": "a host callback sees whole arrays",
    "debug_print": "a host callback sees whole arrays",
}


def own_rule(op: FlatOp, flat: FlatJaxpr) -> OpShardingRule | None:
    """Rules for what Shardy has none for; None means ask Shardy."""
    if op.bodies:
        return _replicated_rule(op, flat, "control flow is solved through its bodies")
    if any(0 in getattr(flat.avals[v], "shape", ()) for v in (*_value_ids(op), *op.all_outputs)):
        return _replicated_rule(op, flat, "an empty tensor")
    if op.name in ("dynamic_slice", "dynamic_update_slice"):
        return _window_rule(op, flat)
    if op.name == "iota":
        return _free_result_rule(op, flat, "every tile of an iota is an iota plus an offset")
    if op.name == "random_bits" and _counter_based(op, flat):
        return _free_result_rule(op, flat, "partitionable threefry draws element i from counter i alone")
    if op.name == "broadcast_in_dim" and isinstance(op.inputs[0], Literal) and len(op.inputs) == 1:
        rule = _free_result_rule(op, flat, "a broadcast literal is the same in every tile")
        # Zero is a partial sum of zero: an empty linear group lets the result start out unreduced.
        return replace(rule, linear=((),)) if is_zero(op.inputs[0]) and not is_bool(op, flat) else rule
    if op.name in ("pin", "optimization_barrier", "sharding_constraint", "copy_p", "device_put"):
        return _identity_rule(op, flat)
    if op.name == "pad_mask":
        rule = replace(_identity_rule(op, flat), reason="elementwise: each tile knows where it begins")
        return rule if op.params["fill"] == "0" else replace(rule, linear=())
    if op.name in _UNSHARDED:
        rule = _replicated_rule(op, flat, _UNSHARDED[op.name])
        return _batch_dims_free(rule, op, flat) if op.name == "top_k" else rule
    if _on_keys(op, flat):
        return _replicated_rule(op, flat, "moves typed keys, which are small")
    if op.name == "random_bits" and not _draws_by_counter(op, flat):
        return _replicated_rule(op, flat, "this generator draws in sequence")
    if _has_shaped_body(op):
        return _replicated_rule(op, flat, "it holds a function of fixed shapes")
    return None


def _value_ids(op: FlatOp) -> list[int]:
    return [i for i in op.inputs if not isinstance(i, Literal)]


def _has_shaped_body(op: FlatOp) -> bool:
    """Whether a parameter is a jaxpr on tensors; it would not fit local tiles. (Reducers work on scalars.)"""
    for value in op.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if isinstance(jaxpr, Jaxpr) and any(getattr(v.aval, "shape", ()) for v in (*jaxpr.invars, *jaxpr.outvars)):
            return True
    return False


def _window_rule(op: FlatOp, flat: FlatJaxpr) -> OpShardingRule:
    """dynamic_slice, dynamic_update_slice: dims that the window covers may be split (there the start is 0)."""
    update = op.name == "dynamic_update_slice"
    whole = _aval(op.inputs[0], flat).shape
    window = _aval(op.inputs[1], flat).shape if update else flat.avals[op.all_outputs[0]].shape
    factors: list[Factor] = []
    tensors: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
    for size, part in zip(whole, window, strict=True):
        kind = FactorKind.PASS_THROUGH if size == part else FactorKind.REPLICATED
        for tensor, n in zip(tensors, (size, part), strict=True):
            if n != 1 and not (size == part and tensor is tensors[1]):
                factors.append(Factor(size=n, kind=kind))
            tensor.append(() if n == 1 else (len(factors) - 1,))
    large, small = tuple(tensors[0]), tuple(tensors[1])
    starts: tuple[tuple[tuple[int, ...], ...], ...] = ((),) * (len(op.inputs) - 1 - update)
    rule = OpShardingRule(
        operands=(large, small, *starts) if update else (large, *starts),
        results=(large,) if update else (small,),
        factors=tuple(factors),
        linear=linear_groups(op, flat),
        origin="own",
        reason="a dim is split only where the window covers it",
    )
    literal = [isinstance(i, Literal) for i in op.inputs]
    return replace(rule, operands=tuple(() if lit else dims for lit, dims in zip(literal, rule.operands, strict=True)))


def _aval(atom: Any, flat: FlatJaxpr) -> Any:
    return atom.aval if isinstance(atom, Literal) else flat.avals[atom]


def _on_keys(op: FlatOp, flat: FlatJaxpr) -> bool:
    """Whether a typed key takes part: StableHLO sees it with one more dim, so that Shardy's rule would not fit."""
    values = [*(i for i in op.inputs if not isinstance(i, Literal)), *op.all_outputs]
    dtypes = (getattr(flat.avals[v], "dtype", None) for v in values)
    return any(d is not None and jax.dtypes.issubdtype(d, jax.dtypes.extended) for d in dtypes)


def _counter_based(op: FlatOp, flat: FlatJaxpr) -> bool:
    """Partitionable threefry on one key with 32-bit counters: tile by tile the same bits."""
    small = math.prod(op.params["shape"]) < 2**32
    return flat.avals[op.inputs[0]].shape == () and small and _draws_by_counter(op, flat)


def _draws_by_counter(op: FlatOp, flat: FlatJaxpr) -> bool:
    return "fry" in str(flat.avals[op.inputs[0]].dtype) and partitionable_threefry()


def _whole(avals: list[Any], first: int, kind: FactorKind) -> tuple[list[tuple[tuple[int, ...], ...]], list[Factor]]:
    """One factor per dim of size > 1, all of one kind."""
    dims, factors = [], []
    for aval in avals:
        tensor: list[tuple[int, ...]] = []
        for size in getattr(aval, "shape", ()):
            if size == 1:
                tensor.append(())
            else:
                tensor.append((first + len(factors),))
                factors.append(Factor(size=size, kind=kind))
        dims.append(tuple(tensor))
    return dims, factors


def _replicated_rule(op: FlatOp, flat: FlatJaxpr, reason: str) -> OpShardingRule:
    """Nothing may be split."""
    ins = [None if isinstance(i, Literal) else flat.avals[i] for i in op.inputs]
    dims, factors = _whole(ins + [flat.avals[o] for o in op.all_outputs], 0, FactorKind.REPLICATED)
    n = len(ins)
    return OpShardingRule(
        operands=tuple(dims[:n]), results=tuple(dims[n:]), factors=tuple(factors), origin="own", reason=reason
    )


def _free_result_rule(op: FlatOp, flat: FlatJaxpr, reason: str) -> OpShardingRule:
    """Every dim of the one result may be split; operands (scalars, keys, sizes) stay whole."""
    ins = [None if isinstance(i, Literal) else flat.avals[i] for i in op.inputs]
    operands, blocked = _whole(ins, 0, FactorKind.REPLICATED)
    results, free = _whole([flat.avals[o] for o in op.all_outputs], len(blocked), FactorKind.PASS_THROUGH)
    return OpShardingRule(
        operands=tuple(operands), results=tuple(results), factors=(*blocked, *free), origin="own", reason=reason
    )


def _identity_rule(op: FlatOp, flat: FlatJaxpr) -> OpShardingRule:
    dims, factors = _whole([flat.avals[op.all_outputs[0]]], 0, FactorKind.PASS_THROUGH)
    return OpShardingRule(
        operands=(dims[0],), results=(dims[0],), factors=tuple(factors), linear=((0,),), origin="own", reason="identity"
    )


def _batch_dims_free(rule: OpShardingRule, op: FlatOp, flat: FlatJaxpr) -> OpShardingRule:
    """top_k: all dims but the searched one pass through."""
    axis = op.params["axis"]
    batch, factors = _whole([flat.avals[op.inputs[0]]], 0, FactorKind.PASS_THROUGH)
    searched = batch[0][axis]
    factors = [replace(f, kind=FactorKind.REPLICATED) if (i,) == searched else f for i, f in enumerate(factors)]
    results = []
    for o in op.all_outputs:
        size = flat.avals[o].shape[axis]
        if size != 1:
            factors.append(Factor(size=size, kind=FactorKind.REPLICATED))
        found = () if size == 1 else (len(factors) - 1,)
        results.append((*batch[0][:axis], found, *batch[0][axis + 1 :]))
    return replace(rule, operands=(batch[0],), results=tuple(results), factors=tuple(factors))
