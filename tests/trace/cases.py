"""What a case of the rule tests is, and the values that cases run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def positive(*shape: int) -> Any:
    return np.abs(floats(*shape)) + 0.5


def ints(high: int, *shape: int, low: int = 0, dtype: str = "int32") -> Any:
    return np.random.default_rng([high, *shape]).integers(low, high, shape).astype(dtype)


def bools(*shape: int) -> Any:
    return floats(*shape) > 0


def grad_of(fn: Callable[..., Any], *args: Any, argnums: Any = 0) -> Case:
    """The value and its gradient under a weighting that makes every element count, each differently.

    No weight is near 0 or below: sums of terms that cancel differ by their rounding alone.
    """

    def loss(*a: Any) -> Any:
        out = fn(*a)
        return (out * (1.5 + jnp.cos(jnp.arange(out.size, dtype=jnp.float32))).reshape(out.shape)).sum()

    return jax.value_and_grad(loss, argnums), args
