"""Which part of a tensor every device holds, as slices and as a picture in text."""

from __future__ import annotations

import itertools

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec


def device_slices(spec: ShardingSpec, shape: tuple[int, ...], mesh: DeviceMesh) -> tuple[tuple[slice, ...], ...]:
    """Per device in mesh order (the last axis fastest), the tile of a tensor of ``shape`` that it holds.

    Raises:
        ValueError: a dim does not divide.
    """
    local = spec.local_shape(shape, mesh)
    found = []
    for place in itertools.product(*map(range, mesh.shape)):
        at = dict(zip(mesh.axis_names, place, strict=True))
        tile = []
        for size, axes in zip(local, spec.dims, strict=True):
            number = 0
            for axis in axes:  # major first
                number = number * mesh.axis_size(axis) + at[axis]
            tile.append(slice(number * size, (number + 1) * size))
        found.append(tuple(tile))
    return tuple(found)


def device_picture(spec: ShardingSpec, shape: tuple[int, ...], mesh: DeviceMesh) -> str:
    """One line per device, e.g. ``device 3 (x=1, y=1)  [4:8, 0:8]``."""
    lines = [f"{spec} of {list(shape)} on {mesh}"]
    places = itertools.product(*map(range, mesh.shape))
    for number, (place, tile) in enumerate(zip(places, device_slices(spec, shape, mesh), strict=True)):
        at = ", ".join(f"{axis}={i}" for axis, i in zip(mesh.axis_names, place, strict=True))
        lines.append(f"  device {number} ({at})  [{', '.join(f'{s.start}:{s.stop}' for s in tile)}]")
    return "\n".join(lines) + "\n"
