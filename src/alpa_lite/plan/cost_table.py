"""What a plan's objective is made of: one row per op, per conversion and for state; the total is the sum of the rows.

A conversion that reduces the partial sums of one op belongs to that op's row, as its price and its final layout; every
other conversion has a row of its own, before the op that reads it. Ops and conversions without a price have rows too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alpa_lite.core.conversion import Conversion
from alpa_lite.plan.records import OpDecision, SearchStep, StagePlan
from alpa_lite.units import format_cost

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan

SHOWN_ROWS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One part of the objective.

    Attributes:
        kind: "op", "conversion" or "state".
        path: of the op, or of the op (or end of the program) before which the conversion stands.
        name: the op's primitive, or the tensor, e.g. "%14".
        before, after: of an op the layouts of its operands and result, of a conversion the tensor's before and after it.
        cost: in the plan's unit, over all executions and readers.
        readers: of a conversion: how many readers pay for it.
    """

    kind: str
    path: str
    name: str
    before: str
    after: str
    cost: float
    readers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """All rows in program order; ``str`` shows those with a price first of all, if they are many."""

    rows: tuple[CostRow, ...]
    unit: str
    costs: str
    search: tuple[SearchStep, ...] = ()

    @property
    def total(self) -> float:
        """Sum of the rows: the plan's objective."""
        return math.fsum(row.cost for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        shown = self.rows
        if len(shown) > SHOWN_ROWS:
            dearest = sorted(self.rows, key=lambda row: -row.cost)[:SHOWN_ROWS]
            kept = {id(row) for row in dearest if row.cost}
            shown = tuple(row for row in self.rows if id(row) in kept)
        cells = [("name", "in", "out", "cost")]
        cells += [(_name(row), row.before, row.after, format_cost(row.cost, self.unit)) for row in shown]
        left = [row for row in self.rows if not any(row is s for s in shown)] if len(shown) < len(self.rows) else []
        if left:
            rest = format_cost(math.fsum(row.cost for row in left), self.unit)
            cells.append((f"and {len(left)} further rows", "", "", rest))
        cells.append(("total", "", "", format_cost(self.total, self.unit)))
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        for row in cells:
            line = "  ".join(cell.ljust(w) for cell, w in zip(row[:3], widths[:3], strict=True))
            yield f"{line}  {row[3].rjust(widths[3])}".rstrip()
        yield from search_lines(self.search, self.unit)


def search_lines(search: tuple[SearchStep, ...], unit: str) -> Iterator[str]:
    """The search trace as text."""
    for step in search[:-1]:
        yield f"{step.found_by}: {format_cost(step.objective, unit)}"
    for step in search[-1:]:
        if step.found_by == "proof":
            yield f"proof: nothing costs less than {format_cost(step.objective, unit)}"
        else:
            bound = format_cost(step.lower_bound, unit)
            yield f"{step.found_by}: {format_cost(step.objective, unit)}, proven to be at least {bound}"


def cost_table(plan: Plan) -> CostTable:
    """The table of a plan, also of one read from a file."""
    rows = tuple(row for stage in plan.stages for row in _stage_rows(stage))
    return CostTable(rows=rows, unit=plan.unit, costs=plan.costs, search=plan.search)


def _stage_rows(stage: StagePlan) -> Iterator[CostRow]:
    decided = {d.path: d for d in stage.decisions}
    at_place: dict[str, list[Conversion]] = defaultdict(list)
    reduces: dict[str, list[Conversion]] = defaultdict(list)
    for conversion in stage.conversions:
        maker = decided.get(conversion.made_by)
        if maker is not None and conversion.source.unreduced and len(maker.results) == 1:
            reduces[conversion.made_by].append(conversion)
    inside = {id(found[0]) for found in reduces.values() if len(found) == 1}
    for conversion in stage.conversions:
        if id(conversion) not in inside:
            at_place[conversion.op].append(conversion)
    for decision in stage.decisions:
        yield from (_conversion_row(c) for c in at_place.pop(decision.path, ()))
        own = [c for c in reduces[decision.path] if id(c) in inside]
        yield _op_row(decision, own)
    for rest in at_place.values():
        yield from map(_conversion_row, rest)
    if stage.penalty:
        yield CostRow(kind="state", path="", name="replicated state", before="", after="", cost=stage.penalty)


def _op_row(decision: OpDecision, reductions: list[Conversion]) -> CostRow:
    results = [c.target for c in reductions] or list(decision.results)
    return CostRow(
        kind="op",
        path=decision.path,
        name=decision.op.partition("(")[0] or "op",
        before=" x ".join(map(str, decision.operands)),
        after=" ".join(map(str, results)),
        cost=math.fsum([decision.time_s, *(c.cost for c in reductions)]),
    )


def _conversion_row(c: Conversion) -> CostRow:
    return CostRow(
        kind="conversion",
        path=c.op,
        name=f"%{c.value}",
        before=str(c.source),
        after=str(c.target),
        cost=c.cost,
        readers=c.readers,
    )


def _name(row: CostRow) -> str:
    if row.kind == "op":
        return f"{row.path} {row.name}"
    if row.kind == "conversion":
        readers = f" x{row.readers}" if row.readers > 1 else ""
        return f"|- {row.name}{readers} before {row.path}"
    return row.name


def layout_schedule(plan: Plan) -> str:
    """Which arguments to shard, and where a tensor changes its layout; nothing else moves."""
    lines = [f"shard    {leaf.path}: {leaf.spec}" for leaf in plan.inputs if not leaf.spec.is_replicated]
    for stage in plan.stages:
        names = {d.path: d.op.partition("(")[0] for d in stage.decisions}
        for c in stage.conversions:
            how = ", ".join(str(step.kind or "slice") for step in c.steps)
            place = f"before {c.op} {names[c.op]}" if c.op in names else "at the end"
            made = f" (made by {c.made_by} {names[c.made_by]})" if c.made_by in names else ""
            lines.append(f"convert  %{c.value}{made} {place}: {c.source} -> {c.target} by {how}")
    return "\n".join(lines) + "\n" if lines else "nothing is sharded and nothing converted\n"
