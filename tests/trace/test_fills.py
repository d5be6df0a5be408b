"""The table of fills against the ops themselves: whatever it claims holds for elements that the operands may hold."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite.trace.fills import Fill, beside, elementwise_fill, joined, literal_fill, product

INF = float("inf")
ELEMENTS = {
    Fill.ZERO: [0.0],
    Fill.LOWEST: [-INF],
    Fill.HIGHEST: [INF],
    Fill.ROW: [
        -1.5,
        0.5,
        7.0,
    ],  # a row of zeros or infinities is not finite where it is divided by, nor without padding
    Fill.FINITE: [-2.0, 0.0, 0.25, 9.0],
    Fill.ANY: [np.nan, -INF, 0.0, 3.0],
}
UNARY = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cbrt",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "log",
    "log1p",
    "logistic",
    "neg",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
]
BINARY = ["add", "atan2", "div", "max", "min", "mul", "nextafter", "pow", "rem", "sub"]


# Nothing is said of the padding that these make.
UNCLAIMED = frozenset(["acos", "acosh", "cbrt", "cosh", "erfc", "log", "rsqrt", "atan2", "nextafter", "pow", "rem"])


def holds(fill: Fill, element: float) -> bool:
    if fill in (Fill.ZERO, Fill.LOWEST, Fill.HIGHEST):
        return element == float(fill)
    return fill is Fill.ANY or bool(np.isfinite(element))


def agrees(primitive, params, count):
    """How many claims about the fill of a result were compared with results."""
    name, claims = primitive.name, 0
    for fills in itertools.product(Fill, repeat=count):
        claimed = elementwise_fill(name, params, fills)
        if claimed is Fill.ANY or set(fills) == {Fill.ROW}:  # a row's padding is computed as its true elements are
            continue
        for elements in itertools.product(*(ELEMENTS[f] for f in fills)):
            made = float(primitive.bind(*map(jnp.float32, elements), **params))
            assert holds(claimed, made), f"{name}{elements} = {made}, fills {fills} claim {claimed}"
            claims += 1
    return claims


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    primitive = getattr(lax, f"{name}_p")
    params = {"rounding_method": lax.RoundingMethod.AWAY_FROM_ZERO} if name == "round" else {}
    if name in ("exp", "log", "sin", "cos", "tan", "tanh", "logistic", "sqrt", "rsqrt", "cbrt", "expm1", "log1p"):
        params["accuracy"] = None
    assert bool(agrees(primitive, params, 1)) == (name not in UNCLAIMED)


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    assert bool(agrees(getattr(lax, f"{name}_p"), {}, 2)) == (name not in UNCLAIMED)


@pytest.mark.parametrize("y", [-2, 1, 3])
def test_integer_pow(y):
    assert bool(agrees(lax.integer_pow_p, {"y": y}, 1)) == (y > 0)


def test_select():
    for first, second in itertools.product(Fill, repeat=2):
        claimed = elementwise_fill("select_n", {}, (Fill.FINITE, first, second))
        for element in ELEMENTS[first] + ELEMENTS[second]:
            assert holds(claimed, element)


def test_what_is_put_together():
    assert joined([Fill.ZERO, Fill.ZERO]) is Fill.ZERO
    assert joined([Fill.ZERO, Fill.ROW]) is Fill.FINITE
    assert joined([Fill.LOWEST, Fill.ZERO]) is Fill.ANY
    assert beside(Fill.ZERO, Fill.LOWEST) is Fill.ANY and beside(Fill.ROW, Fill.LOWEST) is Fill.ROW
    assert product([Fill.ZERO, Fill.FINITE]) is Fill.ZERO and product([Fill.ZERO, Fill.LOWEST]) is Fill.ANY


def test_constants():
    known = {0.0: Fill.ZERO, -INF: Fill.LOWEST, INF: Fill.HIGHEST, 3.0: Fill.ROW, np.nan: Fill.ROW}
    assert {value: literal_fill(np.float32(value)) for value in known} == known
    assert literal_fill(jnp.zeros((), jnp.bfloat16)) is Fill.ZERO
