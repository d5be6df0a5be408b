"""The processes that write one item of a checkpoint together, and how they wait for each other.

Orbax's own barriers know nothing of a process that failed: the others would wait for it until they give up. Here who fails says
so, in the key-value store of the ``jax.distributed`` job, and whoever waits is told why it would wait in vain.
"""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from collections import Counter
from pathlib import Path

import jax

from alpa_lite._jax_compat import JobStore
from alpa_lite.errors import CheckpointError

_LOOK_S = 0.5  # between two looks at whether a process failed


class ItemWriters:
    """The processes of an item, seen by one of them.

    Args:
        folder: of the item; its name and its parent's are no other item's.
        processes: that hold parts of its arrays, this one among them.
    """

    def __init__(self, folder: Path, processes: set[int]) -> None:
        self.processes, self.first = processes, min(processes)
        self._folder, self._me = folder, jax.process_index()
        self._store = JobStore() if len(processes) > 1 else None
        self._prefix = f"alpa_lite/items/{folder.parent.name}/{folder.name}"
        self._met: Counter[str] = Counter()

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process writes nothing more, if none has told so before."""
        if self._store is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first, or the job has ended
                self._store.set(f"{self._prefix}/failed", f"process {self._me} on {socket.gethostname()}: {error}")

    def begin(self, timeout_ms: int) -> None:
        """As ``barrier``, before anything is written. What was said of the last item of this name goes: all are done with it."""
        self.barrier(key="begin", timeout_ms=timeout_ms)
        if self._store is not None and self._me == self.first:
            last = f"alpa_lite/items/last/{zlib.crc32(str(sorted(self.processes)).encode())}/{self._folder.name}"
            if (before := self._store.found(last)) is not None:
                self._store.delete(before)
                self._store.delete(last)
            self._store.set(last, self._prefix)

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes are here; what Orbax asks of a barrier.

        Raises:
            CheckpointError: one of them failed, or did not come in time.
        """
        if self._store is None:
            return
        self._met[key] += 1
        at, end = f"{self._prefix}/{key}/{self._met[key]}", time.monotonic() + timeout_ms / 1000
        if self._me != self.first:
            self._store.set(f"{at}/{self._me}", "")
            self._await(f"{at}/all", self.first, end)
            return
        for process in sorted(self.processes - {self._me}):
            self._await(f"{at}/{process}", process, end)
        self._store.set(f"{at}/all", "")

    def _await(self, key: str, process: int, end: float) -> None:
        assert self._store is not None
        while self._store.get(key, _LOOK_S) is None:
            if (failed := self._store.found(f"{self._prefix}/failed")) is not None:
                raise CheckpointError(
                    f"the item {self._folder.name!r} of a checkpoint was given up, because not all of the {len(self.processes)} "
                    f"processes that write it together could write. {failed}"
                )
            if time.monotonic() > end:
                raise CheckpointError(
                    f"process {process} did not come to write the item {self._folder.name!r} of a checkpoint with "
                    f"{len(self.processes) - 1} others in time. All of them must save the same state at the same step. See what "
                    "it does, or whether its disk hangs."
                )
