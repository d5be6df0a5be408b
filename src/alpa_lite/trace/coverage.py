"""Which primitives a function uses, where their sharding rules come from, and what stays replicated and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from alpa_lite.core.program import Op
from alpa_lite.core.rule import FactorKind
from alpa_lite.trace.program import trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageRow:
    """One primitive.

    Attributes:
        primitive: its name.
        count: how many ops.
        origin: "shardy", "own" (ours, because Shardy has none), "user" (registered) or "none" (unknown: replicated).
        splittable: how many of the ops have a factor that may be split.
        example: one rule.
        reason: for all but "shardy".
    """

    primitive: str
    count: int
    origin: str
    splittable: int
    example: str
    reason: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """All primitives of one function, most frequent first; prints as a table."""

    rows: tuple[CoverageRow, ...]

    @property
    def replicated(self) -> tuple[CoverageRow, ...]:
        """Primitives of which no op may be split."""
        return tuple(row for row in self.rows if not row.splittable)

    def __str__(self) -> str:
        lines = [f"{'primitive':28} {'ops':>6} {'split':>6}  {'rule from':9}  rule, reason"]
        for row in self.rows:
            text = row.example if not row.reason else f"{row.example}  ({row.reason})"
            lines.append(f"{row.primitive:28} {row.count:6} {row.splittable:6}  {row.origin:9}  {text}")
        return "\n".join(lines) + "\n"


def coverage(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Coverage:
    """The rules of every primitive that ``fn(*args, **kwargs)`` uses.

    Args:
        fn: a function that ``jax.jit`` can trace.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct`` pytrees.

    Example:
        >>> print(al.rules.coverage(train_step, state, batch))
    """
    program = trace(fn, args, kwargs).program
    found: dict[tuple[str, str, str], list[Op]] = {}
    for _, _, op in program.walk():
        found.setdefault((op.primitive, op.rule.origin, op.rule.reason), []).append(op)
    rows = []
    for (primitive, origin, reason), ops in found.items():
        free = [op for op in ops if any(f.kind is not FactorKind.REPLICATED and f.size > 1 for f in op.rule.factors)]
        rows.append(
            CoverageRow(
                primitive=primitive,
                count=len(ops),
                origin=origin,
                splittable=len(free) if not ops[0].bodies else len(ops),
                example="" if ops[0].bodies else str((free or ops)[0].rule),
                reason=reason,
            )
        )
    return Coverage(tuple(sorted(rows, key=lambda row: (-row.count, row.primitive, row.reason))))
