"""Carries out the steps of a conversion inside a fully manual ``shard_map`` region, on local tiles."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec


def run_step(x: jax.Array, step: Step, mesh: DeviceMesh) -> jax.Array:
    """One step on the local tile ``x`` (laid out as ``step.before``); returns the tile under ``step.after``."""
    match step.kind:
        case None:
            size = x.shape[step.target_dim] // mesh.axes_size(step.axes)
            if size == 1 and jnp.issubdtype(x.dtype, jnp.integer):
                # XLA (jaxlib 0.10.2 to 0.12) drops an integer multiplication by a constant between two dynamic slices
                # when the second takes one element.
                x = lax.optimization_barrier(x)
            return lax.dynamic_slice_in_dim(x, tile_index(step.axes, mesh) * size, size, step.target_dim)
        case CollectiveKind.ALL_GATHER:
            return lax.all_gather(x, step.axes, axis=step.source_dim, tiled=True)
        case CollectiveKind.ALL_TO_ALL:
            return lax.all_to_all(x, step.axes, split_axis=step.target_dim, concat_axis=step.source_dim, tiled=True)
        case CollectiveKind.ALL_REDUCE:
            return lax.psum(x, step.axes)
        case CollectiveKind.REDUCE_SCATTER:
            return lax.psum_scatter(x, step.axes, scatter_dimension=step.target_dim, tiled=True)
        case CollectiveKind.COLLECTIVE_PERMUTE:
            return lax.ppermute(x, step.axes, permutation(step.before, step.after, step.axes, mesh))
    raise AssertionError(f"unknown step {step}")


def tile_index(axes: tuple[str, ...], mesh: DeviceMesh) -> jax.Array | int:
    """This device's position along several axes, the first the most significant."""
    index: jax.Array | int = 0
    for axis in axes:
        index = index * mesh.axis_size(axis) + lax.axis_index(axis)
    return index


def permutation(
    before: ShardingSpec, after: ShardingSpec, axes: tuple[str, ...], mesh: DeviceMesh
) -> list[tuple[int, int]]:
    """(source, target) pairs, numbered along ``axes``, that turn tiles of ``before`` into tiles of ``after``.

    Devices keep their tile where they can; the rest are paired in order, so the map is a bijection.
    """
    sizes = [mesh.axis_size(a) for a in axes]
    holders: dict[Any, list[int]] = defaultdict(list)
    wanting: dict[Any, list[int]] = defaultdict(list)
    for number, coords in enumerate(itertools.product(*map(range, sizes))):
        at = dict(zip(axes, coords, strict=True))
        holders[_tile(before, at, mesh)].append(number)
        wanting[_tile(after, at, mesh)].append(number)
    pairs = []
    for tile, targets in wanting.items():
        sources = holders[tile]
        stay = set(sources) & set(targets)
        pairs += [(d, d) for d in stay]
        moved = zip([s for s in sources if s not in stay], [t for t in targets if t not in stay], strict=True)
        pairs += list(moved)
    return sorted(pairs)


def _tile(spec: ShardingSpec, at: dict[str, int], mesh: DeviceMesh) -> tuple[int, ...]:
    """Tile coordinates of a device; axes that do not take part in the permutation count as 0."""
    tile = []
    for dim in spec.dims:
        index = 0
        for axis in dim:
            index = index * mesh.axis_size(axis) + at.get(axis, 0)
        tile.append(index)
    return tuple(tile)


def keep_on_first(x: jax.Array, axes: tuple[str, ...], mesh: DeviceMesh) -> jax.Array:
    """``x`` on the first device along ``axes``, zeros elsewhere: a replicated tensor as partial sums."""
    return (
        jnp.where(tile_index(axes, mesh) == 0, x, jnp.zeros_like(x)) if math.prod(map(mesh.axis_size, axes)) > 1 else x
    )
