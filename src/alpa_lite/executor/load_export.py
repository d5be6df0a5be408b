"""``al.load_export``: one rank's part of an exported folder, checked against the digests that were written with it.

Trees of arguments are not part of an export (any Python type may be one), so everything goes by path, in the order of
``plan.input_paths`` and ``plan.output_paths``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.costs.tiles import Box
from alpa_lite.errors import ExportError
from alpa_lite.executor.export import PLAN, SLICES, rank_folder, step_file
from alpa_lite.executor.load_stages import ExportedStages, read_calls, read_rows
from alpa_lite.executor.local import local_mesh
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.answers import KEY_TYPES
from alpa_lite.plan.load import load_plan
from alpa_lite.plan.manifest import Manifest, check_file, read_manifest
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf


class _SliceRow(msgspec.Struct, forbid_unknown_fields=True):
    slice: list[tuple[int, int]]
    file: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExportedPart:
    """What one rank needs to run its part of the step.

    Attributes:
        plan: the plan; its mesh device number ``rank`` (row-major) is this rank.
        rank: this rank.
        programs: platform ("cpu", "cuda", "tpu") -> the SPMD step, JAX's own object, from argument to result leaves.
        parameters: path -> this rank's slice, of the arguments whose values were exported; see ``raw_array`` for types.
        slices: path -> per dim (start, stop) of this rank's slice, of all arguments.
        manifest: how it was written.
    """

    plan: Plan
    rank: int
    programs: Mapping[str, Any]
    parameters: Mapping[str, np.ndarray]
    slices: Mapping[str, Box]
    manifest: Manifest

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """Path of every argument and result to its ``PartitionSpec``."""
        return {leaf.path: partition_spec(leaf.spec) for leaf in (*self.plan.inputs, *self.plan.outputs)}

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The plan's mesh on ``jax.devices()`` (of all processes), or on those given, in rank order."""
        return local_mesh(self.plan.mesh, devices)

    def step(self, mesh: Mesh) -> Any:
        """A jitted function of the argument leaves, which returns the tuple of the result leaves; donation as planned.

        Raises:
            ExportError: the step was not lowered for the mesh's devices.
        """
        platform = mesh.devices.flat[0].platform
        program = self.programs.get("cuda" if platform == "gpu" else platform)
        if program is None:
            raise ExportError(
                f"the mesh has devices of platform {platform!r}, the export was lowered for {', '.join(self.programs)}: for its "
                "cluster's devices, and for CPU where that is possible. It was given to step(mesh). Give such devices, or plan "
                "for a cluster of these and export again."
            )
        shardings = [NamedSharding(mesh, partition_spec(leaf.spec)) for leaf in self.plan.outputs]
        return jax.jit(
            program.call,
            in_shardings=tuple(NamedSharding(mesh, partition_spec(leaf.spec)) for leaf in self.plan.inputs),
            out_shardings=tuple(shardings),
            donate_argnums=self.manifest.donated,  # does not survive jax.export
            keep_unused=True,
        )


def load_part(out_dir: Path, rank: int) -> ExportedPart | ExportedStages:
    """Reads one rank's part; nothing of other ranks is read, and programs of a pipeline when they are asked for.

    Raises:
        ExportError: no export, a file is missing or changed, another version, or no such rank.
    """
    manifest = read_manifest(out_dir)
    if not isinstance(rank, int) or not 0 <= rank < manifest.num_ranks:
        raise ExportError(
            f"rank {rank!r} was asked of the export {str(out_dir)!r}, which has {manifest.num_ranks} "
            f"(0 to {manifest.num_ranks - 1}), one per device of its mesh. It was given as rank. Give one of those, or plan for "
            "more devices and export again."
        )
    plan = load_plan(check_file(out_dir, manifest, PLAN))
    rows = _rows(out_dir, manifest, f"{rank_folder(rank)}/{SLICES}")
    parameters = {
        leaf.path: _read(out_dir, manifest, f"{rank_folder(rank)}/{row.file}", leaf)
        for leaf in plan.inputs
        if (row := rows.get(leaf.path)) is not None and row.file is not None
    }
    slices = {path: tuple(row.slice) for path, row in rows.items()}
    if plan.pipeline is not None:
        return ExportedStages(
            plan=plan,
            rank=rank,
            stages=tuple(n for n, s in enumerate(plan.stages) if 0 <= rank - s.first_device < s.mesh.num_devices),
            parameters=parameters,
            slices=slices,
            calls=read_calls(out_dir, manifest),
            manifest=manifest,
            folder=out_dir,
            rows=read_rows(out_dir, manifest),
            read_program=_program,
        )
    return ExportedPart(
        plan=plan,
        rank=rank,
        programs={p: _program(check_file(out_dir, manifest, step_file(p)), manifest) for p in manifest.platforms},
        parameters=parameters,
        slices=slices,
        manifest=manifest,
    )


def _rows(out_dir: Path, manifest: Manifest, name: str) -> dict[str, _SliceRow]:
    return msgspec.json.decode(check_file(out_dir, manifest, name).read_bytes(), type=dict[str, _SliceRow])


def _read(out_dir: Path, manifest: Manifest, name: str, leaf: Leaf) -> np.ndarray:
    array = np.load(check_file(out_dir, manifest, name), allow_pickle=False)
    if leaf.value.dtype in KEY_TYPES or str(array.dtype) == leaf.value.dtype:
        return array
    return array.view(leaf.value.dtype)  # bfloat16 and such, see raw_array


def _program(path: Path, manifest: Manifest) -> Any:
    from jax import export

    try:
        return export.deserialize(bytearray(path.read_bytes()))
    except ImportError as error:
        raise ExportError(
            f"jax.export cannot read the step {str(path)!r}: {error}. It needs the package flatbuffers. In the environment "
            "that runs alpa-lite: pip install 'alpa-lite[export]'"
        ) from error
    except Exception as error:  # its digest is right, so whatever JAX says, it is another version's
        raise ExportError(
            f"the step {str(path)!r} cannot be read by JAX {jax.__version__}: {error}. It was written by JAX "
            f"{manifest.jax_version}; JAX promises to read exports for six months. Export the plan again, or install that "
            "version."
        ) from error
