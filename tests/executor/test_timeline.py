"""Measured timelines against simulated ones, where every pass takes a fixed delay that needs no core."""

from __future__ import annotations

import json

import pytest

import alpa_lite as al
from benchmarks.delays import delayed_step, simulated

DELAY_S = 0.06  # long beside what a busy machine adds


@pytest.mark.slow  # compiles four stages twice and sleeps for seconds
@pytest.mark.parametrize(("schedule", "num_meshes"), [("1f1b", 4), ("zb-h1", 4), ("interleaved-1f1b", 2)])
def test_the_measured_bubble_is_the_simulated_one(schedule, num_meshes, tmp_path):
    step, args = delayed_step(4, DELAY_S, DELAY_S, DELAY_S)
    options = al.PlanOptions(
        num_stages=4, num_microbatches=8, mesh_shape=(1,), schedule=schedule, num_chunks=4 // num_meshes
    )
    parallel = al.parallelize(step, cluster=al.Cluster.parse(f"1x{num_meshes}:cpu"), options=options)
    compiled = parallel.compile(*args)
    expected = simulated(compiled, DELAY_S, DELAY_S, DELAY_S)
    predicted, measured = compiled.trace(tmp_path / "trace.json", *args)
    assert measured.bubble_share == pytest.approx(expected.bubble_share, rel=0.1)
    assert measured.makespan_s == pytest.approx(expected.makespan_s, rel=0.1)
    ends = {e.label: e.end_s for e in expected.events if e.end_s > e.start_s}
    late = [e.end_s - ends[e.label] for e in measured.events if e.label in ends]
    assert len(late) == len(ends) and max(map(abs, late)) < 0.1 * expected.makespan_s
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in trace if e["name"] == "process_name"] == ["predicted", "measured"]
    for pid, line in ((1, predicted), (2, measured)):
        assert sum(e["ph"] == "X" and e["pid"] == pid for e in trace) == len(line.events)
