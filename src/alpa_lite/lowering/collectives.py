"""Carries out the steps of a conversion inside a fully manual ``shard_map`` region, on local tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.permutes import changed_axes, permutation

_MAX_PIECES = 16  # further ones make the program long for little
_ORIGIN = np.int32(0)  # of the type of positions on the mesh, also where JAX takes numbers for 64 bits wide


def run_alone(x: jax.Array, steps: Sequence[Step], numbers: Sequence[int], mesh: DeviceMesh) -> jax.Array:
    """A conversion on its own: all steps on the local tile ``x``, which is wanted in memory in the usual order.

    Inside a larger program ``run_step`` leaves the order to XLA, which makes the neighbours read what the collective
    left. Here nobody else reads it, and XLA would transpose it; putting the pieces together by hand copies rows.
    """
    return run_steps(x, steps, numbers, mesh, _run_in_pieces)


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
            starts: list[Any] = [_ORIGIN] * x.ndim
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


def run_steps(
    x: jax.Array,
    steps: Sequence[Step],
    numbers: Sequence[int],
    mesh: DeviceMesh,
    run: Callable[[jax.Array, Step, DeviceMesh], jax.Array] = run_step,
) -> jax.Array:
    """All steps of a conversion on the local tile ``x``.

    Args:
        numbers: per step the number of its collective, -1 for a slice, for the audit.
    """
    for step, number in zip(steps, numbers, strict=True):
        with jax.named_scope(f"al_c{number}") if number >= 0 else nullcontext():
            x = run(x, step, mesh)
    return x


def tile_index(axes: tuple[str, ...], mesh: DeviceMesh) -> Any:
    """This device's position along several axes, the first the most significant, as int32."""
    index: Any = _ORIGIN
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
    pairs, parts = permutation(step.before, step.after, mesh)
    axes = changed_axes(step.before, step.after, mesh)
    cuts = np.array(
        [mesh.axes_size(a) // mesh.axes_size(b) for a, b in zip(step.after.dims, step.before.dims, strict=True)]
    )
    if (cuts > 1).any():
        sizes = [size // cut for size, cut in zip(x.shape, cuts.tolist(), strict=True)]
        starts = jnp.asarray(np.array(parts) * sizes, dtype=jnp.int32)[tile_index(axes, mesh)]
        x = _cut(x, list(starts), sizes)
    return lax.ppermute(x, axes, pairs)


def keep_on_first(x: jax.Array, axes: tuple[str, ...], mesh: DeviceMesh) -> jax.Array:
    """``x`` on the first device along ``axes``, zeros elsewhere: a replicated tensor as partial sums."""
    return (
        jnp.where(tile_index(axes, mesh) == 0, x, jnp.zeros_like(x)) if math.prod(map(mesh.axis_size, axes)) > 1 else x
    )
