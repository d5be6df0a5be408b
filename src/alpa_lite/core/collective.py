"""Kinds and records of collectives, shared by costs, plan, lowering and audit.

``size_bytes`` follows one convention everywhere, per device: the *larger* side of the collective. That is the result of an
all-gather, the operand of a reduce-scatter, and operand = result of an all-reduce, all-to-all or collective-permute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CollectiveKind(StrEnum):
    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    COLLECTIVE_PERMUTE = "collective-permute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective that the plan priced.

    Attributes:
        kind: which one.
        axes: mesh axes it runs over, in mesh order.
        size_bytes: per device and execution, see the module docstring.
        count: executions per step (the trip counts of enclosing loops multiplied).
        time_s: predicted time of one execution.
        op: path of the op whose operand (or result) it converts.
        source: the user's file and line.
        tensor: what is moved, e.g. "0/params/kernel" or "%17".
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    size_bytes: int
    count: int = 1
    time_s: float = 0.0
    op: str = ""
    source: str = ""
    tensor: str = ""
