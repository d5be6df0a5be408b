"""Which devices take part in a collective: the notations of HLO text, and the mesh axes they amount to.

Ids in HLO are positions in the program's device assignment, i.e. row-major positions in the mesh that the program was
compiled for, whatever the devices' own ids are.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy as np

from alpa_lite.core.mesh import DeviceMesh

Groups = tuple[tuple[int, ...], ...]

_LISTS = re.compile(r"^\{((?:\{[\d,\s]*\},?\s*)*)\}")
_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"^@?mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\))?\s*\{([^}]*)\}")
_IDS = re.compile(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_AXIS = re.compile(r"^'?([^'=:]+)'?(?:=(\d+))?(?::\((\d+)\)(\d+))?$")


def parse_groups(text: str) -> Groups:
    """Device groups from the text after ``replica_groups=`` (or ``source_target_pairs=``).

    Three notations: ``{{0,1},{2,3}}``; iota ``[2,4]<=[8]`` and ``[2,4]<=[4,2]T(1,0)``; mesh
    ``mesh['a'=2,'b'=4] {'b'}``, where an axis may be split: ``'b':(1)2``, and ``device_ids=`` may follow the mesh, as a
    list or as iota without its reshape, ``([2,4]T(1,0))``. ``{}`` gives no groups (= all devices).

    Raises:
        ValueError: another notation.
    """
    if match := _LISTS.match(text):
        return tuple(_ints(group) for group in re.findall(r"\{([\d,\s]*)\}", match.group(1)))
    if match := _IOTA.match(text):
        shape, reshape = _ints(match.group(1)), _ints(match.group(2))
        ids = np.arange(math.prod(reshape)).reshape(reshape)
        if match.group(3):
            ids = ids.transpose(_ints(match.group(3)))
        return _rows(ids.reshape(shape))
    if match := _MESH.match(text):
        return _mesh_groups(match.group(1), match.group(2), match.group(3))
    raise ValueError(
        f"cannot read the device groups {text[:80]!r}; known notations are lists, iota ([2,4]<=[8]) and mesh forms. "
        f"The compiler of this JAX version prints another one: please report it with this text"
    )


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids)


def _axis(text: str) -> tuple[str, int, int, int]:
    """Name, size, and for a sub-axis its pre-size and size (0 where not given)."""
    match = _AXIS.match(text.strip())
    if match is None:
        raise ValueError(f"cannot read the mesh axis {text!r} in the device groups")
    return match.group(1), int(match.group(2) or 0), int(match.group(3) or 0), int(match.group(4) or 0)


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups:
    """Groups along ``grouped``: the axes are cut so that each grouped (sub-)axis is a dim, then transposed."""
    mesh_axes = [_axis(part) for part in axes.split(",") if part.strip()]
    chosen = [_axis(part) for part in grouped.split(",") if part.strip()]
    cut_shape: list[int] = []
    position: dict[tuple[str, int], int] = {}
    for name, size, _, _ in mesh_axes:
        edges = {1, size}
        for other, _, pre_size, sub_size in chosen:
            if other == name and pre_size:
                edges |= {pre_size, pre_size * sub_size}
        ordered = sorted(edges)
        for low, high in itertools.pairwise(ordered):
            position[name, low] = len(cut_shape)
            cut_shape.append(high // low)
        if size == 1:
            position[name, 1] = len(cut_shape)
            cut_shape.append(1)
    last = [position[name, pre_size or 1] for name, _, pre_size, _ in chosen]
    first = [dim for dim in range(len(cut_shape)) if dim not in last]
    count = math.prod(cut_shape)
    ids = _device_ids(device_ids) if device_ids else np.arange(count)
    group_size = math.prod(cut_shape[dim] for dim in last)
    return _rows(ids.reshape(cut_shape).transpose(first + last).reshape(count // group_size, group_size))


def _device_ids(text: str) -> np.ndarray:
    """Ids in mesh order from ``0,2,1,3`` or ``[2,2]T(1,0)``."""
    if match := _IDS.match(text):
        shape = _ints(match.group(1))
        ids = np.arange(math.prod(shape)).reshape(shape)
        return ids.transpose(_ints(match.group(2))).reshape(-1) if match.group(2) else ids.reshape(-1)
    return np.array(_ints(text))


def mesh_axes_of(groups: Groups, mesh: DeviceMesh, device_ids: tuple[int, ...] | None = None) -> tuple[str, ...] | None:
    """The mesh axes that a list of groups runs along, in mesh order, axes of size 1 left out.

    Args:
        groups: lists of device ids; the order within and of groups does not matter.
        mesh: the mesh that the program was compiled for.
        device_ids: ids in mesh order (row-major) if they are not 0, 1, 2, ...

    Returns:
        None if no set of axes has exactly these groups.

    Example:
        >>> mesh_axes_of(((0, 1), (2, 3)), DeviceMesh(shape=(2, 2), axis_names=("x", "y")))
        ('y',)
    """
    ids = np.array(device_ids if device_ids is not None else range(mesh.num_devices)).reshape(mesh.shape)
    wanted = {frozenset(group) for group in groups}
    real = [dim for dim, size in enumerate(mesh.shape) if size > 1]
    for count in range(len(real) + 1):
        for chosen in itertools.combinations(real, count):
            others = [dim for dim in range(len(mesh.shape)) if dim not in chosen]
            rows = ids.transpose([*others, *chosen]).reshape(-1, math.prod(mesh.shape[dim] for dim in chosen))
            if {frozenset(int(i) for i in row) for row in rows} == wanted:
                return tuple(mesh.axis_names[dim] for dim in chosen)
    return None


def permute_axes_of(
    pairs: Groups, mesh: DeviceMesh, device_ids: tuple[int, ...] | None = None
) -> tuple[str, ...] | None:
    """The mesh axes along which the source and target of any pair differ; None if an id is not in the mesh."""
    ids = device_ids if device_ids is not None else tuple(range(mesh.num_devices))
    place = {device: np.unravel_index(position, mesh.shape) for position, device in enumerate(ids)}
    moved: set[str] = set()
    for source, target in pairs:
        if source not in place or target not in place:
            return None
        moved |= {n for n, a, b in zip(mesh.axis_names, place[source], place[target], strict=True) if a != b}
    return mesh.sort_axes(moved)
