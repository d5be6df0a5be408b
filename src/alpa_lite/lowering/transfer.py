"""Moves arrays between device meshes of one process: the tile plan, carried out without waiting for anything.

In: an array on one mesh and the layout wanted on another (the meshes may share devices). Out: the array there. The plan is
``costs.tiles.plan_tiles``. A transfer has two halves:

* ``send``: what is not a whole tile of the source is cut out there, by one function per device; the pieces are copied;
* ``receive``: pieces are joined on their device; what the target repeats is gathered there, over its own links.

Both halves only enqueue work. ``jax.device_put`` does so for equal tilings alone; for others it brings the array to the host
and so waits for whatever makes it (JAX 0.10 to 0.12). The halves are apart because devices run programs in the order in which
they were enqueued: joined too early, a value that is still being made would hold up the receiver's other work. So ``receive``
belongs right before the value's first reader.

A target that repeats the tensor gets each byte once, spread over its devices, unless the tensor is so small that sending it
to every replica costs less than one more program. Axes that divide no dim are sent once per replica.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from alpa_lite._jax_compat import shard_putter
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.tiles import Box, Placement, TilePlan, plan_tiles
from alpa_lite.errors import SpecError
from alpa_lite.lowering.lower import partition_spec

# What a 25 GB/s link moves while the driver hands out one more program on the receiver (about 40 microseconds) and one more
# piece (10).
GATHER_BYTES = 1 << 20
PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """What one device of the source sends: its whole tile, or the parts that ``function`` cuts out of it."""

    source: int
    function: Callable[[Any], Sequence[Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wave:
    """Pieces of one shape, one for each of some devices: what one call copies. ``pieces`` are numbers over all cuts."""

    pieces: tuple[int, ...]
    put: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Join:
    """A tile of the target: its pieces as (wave, place in the wave), and what makes one of several."""

    pieces: tuple[tuple[int, int], ...]
    function: Callable[..., Any] | None


class Functions:
    """Jitted functions by what they do: what was compiled for one transfer serves others."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}

    def get(self, make: Callable[..., Any], *args: Any) -> Any:
        if (make, args) not in self.made:
            self.made[make, args] = make(*args)
        return self.made[make, args]


