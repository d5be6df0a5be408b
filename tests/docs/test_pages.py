"""The pages of the manual say what the code says, and the pictures beside them can be drawn anew."""

from __future__ import annotations

import pytest

from docs import conventions, conversions, export, pages, pipelines, probing, sameness, serving, symbolic, uneven

# The script of a page with generated text, and a change of that text which must not survive.
WRITTEN = [
    pytest.param(conversions, ("total", "sum"), id="conversions"),
    pytest.param(sameness, ("| all-gather |", "| gather |"), id="sameness"),
    pytest.param(symbolic, ("no plan for n", "a plan for n"), id="symbolic", marks=pytest.mark.medium),
    pytest.param(uneven, ("in 8 parts", "in 4 parts"), id="uneven", marks=pytest.mark.medium),
]
DRAWN = [
    *(conventions, conversions, export, probing, sameness, serving, symbolic, uneven),
    pytest.param(pipelines, marks=pytest.mark.slow),  # compiles and runs two pipelines
]


@pytest.mark.parametrize(("script", "change"), WRITTEN)
def test_the_page_is_up_to_date(script, change):
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.filled(text) == text, f"run python -m {script.__name__}"
    changed = text.replace(*change)
    assert changed != text and script.filled(changed) == text


@pytest.mark.medium
@pytest.mark.parametrize("script", DRAWN, ids=lambda script: script.__name__)
def test_the_picture_is_drawn(script, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    assert script.PICTURE.exists() and script.PICTURE.parent == pages.IMAGES
    monkeypatch.setattr(script, "PICTURE", tmp_path / "images" / script.PICTURE.name)
    monkeypatch.setattr(symbolic, "VALUES", (1, 2))  # two solutions instead of ten
    monkeypatch.setattr(serving, "TOKENS", (1, 64))
    script.draw()
    drawn = script.PICTURE.read_bytes()
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 5_000
