"""One process of a step that runs on several: the programs of its stages, its part of the state, and its place in the order.

In: a parcel, then per step what the driver gives. Out: per step the small results, and what it keeps of the others. Nothing here
knows who started the process (``ray/actor.py`` does so for Ray).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import WorkerError
from alpa_lite.executor.calls import Call, sent_value
from alpa_lite.executor.checkpoint_item import ItemWriter
from alpa_lite.executor.host_data import Read, Reader, ReadOrder
from alpa_lite.executor.host_tiles import HostTiles, dtype_of, local_tiles
from alpa_lite.executor.item_reader import read_leaves
from alpa_lite.executor.local import local_mesh
from alpa_lite.executor.parcel import Parcel, ValueType
from alpa_lite.executor.put_crossing import PutCrossing, lie_alike
from alpa_lite.executor.replay import Crossing, Replay, exported_function
from alpa_lite.executor.transport import Transport
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.lowering.remote_transfer import RemoteTransfer
from alpa_lite.lowering.transfer import Functions, Transfers
from alpa_lite.plan.answers import KEY_TYPES
from alpa_lite.plan.checkpoint import ItemRecord, read_manifest

TOLD_BYTES = 1024  # results up to this size go to the driver with the step's answer
_STEP_BITS = 32  # of the name of a transfer, 64 in all, that tell it from others of its step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """What the driver asks of one process for one step.

    Attributes:
        number: of the step; rises by one, equal in all processes.
        given: argument -> its parts that this process's devices hold.
        kept: argument -> the name of a value that this process keeps.
        names: result -> the name under which this process keeps it.
        dropped: names of values that nobody wants any more.
        timed: wait for every program, and tell how long they took.
        read: argument -> its parts that the process reads itself.
    """

    number: int
    given: Mapping[int, HostTiles] = field(default_factory=dict)
    kept: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[int, int] = field(default_factory=dict)
    dropped: Sequence[int] = ()
    timed: bool = False
    read: Mapping[int, ReadOrder] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """What a process says of a step: small results by position, how long it worked on it, and whether it still writes a
    checkpoint."""

    told: Mapping[int, np.ndarray]
    step_s: float
    busy_s: float = 0.0
    saving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a process has come: steps begun, calls issued in the current one, and a word on what it does."""

    steps: int
    calls: int
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredLeaf:
    """A leaf of a checkpoint, or rows of one, and the name under which a process keeps it."""

    path: str
    name: int
    kind: ValueType


