"""Arguments of an exported step as global arrays: exported slices, given values, or seeded ones.

In: the parts of the ranks that this process owns. Out: one ``jax.Array`` per argument leaf over the mesh of all processes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.costs.tiles import slices
from alpa_lite.errors import LaunchError
from alpa_lite.executor.load_export import ExportedPart
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.answers import KEY_TYPES
from alpa_lite.plan.records import Leaf


def given_values(part: ExportedPart, inputs: str | None, seed: int) -> dict[str, np.ndarray]:
    """Whole values of the arguments that are in the file ``inputs`` or were not exported; keys as their words.

    Raises:
        LaunchError: the file is no ``.npz`` of arguments of this step.
    """
    given = _read(inputs, part) if inputs else {}
    for number, leaf in enumerate(part.plan.inputs):
        if leaf.path not in given and leaf.path not in part.parameters:
            given[leaf.path] = _seeded(leaf, np.random.default_rng((seed, number)))
    return given


def _read(inputs: str, part: ExportedPart) -> dict[str, np.ndarray]:
    try:
        with np.load(Path(inputs), allow_pickle=False) as file:
            found = dict(file)
    except (OSError, ValueError, zipfile.BadZipFile, TypeError) as error:
        raise _bad_inputs(inputs, f"cannot be read: {error}") from error
    leaves = {leaf.path: leaf for leaf in part.plan.inputs}
    for path, value in found.items():
        if path not in leaves:
            raise _bad_inputs(inputs, f"has {path!r}, which is no argument; they are {', '.join(list(leaves)[:8])}")
        if value.shape != _raw_shape(leaves[path]):
            raise _bad_inputs(inputs, f"has {path!r} of shape {value.shape}, it must be {_raw_shape(leaves[path])}")
    return {path: value.astype(_raw_dtype(leaves[path])) for path, value in found.items()}


def _bad_inputs(inputs: str, fact: str) -> LaunchError:
    return LaunchError(
        f"the arguments in {inputs!r} cannot be used: the file {fact}. It must be an .npz whose names are argument paths and "
        "whose values are whole arrays, e.g. np.savez('inputs.npz', **{'1/x': x}). Correct the file, or leave it out for "
        "seeded values."
    )


def _raw_shape(leaf: Leaf) -> tuple[int, ...]:
    key = KEY_TYPES.get(leaf.value.dtype)
    return (*leaf.value.shape, key[1]) if key else leaf.value.shape


def _raw_dtype(leaf: Leaf) -> np.dtype[Any]:
    return np.dtype("uint32" if leaf.value.dtype in KEY_TYPES else leaf.value.dtype)


def _seeded(leaf: Leaf, rng: np.random.Generator) -> np.ndarray:
    """Normal floats; integers and booleans 0 or 1, as they may be indices or labels; any words for keys."""
    shape, dtype = _raw_shape(leaf), _raw_dtype(leaf)
    if leaf.value.dtype in KEY_TYPES:
        return rng.integers(0, 2**32, shape, dtype="uint32")
    if dtype.kind in "iub":
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def global_arguments(parts: Mapping[int, ExportedPart], mesh: Mesh, values: Mapping[str, np.ndarray]) -> list[Any]:
    """One array per argument leaf, whose tiles on this process's devices come from ``values`` or the parts.

    Args:
        parts: by rank, of this process's devices.
        values: whole values by path; they win over exported slices.
    """
    devices = list(mesh.devices.flat)
    plan = next(iter(parts.values())).plan

    def tile(part: ExportedPart, path: str) -> np.ndarray:
        return values[path][slices(part.slices[path])] if path in values else part.parameters[path]

    def array(leaf: Leaf) -> Any:
        spec = partition_spec(leaf.spec)
        key = KEY_TYPES.get(leaf.value.dtype)
        raw_spec = PartitionSpec(*spec, None) if key else spec
        tiles = [jax.device_put(tile(part, leaf.path), devices[rank]) for rank, part in parts.items()]
        raw = jax.make_array_from_single_device_arrays(_raw_shape(leaf), NamedSharding(mesh, raw_spec), tiles)
        if key is None:
            return raw
        return jax.jit(partial(jax.random.wrap_key_data, impl=key[0]), out_shardings=NamedSharding(mesh, spec))(raw)

    return [array(leaf) for leaf in plan.inputs]
