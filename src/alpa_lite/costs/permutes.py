"""Collective-permutes between two specs: who sends which part of its tile to whom. Pricing and lowering share it.

A permute is possible where every tile of the new spec lies inside one of the old spec. Only the axes of the dims that change
take part; all other axes see the same exchange at each of their positions.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec

Tile = tuple[int, ...]


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
    axes = changed_axes(before, after, mesh)
    cuts = [mesh.axes_size(a) // mesh.axes_size(b) for a, b in zip(after.dims, before.dims, strict=True)]
    held, wanted = _tiles(before, axes, mesh), _tiles(after, axes, mesh)
    holders: dict[Tile, list[int]] = defaultdict(list)
    wanting: dict[Tile, list[int]] = defaultdict(list)
    for device, tile in enumerate(held):
        holders[tile].append(device)
    for device, tile in enumerate(wanted):
        wanting[tuple(i // cut for i, cut in zip(tile, cuts, strict=True))].append(device)
    pairs = []
    for tile, targets in wanting.items():
        sources = holders[tile]
        stay = set(sources) & set(targets)
        pairs += [(d, d) for d in stay]
        pairs += zip([s for s in sources if s not in stay], [t for t in targets if t not in stay], strict=True)
    pairs.sort()
    return pairs, [tuple(i % cut for i, cut in zip(wanted[target], cuts, strict=True)) for _, target in pairs]


def moved_axes(before: ShardingSpec, after: ShardingSpec, mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes along which anything is sent, in mesh order: some of ``changed_axes``."""
    axes = changed_axes(before, after, mesh)
    places = list(itertools.product(*(range(mesh.axis_size(a)) for a in axes)))
    moves = [(places[s], places[t]) for s, t in permutation(before, after, mesh)[0] if s != t]
    return tuple(axis for i, axis in enumerate(axes) if any(source[i] != target[i] for source, target in moves))


def _tiles(spec: ShardingSpec, axes: tuple[str, ...], mesh: DeviceMesh) -> list[Tile]:
    """Tile coordinates of every device along ``axes``; other axes count as 0."""
    found = []
    for coords in itertools.product(*(range(mesh.axis_size(a)) for a in axes)):
        at = dict(zip(axes, coords, strict=True))
        tile = []
        for dim in spec.dims:
            index = 0
            for axis in dim:
                index = index * mesh.axis_size(axis) + at.get(axis, 0)
            tile.append(index)
        found.append(tuple(tile))
    return found
