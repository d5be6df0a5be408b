"""The rules of ops that users gave one to: fitted to the op's shapes and tried on the shapes of a tile before they count.

Comes in: an op of ``al.register_rule``, or any op with a ``NamedRule`` for its primitive. Goes out: its ``OpShardingRule``.
The op must give local results for local operands; that is asked of JAX abstractly, nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from alpa_lite._jax_compat import Literal
from alpa_lite.core.rule import OpShardingRule
from alpa_lite.core.rule_text import NamedRule, RuleText
from alpa_lite.errors import RuleError
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.tiles import smallest_split, tile_shape


def registered_rule(op: FlatOp, flat: FlatJaxpr, text: RuleText) -> OpShardingRule:
    """The rule of one op under a registered text.

    Raises:
        RuleError: it does not fit the op's shapes, or the op cannot run on tiles.
    """
    operands = operand_structs(op, flat)
    results = [jax.ShapeDtypeStruct(flat.avals[o].shape, flat.avals[o].dtype) for o in op.all_outputs]
    name = shown_name(op)
    rule = text.resolve([a.shape for a in operands], [a.shape for a in results], where=f"{name} at {op.source}")
    if rule.reduce_op in ("max", "min") and (len(results) > 1 or op.name != "user_op"):
        raise RuleError(
            f"the rule {text.text!r} of {name} joins partial results by {rule.reduce_op}. Only 'add' is possible for an op with "
            f"several results and for a rule by primitive name. At {op.source}. Take the factor out of reduction, or register a "
            "function with one result."
        )
    check_tile_shapes(_bind(op), rule, operands, results, f"{name} at {op.source}")
    return rule


def shown_name(op: FlatOp) -> str:
    """Name of an op in programs and reports: ``user_op:NAME`` for a registered function, else its primitive's."""
    return f"user_op:{op.params['op'].label}" if op.name == "user_op" else op.name


def named_rules(rules: Sequence[NamedRule], ops: Sequence[FlatOp]) -> dict[str, RuleText]:
    """Rules by primitive.

    Raises:
        RuleError: a primitive has two rules, or does not occur, or is control flow.
    """
    found: dict[str, RuleText] = {}
    known = {op.name: op for op in ops}
    for named in rules:
        name = named.primitive
        fault = ""
        if name in found:
            fault = "has two rules"
        elif name not in known:
            fault = f"does not occur in the function; it has {', '.join(sorted(known))}"
        elif known[name].bodies or name in ("user_op", "pin", "shard_map"):
            fault = "cannot take a rule by name"
        if fault:
            raise RuleError(
                f"PlanOptions(rules=...): the primitive {name!r} {fault}. One rule for each primitive that occurs as an "
                f"op of the function (no control flow) is allowed. Rule: {named.rule.text!r}. "
                "Correct the name, or take the rule out."
            )
        found[name] = named.rule
    return found


def check_tile_shapes(
    fn: Callable[..., list[Any]],
    rule: OpShardingRule,
    operands: Sequence[jax.ShapeDtypeStruct],
    results: Sequence[jax.ShapeDtypeStruct],
    where: str,
) -> None:
    """Split each factor as little as possible and ask JAX for the result shapes.

    Raises:
        RuleError: they are not those that the rule says, or the op refuses the tile.
    """
    for number in range(len(rule.factors)):
        parts = smallest_split(rule, number)
        if parts is None:
            continue
        local = [
            jax.ShapeDtypeStruct(tile_shape(rule, dims, parts, a.shape), a.dtype)
            for dims, a in zip(rule.operands, operands, strict=True)
        ]
        want = [tile_shape(rule, dims, parts, a.shape) for dims, a in zip(rule.results, results, strict=True)]
        given = f"on tiles {', '.join(str(list(a.shape)) for a in local)}"
        try:
            got = [tuple(a.shape) for a in jax.eval_shape(fn, *local)]
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise _tile_error(rule, number, where, f"{given} the op fails: {type(error).__name__}: {first}") from error
        if got != want:
            shapes = " and ".join(", ".join(str(list(s)) for s in shapes) for shapes in (want, got))
            raise _tile_error(rule, number, where, f"{given} the rule and the op give different results, {shapes}")


def _tile_error(rule: OpShardingRule, number: int, where: str, fault: str) -> RuleError:
    return RuleError(
        f"the rule {rule} does not fit: with factor {rule.factor_name(number)} split, {fault}. A rule may only split what the "
        f"op's own code computes tile by tile. At {where}. Name the factor in need_replication, or derive sizes from the "
        "operands' shapes instead of fixing them."
    )


def operand_structs(op: FlatOp, flat: FlatJaxpr) -> list[jax.ShapeDtypeStruct]:
    """Shapes and types of an op's operands, literals included."""
    avals: list[Any] = [i.aval if isinstance(i, Literal) else flat.avals[i] for i in op.inputs]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def _bind(op: FlatOp) -> Callable[..., list[Any]]:
    def call(*args: Any) -> list[Any]:
        out = op.primitive.bind(*args, **op.params)
        return list(out) if op.primitive.multiple_results else [out]

    return call
