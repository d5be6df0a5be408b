"""A stacked parameter whose rows lie on several stages, each where the layers are that read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class StagedArray:
    """An array made of rows on different submeshes, which no ``jax.Array`` can be: what a pipelined step returns for state
    that it was given stacked, and takes again without moving it.

    ``np.asarray`` and ``jnp.asarray`` gather it on the host or the default device, ``gathered`` also where it is of keys of
    ``jax.random``; ``parts`` are its rows in order.
    """

    def __init__(self, parts: Sequence[jax.Array]) -> None:
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(part) for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """A part as it lies, for a slice of exactly its rows; anything else on the host."""
        start = 0
        for part in self.parts:
            if isinstance(index, slice) and index.indices(len(self)) == (start, start + len(part), 1):
                return part
            start += len(part)
        return (self.gathered() if self._of_keys else np.asarray(self))[index]

    def gathered(self) -> jax.Array:
        """All rows, on the default device."""
        if not self._of_keys:
            return jnp.asarray(np.asarray(self))
        data = np.concatenate([np.asarray(jax.random.key_data(part)) for part in self.parts])
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(self.parts[0]))

    @property
    def _of_keys(self) -> bool:
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._of_keys:
            raise TypeError(
                f"{self!r} is of keys of jax.random, which are no NumPy array. Take jax.random.key_data(x.gathered())."
            )
        return np.concatenate([np.asarray(part) for part in self.parts]).astype(dtype or self.dtype, copy=False)

    def devices(self) -> set[Any]:
        """Of all parts."""
        return set().union(*(part.devices() for part in self.parts))

    def is_deleted(self) -> bool:
        """Whether it was donated."""
        return any(part.is_deleted() for part in self.parts)

    def block_until_ready(self) -> StagedArray:
        for part in self.parts:
            part.block_until_ready()
        return self

    def __repr__(self) -> str:
        rows = ", ".join(f"{len(part)} on {len(part.devices())} devices" for part in self.parts)
        return f"StagedArray(shape={self.shape}, dtype={self.dtype}, rows: {rows})"
