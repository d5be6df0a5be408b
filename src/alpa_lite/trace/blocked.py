"""Factors of Shardy's rules that may not be split here, because each device evaluates the op on its own tiles."""

from __future__ import annotations

import math

from alpa_lite.core.rule import FactorKind, OpShardingRule
from alpa_lite.trace.flatten import FlatOp

# Results of these may have dims that no operand has: their size is a parameter.
_SIZE_IS_PARAMETER = frozenset(["broadcast_in_dim", "tile"])


def blocked_factors(op: FlatOp, rule: OpShardingRule) -> list[int]:
    """Factors that Shardy would split but our shard-by-shard evaluation cannot."""
    if op.name == "gather":
        return _blocked_in_gather(op, rule)
    if op.name.startswith("scatter"):
        return _blocked_in_scatter(op, rule)
    if op.name == "conv_general_dilated":
        return _blocked_in_convolution(op, rule)
    return []


def one_sided_factors(op: FlatOp, rule: OpShardingRule) -> set[int]:
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
        window = _size(rule, rule.operands[1][rhs])
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
        partial = not indexed and dim not in numbers.operand_batching_dims and _size(rule, factors) != sizes[dim]
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
        kept = {f for d, fs in enumerate(rule.operands[0]) for f in fs if d not in numbers.scatter_dims_to_operand_dims}
        blocked += [f for f in range(len(rule.factors)) if f not in kept]
    return blocked


def _size(rule: OpShardingRule, factors: tuple[int, ...]) -> int:
    return math.prod(rule.factors[i].size for i in factors)
