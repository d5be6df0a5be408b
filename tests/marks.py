"""Marks of parametrized tests."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` of one parameter; `make test` runs those in ``quick``, `make test-all` runs all."""
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]


def slow_rows_but(quick: Container[Any], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The same for several parameters at once."""
    return [pytest.param(*row, marks=[] if row in quick else [pytest.mark.slow]) for row in rows]


def medium_from(first: int, slow: int, count: int) -> list[Any]:
    """Numbers of random cases: `make check` runs those before ``first``, `make test` those before ``slow``."""
    mark = {first: pytest.mark.medium, slow: pytest.mark.slow}
    return [pytest.param(n, marks=[mark[start] for start in mark if n >= start][-1:]) for n in range(count)]
