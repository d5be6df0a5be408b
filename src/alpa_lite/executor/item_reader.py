"""Arrays from the items of a checkpoint, in any layout.

In: a complete checkpoint (``checkpoint_item.py`` writes its items) and what is wanted of it, on any mesh. Out: arrays; of every
stored one only what this process's devices hold is read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from alpa_lite.errors import CheckpointError
from alpa_lite.executor.checkpoint_item import PACKED, orbax
from alpa_lite.plan.answers import KEY_TYPES
from alpa_lite.plan.checkpoint import CheckpointManifest, StoredLeaf, check_files
from alpa_lite.plan.leaf_rows import rows_path, split_path

_WINDOW_BYTES = 2**30  # of host memory, for what is read and not yet on its device
_CACHE_BYTES = 2**25  # a stored chunk that several tiles need is decoded once
_AT_ONCE_BYTES = (
    2**26
)  # of chunks that are being read: host memory beside what is wanted, as they are stored and decoded


def read_leaves(
    folder: Path, manifest: CheckpointManifest, wanted: Mapping[str, jax.ShapeDtypeStruct], *, verified: bool = False
) -> dict[str, jax.Array]:
    """Leaves of a checkpoint in the layouts that are wanted.

    In a ``jax.distributed`` world, the processes of a sharding's mesh all call it; each reads what its devices hold.

    Args:
        folder, manifest: of a complete checkpoint.
        wanted: path -> shape, dtype and sharding (none: the first device); a path may name rows, whatever rows were stored.
        verified: the files' digests were compared already (``CheckpointFolder.read(verify=True)``).

    Raises:
        CheckpointError: a leaf is missing, has other rows, shape or dtype, or a file is damaged.
    """
    orbax()  # brings TensorStore
    requests = [_Request.of(path, struct, manifest, folder) for path, struct in wanted.items()]
    if not verified:
        check_files(folder, manifest, sorted({piece.item for request in requests for piece in request.stored.pieces}))
    stores = _Stores(folder)
    made: dict[str, jax.Array] = {}
    for window in _windows(requests):
        tiles = [request.start(stores) for request in window]
        made.update({request.path: request.array(tile) for request, tile in zip(window, tiles, strict=True)})
    return made


def check_wanted(folder: Path, manifest: CheckpointManifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Whether leaves could be read, before any is; arguments and errors as of ``read_leaves``."""
    for path, struct in wanted.items():
        _check_stored(path, struct, manifest, folder)


