"""Numbers as people read them."""

from __future__ import annotations

import pytest

from alpa_lite.units import format_bytes, format_cost, format_time


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (80 * 1024**3, "80.0 GiB"),
        (-1536, "-1.50 KiB"),
        (5 * 1024**6, "5120 PiB"),
    ],
)
def test_format_bytes(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "0 s"),
        (1.5, "1.50 s"),
        (0.00123, "1.23 ms"),
        (0.0009999, "1.00 ms"),
        (12.34e-6, "12.3 us"),
        (5e-10, "5e-10 s"),
    ],
)
def test_format_time(time_s, text):
    assert format_time(time_s) == text


def test_format_cost_leaves_other_units_alone():
    assert format_cost(0.001, "s") == "1.00 ms"
    assert format_cost(1234.5, "alpa cost") == "1234.5 alpa cost"
    assert format_cost(2.0, "") == "2"
