"""An array that lies on workers: what a step on a Ray cluster returns and takes again without moving it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.executor.host_tiles import dtype_of, joined
from alpa_lite.executor.parcel import StageMesh, ValueType
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.answers import KEY_TYPES

if TYPE_CHECKING:
    from alpa_lite.executor.ray.values import RemoteValues


class RemoteArray:
    """A value on the devices of one submesh, which no process may hold whole.

    ``np.asarray`` (and ``jnp.asarray``, ``float``) fetch it; small results came with the step's answer and cost nothing. Keys are
    fetched as their words (``__array__``), ``key()`` makes keys of them.

    Attributes:
        shape, dtype: of the whole.
        stage: that holds it.
    """

    __slots__ = ("__weakref__", "_mesh", "_spec", "_told", "_values", "dtype", "name", "shape", "stage", "submesh")

    def __init__(
        self,
        values: RemoteValues,
        name: int,
        kind: ValueType,
        mesh: StageMesh,
        submesh: int,
        told: np.ndarray | None = None,
    ) -> None:
        self._values, self.name, self.submesh, self._told = values, name, submesh, told
        self._spec, self._mesh, self.stage = kind.spec, mesh, kind.stage
        self.shape = kind.shape
        self.dtype = dtype_of(kind.dtype)

    def __del__(self) -> None:
        self._values.forget(self.name)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def sharding(self) -> NamedSharding:
        """The layout, on a mesh without devices: those are other processes'."""
        mesh = AbstractMesh(self._mesh.shape, self._mesh.axis_names)
        return NamedSharding(mesh, partition_spec(ShardingSpec.parse(self._spec)))

    def devices(self) -> set[str]:
        """Names of the cluster's devices that hold it; they are no ``jax.Device``s of this process."""
        return {f"device {number}" for number in self._mesh.devices}

    def is_deleted(self) -> bool:
        """Whether it was donated, or its workers are gone."""
        return not self._values.holds(self.name)

    def block_until_ready(self) -> RemoteArray:
        """A step has ended when it returns."""
        return self

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._told is None:
            self._told = joined(self._values.fetch(self.name, self.submesh))
        found = self._told
        return found if dtype is None else found.astype(dtype, copy=False)

    def key(self) -> jax.Array:
        """The keys that this array holds, on this process's default device."""
        name = next(impl for text, (impl, _) in KEY_TYPES.items() if text == str(self.dtype))
        return jax.random.wrap_key_data(jax.numpy.asarray(np.asarray(self)), impl=name)

    def __getitem__(self, index: Any) -> Any:
        """On the host."""
        return np.asarray(self)[index]

    def item(self) -> Any:
        return np.asarray(self).item()

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self)[()], spec) if not self.shape else format(str(self), spec)

    def __repr__(self) -> str:
        told = f", {np.asarray(self._told)}" if self._told is not None and not self.shape else ""
        gone = ", deleted" if self.is_deleted() else ""
        return f"RemoteArray({self.dtype}{list(self.shape)}, {self._spec} on stage {self.stage}{told}{gone})"
