"""Bytes and seconds as people read them, and sizes. Vendor numbers are decimal; memory of a device is shown in binary units."""

from __future__ import annotations

import math
from collections.abc import Sequence

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def format_bytes(size_bytes: float) -> str:
    """Three digits and a binary unit: ``1536`` is "1.50 KiB"."""
    size = float(size_bytes)
    for unit in BYTE_UNITS[:-1]:
        # 1023.5 would round to the four digits of "1024".
        if abs(size) < 1023.5 or (unit == "B" and abs(size) < 1024):
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} {BYTE_UNITS[-1]}"


def format_time(time_s: float) -> str:
    """Three digits and a unit: ``0.00123`` is "1.23 ms"; 0 is "0 s"."""
    if time_s == 0:
        return "0 s"
    for scale, unit in TIME_UNITS:
        # 0.9995 ms rounds to "1.00 ms", not to "1000 us".
        if abs(time_s) >= 0.9995 * scale:
            return f"{_three_digits(time_s / scale)} {unit}"
    return f"{time_s:.3g} s"


def format_cost(cost: float, unit: str) -> str:
    """A cost in the plan's unit: seconds get a prefix, a convention's own unit is written as it is."""
    if unit == "s":
        return format_time(cost)
    whole = math.isfinite(cost) and abs(cost) < 2**53 and float(cost).is_integer()
    return (f"{cost:.0f} {unit}" if whole else f"{cost:.6g} {unit}").rstrip()


def _three_digits(number: float) -> str:
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def numbers_text(numbers: Sequence[int]) -> str:
    """Rising numbers as ranges, e.g. ``0-3, 5``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def next_multiple(size: int, factor: int) -> int:
    """The least multiple of ``factor`` that is not below ``size``."""
    return -(-size // factor) * factor
