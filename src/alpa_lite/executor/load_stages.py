"""One rank's part of an exported pipeline, and the whole pipeline on the devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.tiles import Box
from alpa_lite.errors import ClusterError
from alpa_lite.executor.calls import Call, constant_of, parse_calls
from alpa_lite.executor.local import local_mesh
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.lowering.segments import crossing_sharding
from alpa_lite.lowering.transfer import Transfers
from alpa_lite.plan.manifest import PIPELINE, Manifest, check_file
from alpa_lite.plan.plan import Plan

PROGRAMS = "programs.json"
Values = dict[str, Any]


class ProgramRow(msgspec.Struct, forbid_unknown_fields=True):
    """A program of a stage: its file without platform, and which arguments it is given for good."""

    stage: int
    program: str
    file: str
    donated: list[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExportedStages:
    """What one rank needs of an exported pipeline; what its processes say to each other is up to the caller.

    Attributes:
        plan: the plan; device number ``rank`` of its cluster is this rank.
        rank: this rank.
        stages: those that lie on it.
        parameters: path -> this rank's slice, of the arguments of its stages whose values were exported.
        slices: path -> per dim (start, stop) of this rank's slice, of all arguments of its stages.
        calls: what is done in one step, in order, on all stages.
        manifest: how it was written.
        read_program: reads and checks a file of a program.
    """

    plan: Plan
    rank: int
    stages: tuple[int, ...]
    parameters: Mapping[str, np.ndarray]
    slices: Mapping[str, Box]
    calls: tuple[Call, ...]
    manifest: Manifest
    folder: Path
    rows: Mapping[tuple[int, str], ProgramRow]
    read_program: Callable[[Path, Manifest], Any]

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """Path of every argument and result to its ``PartitionSpec``, on the mesh of its stage."""
        return {leaf.path: partition_spec(leaf.spec) for leaf in (*self.plan.inputs, *self.plan.outputs)}

    def programs(self, platform: str) -> dict[tuple[int, str], Any]:
        """(stage, name) -> the SPMD program, JAX's own object, of this rank's stages; "cpu", "cuda" or "tpu"."""
        return {key: self._program(row, platform) for key, row in self.rows.items() if key[0] in self.stages}

    def _program(self, row: ProgramRow, platform: str) -> Any:
        path = check_file(self.folder, self.manifest, f"{row.file}_{platform}.jax_export")
        return self.read_program(path, self.manifest)

    def meshes(self, devices: Sequence[Any] | None = None) -> list[Mesh]:
        """The mesh of every stage on ``jax.devices()``, or on those given, in rank order.

        Raises:
            ClusterError: there are fewer devices than ranks.
        """
        devices = jax.devices() if devices is None else devices
        if len(devices) < self.manifest.num_ranks:
            raise ClusterError(
                f"the exported pipeline has {self.manifest.num_ranks} ranks, {len(devices)} devices were given. It runs on one "
                f"device per rank. Give as many; on virtual CPU devices after "
                f"jax.config.update('jax_num_cpu_devices', {self.manifest.num_ranks})."
            )
        return [local_mesh(stage.mesh, devices[stage.first_device :]) for stage in self.plan.stages]

    def step(self, devices: Sequence[Any] | None = None) -> Callable[..., tuple[Any, ...]]:
        """The pipeline on devices of this process: a function of the argument leaves (``plan.input_paths``), which returns
        those of the results (``plan.output_paths``) and waits for nothing. Programs of all stages are read; donation as planned.

        Raises:
            ClusterError: there are fewer devices than ranks.
            ExportError: a file is missing or changed, or there are no programs for these devices.
        """
        meshes = self.meshes(devices)
        platform = meshes[0].devices.flat[0].platform
        platform = "cuda" if platform == "gpu" else platform
        made: dict[str, Any] = {}
        functions: dict[tuple[int, str], Any] = {}
        for key, row in self.rows.items():
            program = made[row.file] = made.get(row.file) or self._program(row, platform)
            functions[key] = jax.jit(
                program.call,
                out_shardings=program.out_shardings_jax(meshes[row.stage]),
                donate_argnums=tuple(row.donated),  # does not survive jax.export
                keep_unused=True,
            )
        return _Replay(self.calls, meshes, functions, len(self.plan.outputs))


class _Replay:
    """Carries out calls; a value is dropped after its last reader."""

    def __init__(
        self, calls: Sequence[Call], meshes: Sequence[Mesh], functions: Mapping[Any, Any], results: int
    ) -> None:
        self.meshes, self.functions, self.num_results = meshes, functions, results
        self.transfers = Transfers()
        self.constants: Values = {}
        last = {name: number for number, call in enumerate(calls) for name in call.reads}
        self.steps: list[tuple[Callable[[Values], None], tuple[str, ...]]] = []
        for number, call in enumerate(calls):
            if call.kind == "constant":
                value = constant_of(call)
                self.constants[call.writes[0]] = self._place(value, call) if call.spec else jnp.asarray(value)
            else:
                done = {name for name in (*call.reads, *call.writes) if last.get(name, -1) <= number}
                self.steps.append((self._do(call), tuple(sorted(done))))

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        values = self.constants | {f"a{number}": leaf for number, leaf in enumerate(leaves)}
        for do, done in self.steps:
            do(values)
            for name in done:
                values.pop(name, None)
        return tuple(values[f"r{position}"] for position in range(self.num_results))

    def _sharding(self, call: Call) -> Any:
        return crossing_sharding(ShardingSpec.parse(call.spec), self.meshes[call.stage])

    def _place(self, value: Any, call: Call) -> Any:
        return self.transfers.place(value, self._sharding(call))

    def _do(self, call: Call) -> Callable[[Values], None]:
        work = self._work(call)
        writes = call.writes or (f"r{call.value}",)

        def do(values: Values) -> None:
            values.update(zip(writes, work([values[name] for name in call.reads]), strict=True))

        return do

    def _work(self, call: Call) -> Callable[[list[Any]], Sequence[Any]]:
        """The arrays that the call reads -> those that it writes."""
        match call.kind:
            case "run":
                function = self.functions[call.stage, call.program]
                index = Call(kind="constant", stage=call.stage, spec=str(ShardingSpec.replicated(0)))
                return partial(_run, function, self._place(np.int32(call.microbatch), index))
            case "place":
                sharding, place = self._sharding(call), self.transfers.place
                return lambda given: [place(given[0], sharding)]
            case "send":
                sharding, send = self._sharding(call), self.transfers.send
                return lambda given: [send(given[0], sharding)]
            case "receive":
                receive = self.transfers.receive
                return lambda given: [receive(given[0])]
            case "copy":
                return lambda given: [jnp.copy(given[0])]
            case "stack":
                axis = 1 if ShardingSpec.parse(call.spec).unreduced else 0  # behind the dim of the partial sums
                stack = jax.jit(partial(jnp.stack, axis=axis), out_shardings=self._sharding(call))
                return lambda given: [stack(given)]
            case "return":
                return lambda given: given
        raise AssertionError(call)


def _run(function: Any, index: Any, given: list[Any]) -> Sequence[Any]:
    return function(index, *given)


def read_calls(folder: Path, manifest: Manifest) -> tuple[Call, ...]:
    return parse_calls(check_file(folder, manifest, PIPELINE).read_text(encoding="utf-8"))


def read_rows(folder: Path, manifest: Manifest) -> dict[tuple[int, str], ProgramRow]:
    rows = msgspec.json.decode(check_file(folder, manifest, PROGRAMS).read_bytes(), type=list[ProgramRow])
    return {(row.stage, row.program): row for row in rows}