class Worker:
    """A process's part of a step.

    Args:
        parcel: the step.
        site: number of the process among the parcel's sites.
        transport: to the other processes.
        one_world: all sites are processes of one ``jax.distributed`` job, in their order; arrays go from stage to stage by
            ``jax.device_put`` where both hold them alike.
        kept: what the process keeps, by name, where it has workers of several steps on one transport, whose steps are numbered
            together.
    """

    def __init__(
        self,
        parcel: Parcel,
        site: int,
        transport: Transport,
        *,
        one_world: bool = False,
        kept: dict[int, Any] | None = None,
    ) -> None:
        self.parcel, self.site, self.transport, self.one_world = parcel, parcel.sites[site], transport, one_world
        self.process_of = {device: s.number for s in parcel.sites for device in s.devices}
        self.alone = self.site.num_processes == 1
        self.kept = {} if kept is None else kept
        self.steps, self.calls, self.doing = 0, 0, "loading"
        self.functions = Functions()
        self.meshes = {k: self.mesh_of(k) for k in self.site.stages}
        self.all_calls = parcel.read_calls()
        self.given_away = _given_away(self.all_calls, parcel)
        self.programs = self._programs()
        self.replay = Replay(self.all_calls, self.meshes, self.programs, _Mover(self.alone), self._crossing)
        self.timed = Replay(self.all_calls, self.meshes, self._timed_programs(), _Mover(self.alone), self._crossing)
        self.busy_s = 0.0
        self.writer = ItemWriter()
        self.reader: Reader | None = None
        self.doing = "waiting"

    def mesh_of(self, stage: int) -> Any:
        """The devices of a stage, as far as this process knows of them."""
        number = next(s.number for s in self.parcel.sites if stage in s.stages)
        before = sum(len(s.devices) for s in self.parcel.sites[:number]) if self.one_world else 0
        return local_mesh(self.parcel.stages[stage].logical, jax.devices()[before:])

    def _programs(self) -> dict[tuple[int, str], Any]:
        """This process's programs, compiled: what is wrong shows now, and the first step takes no longer than others."""
        made: dict[Any, Any] = {}
        found = {}
        for row in self.parcel.rows:
            if row.stage not in self.meshes:
                continue
            mesh = self.meshes[row.stage]
            key = (row.file, mesh, tuple(row.donated))
            if key not in made:
                self.doing = f"compiling {row.program} of stage {row.stage}"
                program = jax.export.deserialize(bytearray(self.parcel.programs[row.file]))
                function = exported_function(program, mesh, row.donated)
                shardings = program.in_shardings_jax(mesh)
                pairs = zip(program.in_avals, shardings, strict=True)
                types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in pairs]
                made[key] = function.lower(*types).compile()
            found[row.stage, row.program] = made[key]
        return found

    def _timed_programs(self) -> dict[tuple[int, str], Any]:
        def timed(function: Any) -> Any:
            def run(*args: Any) -> Any:
                jax.block_until_ready(args)
                start = time.perf_counter()
                made = jax.block_until_ready(function(*args))
                self.busy_s += time.perf_counter() - start
                return made

            return run

        return {key: timed(function) for key, function in self.programs.items()}

    def step(self, order: StepOrder) -> StepAnswer:
        """Run a step to its end.

        Raises:
            WorkerError: a value that it should keep is not here.
        """
        start = time.perf_counter()
        self.steps, self.calls, self.doing, self.busy_s = order.number, 0, "step", 0.0
        for name in order.dropped:
            self.kept.pop(name, None)
        given: dict[str, Any] = {f"a{position}": tiles for position, tiles in order.given.items()}
        if order.read:
            assert self.reader is not None, "the driver sets it first"
            self.doing = "reading the batch"
            given |= {f"a{position}": tiles for position, tiles in self.reader.get(order.read).items()}
            self.doing = "step"
        given |= {f"a{position}": self.value(name) for position, name in order.kept.items()}
        results = (self.timed if order.timed else self.replay)(given, self._issued)
        del given
        self.doing = "waiting for devices"
        jax.block_until_ready(results)
        self.kept |= {order.names[position]: array for position, array in results.items() if position in order.names}
        told = {position: self._tell(array) for position, array in results.items() if self._tells(position, array)}
        self.doing = "waiting"
        return StepAnswer(
            told=told, step_s=time.perf_counter() - start, busy_s=self.busy_s, saving=self.writer.is_writing()
        )

    def _issued(self, number: int) -> None:
        self.calls = number

    def set_reader(self, read: Read) -> None:
        """What batches are read with."""
        self.reader = Reader(read)

    def progress(self) -> Progress:
        """Read by another thread."""
        return Progress(steps=self.steps, calls=self.calls, doing=self.doing)

    # -- values that stay ---------------------------------------------------------------------------------------------

    def value(self, name: int) -> Any:
        """A value that this process keeps."""
        if name not in self.kept:
            raise WorkerError(
                f"process {self.site.number} was asked for value {name}, which it does not keep. A value that was donated or "
                "dropped is gone. Use the results of the last step."
            )
        return self.kept[name]

    def fetch(self, name: int) -> HostTiles:
        """What this process can tell of a value that it keeps."""
        return local_tiles(self.value(name))

    def drop(self, names: Sequence[int]) -> None:
        for name in names:
            self.kept.pop(name, None)

    def put(self, name: int, tiles: HostTiles, spec: str, stage: int) -> None:
        """Keep a value of the driver in a layout."""
        self.kept[name] = tiles.array(self.sharding(spec, stage))

    def sharding(self, spec: str, stage: int) -> NamedSharding:
        """A layout on the devices of a stage."""
        return NamedSharding(self.meshes[stage], partition_spec(ShardingSpec.parse(spec)))

    def create(self, program: bytes, args: Sequence[HostTiles], names: Sequence[int], stage: int) -> None:
        """Run an exported program once and keep its results: state that is made where it lies."""
        self.doing = "creating state"
        mesh = self.meshes[stage]
        exported = jax.export.deserialize(bytearray(program))
        function = exported_function(exported, mesh, ())
        given = [a.array(NamedSharding(mesh, partition_spec(ShardingSpec.replicated(len(a.shape))))) for a in args]
        self.kept |= zip(names, jax.block_until_ready(function(*given)), strict=True)
        self.doing = "waiting"

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: str, leaves: Mapping[str, int]) -> None:
        """Begin to write an item of a checkpoint; returns when what it writes may be donated.

        Args:
            folder: of the item.
            leaves: path -> the name of a value that this process keeps.

        Raises:
            CheckpointError: it cannot be begun.
        """
        self.doing = "saving"
        self.writer.start(Path(folder), {path: self.value(name) for path, name in leaves.items()})
        self.doing = "waiting"

    def finish_save(self) -> ItemRecord:
        """What was written, when it is; raises ``CheckpointError`` if it could not be."""
        self._written(0)
        try:
            return self.writer.wait(self._written)
        finally:
            self.doing = "waiting"

    def end_save(self) -> None:
        """Wait until nothing is being written, whatever comes of it."""
        self.writer.end(self._written)
        self.doing = "waiting"

    def _written(self, size: int) -> None:
        self.doing = f"writing a checkpoint, {size:,} bytes so far"  # whoever watches sees that it goes on

    def restore(self, folder: str, leaves: Sequence[RestoredLeaf]) -> int:
        """Keep leaves of a checkpoint, each in its layout; returns how many bytes of them this process read.

        Raises:
            CheckpointError: it is damaged, or holds another state.
        """
        self.doing = "restoring"
        wanted = {
            leaf.path: jax.ShapeDtypeStruct(
                leaf.kind.shape, dtype_of(leaf.kind.dtype), sharding=self.sharding(leaf.kind.spec, leaf.kind.stage)
            )
            for leaf in leaves
        }
        path = Path(folder)
        read = read_leaves(path, read_manifest(path), wanted)
        self.kept |= {leaf.name: read[leaf.path] for leaf in leaves}
        self.doing = "waiting"
        return sum(_held_bytes(array) for array in read.values())

    def _tells(self, position: int, array: Any) -> bool:
        """The first process of a submesh tells what every device has whole."""
        return self.site.process == 0 and array.nbytes <= TOLD_BYTES and array.is_fully_replicated

    def _tell(self, array: Any) -> np.ndarray:
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        return np.asarray(array.addressable_data(0))

    # -- other processes ----------------------------------------------------------------------------------------------

    def _crossing(self, number: int, call: Call) -> Crossing:
        if self.one_world and lie_alike(self.parcel, call):
            return PutCrossing(self, call)
        return _RemoteCrossing(self, number, call)


