"""The page on symbolic worker counts says what the code says, and its picture can be drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("symbolic_page", DOCS / "symbolic.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.medium
def test_the_page_is_up_to_date(page):
    text = (DOCS / "symbolic.md").read_text(encoding="utf-8")
    assert page.filled(text) == text, "run python docs/symbolic.py"


@pytest.mark.medium
def test_the_picture_is_drawn(page, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(page, "PICTURE", tmp_path / "images" / "symbolic.png")
    monkeypatch.setattr(page, "VALUES", (1, 2))
    page.draw()
    assert (tmp_path / "images" / "symbolic.png").read_bytes().startswith(b"\x89PNG")
    assert (DOCS / "images" / "symbolic.png").exists()
