"""What is known of the padding of a tensor: the small abstract domain that decides where a mask is needed.

A dim that was padded has extra elements at its end. ``Fill`` says what they hold. Ops that do not read across the padded dim
hand it on by the table here; reductions and contractions over the dim need a neutral fill, and are given a mask where the
fill is not known to be neutral. ``FINITE`` takes for granted that tensors without the padded dim are finite: where the
unpadded step makes infinities or NaN there, the padded one may make NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np


class Fill(StrEnum):
    """What all elements of a padding hold."""

    ZERO = "0"
    LOWEST = "-inf"
    HIGHEST = "inf"
    FINITE = "finite"  # anything but infinities and NaN
    ANY = "any"


_ZERO_STAYS = frozenset(
    [
        "neg",
        "convert_element_type",
        "copy",
        "copy_p",
        "sqrt",
        "abs",
        "square",
        "tanh",
        "sin",
        "sinh",
        "tan",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "sign",
        "floor",
        "ceil",
        "round",
        "expm1",
        "log1p",
        "erf",
        "real",
        "reduce_precision",
        "optimization_barrier",
        "pin",
        "stop_gradient",
        "pad_mask",
    ]
)
_FINITE_STAYS = frozenset(
    [
        "neg",
        "convert_element_type",
        "copy",
        "copy_p",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
        "stop_gradient",
        "optimization_barrier",
        "pin",
        "tanh",
        "sin",
        "cos",
        "logistic",
        "erf",
        "max",
        "min",
        "add",
        "add_any",
        "sub",
        "mul",
        "square",
    ]
)
_MOVES = frozenset(["copy", "copy_p", "stop_gradient", "optimization_barrier", "pin", "convert_element_type"])
_NEGATED = {Fill.LOWEST: Fill.HIGHEST, Fill.HIGHEST: Fill.LOWEST}
_SMALL = (Fill.ZERO, Fill.FINITE)


def literal_fill(value: Any) -> Fill:
    """Of a constant that fills a tensor."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        return Fill.FINITE if array.dtype.kind in "biu" else Fill.ANY
    number = float(array.reshape(()))
    known = {0.0: Fill.ZERO, float("-inf"): Fill.LOWEST, float("inf"): Fill.HIGHEST}
    return known.get(number, Fill.FINITE if np.isfinite(number) else Fill.ANY)


def joined(fills: Sequence[Fill]) -> Fill:
    """Of a tensor whose padding is put together from paddings with these fills."""
    if len(set(fills)) == 1:
        return fills[0]
    return Fill.FINITE if all(f in _SMALL for f in fills) else Fill.ANY


def product(fills: Sequence[Fill]) -> Fill:
    """Of sums of products of one element of each."""
    if not all(f in _SMALL for f in fills):
        return Fill.ANY
    return Fill.ZERO if Fill.ZERO in fills else Fill.FINITE


def elementwise_fill(name: str, params: dict[str, Any], fills: Sequence[Fill]) -> Fill:
    """Of the result of an elementwise op; ``fills`` of its operands (``FINITE`` for those without the padded dim)."""
    first = fills[0]
    if name == "select_n":
        return joined(fills[1:])
    if name in ("mul", "and"):
        return product(fills)
    if name in ("add", "add_any", "sub"):
        return _sum_fill(fills)
    if name == "div":
        return Fill.ZERO if first is Fill.ZERO and fills[1] is Fill.FINITE else Fill.ANY
    if name in _MOVES:
        return first
    if name == "neg" and first in _NEGATED:
        return _NEGATED[first]
    if name in ("exp", "exp2", "logistic") and first is Fill.LOWEST:
        return Fill.ZERO
    if name == "integer_pow" and params["y"] > 0 and first is Fill.ZERO:
        return Fill.ZERO
    if name in ("max", "min", "or") and set(fills) == {Fill.ZERO}:
        return Fill.ZERO
    if name in _ZERO_STAYS and first is Fill.ZERO:
        return Fill.ZERO
    return Fill.FINITE if name in _FINITE_STAYS and all(f in _SMALL for f in fills) else Fill.ANY


def _sum_fill(fills: Sequence[Fill]) -> Fill:
    """Of a + b or a - b: zero stays zero, an infinite first term swallows finite ones."""
    if set(fills) == {Fill.ZERO}:
        return Fill.ZERO
    if fills[0] in (Fill.LOWEST, Fill.HIGHEST) and fills[1] in _SMALL:
        return fills[0]
    return Fill.FINITE if all(f in _SMALL for f in fills) else Fill.ANY
