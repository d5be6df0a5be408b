"""A stacked parameter whose rows lie on several stages, each where the layers are that read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


class StagedArray:
    """An array made of rows on different submeshes, which no ``jax.Array`` can be: what a pipelined step returns for state
    that it was given stacked, and takes again without moving it.

    ``np.asarray`` and ``jnp.asarray`` gather it on the host or the default device; ``parts`` are its rows in order.
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
        return np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
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
