"""What counts as a number, whoever made it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.numeric import positive, real, several, whole


@pytest.mark.parametrize("x", [3, np.int64(3), np.uint8(3), np.array(3), jnp.array(3), jnp.int32(3)])
def test_whole_numbers(x):
    assert (whole(x), positive(x), real(x)) == (3, 3, 3.0)
    assert (type(whole(x)), type(real(x))) == (int, float)


@pytest.mark.parametrize("x", [0.5, np.float32(0.5), jnp.bfloat16(0.5), np.array(0.5), jnp.array(0.5)])
def test_other_numbers(x):
    assert (whole(x), positive(x), real(x)) == (None, None, 0.5)


@pytest.mark.parametrize(
    "x",
    [
        *(True, np.bool_(1), jnp.array(True), "3", b"3", None, 1j, float, object(), math.nan),
        *([3], {}, np.array([3]), jnp.ones(3), jax.ShapeDtypeStruct((), jnp.int32), jax.random.key(0)),
    ],
)
def test_what_is_no_number(x):
    assert whole(x) is positive(x) is None and math.isnan(real(x))


def test_bounds():
    assert (positive(0), positive(-1), whole(-1), real(10**400), real(-(10**400))) == (
        None,
        None,
        -1,
        math.inf,
        -math.inf,
    )


def test_several():
    assert (
        several(np.array([3, 4])) == several((3, 4)) == several(x for x in (3, 4)) == several(bytes([3, 4])) == [3, 4]
    )
    assert [several(x) for x in ("34", 3, None, {3: 4}, np.array(3))] == [None] * 5
    assert several(()) == []
