"""Arrays to one item of a checkpoint, by Orbax.

In: leaves by path, each an array of any layout, which need not lie in one process. Out: a folder in Orbax's own form, which Orbax
alone can read too, beside it in the folder one file of the bytes of small leaves, and an ``ItemRecord`` of it all.
``item_reader.py`` goes the other way.

All processes that hold parts of an item's arrays write it together, each its own parts. Items of one checkpoint that have no
process in common are written without knowing of each other. Typed keys are stored as their words.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import msgspec
import numpy as np

from alpa_lite.errors import CheckpointError
from alpa_lite.executor.item_writers import ItemWriters
from alpa_lite.plan.answers import KEY_TYPES
from alpa_lite.plan.checkpoint import ItemLeaf, ItemRecord
from alpa_lite.plan.leaf_rows import split_path
from alpa_lite.plan.manifest import digests

PACKED = "packed.bin"
PACKED_BYTES = 2**20  # up to which a leaf is written together with others
CHUNK_BYTES = 2**25  # of what is stored in one: whoever reads any of it needs memory for all of it, twice
_PARTS = 16  # of a chunk that would be too small
_SEEN_S = 5.0  # until all hosts see a folder that one of them has made
_TOLD_S = 5.0  # between two looks at how much was written
_FACT_CHARS = 500
_INSTALL = "pip install 'alpa-lite[checkpoint]'"


def orbax() -> Any:
    """Orbax, on first use.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise CheckpointError(
            f"checkpoints need Orbax, which cannot be imported: {error}. It is an extra of alpa_lite. Install it: {_INSTALL}."
        ) from error
    return orbax.checkpoint


_T = TypeVar("_T")


def in_thread(work: Callable[[], _T]) -> Future[_T]:
    """Does some of the work of a checkpoint beside the steps; a program that ends waits for it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    running = pool.submit(work)
    pool.shutdown(wait=False)
    return running


class ItemWriter:
    """Writes items, one after the other, while the program goes on.

    Args:
        timeout_s: after which processes that write an item together give up on each other.
    """

    def __init__(self, *, timeout_s: float = 1200.0) -> None:
        self._timeout_ms = max(1000, int(timeout_s * 1000))
        self._running: Future[ItemRecord] | None = None
        self._folder = Path()
        self._buffer = np.empty(0, np.uint8)

    def start(self, folder: Path, leaves: Mapping[str, jax.Array]) -> None:
        """Begins to write an item; when this returns, the arrays may be donated or deleted.

        In a ``jax.distributed`` world, all processes that hold parts of the arrays call it with the same leaves.

        Args:
            folder: of the item, in the unfinished folder of a checkpoint; not there yet.
            leaves: path -> array, where a path may name rows, "params/w[0:4]".

        Raises:
            CheckpointError: it cannot be begun, or Orbax is not installed.
        """
        assert self._running is None or self._running.done(), "the last item is not written yet"
        self._running = None
        ocp = orbax()
        together = ItemWriters(folder, _processes(leaves.values()))
        self._folder = folder
        try:
            _check_seen(folder.parent)
            # Before Orbax's own barriers, of which the first ones wait for a process that failed.
            together.begin(self._timeout_ms)
            packed = saver = None
            if len(together.processes) == 1:
                described, large, pieces = _packed(leaves)
                packed = self._copied(pieces) if pieces else None
            else:
                described, large = tuple(_described(*leaf) for leaf in leaves.items()), leaves
            if large or packed is None:
                saver = self._saver(ocp, folder, large, together)
            else:
                folder.mkdir()
        except Exception as error:  # Orbax and TensorStore raise what they like
            raise _not_saved(folder, error, together) from error
        self._running = in_thread(functools.partial(_finish, saver, packed, folder, described, together))

    def _copied(self, pieces: list[np.ndarray]) -> np.ndarray:
        """One behind the other, where those of the last item were if there is room: new memory is slow to get."""
        size = sum(piece.size for piece in pieces)
        if self._buffer.size < size:
            self._buffer = np.empty(size, np.uint8)
        return np.concatenate(pieces, out=self._buffer[:size])

    def _saver(self, ocp: Any, folder: Path, leaves: Mapping[str, jax.Array], together: ItemWriters) -> Any:
        """Orbax, which has begun to write."""
        processes = ocp.options.MultiprocessingOptions()
        if jax.process_count() > 1:
            # The processes meet at barriers of the job's own service, which run no collectives on devices: a save may start
            # between any two steps.
            processes = ocp.options.MultiprocessingOptions(
                primary_host=together.first, active_processes=together.processes, barrier_sync_key_prefix=str(folder)
            )
        saver = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, multiprocessing_options=processes),
            # Folders are made at once: if they cannot be, other threads of Orbax would wait for them in vain.
            async_options=ocp.options.AsyncOptions(
                timeout_secs=self._timeout_ms // 1000,
                create_directories_asynchronously=False,
                barrier_sync_fn=together.barrier,
            ),
            multiprocessing_options=processes,
        )
        arrays = {path: _words(x) for path, x in leaves.items()}
        chunks = {path: ocp.SaveArgs(chunk_byte_size=chunk_bytes(x)) for path, x in arrays.items()}
        saver.save(folder.resolve(), args=ocp.args.PyTreeSave(arrays, save_args=chunks))
        return saver

    def is_writing(self) -> bool:
        """Whether something was started that has not ended."""
        return self._running is not None and not self._running.done()

    def poll(self) -> ItemRecord | None:
        """What was written; None while it is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        assert self._running is not None, "nothing was started"
        return self._running.result() if self._running.done() else None

    def wait(self, tell: Callable[[int], object] | None = None) -> ItemRecord:
        """What was written, when it is; raises as ``poll``.

        Args:
            tell: told every few seconds how many bytes of the item lie in its folder, of all processes that write it.
        """
        assert self._running is not None, "nothing was started"
        written = 0
        while tell is not None and not futures.wait([self._running], timeout=_TOLD_S).done:
            written = max(
                written, self._written_bytes()
            )  # a folder that is renamed meanwhile may be seen in neither place
            tell(written)
        return self._running.result()

    def _written_bytes(self) -> int:
        total = 0
        for item in self._folder.parent.glob(f"{self._folder.name}*"):  # Orbax adds to the name until all is written
            for folder, _, files in os.walk(
                item
            ):  # which passes over folders that are renamed meanwhile, as rglob does not
                for file in files:
                    with contextlib.suppress(OSError):  # nor is this here any more
                        total += os.stat(os.path.join(folder, file)).st_size
        return total

    def end(self, tell: Callable[[int], object] | None = None) -> None:
        """Waits until nothing is being written, whatever came of it; ``tell`` as for ``wait``."""
        if self._running is not None:
            with contextlib.suppress(Exception):
                self.wait(tell)