class _RemoteCrossing:
    """One "send" between submeshes, in one of its processes."""

    by_all = False

    def __init__(self, worker: Worker, number: int, call: Call) -> None:
        value, parcel = sent_value(call), worker.parcel
        self.worker, self.number, self.call = worker, number, call
        self.shape, self.dtype = value.shape, value.dtype
        self.key = KEY_TYPES.get(value.dtype)
        before, after = ShardingSpec.parse(value.spec), ShardingSpec.parse(call.spec)
        self.spec = after
        shape, dtype = value.shape, value.dtype
        if self.key:  # keys travel as their words
            shape, dtype = (*shape, self.key[1]), "uint32"
            before, after = (ShardingSpec((*spec.dims, ())) for spec in (before, after))
        self.empty = 0 in shape  # nothing to send
        if self.empty:
            return
        source, target = parcel.stages[value.stage], parcel.stages[call.stage]
        self.transfer = RemoteTransfer.between(
            shape,
            dtype,
            (before, source.logical, source.devices),
            (after, target.logical, target.devices),
            worker.process_of,
        )
        here, functions = worker.site.number, worker.functions
        if value.stage not in worker.meshes and call.stage not in worker.meshes:
            return
        if value.stage in worker.meshes:
            self.sender = self.transfer.sender(here, functions, copied=call.reads[0] in worker.given_away)
        else:
            self.receiver = self.transfer.receiver(here, worker.meshes[call.stage], after, functions)

    def send(self, array: Any) -> None:
        if self.empty:
            return
        words = jax.random.key_data(array) if self.key else array
        for target, pieces in self.sender(words).items():
            self.worker.transport.post(self._name(target), pieces)

    def expect(self) -> Any:
        """The pieces are on their way; they are joined when the first reader is about to run."""
        if self.empty:
            nothing = HostTiles(
                self.shape, self.dtype, {tuple((0, n) for n in self.shape): np.zeros(self.shape, self.dtype)}
            )
            return nothing.array(self.worker.sharding(self.call.spec, self.call.stage))
        pull = self.worker.transport.pull
        here = self.worker.site.number
        arrived = {p: pull(p, self._name(here), types) for p, types in self.receiver.expected.items()}
        return _Arriving(self, arrived)

    def pass_by(self) -> None:
        raise AssertionError("nobody else takes part")

    def _name(self, target: int) -> int:
        """Of the pieces for a process: no other transfer of this or another step has the same."""
        return (self.worker.steps << _STEP_BITS) + self.number * len(self.worker.parcel.sites) + target


