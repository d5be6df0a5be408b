"""One process's halves of a transfer between meshes that lie in different processes.

In: the type of a tensor, its layouts on both meshes, and which process holds which device. Out: what this process cuts and hands
to which other process, and what it expects from whom and makes of it. The tile plan is that of ``lowering.transfer``; all
pieces from one process to another travel together.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.tiles import Box, Placement, TilePlan, Transfer
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.lowering.transfer import GATHER_BYTES, Functions, cutter, gatherer, joiner, transfer_plan

Pieces = Mapping[int, Sequence[Any]]  # of another process's number


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTransfer:
    """Which piece of a tensor travels from which device to which.

    Attributes:
        plan: between devices of the cluster.
        dtype: of the tensor.
        process_of: device -> process.
    """

    plan: TilePlan
    dtype: Any
    process_of: Mapping[int, int]

    @classmethod
    def between(
        cls,
        shape: tuple[int, ...],
        dtype: Any,
        before: tuple[ShardingSpec, DeviceMesh, Sequence[int]],
        after: tuple[ShardingSpec, DeviceMesh, Sequence[int]],
        process_of: Mapping[int, int],
    ) -> RemoteTransfer:
        """From and to a spec on a mesh of devices of the cluster; not empty, no PRNG keys.

        Raises:
            SpecError: a spec has unreduced axes.
        """
        places = [Placement(spec=s, mesh=m, devices=tuple(devices)) for s, m, devices in (before, after)]
        plan = transfer_plan(shape, jnp.dtype(dtype).itemsize, places[0], places[1], GATHER_BYTES)
        return cls(plan=plan, dtype=jnp.dtype(dtype), process_of=process_of)

    def _between(self, source: int, target: int) -> list[Transfer]:
        """The pieces from one process to another, in the order in which both name them."""
        at = self.process_of
        return [t for t in self.plan.transfers if (at[t.source], at[t.target]) == (source, target)]

    def sender(self, process: int, functions: Functions, *, copied: bool) -> Callable[[Any], Pieces]:
        """What ``process`` does with its part of the array: target process -> pieces, on its devices.

        Args:
            copied: whole tiles are copied, as the array's buffer will be given to others while they are on their way.
        """
        targets = sorted({self.process_of[t.target] for t in self.plan.transfers})
        wanted = {target: found for target in targets if (found := self._between(process, target))}
        own = [d for d in self.plan.before.devices if self.process_of[d] == process]
        whole = tuple((0, n) for n in self.plan.before.spec.local_shape(self.plan.shape, self.plan.before.mesh))
        boxes: dict[int, dict[Box, None]] = defaultdict(dict)
        for transfer in itertools.chain(*wanted.values()):
            boxes[transfer.source][transfer.source_box] = None
        cuts = {
            d: (tuple(found), functions.get(cutter, tuple(found))) for d, found in boxes.items() if [*found] != [whole]
        }

        def send(array: Any) -> Pieces:
            tiles = [shard.data for shard in array.addressable_shards]
            pieces: dict[tuple[int, Box], Any] = {}
            for index, device in enumerate(own):
                if device in cuts:
                    found, cut = cuts[device]
                    pieces.update(zip(((device, box) for box in found), cut(tiles[index]), strict=True))
                elif device in boxes:
                    pieces[device, whole] = jnp.copy(tiles[index]) if copied else tiles[index]
            return {target: [pieces[t.source, t.source_box] for t in found] for target, found in wanted.items()}

        return send

    def receiver(self, process: int, mesh: Mesh, spec: ShardingSpec, functions: Functions) -> Receiver:
        """What ``process`` expects, and how it makes the array in the layout ``spec`` of that."""
        sources = sorted({self.process_of[t.source] for t in self.plan.transfers})
        wanted = {source: found for source in sources if (found := self._between(source, process))}
        devices = dict(zip(self.plan.after.devices, mesh.devices.flat, strict=True))
        expected = {
            source: [
                jax.ShapeDtypeStruct(
                    tuple(hi - lo for lo, hi in t.box), self.dtype, sharding=SingleDeviceSharding(devices[t.target])
                )
                for t in found
            ]
            for source, found in wanted.items()
        }
        place = {id(t): (source, k) for source, found in wanted.items() for k, t in enumerate(found)}
        joins = []
        for device in self.plan.after.devices:
            found = [t for t in self.plan.transfers if t.target == device and id(t) in place]
            if found:
                join = functions.get(joiner, tuple(t.target_box for t in found)) if len(found) > 1 else None
                joins.append((tuple(place[id(t)] for t in found), join))
        target = NamedSharding(mesh, partition_spec(spec))
        landing = NamedSharding(mesh, partition_spec(self.plan.after.spec))
        kept = zip(self.plan.after.spec.dims, spec.dims, strict=True)
        gathered = tuple(landed[len(wanted_axes) :] for landed, wanted_axes in kept)
        gather = functions.get(gatherer, gathered, landing, target) if any(gathered) else None
        return Receiver(expected, tuple(joins), self.plan.shape, landing, gather)


@dataclass(frozen=True, slots=True)
class Receiver:
    """The receiving half: ``expected`` is source process -> types of its pieces; ``join`` makes the array of them."""

    expected: Mapping[int, Sequence[jax.ShapeDtypeStruct]]
    joins: tuple[tuple[tuple[tuple[int, int], ...], Any], ...]
    shape: tuple[int, ...]
    landing: NamedSharding
    gather: Callable[[Any], Any] | None

    def join(self, arrived: Pieces) -> Any:
        """The array, of the pieces of every source; only enqueues work."""
        tiles = []
        for places, join in self.joins:
            pieces = [arrived[source][k] for source, k in places]
            tiles.append(pieces[0] if join is None else join(*pieces))
        landed = jax.make_array_from_single_device_arrays(self.shape, self.landing, tiles)
        return landed if self.gather is None else self.gather(landed)
