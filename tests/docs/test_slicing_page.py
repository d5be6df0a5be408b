"""The page on slicing prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import alpa_lite as al

PAGE = Path(__file__).resolve().parents[2] / "docs" / "slicing.md"


def test_the_example_prints_what_the_page_shows(capsys):
    code, printed, counts = re.findall(r"```(?:python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict = {"np": np}
    exec(code, scope)
    assert capsys.readouterr().out.rstrip() == printed.rstrip()
    table = al.interop.compare_stage_counts(
        scope["cost_s"], scope["tolerated"], num_microbatches=16, counts=(1, 2, 3, 4)
    )
    assert str(table) == counts
