"""The load of ``benchmarks/serve_load.py``, shorter: right answers and statuses, nothing hangs, nothing is left."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SECONDS = 45.0  # two crowds


@pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="Locust is not installed: pip install 'alpa-lite[load]'"
)
def test_right_answers_and_statuses_under_load(ray_session: None) -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'")
    from benchmarks.serve_load import load

    rows = {row.case: row for row in load(SECONDS)}
    assert rows["all"].value == 0, rows
    assert {"requests 'whole'", "requests 'left'", "requests 'read slowly'", "requests 'at once, refused'"} < set(rows)
    assert rows["queued_requests at the end"].value == rows["active_requests at the end"].value == 0
    for who in ("engine", "HTTP", "proxy"):  # memory settles over minutes, which the benchmark measures
        assert abs(rows[f"{who}, open files"].value) < 1.0, rows
