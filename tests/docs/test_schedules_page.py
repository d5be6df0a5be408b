"""The page ``docs/schedules.md``: its Python runs and prints its text, and its formulas are those of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alpa_lite.schedule import GENERATORS, bubble_s, peak_residuals

TEXT = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")


def test_the_blocks_print_what_stands_below_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    shown = 0
    for block, text in re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", TEXT, re.DOTALL):
        exec(block, names)
        printed = capsys.readouterr().out
        assert printed.rstrip("\n") == text.rstrip("\n")
        shown += bool(text)
    assert shown == 3 and (tmp_path / "trace.json").exists() and (tmp_path / "mine.csv").exists()


def test_the_table_of_generators():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.*?) \| (.*?) \|", TEXT, re.MULTILINE)
    assert [name for name, *_ in rows] == list(GENERATORS)
    p, m, v, F, I, W = 4, 8, 2, 3.0, 2.5, 1.5  # noqa: E741
    for name, bubble, residuals in rows:
        chunks = v if name == "interleaved-1f1b" else 1
        assert value(bubble, p=p, m=m, v=v, F=F, I=I, W=W) == pytest.approx(bubble_s(name, p, F, I, W, chunks))
        for i in range(p):
            most = min(value(residuals, p=p, m=m, v=v, i=i), m * chunks)
            assert most == peak_residuals(name, p, m, i, chunks)


def value(formula, **names):
    """A formula of the page, in which products have no sign."""
    return eval(re.sub(r"(?<=[\w)])(?=[(FWI])|(?<=\))(?=p)", "*", formula), names)
