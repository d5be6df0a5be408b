"""A plan as tables of a given width; ``plan_view`` for a terminal with colours, ``plan_table`` as a string."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_lite.plan.plan import Plan
from alpa_lite.plan.summary import Section, summary


def plan_table(plan: Plan, width: int = 120) -> str:
    """The plan as text at most ``width`` columns wide, without colour codes; long cells continue on the next line.

    Example:
        >>> Path("plan.txt").write_text(plan_table(plan))
    """
    file = io.StringIO()
    # Everything that rich would read from the terminal or its environment is given: the same text everywhere.
    console = Console(file=file, width=width, color_system=None, force_terminal=False, no_color=True, _environ={})
    console.print(plan_view(plan))
    return "".join(line.rstrip() + "\n" for line in file.getvalue().splitlines())


def plan_view(plan: Plan) -> RenderableType:
    """The plan for ``rich.console.Console.print``."""
    return Group(*(part for section in summary(plan) for part in _section(section)))


def _section(section: Section) -> tuple[RenderableType, ...]:
    title = Text(section.title, style="bold")
    footer = (Text("  " + section.footer, style="dim"),) if section.footer else ()
    if not section.columns:
        notes = (Text("- " + row[0]) for row in section.rows)
        return (title, *notes, *footer, Text(""))
    return (title, _table(section), *footer, Text(""))


def _table(section: Section) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=any(section.columns), show_edge=False, pad_edge=True)
    for position, heading in enumerate(section.columns):
        # Text, not str: rich would read the brackets of a spec as markup.
        right = position in section.right
        table.add_column(Text(heading), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
