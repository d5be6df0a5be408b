"""The sharding rule of every op: Shardy's where it has one, ours where it has none.

On top of Shardy's factors it is stated here how partial results of a reduction factor are joined (``reduce_op``), in
``linearity`` in which operands an op is linear, and in ``blocked`` which factors our lowering cannot split.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from alpa_lite._jax_compat import Literal, annotate_sharding_rules, lower_many
from alpa_lite.core.rule import FactorKind, OpShardingRule
from alpa_lite.core.rule_text import RuleText
from alpa_lite.trace.blocked import blocked_factors, one_sided_factors
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.linearity import linear_groups
from alpa_lite.trace.own_rules import own_rule
from alpa_lite.trace.shardy import called_functions, check_composed, compose_rules
from alpa_lite.trace.user_rules import registered_rule

# How partial results over a reduction factor are joined. A primitive that is absent may not split such a factor.
_REDUCE_OPS = {
    "dot_general": "add",
    "conv_general_dilated": "add",
    "reduce_sum": "add",
    "scatter-add": "add",
    "gather": "add",  # each device looks up its own rows and contributes zero for the others
    "reduce_max": "max",
    "reduce_min": "min",
}


def op_key(op: FlatOp, flat: FlatJaxpr) -> tuple[Any, ...]:
    """Equal keys mean equal computation: primitive, parameters, operand types, literal values."""
    operands = tuple(
        ("lit", str(i.aval), str(i.val)) if isinstance(i, Literal) else _aval_key(flat.avals[i]) for i in op.inputs
    )
    return (op.name, op.settings, operands)


def _aval_key(aval: Any) -> tuple[Any, ...]:
    return (aval.shape, dtype_name(aval.dtype)) if hasattr(aval, "shape") else (str(aval),)


@functools.cache
def dtype_name(dtype: Any) -> str:
    """``str(dtype)``, which takes numpy longer than all else that is asked of a value, and there are few types."""
    return str(dtype)


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
    alike: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for key, (op, flat) in ops.items():
        text = op.params["op"].rule if op.name == "user_op" else (named or {}).get(op.name)
        own = registered_rule(op, flat, text) if text is not None else own_rule(op, flat)
        if own is not None:
            rules[key] = own
        else:
            alike[key] = _rule_key(op, flat, key)
            asked.setdefault(alike[key], (op, flat))
    found = dict(zip(asked, _ask_shardy(list(asked.values())), strict=True))
    for key, like in alike.items():
        rules[key] = _finish(*ops[key], found[like])
    return rules


def _rule_key(op: FlatOp, flat: FlatJaxpr, key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Ops with one key have one rule of Shardy's: that of a slice knows the shapes alone, so that the layers' rows of a stacked
    parameter are asked for once."""
    if op.name != "slice":
        return key
    return op.name, op.params["strides"], key[2], flat.avals[op.all_outputs[0]].shape


def _ask_shardy(ops: list[tuple[FlatOp, FlatJaxpr]]) -> list[OpShardingRule]:
    """Shardy's composed rules, operands in the order of the op's non-literal inputs."""
    if not ops:
        return []
    equations = [
        (
            op.primitive,
            op.params,
            [i if isinstance(i, Literal) else flat.avals[i] for i in op.inputs],
            [flat.avals[o] for o in op.all_outputs],
        )
        for op, flat in ops
    ]
    module = annotate_sharding_rules(lower_many(equations))
    names = called_functions(module)
    assert len(names) == len(ops), f"asked for {len(ops)} rules, the module has {len(names)} calls"
    return compose_rules(module, names)


def _finish(op: FlatOp, flat: FlatJaxpr, rule: OpShardingRule) -> OpShardingRule:
    """Insert literal operands, add reduce_op and linearity, block what our lowering cannot split."""
    real = iter(rule.operands)
    operands = tuple(() if isinstance(i, Literal) else next(real) for i in op.inputs)
    rule = replace(rule, operands=operands, reduce_op=_REDUCE_OPS.get(op.name, ""), linear=linear_groups(op, flat))
    shapes = [() if isinstance(i, Literal) else flat.avals[i].shape for i in op.inputs]
    shapes += [flat.avals[o].shape for o in op.all_outputs]
    assert check_composed(rule, shapes), f"rule {rule} does not fit {op.name} {shapes}"
    blocked = set(blocked_factors(op, rule)) | set(one_sided_factors(op, rule))
    factors = tuple(
        replace(f, kind=FactorKind.REPLICATED)
        if i in blocked or (f.kind is FactorKind.REDUCTION and not rule.reduce_op)
        else f
        for i, f in enumerate(rule.factors)
    )
    return replace(rule, factors=factors)