@dataclass(frozen=True, slots=True)
class Arriving:
    """Pieces on their way; ``receive`` makes the array of them."""

    transfer: Transfer
    waves: tuple[Any, ...]

    def receive(self) -> Any:
        return self.transfer.receive(self.waves)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfer:
    """Moves arrays of one shape between two placements; made once by ``between``, called with each array.

    Attributes:
        plan: which device sends which part to which; ``plan.moved_bytes`` cross between devices.
        gathered: per dim the target's axes over which it is gathered afterwards.
        target: of the array that comes out.
    """

    plan: TilePlan
    gathered: tuple[tuple[str, ...], ...]
    target: NamedSharding
    landing: NamedSharding
    cuts: tuple[_Cut, ...]
    waves: tuple[_Wave, ...]
    joins: tuple[_Join, ...]
    gather: Callable[[Any], Any] | None

    @classmethod
    def between(
        cls,
        shape: tuple[int, ...],
        dtype: Any,
        source_spec: ShardingSpec,
        source_mesh: Mesh,
        target_spec: ShardingSpec,
        target_mesh: Mesh,
        *,
        gather_bytes: int = GATHER_BYTES,
        functions: Functions | None = None,
    ) -> Transfer:
        """The transfer for arrays of one type.

        Args:
            shape, dtype: of the array; not empty, no PRNG keys (``Transfers`` takes both).
            source_spec, source_mesh: how it lies.
            target_spec, target_mesh: how it is wanted.
            gather_bytes: what gathering on the target costs, in bytes between the meshes; 0 gathers where it can.
            functions: shared with other transfers.

        Raises:
            SpecError: a spec has unreduced axes.
            ValueError: a spec does not divide the shape.
        """
        before, after = _placement(source_spec, source_mesh), _placement(target_spec, target_mesh)
        plan = transfer_plan(shape, np.dtype(dtype).itemsize, before, after, gather_bytes)
        wanted = zip(plan.after.spec.dims, target_spec.dims, strict=True)
        gathered = tuple(landed[len(kept) :] for landed, kept in wanted)
        target = NamedSharding(target_mesh, partition_spec(target_spec))
        landing = NamedSharding(target_mesh, partition_spec(plan.after.spec))
        functions = functions or Functions()
        cuts, numbers = _cuts(plan, functions)
        waves, joins = _waves(plan, numbers, dtype, landing, functions)
        return cls(
            plan=plan,
            gathered=gathered,
            target=target,
            landing=landing,
            cuts=cuts,
            waves=waves,
            joins=joins,
            gather=functions.get(gatherer, gathered, landing, target) if any(gathered) else None,
        )

    def __call__(self, array: Any) -> Any:
        """The array where it is wanted. ``RuntimeError`` if it was deleted or donated."""
        return self.send(array).receive()

    def send(self, array: Any) -> Arriving:
        """Enqueues the first half: cut and copy."""
        pieces: list[Any] = []
        shards = array.addressable_shards  # addressable_data(i) would be the first of a repeated array, whatever i
        for cut in self.cuts:
            tile = shards[cut.source].data
            pieces.extend((tile,) if cut.function is None else cut.function(tile))
        return Arriving(self, tuple(wave.put([pieces[i] for i in wave.pieces]) for wave in self.waves))

    def receive(self, waves: Sequence[Any]) -> Any:
        """Enqueues the second half: join and gather."""
        landed = waves[0]
        if self.joins:
            tiles = []
            for join in self.joins:
                pieces = [waves[wave].addressable_data(place) for wave, place in join.pieces]
                tiles.append(pieces[0] if join.function is None else join.function(*pieces))
            landed = jax.make_array_from_single_device_arrays(self.plan.shape, self.landing, tiles)
        return landed if self.gather is None else self.gather(landed)


class Transfers:
    """The transfers of one step, made on first use.

    Args:
        gather_bytes: as in ``Transfer.between``.
    """

    def __init__(self, *, gather_bytes: int = GATHER_BYTES) -> None:
        self.gather_bytes = gather_bytes
        self.made: dict[Any, Transfer] = {}
        self.functions = Functions()

    def place(self, value: Any, sharding: NamedSharding) -> Any:
        """Any array or number in a layout. ``jax.device_put`` takes what does not lie on a mesh, and that without waiting."""
        held = getattr(value, "sharding", None)
        if isinstance(held, NamedSharding) and held.memory_kind == sharding.memory_kind:
            return self.move(value, sharding)
        return jax.device_put(jnp.asarray(value), sharding)

    def move(self, array: Any, sharding: NamedSharding) -> Any:
        """The array in another layout, maybe on other devices; only enqueues work. Both halves at once.

        As with ``jax.device_put``, tiles that stay on their device are shared with the given array, not copied.
        """
        return self.receive(self.send(array, sharding))

    def send(self, array: Any, sharding: NamedSharding) -> Any:
        """The first half; hand what it returns to ``receive`` before the first reader runs.

        The array may hold PRNG keys and may be empty. One that lies as wanted is returned as it is.

        Raises:
            SpecError: its own sharding names no mesh.
            RuntimeError: it was deleted or donated.
        """
        if _lies_as(array, sharding):
            return array
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            bits = self.send(jax.random.key_data(array), sharding)
            return partial(self._keys, bits, jax.random.key_impl(array))
        key = (array.shape, array.dtype, array.sharding, sharding)
        transfer = self.made.get(key)
        if transfer is None:
            if not array.size:
                return jax.device_put(np.zeros(array.shape, array.dtype), sharding)
            transfer = self.made[key] = self._between(array, sharding)
        return transfer.send(array)

    def receive(self, sent: Any) -> Any:
        """The second half."""
        if isinstance(sent, Arriving):
            return sent.receive()
        return sent() if isinstance(sent, partial) else sent

    def _keys(self, bits: Any, impl: Any) -> Any:
        return jax.random.wrap_key_data(self.receive(bits), impl=impl)

    def _between(self, array: Any, sharding: NamedSharding) -> Transfer:
        source, target = (_layout(s, array.ndim) for s in (array.sharding, sharding))
        options = {"gather_bytes": self.gather_bytes, "functions": self.functions}
        return Transfer.between(array.shape, array.dtype, *source, *target, **options)


