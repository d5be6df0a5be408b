"""Pins as data: what a user fixed for a leaf, dim by dim, and whether a spec keeps to it. Knows no JAX.

``trace/pins.py`` reads them from what users write; the intra-op problem uses ``PinnedDims.allows`` as a domain filter.
Text form, as for specs with ``?`` for a free dim: ``[_,model,?]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import PinError, UnevenPinError
from alpa_lite.plan.identity import close_matches
from alpa_lite.units import next_multiple

Dims = tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedDims:
    """What is fixed for one tensor.

    Attributes:
        path: the leaf, or the op of an ``al.pin``.
        shape: global shape.
        dims: per dim the axes that split it, () for whole, None for free.
        origin: the key as the user wrote it; "" if nothing was said about the tensor.
        border: of an argument leaf whose dims hold for its padded form: how it lies itself, where that is fixed.
    """

    path: str
    shape: tuple[int, ...]
    dims: Dims
    origin: str = ""
    border: PinnedDims | None = None

    def __post_init__(self) -> None:
        assert len(self.dims) == len(self.shape), f"{self.path}: pin {self.dims} for shape {self.shape}"

    @property
    def is_free(self) -> bool:
        return all(axes is None for axes in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes used, in dim order."""
        return tuple(axis for axes in self.dims for axis in axes or ())

    def allows(self, spec: ShardingSpec, mesh: DeviceMesh | None = None) -> bool:
        """Whether the spec has exactly the pinned axes, in order, on every dim that is not free.

        Never true for an unreduced spec. With a mesh, axes of size 1 do not count: splitting over them is no splitting.
        """
        if spec.rank != len(self.dims) or _counted(spec.unreduced, mesh):
            return False
        return self._agrees(spec.dims, mesh)

    def joined(self, dims: Dims, mesh: DeviceMesh | None = None) -> Dims | None:
        """The pin's dims, and those given where it is free; None if they disagree. With a mesh as for ``allows``."""
        if not self._agrees(dims, mesh):
            return None
        return tuple(b if a is None else a for a, b in zip(self.dims, dims, strict=True))

    def _agrees(self, dims: Dims, mesh: DeviceMesh | None) -> bool:
        pairs = zip(self.dims, dims, strict=True)
        return all(a is None or b is None or _counted(a, mesh) == _counted(b, mesh) for a, b in pairs)

    def is_uneven(self, mesh: DeviceMesh) -> bool:
        """Whether it splits a dim that does not divide."""
        if not set(self.axes) <= set(mesh.axis_names):
            return False
        return any(axes and size % mesh.axes_size(axes) for size, axes in zip(self.shape, self.dims, strict=True))

    def check(self, mesh: DeviceMesh, source: str) -> None:
        """Refuses a pin that the mesh cannot hold.

        Raises:
            PinError: for an unknown axis; ``UnevenPinError`` for a dim that does not divide.
        """
        for axis in self.axes:
            if axis not in mesh.axis_names:
                raise PinError(
                    f"the pin {self.origin!r} uses the axis {axis!r}. The axes of the mesh {mesh} are"
                    f" {', '.join(map(repr, mesh.axis_names))}.{close_matches(axis, mesh.axis_names)} At {source}."
                    " Use one of them, or name the axes with PlanOptions(axis_names=...)."
                )
        for dim, (size, axes) in enumerate(zip(self.shape, self.dims, strict=True)):
            if axes and size % mesh.axes_size(axes):
                over = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {axes}"
                raise UnevenPinError(
                    f"the pin {self.origin!r} cannot split {self.path!r} of shape {self.shape}: dim {dim} of size"
                    f" {size} does not divide over {over} of {mesh.axes_size(axes)} devices. Only even splits are"
                    f" possible without padding. At {source}. Pad dim {dim} to"
                    f" {next_multiple(size, mesh.axes_size(axes))}, pin another dim, use a mesh on which it divides, or"
                    " let PlanOptions(padding='auto') pad it."
                )

    def __str__(self) -> str:
        return "[" + ",".join("?" if axes is None else ".".join(axes) or "_" for axes in self.dims) + "]"


