"""A plan as plain aligned text; what ``print(plan)`` shows. Needs nothing but the records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from alpa_lite.plan.summary import Section, summary

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan

GAP = "  "


def plan_text(plan: Plan) -> str:
    """All sections of the plan, one below the other."""
    return "\n\n".join("\n".join(section_lines(section)) for section in summary(plan)) + "\n"


def section_lines(section: Section) -> Iterator[str]:
    """Title, heading, rows, footer; columns are as wide as their widest cell."""
    yield section.title
    if not section.columns:
        yield from (f"- {row[0]}" for row in section.rows)
    else:
        table = [section.columns, *section.rows] if any(section.columns) else list(section.rows)
        widths = [max(len(row[i]) for row in table) for i in range(len(section.columns))]
        for row in table:
            cells = [
                cell.rjust(width) if i in section.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield (GAP + GAP.join(cells)).rstrip()
    if section.footer:
        yield GAP + section.footer
