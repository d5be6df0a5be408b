"""Paths of parts of a leaf: stacked parameters of layers on several stages lie there by rows, e.g. "0/params/w[0:4]"."""

from __future__ import annotations

import re

_ROWS = re.compile(r"(.*)\[(\d+):(\d+)\]")


def rows_path(path: str, start: int, stop: int) -> str:
    """The path of rows ``start`` to ``stop`` (exclusive) of the leaf ``path``."""
    return f"{path}[{start}:{stop}]"


def split_path(path: str) -> tuple[str, tuple[int, int] | None]:
    """(path of the leaf, the rows), the inverse of ``rows_path``; rows are None for a whole leaf."""
    match = _ROWS.fullmatch(path)
    if match is None:
        return path, None
    whole, start, stop = match.groups()
    return whole, (int(start), int(stop))
