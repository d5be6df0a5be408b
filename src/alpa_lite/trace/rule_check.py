"""Re-checking a rule with numbers: the op on tiles against the op on whole arrays, on fresh random data.

Used by ``al.rules.check``, by ``al.rules.probe`` for what it found, and for functions registered with ``check=True``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from alpa_lite.core.rule import OpShardingRule
from alpa_lite.core.rule_text import parse_rule
from alpa_lite.errors import RuleError
from alpa_lite.trace.flatten import FlatJaxpr
from alpa_lite.trace.samples import Sampler
from alpa_lite.trace.tiles import TileRun, TilesDisagree, contiguous, difference, smallest_split
from alpa_lite.trace.user_rules import operand_structs

ROUNDS = 3


def check(
    fn: Callable[..., Any], rule: OpShardingRule | str, *args: Any, seed: int = 0, **kinds: Any
) -> OpShardingRule:
    """Run ``fn`` whole and on tiles, factor by factor and all together, and compare.

    Args:
        fn: a function of pytrees of arrays; one operand of the rule per leaf.
        rule: a rule, or its text with ``reduction=``, ``need_replication=``, ``reduce_op=`` and sizes as in ``register_rule``.
        args: arrays (their integers are drawn from again) or ``jax.ShapeDtypeStruct`` pytrees.
        seed: of the random data.

    Returns:
        The rule, for these shapes.

    Raises:
        RuleError: a factor does not hold, with what was split and how far off the values are.

    Example:
        >>> al.rules.check(jnp.matmul, "i k, k j -> i j", x, w, reduction="k")
    """
    leaves, flat = flat_function(fn, args)
    name = getattr(fn, "__name__", repr(fn))
    structs = [jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf)) for leaf in leaves]
    if isinstance(rule, str):
        results = [tuple(r.shape) for r in jax.eval_shape(flat, *structs)]
        rule = parse_rule(rule, **kinds).resolve([s.shape for s in structs], results, where=name)
    check_values(flat, rule, Sampler(leaves, seed), name)
    return rule


def flat_function(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[list[Any], Callable[..., list[Any]]]:
    """The leaves of the arguments, and ``fn`` from leaves to a list of leaves."""
    leaves, tree = jax.tree_util.tree_flatten(args)

    def flat(*given: Any) -> list[Any]:
        results = jax.tree_util.tree_leaves(fn(*jax.tree_util.tree_unflatten(tree, given)))
        return [jax.random.key_data(r) if _is_key(r) else jax.numpy.asarray(r) for r in results]

    return leaves, flat


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def check_values(fn: Callable[..., list[Any]], rule: OpShardingRule, sampler: Sampler, name: str) -> None:
    """``check`` on flat arguments."""
    compiled = jax.jit(fn)
    for parts in _splits(rule):
        if fault := compare(compiled, TileRun(fn, rule, parts), sampler):
            raise _wrong(rule, parts, name, fault)


def compare(whole_run: Callable[..., Sequence[Any]], tile_run: TileRun, sampler: Sampler) -> str:
    """What is wrong with a split, on several fresh sets of operands, or ""."""
    for _ in range(ROUNDS):
        args = sampler.draw()
        whole = [np.asarray(r) for r in whole_run(*args)]
        try:
            got = tile_run(args, whole)
        except TilesDisagree as error:
            return str(error)
        for position, (a, b) in enumerate(zip(got, whole, strict=True)):
            if (off := difference(a, b)) > 1.0:
                return f"result {position} differs from the unsharded one, {off:.1e} times what rounding explains"
    return ""


def _splits(rule: OpShardingRule) -> Iterator[dict[int, int]]:
    """Every factor split as little and as far as possible, then all factors at once."""
    together: dict[int, int] = {}
    for factor in range(len(rule.factors)):
        least = smallest_split(rule, factor)
        if least is None:
            continue
        yield least
        together |= {f: n for f, n in least.items() if together.get(f, 1) < n}
        most = least | {factor: rule.factors[factor].size}
        if most != least and math.prod(most.values()) <= _MOST_TILES:
            yield most
    joint = contiguous(rule, together)
    if joint is not None and len(joint) > 1 and math.prod(joint.values()) <= _MOST_TILES:
        yield joint


_MOST_TILES = 256


def _wrong(rule: OpShardingRule, parts: dict[int, int], name: str, fault: str) -> RuleError:
    split = ", ".join(f"{rule.factor_name(f)} in {n}" for f, n in parts.items())
    return RuleError(
        f"the rule {rule} is wrong for {name}: with {split}, {fault}. A factor may be split only if tiles give the same values, "
        "joined as the rule says. At al.register_rule or al.rules.check of this function. Take the factor out, name it in "
        "reduction or need_replication, or let al.rules.probe find the rule."
    )


def check_user_ops(flat: FlatJaxpr) -> None:
    """Check the ops that were registered with ``check=True``, each once for its shapes."""
    done: set[Any] = set()
    for op, owner in _user_ops(flat):
        user = op.params["op"]
        structs = operand_structs(op, owner)
        key = (user, tuple((s.shape, str(s.dtype)) for s in structs))
        if user.check and key not in done:
            done.add(key)
            results = [owner.avals[o].shape for o in op.all_outputs]
            rule = user.rule.resolve([s.shape for s in structs], results, where=f"{user.label} at {op.source}")
            check_values(user.fn, rule, Sampler(structs, 0), f"{user.label} at {op.source}")


def _user_ops(flat: FlatJaxpr) -> Iterator[tuple[Any, FlatJaxpr]]:
    for op in flat.ops:
        if op.name == "user_op":
            yield op, flat
        for body in op.bodies:
            yield from _user_ops(body)