def without_single(dims: Dims, mesh: DeviceMesh | None) -> Dims:
    """The dims without a mesh's axes of size 1."""
    return tuple(None if axes is None else _counted(axes, mesh) for axes in dims)


def _counted(axes: tuple[str, ...], mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Without a mesh's axes of size 1; axes that it does not have are refused elsewhere."""
    if mesh is None:
        return axes
    return tuple(axis for axis in axes if axis not in mesh.axis_names or mesh.axis_size(axis) > 1)


def parse_dims(text: str) -> Dims:
    """Inverse of ``str`` of a ``PinnedDims``; ``ValueError`` names a bad text."""
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(f"cannot read the pin {text!r}; expected a form like '[_,model,?]'")
    entries = text[1:-1].split(",") if len(text) > 2 else []
    return tuple(None if e == "?" else () if e == "_" else tuple(e.split(".")) for e in entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPins:
    """All pins of one step.

    Attributes:
        inputs, outputs: one per argument and result leaf.
        ties: pairs of argument positions that must have one spec (from ``pin_like``).
        axis_names: axes that pins use, in order of first use.
        keys: (key, spec) as the user wrote them, for the plan.
        notes: what was skipped or did not match.
        source: where in the user's code the pins came in.
    """

    inputs: tuple[PinnedDims, ...]
    outputs: tuple[PinnedDims, ...]
    ties: tuple[tuple[int, int], ...] = ()
    axis_names: tuple[str, ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""

    def check(self, mesh: DeviceMesh) -> None:
        """Refuses pins that the mesh cannot hold (``PinError``, the first one); for each mesh that is searched."""
        for pinned in self.inputs + self.outputs:
            pinned.check(mesh, self.source)

    def with_fixed(self, fixed: Mapping[int, tuple[Dims, str]], mesh: DeviceMesh | None = None) -> ResolvedPins:
        """The pins, and beside them layouts that come from elsewhere.

        A pin that splits its leaf unevenly is kept by the leaf's padded form, so that the leaf itself may lie otherwise.

        Args:
            fixed: position of an argument leaf -> what is fixed there, and where from, for messages and as its origin.
            mesh: for which it is fixed, where that is known: axes of size 1 make no difference.

        Raises:
            PinError: a pin says something else.
        """
        inputs = list(self.inputs)
        for position, (dims, origin) in fixed.items():
            pinned = inputs[position]
            if all(axes is None for axes in dims) and dims:
                continue
            other = PinnedDims(path=pinned.path, shape=pinned.shape, dims=dims, origin=origin)
            if mesh is not None and other.is_uneven(mesh):
                raise PinError(
                    f"{origin!r} says that {pinned.path!r} of shape {pinned.shape} lies as {other}, and no array does on the "
                    f"mesh {mesh}: it does not divide. At {self.source}. Give a layout that divides; only a pin may split "
                    "unevenly, and holds for the padded form."
                )
            if mesh is not None and pinned.is_uneven(mesh):
                border = other if pinned.border is None else self._joined(pinned.border, other, mesh)
                inputs[position] = replace(pinned, border=border)
            else:
                inputs[position] = self._joined(pinned, other, mesh)
        return replace(self, inputs=tuple(inputs))

    def _joined(self, pinned: PinnedDims, other: PinnedDims, mesh: DeviceMesh | None) -> PinnedDims:
        joined = pinned.joined(other.dims, mesh)
        axes = [axis for part in joined or () for axis in part or ()]
        if joined is None or len(set(axes)) < len(axes):
            raise PinError(
                f"the pin {pinned.origin!r} and {other.origin!r} disagree on {pinned.path!r}: {pinned} and {other} (? is free, _ "
                f"whole). A leaf has one layout, in which an axis splits one dim, or it would have to be moved. At "
                f"{self.source}. Take the pin away, or give both the same spec."
            )
        return replace(pinned, dims=joined, origin=pinned.origin or other.origin)
