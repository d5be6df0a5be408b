"""The page on uneven dims: its example prints what it shows, and its picture shows what JAX would hold."""

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
    spec = importlib.util.spec_from_file_location("uneven_page", DOCS / "uneven.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.medium
def test_the_page_is_up_to_date(page):
    text = (DOCS / "uneven.md").read_text(encoding="utf-8")
    assert page.filled(text) == text, "run python docs/uneven.py"
    assert page.filled(text.replace("in 8 parts", "in 4 parts")) == text


def test_the_picture_shows_the_layouts_it_names(page):
    mesh = device_mesh((page.DEVICES,))
    for (_, devices), spec in zip(page.panels(), ("[_,x]", "[_,x]", "[x,_]"), strict=True):
        held = owned(ShardingSpec.parse(spec), devices.shape, mesh).reshape(page.DEVICES, *devices.shape)
        for device in range(page.DEVICES):
            np.testing.assert_array_equal(held[device], devices == device)
    assert (DOCS / "images" / "uneven.png").exists()
