"""Values from stage to stage by ``jax.device_put``, where all processes are one ``jax.distributed`` job.

On GPUs, JAX moves such arrays from device to device (NCCL). Each process numbers these transfers by a counter (JAX 0.10),
so all of them issue all transfers in one order, also those that they have no part in: of arrays without shards of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.executor.calls import Call, sent_value
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.answers import KEY_TYPES

if TYPE_CHECKING:
    from alpa_lite.executor.parcel import Parcel
    from alpa_lite.executor.worker import Worker


def lie_alike(parcel: Parcel, call: Call) -> bool:
    """Whether a "send" only changes the devices: JAX moves nothing else between processes."""
    value = sent_value(call)
    source, target = parcel.stages[value.stage], parcel.stages[call.stage]
    if value.dtype in KEY_TYPES or 0 in value.shape or source.shape != target.shape:
        return False
    return _places(value.spec, source.axis_names) == _places(call.spec, target.axis_names)


def _places(spec: str, names: tuple[str, ...]) -> list[list[int]]:
    """Per dim the numbers of the axes that split it."""
    return [[names.index(axis) for axis in dim] for dim in ShardingSpec.parse(spec).dims]


class PutCrossing:
    """One "send" between submeshes, in every process of the job."""

    by_all = True

    def __init__(self, worker: Worker, call: Call) -> None:
        value = sent_value(call)
        self.shape, self.dtype = value.shape, jax.numpy.dtype(value.dtype)
        self.copied = call.reads[0] in worker.given_away  # its buffer will be another's while it is on its way
        self.source = self._sharding(worker, value.stage, value.spec)
        self.target = self._sharding(worker, call.stage, call.spec)

    @staticmethod
    def _sharding(worker: Worker, stage: int, spec: str) -> NamedSharding:
        return NamedSharding(worker.mesh_of(stage), partition_spec(ShardingSpec.parse(spec)))

    def send(self, array: Any) -> None:
        if not array.sharding.is_equivalent_to(self.source, array.ndim):
            array = jax.jit(lambda x: x, out_shardings=self.source)(array)
        elif self.copied:
            array = jax.numpy.copy(array)
        jax.device_put(array, self.target)

    def expect(self) -> Any:
        return jax.device_put(self._elsewhere(), self.target)

    def pass_by(self) -> None:
        jax.device_put(self._elsewhere(), self.target)

    def _elsewhere(self) -> Any:
        """The array as those see it that have no part of it."""
        return jax.make_array_from_single_device_arrays(self.shape, self.source, [], dtype=self.dtype)
