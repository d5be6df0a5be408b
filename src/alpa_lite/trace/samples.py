"""Random operands for probing a function of unknown meaning.

Values are small multiples of 1/4, so that sums are exact and equal values occur (a comparison of distinct reals would never be
true and look as if it read nothing). Rounds differ in range: signed, positive, and inside (0, 1). Integers of concrete
arguments are drawn from the argument's own values, since they may be indices; without an argument from [0, n), with n every
other time the largest size of an operand's dim, else each size in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Sampler:
    """Draws operands of given shapes and types; every draw is fresh."""

    def __init__(self, leaves: Sequence[Any], seed: int) -> None:
        self.shapes = [tuple(np.shape(leaf)) for leaf in leaves]
        self.dtypes = [jnp.result_type(leaf) for leaf in leaves]
        self.rng = np.random.default_rng(seed)
        self.round = 0
        self._pools = [_pool(leaf) for leaf in leaves]
        self._bounds = sorted({n for shape in self.shapes for n in shape}) or [8]

    def is_key(self, position: int) -> bool:
        """Whether an operand is a typed random key; it is never split."""
        return jax.dtypes.issubdtype(self.dtypes[position], jax.dtypes.prng_key)

    def draw(self) -> list[Any]:
        """One full set of operands; the next range of values."""
        self.round += 1
        return [self.fresh(position) for position in range(len(self.shapes))]

    def fresh(self, position: int) -> Any:
        """New values of one operand, in the present range."""
        shape, dtype, rng = self.shapes[position], self.dtypes[position], self.rng
        if self.is_key(position):
            return jax.random.key(int(rng.integers(2**31)))
        pool = self._pools[position]
        if pool is not None:
            return rng.choice(pool, size=shape).astype(dtype)
        if dtype == np.bool_:
            return np.asarray(rng.integers(0, 2, size=shape), dtype=dtype)
        if jnp.issubdtype(dtype, np.integer):
            bound = self._bounds[-1 if self.round % 2 else self.round // 2 % len(self._bounds)]
            return np.asarray(rng.integers(0, min(bound, jnp.iinfo(dtype).max), size=shape), dtype=dtype)
        values = rng.integers(-8, 9, size=shape) / 4.0
        if self.round % 3 == 1:
            values = rng.integers(1, 17, size=shape) / 4.0
        elif self.round % 3 == 2:
            values = rng.integers(1, 32, size=shape) / 32.0
        if jnp.issubdtype(dtype, np.complexfloating):
            values = values + 1j * rng.integers(-8, 9, size=shape) / 4.0
        return np.asarray(values).astype(dtype)


def _pool(leaf: Any) -> np.ndarray | None:
    """The values of a concrete integer array of at least two different ones."""
    if not isinstance(leaf, np.ndarray | jax.Array) or not jnp.issubdtype(leaf.dtype, np.integer):
        return None
    values = np.unique(np.asarray(leaf))
    return values if values.size > 1 else None
