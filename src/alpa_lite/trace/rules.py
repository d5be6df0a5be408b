"""The sharding rule of every op: Shardy's where it has one, ours (each with its reason) where it has none.

On top of Shardy's factors this module states what Shardy leaves open: how partial results of a reduction factor are joined
(``reduce_op``) and in which operands an op is linear, so that partial sums may pass through it unreduced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from alpa_lite._jax_compat import Jaxpr, Literal, annotate_sharding_rules, lower_many, partitionable_threefry
from alpa_lite.core.rule import Factor, FactorKind, OpShardingRule
from alpa_lite.core.rule_text import RuleText
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.shardy import called_functions, check_composed, compose_rules
from alpa_lite.trace.user_rules import registered_rule

# How partial results over a reduction factor are joined. A primitive that is absent may not split such a factor.
REDUCE_OPS = {
    "dot_general": "add",
    "conv_general_dilated": "add",
    "reduce_sum": "add",
    "scatter-add": "add",
    "gather": "add",  # each device looks up its own rows and contributes zero for the others
    "reduce_max": "max",
    "reduce_min": "min",
}

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

ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bitcast_convert_type",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "one_minus_square",
        "not",
        "optimization_barrier",
        "or",
        "pad_mask",
        "pin",
        "population_count",
        "pow",
        "real",
        "imag",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
        "threefry2x32",
    ]
)

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
    "custom_call": "its access pattern is unknown",
    "ffi_call": "its access pattern is unknown",
    "pure_callback": "a host callback sees whole arrays",
    "io_callback": "a host callback sees whole arrays",
    "debug_callback": "a host callback sees whole arrays",
    "debug_print": "a host callback sees whole arrays",
}


def op_key(op: FlatOp, flat: FlatJaxpr) -> tuple[Any, ...]:
    """Equal keys mean equal computation: primitive, parameters, operand types, literal values."""
    operands = tuple(
        ("lit", str(i.aval), str(i.val)) if isinstance(i, Literal) else _aval_key(flat.avals[i]) for i in op.inputs
    )
    params = tuple((k, _param_key(v)) for k, v in op.params.items() if k != "group" and not op.bodies)
    return (op.name, params, operands)


def _aval_key(aval: Any) -> tuple[Any, ...]:
    return (aval.shape, str(aval.dtype)) if hasattr(aval, "shape") else (str(aval),)


def _param_key(value: Any) -> Any:
    if value is None or isinstance(value, int | str | bool | float):
        return value
    if isinstance(value, tuple) and all(isinstance(v, int | str | bool) for v in value):
        return value
    return re.sub(r"0x[0-9a-f]+", "", str(value))


def rules_for(
    ops: dict[tuple[Any, ...], tuple[FlatOp, FlatJaxpr]], named: Mapping[str, RuleText] | None = None
) -> dict[tuple[Any, ...], OpShardingRule]:
    """Rules of distinct ops without bodies, by key; one Shardy query for all that need one.

    Args:
        ops: by ``op_key``.
        named: the user's rules by primitive; they replace all others.
    """
    rules: dict[tuple[Any, ...], OpShardingRule] = {}
    asked: dict[tuple[Any, ...], tuple[FlatOp, FlatJaxpr]] = {}
    for key, (op, flat) in ops.items():
        text = op.params["op"].rule if op.name == "user_op" else (named or {}).get(op.name)
        own = registered_rule(op, flat, text) if text is not None else _own_rule(op, flat)
        if own is not None:
            rules[key] = own
        else:
            asked[key] = (op, flat)
    for (key, (op, flat)), rule in zip(asked.items(), _ask_shardy(list(asked.values())), strict=True):
        rules[key] = _finish(op, flat, rule)
    return rules


def _ask_shardy(ops: list[tuple[FlatOp, FlatJaxpr]]) -> list[OpShardingRule]:
    """Shardy's composed rules, operands in the order of the op's non-literal inputs."""
    if not ops:
        return []
    functions = [_caller(op) for op, _ in ops]
    arguments = [[_struct(flat.avals[i]) for i in op.inputs if not isinstance(i, Literal)] for op, flat in ops]
    module = annotate_sharding_rules(lower_many(functions, arguments))
    names = called_functions(module)
    assert len(names) == len(ops), f"asked for {len(ops)} rules, the module has {len(names)} calls"
    return compose_rules(module, names)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _caller(op: FlatOp) -> Callable[..., Any]:
    """A function of the non-literal inputs that binds the op's primitive."""

    def call(*args: Any) -> Any:
        it = iter(args)
        return op.primitive.bind(*(i.val if isinstance(i, Literal) else next(it) for i in op.inputs), **op.params)

    return call


