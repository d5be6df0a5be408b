"""Batches by position, from what users have: a function of the position, or anything that can be iterated.

A run that goes back to a checkpoint reads batches again. A function is simply asked; of an iterable, the batches since the newest
complete checkpoint are kept, and a new process skips those that an earlier one used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from alpa_lite.errors import ArgumentsError, user_line
from alpa_lite.executor.host_data import HostData


class Batches:
    """The data of a run.

    Args:
        data: ``data(position) -> batch``, an iterable of batches, or a ``HostData``.
        here: whether a ``HostData`` is read by this process, for steps that take only arrays.

    Raises:
        ArgumentsError: it is neither.
    """

    def __init__(self, data: Callable[[int], Any] | Iterable[Any] | HostData, *, here: bool = True) -> None:
        if isinstance(data, HostData):
            data = partial(_read_here, data) if here else data.at
        self.read: Callable[[int], Any] | None = data if callable(data) else None
        self.rest: Iterator[Any] = iter(())
        self.kept: deque[Any] = deque()
        self.first = 0  # position of the first that is kept
        if callable(data):
            return
        if isinstance(data, str | bytes | Mapping | np.ndarray | jax.Array):
            kind = "array" if hasattr(data, "shape") else type(data).__name__
            raise ArgumentsError(
                f"data was given one {kind}, which is no series of batches: its rows or keys would each be one. At "
                f"{user_line()}. Give a list of batches, itertools.repeat(batch), or lambda position: batch."
            )
        try:
            self.rest = iter(data)
        except TypeError as error:
            raise ArgumentsError(
                f"data={data!r} was given. It must be a function of a position, data(7) -> batch, or an iterable of batches. At "
                f"{user_line()}. Give, e.g., data=iter(loader)."
            ) from error

    def at(self, position: int) -> Any:
        """The batch at a position.

        Raises:
            ArgumentsError: the data ends before it, or it was released.
        """
        if self.read is not None:
            return self.read(position)
        assert position >= self.first, f"batch {position} was released"
        while self.first + len(self.kept) <= position:
            try:
                self.kept.append(next(self.rest))
            except StopIteration:
                raise ArgumentsError(
                    f"the data has {self.first + len(self.kept)} batches, and batch {position} is wanted. There must be one per "
                    f"step. At {user_line()}. Give more data, e.g. itertools.cycle(batches), or fewer steps."
                ) from None
        return self.kept[position - self.first]

    def release(self, position: int) -> None:
        """Nobody will ask for what lies before ``position`` any more."""
        while self.read is None and self.first < position:
            if self.kept:
                self.kept.popleft()
            else:
                next(self.rest, None)  # of a run that is resumed
            self.first += 1


def _read_here(data: HostData, position: int) -> Any:
    return jax.tree.map(np.asarray, data.at(position))