def _lies_as(array: Any, sharding: NamedSharding) -> bool:
    """Whether nothing is to be done; XLA's results may leave out dims of a spec that are not split."""
    held = array.sharding
    same_mesh = isinstance(held, NamedSharding) and held.mesh == sharding.mesh
    return held == sharding or (same_mesh and held.is_equivalent_to(sharding, array.ndim))


def _layout(sharding: Any, rank: int) -> tuple[ShardingSpec, Mesh]:
    """The spec and the mesh of an array's sharding."""
    if isinstance(sharding, SingleDeviceSharding):
        return ShardingSpec.replicated(rank), Mesh(np.array(list(sharding.device_set)), ("x",))
    if not isinstance(sharding, NamedSharding):
        raise SpecError(
            f"an array with the sharding {sharding} was to be moved between meshes. It must lie on a mesh, as a "
            f"NamedSharding says. The array came to Transfers.send; put it into such a sharding first, with jax.device_put."
        )
    dims = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in sharding.spec]
    spec = ShardingSpec((*dims, *[()] * (rank - len(dims))), tuple(sharding.spec.unreduced))
    assert isinstance(sharding.mesh, Mesh), "arrays lie on devices"
    return spec, sharding.mesh


def _placement(spec: ShardingSpec, mesh: Mesh) -> Placement:
    logical = DeviceMesh(shape=mesh.devices.shape, axis_names=tuple(mesh.axis_names))
    return Placement(spec=spec, mesh=logical, devices=tuple(d.id for d in mesh.devices.flat))


# -- what to do -----------------------------------------------------------------------------------------------------


def transfer_plan(
    shape: tuple[int, ...], itemsize: int, before: Placement, after: Placement, gather_bytes: int
) -> TilePlan:
    """The tile plan to the layout in which the tensor lands; what the target repeats may be split there and gathered after.

    Of the ways to split it, and that not to, the cheapest in bytes, pieces and programs; then that with the fewest axes.
    """
    mesh, spec = after.mesh, after.spec
    free = [a for a in mesh.axis_names if a not in spec.sharded_axes and mesh.axis_size(a) > 1]
    found = []
    for place in itertools.product(range(-1, len(shape)), repeat=len(free)):
        added = ShardingSpec.from_axes(len(shape), {a: d for a, d in zip(free, place, strict=True) if d >= 0})
        split = ShardingSpec(tuple(kept + more for kept, more in zip(spec.dims, added.dims, strict=True)))
        if split.divides(shape, mesh):
            plan = plan_tiles(shape, itemsize, before, Placement(spec=split, mesh=mesh, devices=after.devices))
            extra = gather_bytes if any(added.dims) else 0
            found.append((plan.moved_bytes + PIECE_BYTES * len(plan.transfers) + extra, len(added.sharded_axes), plan))
    return min(found, key=lambda f: f[:2])[2]


def _cuts(plan: TilePlan, functions: Functions) -> tuple[tuple[_Cut, ...], dict[tuple[int, Box], int]]:
    """Per source device its cut, and the number of every (device, part of its tile)."""
    wanted: dict[int, dict[Box, None]] = defaultdict(dict)
    for t in plan.transfers:
        wanted[t.source][t.source_box] = None
    whole = tuple((0, size) for size in plan.before.spec.local_shape(plan.shape, plan.before.mesh))
    cuts: list[_Cut] = []
    numbers: dict[tuple[int, Box], int] = {}
    for index, device in enumerate(plan.before.devices):
        boxes = [box for box in wanted.get(device, ()) if box != whole]
        if whole in wanted.get(device, ()):
            numbers[device, whole] = len(numbers)
            cuts.append(_Cut(source=index, function=None))
        if boxes:
            numbers.update({(device, box): len(numbers) + k for k, box in enumerate(boxes)})
            cuts.append(_Cut(source=index, function=functions.get(cutter, tuple(boxes))))
    return tuple(cuts), numbers


