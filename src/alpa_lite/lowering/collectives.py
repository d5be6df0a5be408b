"""Carries out the steps of a conversion inside a fully manual ``shard_map`` region, on local tiles."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec

_MAX_PIECES = 16  # further ones make the program long for little


def run_alone(x: jax.Array, steps: Sequence[Step], numbers: Sequence[int], mesh: DeviceMesh) -> jax.Array:
    """A conversion on its own: all steps on the local tile ``x``, which is wanted in memory in the usual order.

    Inside a larger program ``run_step`` leaves the order to XLA, which makes the neighbours read what the collective
    left. Here nobody else reads it, and XLA would transpose it; putting the pieces together by hand copies rows.

    Args:
        numbers: per step the number of its collective, -1 for a slice, for the audit.
    """
    for step, number in zip(steps, numbers, strict=True):
        with jax.named_scope(f"al_c{number}") if number >= 0 else nullcontext():
            x = _run_in_pieces(x, step, mesh)
    return x


def _run_in_pieces(x: jax.Array, step: Step, mesh: DeviceMesh) -> jax.Array:
    """``run_step`` with one piece per device along a leading dim, on which the collective works."""
    n = mesh.axes_size(step.axes)

    def apart(dim: int) -> jax.Array:
        return x.reshape(n, -1, *x.shape[1:]) if dim == 0 else jnp.stack(jnp.split(x, n, dim))

    def together(pieces: jax.Array, dim: int) -> jax.Array:
        return pieces.reshape(-1, *pieces.shape[2:]) if dim == 0 else jnp.concatenate(list(pieces), dim)

    if n <= _MAX_PIECES:
        match step.kind:
            case CollectiveKind.ALL_GATHER if step.source_dim > 0:
                return together(lax.all_gather(x, step.axes), step.source_dim)
            case CollectiveKind.ALL_TO_ALL:
                pieces = lax.all_to_all(apart(step.target_dim), step.axes, split_axis=0, concat_axis=0, tiled=True)
                return together(pieces, step.source_dim)
            case CollectiveKind.REDUCE_SCATTER if step.target_dim > 0:
                return lax.psum_scatter(apart(step.target_dim), step.axes, scatter_dimension=0)
    return run_step(x, step, mesh)


def run_step(x: jax.Array, step: Step, mesh: DeviceMesh) -> jax.Array:
    """One step on the local tile ``x`` (laid out as ``step.before``); returns the tile under ``step.after``."""
    match step.kind:
        case None:
            sizes = list(x.shape)
            sizes[step.target_dim] //= mesh.axes_size(step.axes)
            starts: list[Any] = [0] * x.ndim
            starts[step.target_dim] = tile_index(step.axes, mesh) * sizes[step.target_dim]
            return _cut(x, starts, sizes)
        case CollectiveKind.ALL_GATHER:
            return lax.all_gather(x, step.axes, axis=step.source_dim, tiled=True)
        case CollectiveKind.ALL_TO_ALL:
            return lax.all_to_all(x, step.axes, split_axis=step.target_dim, concat_axis=step.source_dim, tiled=True)
        case CollectiveKind.ALL_REDUCE:
            return lax.psum(x, step.axes)
        case CollectiveKind.REDUCE_SCATTER:
            return lax.psum_scatter(x, step.axes, scatter_dimension=step.target_dim, tiled=True)
        case CollectiveKind.COLLECTIVE_PERMUTE:
            return _permute(x, step, mesh)
    raise AssertionError(f"unknown step {step}")


def tile_index(axes: tuple[str, ...], mesh: DeviceMesh) -> jax.Array | int:
    """This device's position along several axes, the first the most significant."""
    index: jax.Array | int = 0
    for axis in axes:
        index = index * mesh.axis_size(axis) + lax.axis_index(axis)
    return index


def _cut(x: jax.Array, starts: list[Any], sizes: list[int]) -> jax.Array:
    """The part of ``x`` that begins at ``starts``."""
    if jnp.issubdtype(x.dtype, jnp.integer) and any(new == 1 < old for new, old in zip(sizes, x.shape, strict=True)):
        # XLA (jaxlib 0.10.2 to 0.12) drops an integer multiplication by a constant between two dynamic slices when the
        # second takes one element.
        x = lax.optimization_barrier(x)
    return lax.dynamic_slice(x, starts, sizes)


def _permute(x: jax.Array, step: Step, mesh: DeviceMesh) -> jax.Array:
    """Each device cuts out the part of its tile that another one wants, then the parts change places."""
    pairs, parts = permutation(step.before, step.after, step.axes, mesh)
    cuts = np.array(
        [mesh.axes_size(a) // mesh.axes_size(b) for a, b in zip(step.after.dims, step.before.dims, strict=True)]
    )
    if (cuts > 1).any():
        sizes = [size // cut for size, cut in zip(x.shape, cuts.tolist(), strict=True)]
        starts = jnp.asarray(np.array(parts) * sizes, dtype=jnp.int32)[tile_index(step.axes, mesh)]
        x = _cut(x, list(starts), sizes)
    return lax.ppermute(x, step.axes, pairs)


def permutation(
    before: ShardingSpec, after: ShardingSpec, axes: tuple[str, ...], mesh: DeviceMesh
) -> tuple[list[tuple[int, int]], list[tuple[int, ...]]]:
    """How tiles of ``before`` become tiles of ``after``, each of which lies inside one of ``before``.

    Returns:
        (source, target) pairs of devices, numbered along ``axes``: a bijection, in which devices keep their tile where
        they can and the rest are paired in order. And per source, which part of its tile it sends, counted per dim.
    """
    sizes = [mesh.axis_size(a) for a in axes]
    cuts = [mesh.axes_size(a) // mesh.axes_size(b) for a, b in zip(after.dims, before.dims, strict=True)]
    holders: dict[Any, list[int]] = defaultdict(list)
    wanting: dict[Any, list[int]] = defaultdict(list)
    wanted = []
    for number, coords in enumerate(itertools.product(*map(range, sizes))):
        at = dict(zip(axes, coords, strict=True))
        holders[_tile(before, at, mesh)].append(number)
        wanted.append(_tile(after, at, mesh))
        wanting[tuple(i // cut for i, cut in zip(wanted[-1], cuts, strict=True))].append(number)
    pairs = []
    for tile, targets in wanting.items():
        sources = holders[tile]
        stay = set(sources) & set(targets)
        pairs += [(d, d) for d in stay]
        moved = zip([s for s in sources if s not in stay], [t for t in targets if t not in stay], strict=True)
        pairs += list(moved)
    pairs.sort()
    parts = [tuple(i % cut for i, cut in zip(wanted[target], cuts, strict=True)) for _, target in pairs]
    return pairs, parts


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