def _check_stored(path: str, struct: jax.ShapeDtypeStruct, manifest: CheckpointManifest, folder: Path) -> StoredLeaf:
    """The stored leaf, of which a leaf or rows of it are wanted."""
    whole, rows = split_path(path)
    stored = manifest.leaf(whole, folder)
    available = stored.shape
    if rows is not None and stored.shape and rows[1] <= stored.shape[0]:
        available = (rows[1] - rows[0], *stored.shape[1:])
    if (available, stored.dtype) != (tuple(struct.shape), str(struct.dtype)):
        raise CheckpointError(
            f"the leaf {whole!r} of the checkpoint {str(folder)!r} is {stored}, and {path!r} is wanted as "
            f"{struct.dtype}{list(struct.shape)}. Leaves are restored as they were saved, on any mesh. Restore into the shapes "
            "and types of the step that saved it, and convert then."
        )
    dtype = np.dtype("uint32") if stored.dtype in KEY_TYPES else jnp.dtype(stored.dtype)
    if (made := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        raise CheckpointError(
            f"the leaf {whole!r} of the checkpoint {str(folder)!r} is {stored}, of which JAX would make {made}. Types of 64 "
            "bits exist only where they are enabled. Call jax.config.update('jax_enable_x64', True) first."
        )
    return stored


Box = tuple[tuple[int, int], ...]  # per dim: first index and the one after the last
_Tile = tuple[np.ndarray, list[tuple[str, Any]]]  # and what is being read into it: (item, what has a ``result``)


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A part of a small leaf, read when it is asked for."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    target: np.ndarray

    def result(self) -> None:
        size = math.prod(self.shape)
        words = np.fromfile(self.file, np.uint8, size * self.target.itemsize, offset=self.offset)
        self.target[...] = words.view(self.target.dtype).reshape(self.shape)[self.index]


class _Stores:
    """TensorStore's view of the stored arrays, opened once each."""

    def __init__(self, folder: Path) -> None:
        import tensorstore as ts

        self._folder, self._open = folder.resolve(), {}
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._ts = ts
        self._reading: deque[tuple[int, Any]] = deque()  # bytes, and what ends when they are read
        self._reading_bytes = 0

    def packed(self, item: str) -> Path:
        """The bytes of an item's small leaves."""
        return self._folder / item / PACKED

    def __call__(self, item: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        key = item, name
        if key not in self._open:
            kvstore = {"driver": "ocdbt", "base": f"file://{self._folder / item}/", "path": f"{name}/"}
            try:
                store = self._ts.open({"driver": "zarr", "kvstore": kvstore}, context=self._context, read=True).result()
            except ValueError as error:
                raise _unreadable(self._folder, item, name, str(error)) from error
            if store.shape != shape or store.dtype.numpy_dtype != dtype:
                found = f"it is {store.dtype.name}{list(store.shape)}, its manifest says {dtype}{list(shape)}"
                raise _unreadable(self._folder, item, name, found)
            self._open[key] = store
        return self._open[key]

    def read(self, store: Any, box: Box, target: np.ndarray) -> Iterator[Any]:
        """Begins to read a box into memory that is there, chunk by chunk, and waits where many are on their way.

        TensorStore, asked for all of it, has all chunks as they are stored in memory where decoding is slow.

        Yields:
            What has a ``result``, when it is read.
        """
        into, chunk = self._ts.array(target), store.chunk_layout.read_chunk.shape or ()
        size = math.prod(chunk) * target.itemsize
        is_large = size > _AT_ONCE_BYTES  # of all that one device had: it is decoded once for all who ask at once
        for part in (box,) if is_large else itertools.product(*map(_cut, box, chunk)):
            while self._reading and not is_large and self._reading_bytes + size > _AT_ONCE_BYTES:
                done, reading = self._reading.popleft()
                reading.commit.exception()  # waits; whoever reads it is told
                self._reading_bytes -= done
            source = tuple(slice(lo, hi) for lo, hi in part)
            place = tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(part, box, strict=True))
            reading = into[place].write(store[source])
            self._reading.append((size, reading))
            self._reading_bytes += size
            yield reading


def _cut(part: tuple[int, int], size: int) -> list[tuple[int, int]]:
    """What of a dim is wanted, cut where chunks of a size begin."""
    lo, hi = part
    starts = [lo, *range((lo // size + 1) * size, hi, size)]
    return list(zip(starts, [*starts[1:], hi], strict=True))


def _unreadable(folder: Path, item: str, name: str, fact: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {str(folder)!r} is damaged: {name!r} in its item {item!r} cannot be read: {fact:.500}. All files must "
        "be as they were written. Copy the folder again, or restore an older step."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A leaf that is wanted.

    Attributes:
        first_row: of the stored leaf, where what is wanted begins.
        shape, dtype: of what is wanted, as it is stored: keys as words.
    """

    path: str
    stored: StoredLeaf
    folder: Path
    first_row: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    struct: jax.ShapeDtypeStruct
    sharding: Any

    @classmethod
    def of(cls, path: str, struct: jax.ShapeDtypeStruct, manifest: CheckpointManifest, folder: Path) -> _Request:
        stored = _check_stored(path, struct, manifest, folder)
        rows = split_path(path)[1]
        key = KEY_TYPES.get(stored.dtype)
        dtype = np.dtype("uint32") if key else jnp.dtype(stored.dtype)
        sharding = struct.sharding or SingleDeviceSharding(jax.devices()[0])
        return cls(
            path=path,
            stored=stored,
            folder=folder,
            first_row=rows[0] if rows else 0,
            shape=(*struct.shape, key[1]) if key else tuple(struct.shape),
            dtype=dtype,
            struct=struct,
            sharding=_of_words(sharding) if key else sharding,
        )

    def boxes(self) -> dict[Any, Box]:
        """Of the tiles of this process's devices."""
        index = self.sharding.addressable_devices_indices_map(self.shape)
        return {
            device: tuple(s.indices(size)[:2] for s, size in zip(slices, self.shape, strict=True))
            for device, slices in index.items()
        }

    def size_bytes(self) -> int:
        """Of all distinct tiles."""
        return sum(math.prod(hi - lo for lo, hi in box) for box in set(self.boxes().values())) * self.dtype.itemsize

    def start(self, stores: _Stores) -> dict[Box, _Tile]:
        """Begins to read every distinct tile, by its box."""
        tiles = {box: np.empty([hi - lo for lo, hi in box], self.dtype) for box in set(self.boxes().values())}
        return {box: (tile, list(self._parts(box, tile, stores))) for box, tile in tiles.items()}

    def _parts(self, box: Box, tile: np.ndarray, stores: _Stores) -> Iterator[tuple[str, Any]]:
        for piece in self.stored.pieces:
            name, shape = self.stored.path, (*self.stored.shape, *self.shape[len(self.stored.shape) :])
            source, target = [slice(lo, hi) for lo, hi in box], [slice(None)] * len(box)
            if box:
                start, stop = piece.rows or (0, shape[0])
                lo, hi = max(box[0][0] + self.first_row, start), min(box[0][1] + self.first_row, stop)
                if lo >= hi:
                    continue
                source[0] = slice(lo - start, hi - start)
                target[0] = slice(lo - self.first_row - box[0][0], hi - self.first_row - box[0][0])
                if piece.rows is not None:
                    name, shape = rows_path(name, start, stop), (stop - start, *shape[1:])
            into = tile[(*target, ...)]  # a view, of no dims too
            if piece.offset is not None:
                yield piece.item, _Unpacked(stores.packed(piece.item), piece.offset, shape, tuple(source), into)
                continue
            store = stores(piece.item, name, shape, self.dtype)
            own = tuple(s.indices(size)[:2] for s, size in zip(source, shape, strict=True))
            for reading in stores.read(store, own, into):
                yield piece.item, reading

    def array(self, tiles: Mapping[Box, _Tile]) -> jax.Array:
        """The leaf, when its tiles are read."""
        values = {box: self._when_read(*tile) for box, tile in tiles.items()}
        on_devices = [jax.device_put(values[box], device) for device, box in self.boxes().items()]
        array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, on_devices, dtype=self.dtype)
        key = KEY_TYPES.get(self.stored.dtype)
        if key is None:
            return array
        return jax.jit(functools.partial(jax.random.wrap_key_data, impl=key[0]), out_shardings=self.struct.sharding)(
            array
        )

    def _when_read(self, tile: np.ndarray, parts: Sequence[tuple[str, Any]]) -> np.ndarray:
        for item, reading in parts:
            try:
                reading.result()
            except (OSError, ValueError) as error:
                raise _unreadable(self.folder, item, self.path, str(error)) from error
        return tile


def _of_words(sharding: Any) -> Any:
    """Of keys -> of their words, whose last dim is never split."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, None))
    return sharding


def _windows(requests: Sequence[_Request]) -> Iterator[list[_Request]]:
    """Requests in order, as many at once as host memory is set aside for."""
    window: list[_Request] = []
    total = 0
    for request in requests:
        size = request.size_bytes()
        if window and total + size > _WINDOW_BYTES:
            yield window
            window, total = [], 0
        window.append(request)
        total += size
    if window:
        yield window
