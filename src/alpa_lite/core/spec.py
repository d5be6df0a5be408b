"""The sharding spec: per tensor dim the ordered mesh axes that split it, plus the axes it is unreduced over.

Text form, one entry per dim, ``_`` for an unsharded dim, ``xy`` axes joined with ``.``, unreduced axes after ``+``::

    [x,_]        dim 0 split over x
    [_,x.y]      dim 1 split over x (major) and y (minor)
    [x,_]+{y}    as the first, and every device along y holds a partial sum
    []           a replicated scalar
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from alpa_lite.core.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """How one tensor lies on a device mesh.

    Constraints: an axis occurs at most once over all dims and the unreduced axes together; ``unreduced`` is sorted by
    name so that equal layouts compare equal.

    Attributes:
        dims: for every tensor dim the mesh axes that split it, major first.
        unreduced: axes along which the devices hold partial sums.
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used = [axis for dim in self.dims for axis in dim] + list(self.unreduced)
        if len(set(used)) != len(used):
            raise ValueError(f"a mesh axis may be used once per tensor, got {self}")
        if tuple(sorted(self.unreduced)) != self.unreduced:
            object.__setattr__(self, "unreduced", tuple(sorted(self.unreduced)))

    @classmethod
    def replicated(cls, rank: int) -> ShardingSpec:
        return cls(((),) * rank)

    @classmethod
    def parse(cls, text: str) -> ShardingSpec:
        """Inverse of ``str``; ``ValueError`` names the text on bad input."""
        body, _, rest = text.partition("+")
        if not (body.startswith("[") and body.endswith("]")) or (rest and not (rest[0] == "{" and rest[-1] == "}")):
            raise ValueError(f"cannot read the sharding spec {text!r}; expected a form like '[x,_]' or '[x,_]+{{y}}'")
        inner = body[1:-1]
        dims = tuple(() if d == "_" else tuple(d.split(".")) for d in inner.split(",")) if inner else ()
        return cls(dims, tuple(rest[1:-1].split(",")) if rest else ())

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """Axes used by dims, in dim order."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def dim_of_axis(self) -> dict[str, int]:
        """The same layout seen from the mesh: per axis that splits a dim, which one. ``from_axes`` is the inverse."""
        return {axis: dim for dim, axes in enumerate(self.dims) for axis in axes}

    @classmethod
    def from_axes(cls, rank: int, dim_of_axis: Mapping[str, int]) -> ShardingSpec:
        """The spec in which every given axis splits the dim it is mapped to, axes of one dim in the order given."""
        return cls(tuple(tuple(a for a, d in dim_of_axis.items() if d == dim) for dim in range(rank)))

    @property
    def is_replicated(self) -> bool:
        return not self.unreduced and not any(self.dims)

    def num_shards(self, mesh: DeviceMesh) -> int:
        """Number of distinct tiles of the tensor."""
        return mesh.axes_size(self.sharded_axes)

    def local_shape(self, shape: tuple[int, ...], mesh: DeviceMesh) -> tuple[int, ...]:
        """Shape of one device's tile; sizes must divide (``ValueError`` names dim, size and axes otherwise)."""
        if len(shape) != self.rank:
            raise ValueError(f"the spec {self} has rank {self.rank}, the shape {shape} has rank {len(shape)}")
        local = []
        for dim, (size, axes) in enumerate(zip(shape, self.dims, strict=True)):
            parts = mesh.axes_size(axes)
            if size % parts:
                raise ValueError(f"dim {dim} of size {size} does not divide over axes {axes} of {parts} devices")
            local.append(size // parts)
        return tuple(local)

    def local_size_bytes(self, shape: tuple[int, ...], itemsize: int, mesh: DeviceMesh) -> int:
        """Bytes of one device's tile."""
        return math.prod(self.local_shape(shape, mesh)) * itemsize

    def divides(self, shape: tuple[int, ...], mesh: DeviceMesh) -> bool:
        """Whether every dim divides evenly."""
        return all(size % mesh.axes_size(axes) == 0 for size, axes in zip(shape, self.dims, strict=True))

    def __str__(self) -> str:
        body = "[" + ",".join(".".join(axes) if axes else "_" for axes in self.dims) + "]"
        return body + ("+{" + ",".join(self.unreduced) + "}" if self.unreduced else "")


def layouts(mesh: DeviceMesh, rank: int) -> tuple[ShardingSpec, ...]:
    """All layouts that follow the hardware: each mesh axis splits one dim or none, axes of one dim in mesh order.

    There are (rank + 1) ** axes, of which rank ** axes split the tensor over all devices; replicated comes first.

    Example:
        >>> [str(s) for s in layouts(DeviceMesh(shape=(4,), axis_names=("x",)), 2)]
        ['[_,_]', '[x,_]', '[_,x]']
    """
    names = mesh.axis_names
    places = itertools.product(range(-1, rank), repeat=len(names))
    return tuple(
        ShardingSpec.from_axes(rank, {a: d for a, d in zip(names, place, strict=True) if d >= 0}) for place in places
    )
