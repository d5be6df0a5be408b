"""States for tests of checkpoints: every kind of leaf, and pipelines whose stacked parameters lie on several submeshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.executor.checkpoint_item import ItemWriter
from alpa_lite.plan.checkpoint import ItemRecord
from alpa_lite.plan.checkpoint_folder import CheckpointFolder

KINDS = ("float32", "bfloat16", "float8_e4m3fn", "float16", "int32", "int8", "uint32", "bool", "complex64", "int4")


def mesh(first: int = 0, shape: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("x", "y")) -> Mesh:
    """Devices of this process from ``first`` on."""
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[first : first + count]).reshape(shape), names)


def placed(value: Any, on: Mesh, spec: P) -> jax.Array:
    return jax.device_put(value, NamedSharding(on, spec))


def leaves(on: Mesh) -> dict[str, jax.Array]:
    """Every kind of leaf, split in several ways."""
    values = jax.random.normal(jax.random.key(1), (8, 4)) * 5
    found = {f"kinds/{kind}": placed(values.astype(kind), on, P("x", "y")) for kind in KINDS}
    found["w"] = placed(values, on, P(("y", "x"), None))
    found["odd name.with [marks]"] = placed(values[:, 0], on, P())
    found["key"] = placed(jax.random.key(3), on, P())
    found["keys"] = placed(jax.random.split(jax.random.key(4), 4), on, P("x"))
    found["rbg"] = placed(jax.random.key(5, impl="rbg"), on, P())
    found["count"] = placed(jnp.int32(7), on, P())
    return found


def structs(arrays: dict[str, jax.Array], on: Mesh | None, spec: P | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """The same leaves, wanted on another mesh, all with one spec as far as they have dims; None: on one device."""

    def sharding(array: jax.Array) -> Any:
        return None if on is None else NamedSharding(on, P(*(spec or P())[: array.ndim]))

    return {path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(a)) for path, a in arrays.items()}


def assert_equal(one: Any, other: Any) -> None:
    """Bit for bit, typed keys too."""
    assert one.dtype == other.dtype and one.shape == other.shape
    if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    one, other = np.asarray(one), np.asarray(other)
    assert one.tobytes() == other.tobytes()


def saved(folder: CheckpointFolder, step: int, items: dict[str, dict[str, jax.Array]]) -> Path:
    """A complete checkpoint of items that are written at once."""
    unfinished = folder.begin(step)
    writers = []
    for name, arrays in items.items():
        writers.append(ItemWriter())
        writers[-1].start(unfinished / name, arrays)
    records: list[ItemRecord] = [writer.wait() for writer in writers]
    return folder.commit(step, records, plan_text="{}\n", position=10 * step)
