"""The device mesh: a logical grid of devices with named axes."""

from __future__ import annotations

import math
from dataclasses import dataclass


def is_axis_name(name: object) -> bool:
    """Whether a mesh axis may be called so: what the text form of specs, XLA and JAX can all tell apart."""
    return isinstance(name, str) and name.isascii() and name.isidentifier() and name != "_"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMesh:
    """A logical grid of devices.

    Attributes:
        shape: size of every axis, slowest-varying device id first (row-major).
        axis_names: one distinct name per axis.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axis_names):
            raise ValueError(
                f"a device mesh needs one name per axis, got shape {self.shape} and names {self.axis_names}"
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"mesh axis names must be distinct, got {self.axis_names}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"mesh axis sizes must be at least 1, got {self.shape}")

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def axis_size(self, name: str) -> int:
        """Size of one axis; ``KeyError`` for an unknown name."""
        try:
            return self.shape[self.axis_names.index(name)]
        except ValueError:
            raise KeyError(f"unknown mesh axis {name!r}; the mesh has {self.axis_names}") from None

    def axes_size(self, names: tuple[str, ...]) -> int:
        """Number of devices along several axes together."""
        return math.prod(self.axis_size(name) for name in names)

    def sort_axes(self, names: tuple[str, ...] | frozenset[str] | set[str]) -> tuple[str, ...]:
        """The given axes in mesh order."""
        return tuple(name for name in self.axis_names if name in names)

    def __str__(self) -> str:
        return "(" + ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True)) + ")"
