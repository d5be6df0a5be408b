"""The layouts that a rule gives an op on one mesh axis, written out and counted (hidet's ``OpShardSpec``, issue #335).

Comes in: an ``OpShardingRule`` and a number of shards. Goes out: one ``OneAxisRule`` per way to run the same op on shards.
A sum over a split factor counts twice: reduced to the whole result (all-reduce), or to shards of it (reduce-scatter).
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.rule import FactorKind, OpShardingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class OneAxisRule:
    """One way to run an op on the shards of one mesh axis.

    Attributes:
        operands, results: per tensor the split dim, None for a whole tensor.
        factor: the split factor; -1 for the trivial rule (everything whole).
        reduce: the collective that joins partial results, None if results are complete.
        reduce_op: how it joins them.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    factor: int = -1
    reduce: CollectiveKind | None = None
    reduce_op: str = ""

    @property
    def is_trivial(self) -> bool:
        return self.factor < 0

    def __str__(self) -> str:
        def side(dims: tuple[int | None, ...]) -> str:
            return ", ".join("R" if d is None else f"S{d}" for d in dims)

        text = f"{side(self.operands)} -> {side(self.results)}"
        return f"{text} {self.reduce.value}({self.reduce_op})" if self.reduce else text


def enumerate_sharded(rule: OpShardingRule, num_shards: int) -> tuple[OneAxisRule, ...]:
    """All layouts of ``rule`` on one mesh axis of ``num_shards`` devices, the trivial one first.

    A factor counts if the number of shards divides it and it is the major factor of every dim that holds it (else its
    shards are not contiguous). ``num_shards=1`` gives exactly the trivial rule.

    Example:
        >>> for layout in al.rules.enumerate_sharded(rule, 4): print(layout)
        R, R -> R
        S0, R -> S0
        S1, S0 -> R all-reduce(add)
        S1, S0 -> S0 reduce-scatter(add)
        R, S1 -> S1
    """
    found = [OneAxisRule(operands=(None,) * len(rule.operands), results=(None,) * len(rule.results))]
    for number, factor in enumerate(rule.factors):
        if num_shards == 1 or factor.kind is FactorKind.REPLICATED or factor.size % num_shards:
            continue
        places = [_place(rule, dims, number) for dims in (*rule.operands, *rule.results)]
        if any(major is False for _, major in places):
            continue
        dims = tuple(dim for dim, _ in places)
        split = OneAxisRule(operands=dims[: len(rule.operands)], results=dims[len(rule.operands) :], factor=number)
        found += _reduced(rule, split, num_shards) if factor.kind is FactorKind.REDUCTION else [split]
    return tuple(found)


def _place(rule: OpShardingRule, dims: tuple[tuple[int, ...], ...], number: int) -> tuple[int | None, bool | None]:
    """(dim that holds the factor or None, whether only factors of size 1 stand before it there)."""
    for dim, factors in enumerate(dims):
        if number in factors:
            before = factors[: factors.index(number)]
            return dim, all(rule.factors[f].size == 1 for f in before)
    return None, None


def _reduced(rule: OpShardingRule, split: OneAxisRule, num_shards: int) -> list[OneAxisRule]:
    """All-reduce always; reduce-scatter for sums where every result has a dim that divides, on the first such dim."""

    def made(results: tuple[int | None, ...], kind: CollectiveKind) -> OneAxisRule:
        return OneAxisRule(
            operands=split.operands, results=results, factor=split.factor, reduce=kind, reduce_op=rule.reduce_op
        )

    out = [made(split.results, CollectiveKind.ALL_REDUCE)]
    sizes = [[_dim_size(rule, dim) for dim in dims] for dims in rule.results]
    scattered = tuple(next((d for d, n in enumerate(s) if n % num_shards == 0), None) for s in sizes)
    if rule.reduce_op == "add" and None not in scattered:
        out.append(made(scattered, CollectiveKind.REDUCE_SCATTER))
    return out


def _dim_size(rule: OpShardingRule, dim: tuple[int, ...]) -> int:
    size = 1
    for f in dim:
        size *= rule.factors[f].size
    return size
