"""The page on sameness says what the code says, and its picture shows what JAX does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from alpa_lite.core.spec import ShardingSpec
from tests.costs.layout_oracle import owned
from tests.harness import device_mesh

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sameness_page", DOCS / "sameness.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(page):
    text = (DOCS / "sameness.md").read_text(encoding="utf-8")
    assert page.filled(text) == text, "run python docs/sameness.py"
    assert page.filled(text.replace("| all-gather |", "| gather |")) == text


def test_the_picture_shows_what_jax_and_the_oracle_say(page):
    mesh = device_mesh((2, 4))
    for text, spec, _ in page.PANELS:
        found = page.holders(spec)
        held = owned(ShardingSpec.parse(text), page.SHAPE, mesh).reshape(8, *page.SHAPE)
        for (row, column), devices in found.items():
            assert sorted(devices) == np.flatnonzero(held[:, row, column]).tolist()


@pytest.mark.medium
def test_the_picture_is_drawn(page, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(page, "PICTURE", tmp_path / "images" / "map.png")
    page.draw()
    drawn = (tmp_path / "images" / "map.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 10_000
    assert (DOCS / "images" / "device_index_map.png").exists()
