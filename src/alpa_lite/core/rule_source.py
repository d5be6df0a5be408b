"""A rule for certain shapes -> the line of source that registers it; the inverse of reading and resolving a rule's text."""

from __future__ import annotations

import itertools

from alpa_lite.core.rule import FactorKind, OpShardingRule
from alpa_lite.core.rule_text import REDUCE_OPS


def suggest(rule: OpShardingRule) -> str:
    """The rule as a line of source that registers it, e.g. to keep what ``al.rules.probe`` found.

    Every dim is written out, so it holds for other sizes of the same ranks. Partial results that ``register_rule`` cannot join
    (products) are left out, their factors stay whole.

    Example:
        >>> al.rules.suggest(al.rules.probe(my_matmul, x, w))
        '@al.register_rule("i k, k j -> i j", reduction="k")'
    """
    spare = (f"one{n}" for n in itertools.count())  # a dim of size 1 has no factor in the rule
    tensors = [
        [[rule.factor_name(f) for f in dim] or [next(spare)] for dim in dims]
        for dims in (*rule.operands, *rule.results)
    ]
    terms = [" ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims) for dims in tensors]
    count = len(rule.operands)
    keywords = [f'"{", ".join(terms[:count])} -> {", ".join(terms[count:])}"']
    if rule.reduction_factors and rule.reduce_op in REDUCE_OPS:
        keywords.append(f'reduction="{" ".join(map(rule.factor_name, rule.reduction_factors))}"')
        keywords += [f'reduce_op="{rule.reduce_op}"'] if rule.reduce_op != "add" else []
    sides = [{f for dims in side for dim in dims for f in dim} for side in (rule.operands, rule.results)]
    whole = [i for i, f in enumerate(rule.factors) if f.kind is FactorKind.REPLICATED and i in sides[0] & sides[1]]
    if whole:  # those on one side only stay whole without a word
        keywords.append(f'need_replication="{" ".join(map(rule.factor_name, whole))}"')
    alone = {dim[0] for dims in tensors for dim in dims if len(dim) == 1}
    sized = {f for dims in tensors for dim in dims for f in dim[:-1]} - alone  # the last of a dim is what is left
    keywords += [f"{rule.factor_name(i)}={f.size}" for i, f in enumerate(rule.factors) if rule.factor_name(i) in sized]
    return f"@al.register_rule({', '.join(keywords)})"
