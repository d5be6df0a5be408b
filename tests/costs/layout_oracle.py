"""Which elements of a tensor lie on which device, by brute force in NumPy; knows nothing of rules, factors or conversions.

``agree`` compares two layouts around a linear op that is given by what it does to an array of element numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec


def owned(spec: ShardingSpec, shape: tuple[int, ...], mesh: DeviceMesh) -> np.ndarray:
    """``[device, element]``: whether the device holds (a partial sum of) the element; devices and elements row-major."""
    coordinates = {axis: grid.reshape(-1) for axis, grid in zip(mesh.axis_names, np.indices(mesh.shape), strict=True)}
    held = np.ones((mesh.num_devices, *shape), dtype=bool)
    for dim, axes in enumerate(spec.dims):
        tile, parts = np.zeros(mesh.num_devices, dtype=int), 1
        for axis in axes:
            tile, parts = tile * mesh.axis_size(axis) + coordinates[axis], parts * mesh.axis_size(axis)
        inside = np.arange(shape[dim]) * parts // shape[dim] == tile[:, None]
        held &= inside.reshape(-1, *(shape[dim] if d == dim else 1 for d in range(len(shape))))
    return held.reshape(mesh.num_devices, -1)


def groups(axes: tuple[str, ...], mesh: DeviceMesh) -> np.ndarray:
    """``[group, member]``: devices that differ along ``axes`` only."""
    numbers = np.arange(mesh.num_devices).reshape(mesh.shape)
    last = [mesh.axis_names.index(a) for a in axes]
    first = [d for d in range(len(mesh.shape)) if d not in last]
    return numbers.transpose(first + last).reshape(-1, mesh.axes_size(axes))


@dataclass(frozen=True)
class LinearOp:
    """One op on one shape: ``apply`` on element numbers gives, per result element, the operand element that it reads;
    with a further last dim, all those that it sums."""

    shape: tuple[int, ...]
    apply: Callable[[np.ndarray], np.ndarray]
    sums: bool = False

    @cached_property
    def reads(self) -> np.ndarray:
        """``[result element, operand element]``."""
        size = int(np.prod(self.shape))
        made = self.apply(np.arange(size).reshape(self.shape))
        rows = made.reshape(-1, made.shape[-1]) if self.sums else made.reshape(-1, 1)
        table = np.zeros((len(rows), size), dtype=bool)
        table[np.arange(len(rows))[:, None], rows] = True
        return table

    @cached_property
    def result_shape(self) -> tuple[int, ...]:
        made = self.apply(np.zeros(self.shape, dtype=int))
        return made.shape[:-1] if self.sums else made.shape


class Oracle:
    """Answers for one op on one mesh."""

    def __init__(self, op: LinearOp, mesh: DeviceMesh) -> None:
        self.op, self.mesh = op, mesh
        self.relevant = op.reads.any(axis=0)
        self._have: dict[ShardingSpec, np.ndarray] = {}
        self._summands: dict[ShardingSpec, np.ndarray] = {}
        self._tiles: dict[ShardingSpec, np.ndarray] = {}
        self._need: dict[ShardingSpec, np.ndarray] = {}

    def agree(self, operand: ShardingSpec, result: ShardingSpec) -> bool:
        """Whether every device can do its part of the op on what it holds, and holds nothing that it does not use.

        A variable is an element, or one device group's partial sum of it. The devices that differ only along the axes over
        which the result is partial must together use every variable of their common tile exactly once, and each must have a
        summand for every element of its tile.
        """
        if operand not in self._have:
            self._have[operand] = owned(operand, self.op.shape, self.mesh) & self.relevant
            self._summands[operand] = self._have[operand] @ self.op.reads.T
        if result not in self._need:
            self._tiles[result] = owned(result, self.op.result_shape, self.mesh)
            self._need[result] = self._tiles[result] @ self.op.reads
        have, need = self._have[operand], self._need[result]
        if (have & ~need).any() or (self._tiles[result] & ~self._summands[operand]).any():
            return False
        copies = np.zeros(self.mesh.num_devices, dtype=int)  # which partial sum of an element a device holds
        members = groups(operand.unreduced, self.mesh)
        copies[members] = np.arange(members.shape[1])
        for group in groups(result.unreduced, self.mesh):
            for copy in range(members.shape[1]):
                uses = have[group[copies[group] == copy]].sum(axis=0)
                if (uses[need[group[0]]] != 1).any():
                    return False
        return True
