"""Batches that every host reads for itself, so that the driver is no bottleneck.

In: a function that reads a part of a leaf of a batch. Out: on each worker the parts that its devices hold, the next batch's while
the current step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from alpa_lite.costs.tiles import Box, slices
from alpa_lite.errors import ArgumentsError, user_line
from alpa_lite.executor.host_tiles import HostTiles
from alpa_lite.trace.paths import leaf_paths

Read = Callable[[int, str, tuple[slice, ...]], np.ndarray]


@dataclass(frozen=True, slots=True)
class HostData:
    """Data that hosts read themselves.

    Attributes:
        read: ``read(position, path, index)`` returns part ``index`` (a slice per dim) of the leaf ``path`` ("x", "labels/0"; ""
            if the batch is one leaf) of the batch at a position. It runs on the workers and must return the same for the same
            arguments. Ray brings it there.
        batch: a batch as shapes (``jax.ShapeDtypeStruct``), or one like it.

    Example:
        >>> def read(position, path, index):
        ...     return tokens[path][position * 64 : (position + 1) * 64][index]
        >>> al.fit(step, init=init, data=al.HostData(read, batch_shapes), num_steps=1000)
    """

    read: Read
    batch: Any

    def __post_init__(self) -> None:
        if not callable(self.read):
            raise ArgumentsError(
                f"al.HostData was given {self.read!r} to read with. It must be a function of (position, path, index). At "
                f"{user_line()}. See its documentation for an example."
            )

    def at(self, position: int) -> Any:
        """The batch as a tree of ``HostLeaf``s."""
        leaves = [
            HostLeaf(self.read, position, path, tuple(leaf.shape), leaf.dtype)
            for path, leaf in leaf_paths(self.batch, "")
        ]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self.batch), leaves)


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """A leaf of a batch that nobody has read yet; ``np.asarray`` reads all of it."""

    read: Read
    position: int
    path: str
    shape: tuple[int, ...]
    dtype: Any

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return part_of(self.read, self.position, self.path, tuple((0, n) for n in self.shape), str(self.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOrder:
    """What a worker reads of an argument: the parts of a leaf of the batch at a position."""

    position: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]


class Reader:
    """Reads on a worker, one batch ahead."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self.ahead: tuple[int, Future[dict[int, HostTiles]]] | None = None

    def get(self, orders: Mapping[int, ReadOrder]) -> dict[int, HostTiles]:
        """Argument -> its parts; begins to read those of the next position."""
        position = next(iter(orders.values())).position
        ahead, self.ahead = self.ahead, None
        found = ahead[1].result() if ahead is not None and ahead[0] == position else self._all(orders, position)
        self.ahead = position + 1, self.pool.submit(self._all, orders, position + 1)
        return found

    def _all(self, orders: Mapping[int, ReadOrder], position: int) -> dict[int, HostTiles]:
        return {
            argument: HostTiles(
                o.shape, o.dtype, {box: part_of(self.read, position, o.path, box, o.dtype) for box in o.boxes}
            )
            for argument, o in orders.items()
        }


def part_of(read: Read, position: int, path: str, box: Sequence[tuple[int, int]], dtype: str) -> np.ndarray:
    """A part of a leaf, checked.

    Raises:
        ArgumentsError: the user's function returned something else.
    """
    found = np.asarray(read(position, path, slices(tuple(box))))
    wanted = tuple(hi - lo for lo, hi in box)
    if found.shape != wanted or str(found.dtype) != dtype:
        raise ArgumentsError(
            f"the function of al.HostData returned {found.dtype}{list(found.shape)} for part {list(box)} of leaf {path!r} of "
            f"batch {position}. It must return {dtype}{list(wanted)}, that part alone. Index the leaf with what it is given."
        )
    return found