def _waves(
    plan: TilePlan, numbers: dict[tuple[int, Box], int], dtype: Any, landing: NamedSharding, functions: Functions
) -> tuple[tuple[_Wave, ...], tuple[_Join, ...]]:
    """Copies grouped by (place among the target's pieces, shape); no joins if one wave brings every tile whole."""
    arriving: dict[int, list[Any]] = {device: [] for device in plan.after.devices}
    for t in plan.transfers:
        arriving[t.target].append(t)
    groups: dict[Any, list[tuple[int, int]]] = defaultdict(list)  # (place, shape) -> (target's index, piece)
    where: dict[int, list[tuple[Any, int]]] = defaultdict(list)  # target's index -> (group, place in the group)
    for index, pieces in enumerate(arriving.values()):
        for place, t in enumerate(pieces):
            group = (place, tuple(hi - lo for lo, hi in t.box))
            where[index].append((group, len(groups[group])))
            groups[group].append((index, numbers[t.source, t.source_box]))
    if all(len(pieces) == 1 for pieces in arriving.values()):
        (pieces,) = groups.values()
        put = shard_putter(plan.shape, dtype, landing)
        return (_Wave(pieces=tuple(number for _, number in pieces), put=put),), ()
    devices = list(landing.mesh.devices.flat)
    waves = []
    for (_, shape), pieces in groups.items():
        line = NamedSharding(Mesh(np.array([devices[i] for i, _ in pieces]), ("i",)), PartitionSpec("i"))
        put = shard_putter((len(pieces) * shape[0], *shape[1:]), dtype, line)
        waves.append(_Wave(pieces=tuple(number for _, number in pieces), put=put))
    order = {group: k for k, group in enumerate(groups)}
    joins = []
    for index, transfers in enumerate(arriving.values()):
        boxes = tuple(t.target_box for t in transfers)
        function = functions.get(joiner, boxes) if len(boxes) > 1 else None
        pieces = tuple((order[group], place) for group, place in where[index])
        joins.append(_Join(pieces=pieces, function=function))
    return tuple(waves), tuple(joins)


# -- what runs on devices -------------------------------------------------------------------------------------------


def cutter(boxes: tuple[Box, ...]) -> Callable[[Any], Sequence[Any]]:
    def cut(tile: Any) -> list[Any]:
        return [lax.slice(tile, [lo for lo, _ in box], [hi for _, hi in box]) for box in boxes]

    return jax.jit(cut)


def joiner(boxes: tuple[Box, ...]) -> Callable[..., Any]:
    """Joins pieces that fill a tile as a grid, given in row-major order."""
    counts = [len({box[dim] for box in boxes}) for dim in range(len(boxes[0]))]
    assert math.prod(counts) == len(boxes), f"{boxes} are no grid"

    def join(*pieces: Any) -> Any:
        parts = list(pieces)
        for dim in reversed(range(len(counts))):
            n = counts[dim]
            if n > 1:
                parts = [lax.concatenate(parts[k : k + n], dim) for k in range(0, len(parts), n)]
        return parts[0]

    return jax.jit(join)


def gatherer(
    gathered: tuple[tuple[str, ...], ...], landing: NamedSharding, target: NamedSharding
) -> Callable[[Any], Any]:
    def local(tile: Any) -> Any:
        for dim, axes in enumerate(gathered):
            tile = lax.all_gather(tile, axes, axis=dim, tiled=True) if axes else tile
        return tile

    mapped = jax.shard_map(local, mesh=target.mesh, in_specs=landing.spec, out_specs=target.spec, check_vma=False)
    return jax.jit(mapped, out_shardings=target)  # which keeps dims that are not split in the spec
