"""The picture of timelines: a bar per action, and what it needs."""

from __future__ import annotations

import sys

import pytest

from alpa_lite.errors import AlpaLiteError
from alpa_lite.report import timeline as module
from alpa_lite.report.timeline import draw_timelines
from alpa_lite.schedule import ActionKind, make_schedule, simulate_schedule

LINES = {
    name: simulate_schedule(make_schedule(name, 4, 4, chunks), lambda action: 1.0, lambda transfer: 0.5)
    for name, chunks in (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1))
}


@pytest.mark.medium
def test_a_picture_has_a_bar_per_action(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = {}
    real = module._panel

    def panel(axes, line, width_s, unit_s):
        kinds, further = real(axes, line, width_s, unit_s)
        drawn[line.name] = (len(axes.patches), len(axes.texts), kinds, further, axes.get_xlim()[1])
        return kinds, further

    monkeypatch.setattr(module, "_panel", panel)
    draw_timelines(LINES, tmp_path / "lines.png")
    assert (tmp_path / "lines.png").read_bytes().startswith(b"\x89PNG")
    for name, line in LINES.items():
        bars, texts, kinds, further, right = drawn[name]
        actions = [event.label for event in line.events if not event.lane]
        assert bars == len(actions) and texts == sum(label[-1].isdigit() for label in actions)
        assert (ActionKind.W in kinds) == (name == "zb-h1")
        assert further == (name == "interleaved-1f1b")
        assert right == max(line.makespan_s for line in LINES.values())


@pytest.mark.medium
def test_short_steps_are_drawn_in_their_own_unit(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    schedule, scales = make_schedule("1f1b", 4, 4, 1), []
    real = module._panel
    monkeypatch.setattr(module, "_panel", lambda *args: scales.append(args[-1]) or real(*args))
    for seconds in (1.0, 1e-3, 1e-6, 1e-9):
        line = simulate_schedule(schedule, lambda action, s=seconds: s, lambda transfer: 0.0)
        draw_timelines({"": line}, tmp_path / "lines.svg")
    assert scales == [1.0, 1e-3, 1e-6, 1e-6]


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AlpaLiteError, match=r"needs matplotlib.*alpa-lite\[plots\]"):
        draw_timelines(LINES, tmp_path / "lines.png")
