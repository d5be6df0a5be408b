"""The op sharding rule: which dims of an op's operands and results are split together (Shardy's vocabulary).

A rule lists *factors*. Every dim of every operand and result is an ordered product of factors (major first, empty for a
dim that must stay whole). Splitting a factor over mesh axes splits every dim that contains it.

Text form follows Shardy: ``([i,k],[k,j])->([i,j]) {i=4,j=8,k=16} reduction={k}``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FactorKind(StrEnum):
    """What splitting a factor means (Shardy ``docs/sdy_dialect.md``, OpShardingRuleAttr)."""

    PASS_THROUGH = "pass"  # each tile of the results needs the matching tiles of the operands
    REDUCTION = "reduction"  # each device computes a partial result
    REPLICATED = "replicated"  # may not be split


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor: its size and kind."""

    size: int
    kind: FactorKind = FactorKind.PASS_THROUGH


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShardingRule:
    """How one op may be split.

    Attributes:
        operands: per operand, per dim, the factor indices (major first).
        results: the same for results.
        factors: all factors.
        reduce_op: what joins partial results of reduction factors: "add", "max", "min", "mul", "and", "or" ("" if none).
        linear: groups of operand positions in which the op is linear: if *all* operands of one group are unreduced over an
            axis and no other operand is split or unreduced over it, the results are unreduced over it.
        origin: where the rule comes from: "shardy", "own", "user" (registered), "probed", "none".
        reason: for "own" and "none", why.
    """

    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    factors: tuple[Factor, ...]
    reduce_op: str = ""
    linear: tuple[tuple[int, ...], ...] = ()
    origin: str = "shardy"
    reason: str = ""

    def __post_init__(self) -> None:
        for tensor in self.operands + self.results:
            for dim in tensor:
                for index in dim:
                    assert 0 <= index < len(self.factors), f"factor {index} is not one of {len(self.factors)}"

    @property
    def reduction_factors(self) -> tuple[int, ...]:
        return tuple(i for i, f in enumerate(self.factors) if f.kind is FactorKind.REDUCTION)

    def factor_name(self, index: int) -> str:
        """The name of a factor in the rule's text."""
        return _factor_name(index)

    def __str__(self) -> str:
        names = [_factor_name(i) for i in range(len(self.factors))]

        def tensor(dims: tuple[tuple[int, ...], ...]) -> str:
            return "[" + ",".join("".join(names[i] for i in dim) or "1" for dim in dims) + "]"

        sizes = ",".join(f"{n}={f.size}" for n, f in zip(names, self.factors, strict=True))
        text = f"({','.join(map(tensor, self.operands))})->({','.join(map(tensor, self.results))}) {{{sizes}}}"
        for kind in (FactorKind.REDUCTION, FactorKind.REPLICATED):
            members = [n for n, f in zip(names, self.factors, strict=True) if f.kind is kind]
            if members:
                text += f" {kind.value}={{{','.join(members)}}}"
        if self.reduce_op not in ("", "add"):
            text += f" reduce_op={self.reduce_op}"
        if self.linear:
            text += " linear=" + "|".join(",".join(map(str, group)) for group in self.linear)
        return text


def _factor_name(index: int) -> str:
    return chr(ord("i") + index) if index < 18 else f"z_{index - 17}"
