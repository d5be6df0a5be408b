"""Marks of parametrized tests."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` of one parameter; `make test` runs those in ``quick``, `make test-all` runs all."""
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]
