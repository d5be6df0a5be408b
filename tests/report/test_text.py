"""Plans as rich tables."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from alpa_lite.plan.load import load_plan
from alpa_lite.report.text import plan_table, plan_view

# The plan that tests/plan saves and compares byte by byte.
SAMPLE = Path(__file__).parent.parent / "golden" / "plan_file.txt"


@pytest.fixture
def plan():
    return load_plan(SAMPLE)


def test_golden(plan, golden):
    golden("report_text", plan_table(plan))


def letters(text):
    return Counter(character for character in text if not character.isspace() and character != "─")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_fits_the_width_and_loses_nothing(plan, width):
    text = plan_table(plan, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert letters(text) == letters(plan_table(plan, width=500))


def test_no_colour_codes_in_text_but_on_a_terminal(plan):
    assert "\x1b" not in plan_table(plan)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=120, _environ={})
    console.print(plan_view(plan))
    assert "\x1b[1mPlan" in console.file.getvalue()


def test_brackets_are_not_markup(plan):
    odd = replace(plan, notes=("[bold]x[/bold] [red] [/]",))
    assert "- [bold]x[/bold] [red] [/]" in plan_table(odd)


def test_the_environment_does_not_matter(plan, monkeypatch):
    before = plan_table(plan)
    for name, value in (("COLUMNS", "40"), ("FORCE_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    assert plan_table(plan) == before
