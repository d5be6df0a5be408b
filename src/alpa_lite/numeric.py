"""Numbers that users give: Python's, NumPy's, and arrays of one number. Nothing behind these functions sees any but Python's."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any


def whole(x: Any) -> int | None:
    """A whole number as an ``int``; None if it is none. Truth values are none."""
    if isinstance(x, bool):
        return None
    try:
        return operator.index(x)
    except (TypeError, NotImplementedError):  # the latter of JAX's keys
        return None


def positive(x: Any) -> int | None:
    """A whole number from 1 as an ``int``; None if it is none."""
    found = whole(x)
    return found if found is not None and found >= 1 else None


def several(xs: Any) -> list[Any] | None:
    """What an iterable holds, one by one; None if it is none. Texts and mappings are none."""
    if isinstance(xs, str | Mapping):
        return None
    try:
        return list(xs)
    except TypeError:
        return None


def real(x: Any) -> float:
    """A number as a ``float``; nan, which no comparison allows, if it is none. Truth values are none."""
    try:
        x = x.item() if getattr(x, "shape", None) == () else x
        return float(x) if isinstance(x, Real) and not isinstance(x, bool) else math.nan
    except (TypeError, AttributeError, NotImplementedError):  # shapes without a value, JAX's keys
        return math.nan
    except OverflowError:  # of a whole number
        return math.inf if x > 0 else -math.inf
