"""What a recorder makes of programs and transfers that are over at once."""

from __future__ import annotations

import time

import jax.numpy as jnp
import pytest

from alpa_lite.executor.measure import Recorder

PAUSE_S = 0.02


def test_a_program_starts_when_it_is_issued_and_what_it_reads_has_arrived():
    record, there = Recorder(), jnp.zeros(1)
    record.ran(0, "0F0", there)
    time.sleep(PAUSE_S)
    record.sent(5, 0, 1, "x0@0", "0F0", [there])
    record.ran(1, "1F0", there, [5])
    time.sleep(PAUSE_S)
    record.ran(1, "1B0", there)
    line = record.timeline("test", 2)
    spans = {event.label: (event.start_s, event.end_s) for event in line.events}
    assert [(e.mesh, e.lane, e.label) for e in line.events] == [
        (0, "", "0F0"),
        (0, "to mesh 1", "x0@0"),
        (1, "", "1F0"),
        (1, "", "1B0"),
    ]
    assert spans["0F0"][0] == 0.0
    assert spans["x0@0"][0] >= PAUSE_S and spans["1F0"][0] >= spans["x0@0"][1]
    assert spans["1B0"][0] >= max(2 * PAUSE_S, spans["1F0"][1])
    assert line.makespan_s == spans["1B0"][1] < 60, "times count from the first start"
    assert line.busy_s == pytest.approx(
        [spans["0F0"][1] - spans["0F0"][0], sum(spans[k][1] - spans[k][0] for k in ("1F0", "1B0"))]
    )


def test_nothing_recorded():
    line = Recorder().timeline("empty", 2)
    assert line.makespan_s == 0 and line.events == () and line.bubble_share == 0