def _finish(op: FlatOp, flat: FlatJaxpr, rule: OpShardingRule) -> OpShardingRule:
    """Insert literal operands, add reduce_op and linearity, block what our lowering cannot split."""
    real = iter(rule.operands)
    operands = tuple(() if isinstance(i, Literal) else next(real) for i in op.inputs)
    rule = replace(rule, operands=operands, reduce_op=REDUCE_OPS.get(op.name, ""), linear=_linear_groups(op, flat))
    shapes = [() if isinstance(i, Literal) else flat.avals[i].shape for i in op.inputs]
    shapes += [v.aval.shape for v in _outvars(op, flat)]
    assert check_composed(rule, shapes), f"rule {rule} does not fit {op.name} {shapes}"
    blocked = set(_blocked_factors(op, rule)) | set(_one_sided_factors(op, rule))
    factors = tuple(
        replace(f, kind=FactorKind.REPLICATED)
        if i in blocked or (f.kind is FactorKind.REDUCTION and not rule.reduce_op)
        else f
        for i, f in enumerate(rule.factors)
    )
    return replace(rule, factors=factors)


class _Out:
    def __init__(self, aval: Any) -> None:
        self.aval = aval


def _outvars(op: FlatOp, flat: FlatJaxpr) -> list[_Out]:
    return [_Out(flat.avals[o]) for o in op.all_outputs]


def _linear_groups(op: FlatOp, flat: FlatJaxpr) -> tuple[tuple[int, ...], ...]:
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
    elif (name == "convert_element_type" and _widens(op, flat)) or (
        name == "pad" and isinstance(inputs[1], Literal) and float(inputs[1].val) == 0.0
    ):
        groups = ((0,),)
    # A literal that takes part in a sum cannot be unreduced, except zero, which is a partial sum of zero.
    return tuple(
        tuple(i for i in g if not isinstance(inputs[i], Literal))
        for g in groups
        if all(not isinstance(inputs[i], Literal) or _is_zero(inputs[i]) for i in g)
        and any(not isinstance(inputs[i], Literal) for i in g)
    )


def _is_linear(op: FlatOp, flat: FlatJaxpr) -> bool:
    """False for ops of the tables above whose parameters or types make them non-linear."""
    if _is_bool(op, flat):  # truth values do not add up
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


def _is_bool(op: FlatOp, flat: FlatJaxpr) -> bool:
    return str(getattr(flat.avals[op.all_outputs[0]], "dtype", "")) == "bool"


def _is_zero(literal: Any) -> bool:
    try:
        return float(literal.val) == 0.0
    except (TypeError, ValueError):
        return False


def _widens(op: FlatOp, flat: FlatJaxpr) -> bool:
    """Rounding partial sums to fewer bits would change the result; widening a float does not."""
    if isinstance(op.inputs[0], Literal):
        return False
    old, new = flat.avals[op.inputs[0]].dtype, op.params["new_dtype"]
    return jax.numpy.issubdtype(old, jax.numpy.floating) and jax.numpy.promote_types(old, new) == new


def _blocked_factors(op: FlatOp, rule: OpShardingRule) -> list[int]:
    """Factors that Shardy would split but our shard-by-shard evaluation cannot."""
    if op.name == "gather":
        return _blocked_in_gather(op, rule)
    if op.name.startswith("scatter"):
        return _blocked_in_scatter(op, rule)
    if op.name == "conv_general_dilated":
        return _blocked_in_convolution(op, rule)
    return []


# Results of these may have dims that no operand has: their size is a parameter.
_SIZE_IS_PARAMETER = frozenset(["broadcast_in_dim", "tile"])


def _one_sided_factors(op: FlatOp, rule: OpShardingRule) -> set[int]:
    """Factors of operands that no result has and that are not summed, and factors of results that no operand has.

    Composed rules have them where an op in between has no rule (a LAPACK call) or sizes do not align (a reshape).
    """
    read = {f for tensor in rule.operands for dim in tensor for f in dim}
    made = {f for tensor in rule.results for dim in tensor for f in dim}
    read -= {i for i, f in enumerate(rule.factors) if f.kind is FactorKind.REDUCTION}
    if op.name in _SIZE_IS_PARAMETER:
        return read - made
    if op.name == "gather":  # an indexed dim of the operand: joined by reduce_op or blocked already
        return made - read
    return read ^ made


def _blocked_in_convolution(op: FlatOp, rule: OpShardingRule) -> list[int]:
    """Windows that overlap or are padded need neighbours' rows; grouped channels are split over the batch only."""
    params, numbers = op.params, op.params["dimension_numbers"]
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        keep = set(rule.operands[0][numbers.lhs_spec[0]]) if params["batch_group_count"] == 1 else set()
        return [i for i in range(len(rule.factors)) if i not in keep]
    blocked: list[int] = []
    for i, (lhs, rhs) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
        window = rule_size(rule, rule.operands[1][rhs])
        tiled = params["padding"][i] == (0, 0) and params["window_strides"][i] == window
        plain = params["lhs_dilation"][i] == 1 and params["rhs_dilation"][i] == 1
        blocked += rule.operands[1][rhs]
        if not (tiled and plain):
            blocked += rule.operands[0][lhs]
    return blocked


