"""JSON that people can read and diff: short things on one line, long objects and tables one entry per line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

LINE_LENGTH = 110


def json_text(value: Any) -> str:
    """JSON text of plain values (no tuples); the same value always gives the same text.

    Raises:
        ValueError: for a float that JSON cannot hold (the encoder would write it as null).
    """
    check_floats(value)
    return "\n".join(_lines(value, "")) + "\n"


def check_floats(value: Any) -> None:
    """Refuses (ValueError) a float that JSON cannot hold, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot be written as JSON")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        check_floats(item)


def _lines(value: Any, indent: str) -> Iterator[str]:
    """The first line stands where the caller is; further lines carry ``indent``."""
    text = msgspec.json.encode(value).decode()
    if len(text) + len(indent) <= LINE_LENGTH or not _opens(value):
        yield text
        return
    start, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    inner = indent + " "
    yield start
    for position, (key, item) in enumerate(items, start=1):
        # A row of a table stays on its line, however long.
        row = isinstance(value, list) and isinstance(item, list)
        *head, last = [msgspec.json.encode(item).decode()] if row else _lines(item, inner)
        comma = "," if position < len(value) else ""
        first, *rest = [*head, last + comma]
        yield inner + (f"{msgspec.json.encode(key).decode()}: " if key is not None else "") + first
        yield from rest
    yield indent + end


def _opens(value: Any) -> bool:
    """Objects, tables and lists of sentences get a line per entry; long rows of numbers or short names do not."""
    if isinstance(value, list):
        return any(isinstance(v, (list, dict)) or (isinstance(v, str) and " " in v) for v in value)
    return isinstance(value, dict)
