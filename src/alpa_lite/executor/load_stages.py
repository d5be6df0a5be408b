"""One rank's part of an exported pipeline, and the whole pipeline on the devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from alpa_lite.costs.tiles import Box
from alpa_lite.errors import ClusterError
from alpa_lite.executor.calls import Call, parse_calls
from alpa_lite.executor.local import stage_meshes
from alpa_lite.executor.replay import Replay, exported_function
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.lowering.transfer import Transfers
from alpa_lite.plan.manifest import PIPELINE, Manifest, check_file
from alpa_lite.plan.plan import Plan

PROGRAMS = "programs.json"


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
        return stage_meshes(self.plan, devices)

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
            functions[key] = exported_function(program, meshes[row.stage], row.donated)
        replay = Replay(self.calls, dict(enumerate(meshes)), functions, Transfers())
        count = len(self.plan.outputs)

        def step(*leaves: Any) -> tuple[Any, ...]:
            results = replay({f"a{number}": leaf for number, leaf in enumerate(leaves)})
            return tuple(results[position] for position in range(count))

        return step


def read_calls(folder: Path, manifest: Manifest) -> tuple[Call, ...]:
    return parse_calls(check_file(folder, manifest, PIPELINE).read_text(encoding="utf-8"))


def read_rows(folder: Path, manifest: Manifest) -> dict[tuple[int, str], ProgramRow]:
    rows = msgspec.json.decode(check_file(folder, manifest, PROGRAMS).read_bytes(), type=list[ProgramRow])
    return {(row.stage, row.program): row for row in rows}