def _blocked_in_gather(op: FlatOp, rule: OpShardingRule) -> list[int]:
    """An indexed operand dim may be split only when the slice takes one whole element of it."""
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    blocked = []
    for dim, factors in enumerate(rule.operands[0]):
        indexed = dim in numbers.start_index_map
        single = indexed and sizes[dim] == 1 and dim in numbers.collapsed_slice_dims
        partial = not indexed and dim not in numbers.operand_batching_dims and rule_size(rule, factors) != sizes[dim]
        if (indexed and not single) or partial:
            blocked += factors
    return blocked


def _blocked_in_scatter(op: FlatOp, rule: OpShardingRule) -> list[int]:
    """As for gather; only scatter-add can join the contributions of several devices."""
    numbers = op.params["dimension_numbers"]
    blocked = []
    for dim, factors in enumerate(rule.operands[0]):
        indexed = dim in numbers.scatter_dims_to_operand_dims
        if indexed and dim not in numbers.inserted_window_dims:
            blocked += factors
    if op.name != "scatter-add":
        updates = {f for d in rule.operands[1] + rule.operands[2] for f in d}
        kept = {f for d, fs in enumerate(rule.operands[0]) for f in fs if d not in numbers.scatter_dims_to_operand_dims}
        blocked += [f for f in range(len(rule.factors)) if f not in kept or (f not in updates and f not in kept)]
    return blocked


def rule_size(rule: OpShardingRule, factors: tuple[int, ...]) -> int:
    size = 1
    for i in factors:
        size *= rule.factors[i].size
    return size


def _own_rule(op: FlatOp, flat: FlatJaxpr) -> OpShardingRule | None:
    """Rules for what Shardy has none for; None means ask Shardy."""
    if op.bodies:
        return replicated_rule(op, flat, "control flow is solved through its bodies", origin="own")
    if any(0 in getattr(flat.avals[v], "shape", ()) for v in (*_value_ids(op), *op.all_outputs)):
        return replicated_rule(op, flat, "an empty tensor", origin="own")
    if op.name in ("dynamic_slice", "dynamic_update_slice"):
        return _window_rule(op, flat)
    if op.name == "iota":
        return _free_result_rule(op, flat, "every tile of an iota is an iota plus an offset")
    if op.name == "random_bits" and _counter_based(op, flat):
        return _free_result_rule(op, flat, "partitionable threefry draws element i from counter i alone")
    if op.name == "broadcast_in_dim" and isinstance(op.inputs[0], Literal) and len(op.inputs) == 1:
        rule = _free_result_rule(op, flat, "a broadcast literal is the same in every tile")
        # Zero is a partial sum of zero: an empty linear group lets the result start out unreduced.
        return replace(rule, linear=((),)) if _is_zero(op.inputs[0]) and not _is_bool(op, flat) else rule
    if op.name == "shard_map":
        return replicated_rule(op, flat, "laid out by the user's own shard_map", origin="own")
    if op.name in ("pin", "optimization_barrier", "sharding_constraint", "copy_p", "device_put"):
        return _identity_rule(op, flat)
    if op.name == "pad_mask":
        rule = replace(_identity_rule(op, flat), reason="elementwise: each tile knows where it begins")
        return rule if op.params["fill"] == "0" else replace(rule, linear=())
    if op.name in _UNSHARDED:
        rule = replicated_rule(op, flat, _UNSHARDED[op.name], origin="own")
        return _batch_dims_free(rule, op, flat) if op.name == "top_k" else rule
    if _on_keys(op, flat):
        return replicated_rule(op, flat, "moves typed keys, which are small", origin="own")
    if op.name == "random_bits" and not _draws_by_counter(op, flat):
        return replicated_rule(op, flat, "this generator draws in sequence", origin="own")
    if _has_shaped_body(op):
        return replicated_rule(op, flat, "it holds a function of fixed shapes", origin="own")
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
        linear=_linear_groups(op, flat),
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


def replicated_rule(op: FlatOp, flat: FlatJaxpr, reason: str, origin: str = "none") -> OpShardingRule:
    """Nothing may be split."""
    ins = [None if isinstance(i, Literal) else flat.avals[i] for i in op.inputs]
    dims, factors = _whole(ins + [flat.avals[o] for o in op.all_outputs], 0, FactorKind.REPLICATED)
    n = len(ins)
    return OpShardingRule(
        operands=tuple(dims[:n]), results=tuple(dims[n:]), factors=tuple(factors), origin=origin, reason=reason
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
