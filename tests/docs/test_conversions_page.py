"""The page on conversions prints what the code prints, and its picture can be drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from alpa_lite.costs.conversion import SpecSpace

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conversions_page", DOCS / "conversions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(page):
    text = (DOCS / "conversions.md").read_text(encoding="utf-8")
    assert page.filled(text) == text, "run python docs/conversions.py"
    assert page.filled(text.replace("total", "sum")) == text


@pytest.mark.medium
def test_the_picture_shows_every_step(page, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    space = SpecSpace(mesh=page.MESH, rank=2)
    assert {str(spec) for spec in space.specs} == set(page.PLACES)
    assert {str(step.kind or "slice") for step in space.steps} == set(page.COLOURS)
    monkeypatch.setattr(page, "PICTURE", tmp_path / "images" / "graph.png")
    page.draw()
    drawn = (tmp_path / "images" / "graph.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 10_000
    assert (DOCS / "images" / "conversion_graph.png").exists()
