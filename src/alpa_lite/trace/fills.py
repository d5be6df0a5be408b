"""What is known of the padding of a tensor: the small abstract domain that decides where a mask is needed.

A dim that was padded has extra elements at its end. ``Fill`` says what they hold. Ops that do not read across the padded dim
hand it on by the tables here; reductions and contractions over the dim need a neutral fill, and are given a mask where the
fill is not known to be neutral. One thing is taken for granted: tensors without the padded dim are finite. Where the
unpadded step has infinities or NaN there, the padded one may make NaN.

Elements in the padding of several dims hold to the fills of all of them, unless one is ``ANY``: then they may hold anything,
which does no harm, because what is made of them lies in the padding of that dim again (or is masked).
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
    ROW = "row"  # what the true elements beside them hold, which are all alike: a broadcast along the dim
    FINITE = "finite"  # anything but infinities and NaN
    ANY = "any"


_ODD = frozenset(["asin", "asinh", "atan", "atanh", "erf", "expm1", "log1p", "neg", "sin", "sinh", "tan", "tanh"])
_ZERO_STAYS = _ODD | frozenset(["abs", "ceil", "floor", "real", "reduce_precision", "round", "sign", "sqrt", "square"])
# Finite operands cannot make anything else; sums and products may overflow.
_FINITE_STAYS = frozenset(
    ["abs", "ceil", "cos", "erf", "floor", "logistic", "max", "min", "neg", "round", "sign", "sin", "tanh"]
)
_MOVES = frozenset(["convert_element_type", "copy", "copy_p", "optimization_barrier", "pin", "stop_gradient"])
_NEGATED = {Fill.LOWEST: Fill.HIGHEST, Fill.HIGHEST: Fill.LOWEST}
_SMALL = (Fill.ZERO, Fill.ROW, Fill.FINITE)


def literal_fill(value: Any) -> Fill:
    """Of a tensor filled with a constant."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind == "c":
        return Fill.ROW
    known = {0.0: Fill.ZERO, float("-inf"): Fill.LOWEST, float("inf"): Fill.HIGHEST}
    return known.get(float(array.reshape(())), Fill.ROW)


def joined(fills: Sequence[Fill]) -> Fill:
    """Of a tensor whose padding is put together from paddings with these fills."""
    if len(set(fills)) == 1:
        return fills[0]
    return Fill.FINITE if all(f in _SMALL for f in fills) else Fill.ANY


def beside(fill: Fill, other: Fill) -> Fill:
    """Of a dim after the padding of another dim was set to ``other``: they share corners."""
    return fill if fill is Fill.ROW else joined([fill, other])


def product(fills: Sequence[Fill]) -> Fill:
    """Of sums of products of one element of each."""
    if Fill.ZERO in fills and all(f in _SMALL for f in fills):
        return Fill.ZERO
    return Fill.ROW if set(fills) == {Fill.ROW} else Fill.ANY


def elementwise_fill(name: str, params: dict[str, Any], fills: Sequence[Fill]) -> Fill:
    """Of the result of an elementwise op; ``fills`` of its operands (``ROW`` for those without the padded dim)."""
    first = fills[0]
    if set(fills) == {Fill.ROW}:
        return Fill.ROW
    if name in _MOVES:
        return Fill.ANY if first is Fill.FINITE and str(params.get("new_dtype")) == "float16" else first
    if name == "select_n":
        return joined(fills[1:]) if Fill.ROW not in fills[1:] else joined(fills)
    if name in ("mul", "and"):
        return product(fills)
    if name in ("add", "add_any", "sub"):
        return _sum_fill(fills)
    if name == "div":  # zero by zero would be NaN; a row's true elements are divided by the same as its padding
        return Fill.ZERO if first is Fill.ZERO and fills[1] is Fill.ROW else Fill.ANY
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
    return fills[0] if fills[0] in (Fill.LOWEST, Fill.HIGHEST) and fills[1] in _SMALL else Fill.ANY
