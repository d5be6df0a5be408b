"""Timelines as text and as trace files."""

from __future__ import annotations

import json
import re

import pytest

from alpa_lite.schedule import (
    ActionKind,
    Event,
    chain_step,
    chrome_trace,
    make_schedule,
    simulate_schedule,
    timeline_text,
    write_trace,
)

K = ActionKind
SECONDS = {K.F: 1.0, K.B: 2.0, K.GRADSYNC: 0.5, K.UPDATE: 0.5}


def timeline(bytes_=0, transfer_s=0.25):
    schedule = make_schedule("1f1b", 4, 8)
    step = chain_step(schedule, residual_bytes=bytes_)
    return simulate_schedule(schedule, lambda a: SECONDS[a.kind], lambda t: transfer_s, step)


def test_a_trace_holds_every_event_of_every_group(tmp_path):
    predicted = timeline()
    measured = [Event(0, 0.0, 1.5, "0F0"), Event(3, 1.5, 2.0, "3F0")]
    groups = {"predicted": predicted.events, "measured": measured}
    path = tmp_path / "trace.json"
    write_trace(path, groups)
    trace = json.loads(path.read_text())
    entries = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert list(names.values()) == ["predicted", "measured"]
    found = {name: [] for name in groups}
    for e in entries:
        if e["ph"] == "X":
            words = lanes[e["pid"], e["tid"]].split(" ", 2)
            lane = words[2] if len(words) == 3 else ""
            start, end = e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6
            found[names[e["pid"]]].append((int(words[1]), lane, e["name"], pytest.approx(start), pytest.approx(end)))
    for name, events in groups.items():
        assert found[name] == [(e.mesh, e.lane, e.label, e.start_s, e.end_s) for e in events]
    assert {e["cat"] for e in entries if e["ph"] == "X"} == {"F", "B", "G", "U", "transfer"}


def test_a_trace_refuses_what_json_cannot_hold():
    with pytest.raises(ValueError, match="not JSON compliant"):
        chrome_trace({"measured": [Event(0, 0.0, float("nan"), "0F0")]})
    assert json.loads(chrome_trace({}))["traceEvents"] == []


def test_the_text_of_a_timeline(golden):
    golden("schedule_timeline", str(timeline(bytes_=2**20)))


def test_each_character_is_its_part_of_the_time():
    events = [
        Event(0, 0.0, 4.0, "0F0"),
        Event(0, 6.0, 10.0, "0B0"),
        Event(1, 4.0, 6.0, "1F0"),
        Event(1, 0, 9, "x", "l"),
    ]
    assert timeline_text(events, width=10) == "mesh 0 |FFFF..BBBB|\nmesh 1 |....FF....|\n"
    assert timeline_text(events, width=5) == "mesh 0 |FF.BB|\nmesh 1 |..F..|\n"
    assert timeline_text([]) == ""


@pytest.mark.parametrize("width", [7, 50, 96, 333])
def test_the_idle_part_of_the_text_is_the_bubble(width):
    played = timeline()
    rows = timeline_text(played.events, width=width).splitlines()
    assert len(rows) == 4 and all(re.fullmatch(rf"mesh \d \|[FBGU.]{{{width}}}\|", row) for row in rows)
    if width == 333:
        idle = sum(row.count(".") for row in rows) / (4 * width)
        assert idle == pytest.approx(played.bubble_share, abs=0.02)


def test_figures():
    played = timeline(transfer_s=0.0)
    assert played.makespan_s == 8 * 3 + 3 * 3 + 1
    assert played.busy_s == (25.0,) * 4 and played.bubble_s == (9.0,) * 4
    assert played.bubble_share == pytest.approx(9 / 34)