def _packed(
    leaves: Mapping[str, jax.Array],
) -> tuple[tuple[ItemLeaf, ...], dict[str, jax.Array], list[np.ndarray]]:
    """Large leaves as they are, and the bytes of small ones, of which Orbax would make much work each."""
    described: list[ItemLeaf] = []
    large: dict[str, jax.Array] = {}
    pieces: list[np.ndarray] = []
    size = 0
    for path, array in leaves.items():
        leaf = _described(path, array)
        if array.nbytes > PACKED_BYTES:
            large[path] = array
        else:
            pieces.append(np.asarray(_words(array)).reshape(-1).view(np.uint8))
            leaf, size = msgspec.structs.replace(leaf, offset=size), size + pieces[-1].size
        described.append(leaf)
    return tuple(described), large, pieces


def chunk_bytes(array: jax.Array) -> int | None:
    """How much of an array Orbax is to store in one; None: all that a device has.

    Orbax makes chunks smaller by the divisors of one dim after another, so that one of a large prime would become single rows.
    """
    shape, most = array.sharding.shard_shape(array.shape), CHUNK_BYTES // array.dtype.itemsize
    if math.prod(shape) <= most:
        return None
    # In its order: the longest dim, of those alone that are split already while that goes.
    chunk = list(shape)
    split = [here < there for here, there in zip(shape, array.shape, strict=True)]
    while math.prod(chunk) > most:
        dims = [dim for dim, size in enumerate(chunk) if split[dim] and size > 1]
        if not dims:
            split = [True] * len(chunk)
            continue
        dim = max(dims, key=chunk.__getitem__)
        chunk[dim] = max(n for n in _divisors(shape[dim]) if n < chunk[dim])
    return CHUNK_BYTES if math.prod(chunk) * _PARTS >= most else None


@functools.cache
def _divisors(size: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return [*small, *(size // n for n in small)]


def _finish(
    saver: Any, packed: np.ndarray | None, folder: Path, leaves: tuple[ItemLeaf, ...], together: ItemWriters
) -> ItemRecord:
    """In a thread: until Orbax has renamed the item into its place, in which all processes take part."""
    try:
        if saver is not None:
            saver.wait_until_finished()
            saver.close()
        if packed is not None:
            (folder / PACKED).write_bytes(packed.data)
        first = jax.process_index() == together.first
        return ItemRecord(name=folder.name, leaves=leaves, files=digests(folder) if first else {})
    except Exception as error:  # as above
        raise _not_saved(folder, error, together) from error


def _check_seen(unfinished: Path) -> None:
    """Raises where this host does not have the folder that the checkpoint was begun in: Orbax would make one of its own."""
    end = time.monotonic() + _SEEN_S
    while not (seen := unfinished.exists()) and time.monotonic() < end:
        time.sleep(0.1)
    if not seen:
        raise CheckpointError(
            f"the folder {str(unfinished.parent)!r} of host {socket.gethostname()!r} is not the one in which a checkpoint was "
            f"begun: {unfinished.name!r} is not in it. All hosts must see the folder of checkpoints under one path. Give one on "
            "a file system that they share."
        )


def _not_saved(folder: Path, error: Exception, together: ItemWriters) -> CheckpointError:
    """What is raised, which the other writers are told, too."""
    failure = error if isinstance(error, CheckpointError) else _not_written(folder, error)
    together.fail(failure)
    return failure


def _not_written(folder: Path, error: Exception) -> CheckpointError:
    told = str(error)
    if len(told) > _FACT_CHARS:  # of TensorStore: paths, and what happened at the very end
        told = f"{told[: _FACT_CHARS // 2]} ... {told[-_FACT_CHARS // 2 :]}"
    fact = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {told}"
    return CheckpointError(
        f"the item {folder.name!r} of a checkpoint could not be written to {str(folder.parent)!r}: {fact}. The folder must be "
        "writable and have room. Nothing of it is seen, older checkpoints are untouched. Correct the cause, or save elsewhere."
    )


def _described(path: str, array: jax.Array) -> ItemLeaf:
    whole, rows = split_path(path)
    assert rows is None or rows[1] - rows[0] == array.shape[0], f"{path} has {array.shape[0]} rows"
    return ItemLeaf(path=whole, rows=rows, shape=tuple(array.shape), dtype=_name(array.dtype))


def _words(array: jax.Array) -> jax.Array:
    return jax.jit(jax.random.key_data)(array) if _name(array.dtype) in KEY_TYPES else array


_name = functools.cache(str)  # of a type of elements: NumPy makes it anew each time, for every leaf of every save


def _processes(arrays: Any) -> set[int]:
    found = {device.process_index for array in arrays for device in array.sharding.device_set}
    return found or {jax.process_index()}
