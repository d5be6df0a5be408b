"""Collective-permutes between two specs: who sends which part of its tile to whom. Pricing and lowering share it.

A permute is possible where every tile of the new spec lies inside one of the old spec. Only the axes of the dims that change
take part; all other axes see the same exchange at each of their positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec

Numbers = NDArray[np.int64]


def changed_axes(before: ShardingSpec, after: ShardingSpec, mesh: DeviceMesh) -> tuple[str, ...]:
    """Axes of the dims that change, in mesh order."""
    return mesh.sort_axes(
        {a for old, new in zip(before.dims, after.dims, strict=True) if old != new for a in old + new}
    )


def permutation(
    before: ShardingSpec, after: ShardingSpec, mesh: DeviceMesh
) -> tuple[list[tuple[int, int]], list[tuple[int, ...]]]:
    """The exchange, with devices numbered along ``changed_axes``.

    Returns:
        (source, target) pairs: a bijection, in which devices keep their tile where they can and the rest are paired in
        order. And per source, which part of its tile it sends, counted per dim.
    """
    sources, targets, parts = _exchange(before, after, mesh, changed_axes(before, after, mesh))
    order = np.argsort(sources)
    pairs = list(zip(sources[order].tolist(), targets[order].tolist(), strict=True))
    return pairs, [tuple(part) for part in parts[targets[order]].tolist()]


def _exchange(
    before: ShardingSpec, after: ShardingSpec, mesh: DeviceMesh, axes: tuple[str, ...]
) -> tuple[Numbers, Numbers, Numbers]:
    """Sources and targets, pair by pair, and per device (row) and dim which part of the source's tile it wants."""
    cuts = np.array([mesh.axes_size(a) // mesh.axes_size(b) for a, b in zip(after.dims, before.dims, strict=True)])
    sizes = [mesh.axes_size(dim) for dim in before.dims]
    wanted = _tiles(after, axes, mesh)
    held_tile = _number(_tiles(before, axes, mesh), sizes)
    wanted_tile = _number(wanted // cuts, sizes)
    moving = np.flatnonzero(held_tile != wanted_tile)  # the others keep their tile
    staying = np.flatnonzero(held_tile == wanted_tile)
    senders = moving[np.argsort(held_tile[moving], kind="stable")]
    receivers = moving[np.argsort(wanted_tile[moving], kind="stable")]
    assert (held_tile[senders] == wanted_tile[receivers]).all()
    return np.concatenate([staying, senders]), np.concatenate([staying, receivers]), wanted % cuts


def moved_axes(before: ShardingSpec, after: ShardingSpec, mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes along which anything is sent, in mesh order: some of ``changed_axes``."""
    axes = changed_axes(before, after, mesh)
    sources, targets, _ = _exchange(before, after, mesh, axes)
    shape = [mesh.axis_size(a) for a in axes]
    differ = [
        (s != t).any() for s, t in zip(np.unravel_index(sources, shape), np.unravel_index(targets, shape), strict=True)
    ]
    return tuple(axis for axis, moved in zip(axes, differ, strict=True) if moved)


def _tiles(spec: ShardingSpec, axes: tuple[str, ...], mesh: DeviceMesh) -> Numbers:
    """(device along ``axes``, dim): tile coordinates; other axes count as 0."""
    shape = [mesh.axis_size(a) for a in axes]
    at = dict(zip(axes, np.indices(shape).reshape(len(axes), -1), strict=True))
    found = np.zeros((math.prod(shape), len(spec.dims)), dtype=np.int64)
    for dim, names in enumerate(spec.dims):
        for axis in names:
            found[:, dim] = found[:, dim] * mesh.axis_size(axis) + at.get(axis, 0)
    return found


def _number(tiles: Numbers, sizes: Sequence[int]) -> Numbers:
    """One number per row of tile coordinates, of a spec with so many tiles per dim."""
    return np.ravel_multi_index(tuple(tiles.T), sizes) if sizes else np.zeros(len(tiles), dtype=np.int64)
