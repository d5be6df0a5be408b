"""Values on their way from the driver to workers: of every value only the parts that a process's devices hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.tiles import Box, Placement, slices
from alpa_lite.plan.answers import KEY_TYPES


@dataclass(frozen=True, slots=True)
class HostTiles:
    """Parts of one value in host memory.

    Attributes:
        shape, dtype: of the whole, e.g. "float32"; keys are their words, with a last dim of their own.
        tiles: box of the whole -> its values.
    """

    shape: tuple[int, ...]
    dtype: str
    tiles: Mapping[Box, np.ndarray]

    def whole(self) -> np.ndarray:
        """The value, of tiles that cover it."""
        first = next(iter(self.tiles.values()))
        if first.shape == raw_shape(self.shape, self.dtype):
            return first
        made = np.empty(raw_shape(self.shape, self.dtype), first.dtype)
        for box, tile in self.tiles.items():
            made[slices(box)] = tile
        return made

    def array(self, sharding: NamedSharding) -> jax.Array:
        """On devices; of those of other processes nothing is needed."""
        key = KEY_TYPES.get(self.dtype)
        spec = sharding.spec
        raw = (
            NamedSharding(sharding.mesh, PartitionSpec(*spec, *[None] * (len(self.shape) - len(spec)), None))
            if key
            else sharding
        )
        shape = raw_shape(self.shape, self.dtype)

        def tile(index: Any) -> np.ndarray:
            box = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            found = self.tiles.get(box)
            return self.whole()[index] if found is None else found

        made = jax.make_array_from_callback(shape, raw, tile)
        if key is None:
            return made
        return jax.jit(lambda words: jax.random.wrap_key_data(words, impl=key[0]), out_shardings=sharding)(made)


def dtype_of(text: str) -> Any:
    """A type by the name that plans have for it; "key<fry>" and the like are types of keys."""
    key = KEY_TYPES.get(text)
    return jax.eval_shape(lambda: jax.random.key(0, impl=key[0])).dtype if key else jax.numpy.dtype(text)


def raw_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Of the words of keys; of anything else as it is."""
    key = KEY_TYPES.get(dtype)
    return (*shape, key[1]) if key else shape


def raw_values(value: Any) -> np.ndarray:
    """A value in host memory, keys as their words."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def whole_tiles(value: Any) -> HostTiles:
    """A value of the host as one part."""
    dtype = str(getattr(value, "dtype", None) or jax.dtypes.canonicalize_dtype(np.result_type(value)))
    raw = raw_values(value)
    shape = tuple(np.shape(value))
    return HostTiles(shape, dtype, {tuple((0, n) for n in raw_shape(shape, dtype)): raw})


@dataclass(frozen=True)
class Tiling:
    """How a value is dealt out to the processes of a mesh.

    Attributes:
        shape, dtype: of the value.
        spec, mesh, devices: its layout.
        process_of: device -> process.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: ShardingSpec
    mesh: DeviceMesh
    devices: tuple[int, ...]
    process_of: Mapping[int, int]

    @cached_property
    def boxes(self) -> dict[int, tuple[Box, ...]]:
        """Process -> the parts that its devices hold, each once."""
        found: dict[int, dict[Box, None]] = {}
        extra = tuple((0, n) for n in raw_shape(self.shape, self.dtype)[len(self.shape) :])
        for device, box in Placement(spec=self.spec, mesh=self.mesh, devices=self.devices).boxes(self.shape).items():
            found.setdefault(self.process_of[device], {})[(*box, *extra)] = None
        return {process: tuple(boxes) for process, boxes in found.items()}

    def deal(self, value: Any) -> dict[int, HostTiles]:
        """Process -> what it gets of a value; views, not copies."""
        raw = raw_values(value)
        return {
            process: HostTiles(self.shape, self.dtype, {box: raw[slices(box)] for box in boxes})
            for process, boxes in self.boxes.items()
        }


def local_tiles(array: jax.Array) -> HostTiles:
    """What this process alone can tell of an array: shards of which it holds the first copy."""
    dtype, shape = str(array.dtype), array.shape
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.jit(jax.random.key_data)(array)
    tiles = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            box = tuple(s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True))
            tiles[box] = np.asarray(shard.data)
    return HostTiles(shape, dtype, tiles)


def joined(parts: Sequence[HostTiles]) -> np.ndarray:
    """One value of what several processes told of it."""
    tiles = {box: tile for part in parts for box, tile in part.tiles.items()}
    return HostTiles(parts[0].shape, parts[0].dtype, tiles).whole()