@dataclass(frozen=True, slots=True)
class _Arriving:
    crossing: _RemoteCrossing
    pieces: dict[int, Sequence[Any]]

    def array(self) -> Any:
        made = self.crossing.receiver.join(self.pieces)
        if self.crossing.key is None:
            return made
        impl = self.crossing.key[0]
        return jax.jit(lambda words: jax.random.wrap_key_data(words, impl=impl))(made)


class _Mover:
    """Within the process; where a mesh spans several, every process does the same in the same order."""

    def __init__(self, alone: bool) -> None:
        self.alone, self.transfers = alone, Transfers()

    def place(self, value: Any, sharding: Any) -> Any:
        if isinstance(value, HostTiles):
            return value.array(sharding)
        if self.alone:
            return self.transfers.place(value, sharding)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return self._moved(value, sharding)
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def send(self, array: Any, sharding: Any) -> Any:
        return self.transfers.send(array, sharding) if self.alone else self._moved(array, sharding)

    def receive(self, sent: Any) -> Any:
        return sent.array() if isinstance(sent, _Arriving) else self.transfers.receive(sent)

    def _moved(self, array: Any, sharding: Any) -> Any:
        if array.sharding.is_equivalent_to(sharding, array.ndim):
            return array
        return jax.jit(lambda x: x, out_shardings=sharding)(array)


def _given_away(calls: Sequence[Call], parcel: Parcel) -> frozenset[str]:
    """Names of values whose buffer some program takes over: what is sent of them must be copied first."""
    donated = {(row.stage, row.program): row.donated for row in parcel.rows}
    same: dict[str, str] = {}  # names of what may be the same array

    def root(name: str) -> str:
        while name in same:
            name = same[name]
        return name

    for call in calls:
        if call.kind in ("place", "send", "receive") and root(call.writes[0]) != root(call.reads[0]):
            same[root(call.writes[0])] = root(call.reads[0])
    gone = set()
    for call in calls:
        if call.kind == "run":
            gone |= {root(call.reads[k - 1]) for k in donated.get((call.stage, call.program), ())}
    return frozenset(name for call in calls for name in (*call.reads, *call.writes) if root(name) in gone)


def _held_bytes(array: jax.Array) -> int:
    """Of the distinct tiles that this process holds."""
    words = jax.eval_shape(jax.random.key_data, array) if str(array.dtype) in KEY_TYPES else array
    tiles = {str(shard.index): shard.data.size for shard in array.addressable_shards}
    return sum(tiles.values()) * words.dtype.itemsize * (words.size // max(array.size, 1))
