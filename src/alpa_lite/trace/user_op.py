"""``al.register_rule``: a user's function becomes one op with the user's own sharding rule.

Nothing is registered anywhere: the rule travels with the function that ``register_rule`` returns, as the parameter of the
one op that it traces to, or, for a JAX primitive by name, with ``PlanOptions(rules=...)``. Outside of a plan the returned
function computes what the given one does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from alpa_lite._jax_compat import calling_primitive
from alpa_lite.core.rule_text import NamedRule, RuleText, parse_rule
from alpa_lite.errors import RuleError, user_line


@dataclass(frozen=True, slots=True, eq=False)
class UserOp:
    """What a user op runs.

    Attributes:
        fn: arrays in, list of arrays out; runs on tiles as on whole arrays.
        label: name for reports.
        rule: as registered.
        check: compare sharded with whole values when a plan is made.
    """

    fn: Callable[..., list[Any]]
    label: str
    rule: RuleText
    check: bool

    def batched(self, mapped: Sequence[bool]) -> UserOp:
        axes = tuple(0 if m else None for m in mapped)
        return replace(self, fn=jax.vmap(self.fn, in_axes=axes), rule=self.rule.batched(mapped))

    def __str__(self) -> str:
        return f"{self.label}: {self.rule.to_text()}"


user_op_p = calling_primitive(
    "user_op", function=lambda op: op.fn, batched=lambda mapped, op: {"op": op.batched(mapped)}
)


class RuledFunction:
    """A function that stays one op in a plan; made by ``register_rule``. Keyword arguments are static values."""

    def __init__(self, fn: Callable[..., Any], rule: RuleText, check: bool) -> None:
        self.rule, self._check = rule, check
        self._flat: dict[Any, tuple[UserOp, list[Any]]] = {}  # so that a repeated call compiles once
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__ = fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)  # a partial has none

    def __call__(self, *args: Any, **static: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(args)
        key = (tree, tuple(sorted(static.items())))
        try:
            known = key in self._flat
        except TypeError as error:
            name = next((k for k, v in static.items() if getattr(v, "__hash__", None) is None), next(iter(static)))
            raise RuleError(
                f"{self.__name__} was called with the keyword {name!r} of type {type(static[name]).__name__}. "
                "Keyword arguments of a registered function are static: hashable Python values. Pass arrays by position, one "
                f"term of the rule {self.rule.text!r} per leaf."
            ) from error
        if not known:
            self._flat[key] = self._flatten(tree, static)
        op, out_tree = self._flat[key]
        results = user_op_p.bind(*leaves, op=op)
        return jax.tree_util.tree_unflatten(out_tree[0], results)

    def _flatten(self, tree: Any, static: dict[str, Any]) -> tuple[UserOp, list[Any]]:
        """The op of one argument tree, and a cell that its first trace fills with the tree of the result."""
        out_tree: list[Any] = [None]

        def flat(*leaves: Any) -> list[Any]:
            made = self.__wrapped__(*jax.tree_util.tree_unflatten(tree, leaves), **static)
            results, out_tree[0] = jax.tree_util.tree_flatten(made)
            return results

        return UserOp(flat, self.__name__, self.rule, self._check), out_tree

    def __repr__(self) -> str:
        return f"<al.register_rule({self.rule.to_text()!r}) of {self.__wrapped__}>"


def register_rule(
    target: str | Callable[..., Any],
    rule: str | None = None,
    /,
    *,
    reduction: str | Sequence[str] = (),
    need_replication: str | Sequence[str] = (),
    reduce_op: str = "add",
    check: bool = False,
    **factor_sizes: int,
) -> Any:
    """Say how a function of yours may be split over devices, in the notation of JAX's ``SdyShardingRule``.

    Three forms, none of which changes anything global:

    - ``@al.register_rule("i k, k j -> i j", reduction="k")`` decorates a function;
    - ``al.register_rule(fn, "i k, k j -> i j", reduction="k")`` returns the decorated function;
    - ``al.register_rule("my_primitive", "... i -> ... i")`` returns a ``NamedRule`` for every op of a JAX primitive, to be given
      as ``al.PlanOptions(rules=(...,))``.

    The decorated function stays one op: a plan runs it on tiles, with local shapes, and adds the collectives that the rule
    asks for. Its arguments are pytrees of arrays, one term of the rule per leaf; keyword arguments are static values. Under
    ``jax.grad`` the result is still the one op and its derivative is that of the body; around a kernel without a derivative put
    ``jax.custom_vjp``, and register the kernels inside.

    Args:
        target: the rule, the function, or the name of a primitive; see above.
        rule: the rule in the second and third form.
        reduction: factors of operands whose split leaves partial results, joined by ``reduce_op``. A factor that stands on one
            side only and is not named here stays whole.
        need_replication: factors that may not be split.
        reduce_op: "add", "max" or "min".
        check: whenever a plan is made, run the function on random data, sharded and whole, and refuse a rule that is wrong.
        factor_sizes: sizes of factors that stand only in ``(a b)``.

    Raises:
        RuleError: the rule is malformed (with a caret at the character).

    Example:
        >>> @al.register_rule("... i k, k j -> ... i j", reduction="k")
        ... def my_matmul(x, w): ...
    """

    def parse(text: str) -> RuleText:
        return parse_rule(
            text, reduction=reduction, need_replication=need_replication, reduce_op=reduce_op, **factor_sizes
        )

    def ruled(fn: Callable[..., Any], parsed: RuleText) -> RuledFunction:
        if not callable(fn):
            raise RuleError(
                f"al.register_rule was given {fn!r} to rule, which cannot be called. A rule belongs to a function, or to a "
                f"primitive by its name. At {user_line()}. Use it as @al.register_rule('i k, k j -> i j') above the function."
            )
        return RuledFunction(fn, parsed, check)

    if rule is None:
        if not isinstance(target, str):
            raise RuleError(
                f"al.register_rule got {target!r} and no rule; it takes a rule such as 'i k, k j -> i j'. "
                "Use it as @al.register_rule('i k, k j -> i j') above the function."
            )
        parsed = parse(target)
        return lambda fn: ruled(fn, parsed)
    if isinstance(target, str):
        if check:
            raise RuleError(
                f"al.register_rule({target!r}, ..., check=True): a rule for a primitive has no function to run. "
                "check=True goes with a function. Leave it out, or use al.rules.check on a function that binds the primitive."
            )
        return NamedRule(primitive=target, rule=parse(rule))
    return ruled(target, parse(rule))
