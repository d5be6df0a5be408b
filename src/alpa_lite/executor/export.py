"""``plan.export``: a plan, its step and its arguments as a folder that others can read and any rank can run from.

In: a plan, the traced function, and its argument leaves (arrays, or only their shapes). Out: a folder that is there whole
or not at all. ``docs/export.md`` lists the files; ``load_export.py`` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.costs.tiles import Box, Placement, slices
from alpa_lite.errors import ExportError
from alpa_lite.executor.serialize import NotExportable, abstract_step, serialize_step
from alpa_lite.plan.answers import KEY_TYPES, logical_axis_rules, partition_specs, shardy_text
from alpa_lite.plan.encode import encode_plan
from alpa_lite.plan.folders import folder_at_once
from alpa_lite.plan.json_text import json_text
from alpa_lite.plan.manifest import Manifest, digests, write_manifest
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf
from alpa_lite.trace.program import Traced

PLAN, SLICES = "plan.json", "slices.json"
Lowered = TypeVar("Lowered")
_INSTALL = "pip install 'alpa-lite[export]'"


def write_export(plan: Plan, traced: Traced, leaves: Sequence[Any], out_dir: Path, *, overwrite: bool) -> None:
    """Writes the folder.

    Args:
        leaves: per argument leaf an array, whose slices are stored, or a ``jax.ShapeDtypeStruct``.
        overwrite: whether ``out_dir`` may hold something; an earlier export is replaced, other files stay.

    Raises:
        ExportError: ``out_dir`` is not empty or not writable, the step cannot be exported, or a leaf is not here.
    """
    steps = _lowered(plan, traced)
    files: dict[str, str | bytes] = {step_file(platform): step for platform, step in steps.items()}
    write_folder(
        plan, traced, files | _texts(plan, traced), tuple(steps), stored_leaves(leaves), out_dir, overwrite=overwrite
    )


def stored_leaves(leaves: Sequence[Any]) -> dict[int, Any]:
    """Those that have values, by position."""
    return {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, jax.ShapeDtypeStruct)}


def write_folder(
    plan: Plan,
    traced: Traced,
    files: Mapping[str, str | bytes],
    platforms: tuple[str, ...],
    stored: Mapping[int, Any],
    out_dir: Path,
    *,
    overwrite: bool,
) -> None:
    """Writes ``files``, the plan, the parts of all ranks and the manifest.

    Args:
        files: relative name -> content.
        platforms: what the programs among them were lowered for.
        stored: argument leaves of the plan whose values are stored, by position.
        overwrite: as in ``write_export``, like the errors.
    """
    check_target(out_dir, overwrite=overwrite)
    state = traced.program.aliases
    try:
        with folder_at_once(out_dir) as folder:
            (folder / PLAN).write_bytes(encode_plan(plan))
            for name, content in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
            _write_ranks(plan, stored, folder)
            manifest = Manifest(
                num_ranks=num_ranks(plan),
                platforms=platforms,
                donated=tuple(i for i, _ in state if traced.program.donated[i]),
                state=state,
                jax_version=jax.__version__,
                alpa_lite_version=plan.identity.alpa_lite_version,
                files=digests(folder),
            )
            write_manifest(folder, manifest)
    except OSError as error:
        raise ExportError(
            f"the plan cannot be exported to {str(out_dir)!r}: {error.strerror or error}. It must be a new or empty folder in "
            "an existing one that you may write to, on a disk with room. Nothing was written. Correct the path."
        ) from error


def num_ranks(plan: Plan) -> int:
    """One per device that a stage lies on, counted through the cluster."""
    return max(stage.first_device + stage.mesh.num_devices for stage in plan.stages)


def check_target(out_dir: Path, *, overwrite: bool) -> None:
    """Refuses what is no folder, and a folder that holds something, unless it may be written over."""
    if not out_dir.exists() and not out_dir.is_symlink():
        return
    if not out_dir.is_dir():
        given, advice = f"{str(out_dir)!r} is not a folder", "Give another name."
    else:
        found = sorted(entry.name for entry in out_dir.iterdir())
        if overwrite or not found:
            return
        given = f"the folder {str(out_dir)!r} is not empty ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
        advice = "Give another folder, or plan.export(..., overwrite=True) to replace what is in the way."
    raise ExportError(
        f"{given}. A plan is exported to a new or an empty folder, so that nothing of another export is taken for a part of "
        f"this one. It was given as out_dir. {advice}"
    )


def _lowered(plan: Plan, traced: Traced) -> dict[str, bytes]:
    """The step, per platform."""
    step, args = abstract_step(traced, plan)
    return lowered_for(plan, lambda platform: serialize_step(step, args, platform))


def lowered_for(
    plan: Plan, lower: Callable[[str], Lowered], platforms: tuple[str, ...] | None = None
) -> dict[str, Lowered]:
    """What ``lower`` makes for the cluster's platform, and for CPU, where an export can be tried, unless that lacks an op;
    or for ``platforms``.

    One artefact per platform: JAX puts a choice by platform around every all-gather of a common one, which XLA keeps.
    """
    own = Cluster.parse(plan.identity.cluster).device.platform
    found: dict[str, Lowered] = {}
    for platform in dict.fromkeys(platforms or (own, "cpu")):
        try:
            found[platform] = lower(platform)
        except ImportError as error:
            raise ExportError(
                f"jax.export cannot write the step: {error}. It needs the package flatbuffers. In the environment that runs "
                f"alpa-lite: {_INSTALL}"
            ) from error
        except NotExportable as error:
            if platform != own:
                continue  # made for the cluster's devices alone, e.g. a CUDA kernel: the export is whole without CPU
            raise ExportError(
                f"the step cannot be exported: {error}\nAllowed is what jax.export takes: no host callbacks such as "
                "jax.debug.print, no custom calls without a stability promise. Leave them out of the function to export it."
            ) from error
    return found


def step_file(platform: str) -> str:
    return f"step_{platform}.jax_export"


def _texts(plan: Plan, traced: Traced) -> dict[str, str]:
    return {
        "program.txt": str(traced.program),
        "scheme.txt": f"{plan}\nSchedule\n{plan.layout_schedule()}",
        "partition_specs.json": partition_specs(plan),
        "shardings.mlir": shardy_text(plan),
        "logical_axis_rules.json": logical_axis_rules(plan),
    }


# -- one part per rank -------------------------------------------------------------------------------------------------


def rank_folder(rank: int) -> str:
    return f"rank_{rank}"


def _write_ranks(plan: Plan, stored: Mapping[int, Any], folder: Path) -> None:
    """Per rank: which slice of every argument of its stages is its, and those whose values are known as ``.npy``."""
    boxes = [_boxes(plan, leaf) for leaf in plan.inputs]
    for rank in range(num_ranks(plan)):
        part = folder / rank_folder(rank)
        part.mkdir()
        rows = {
            leaf.path: {
                "slice": [list(bounds) for bounds in boxes[i][rank]],
                "file": f"{i}.npy" if i in stored else None,
            }
            for i, leaf in enumerate(plan.inputs)
            if rank in boxes[i]
        }
        (part / SLICES).write_text(json_text(rows), encoding="utf-8")
    for i, value in stored.items():
        _write_slices(raw_array(value, plan.inputs[i]), boxes[i], f"{i}.npy", folder)


def _boxes(plan: Plan, leaf: Leaf) -> dict[int, Box]:
    """The part of a leaf that each rank of its stage holds."""
    stage = plan.stages[leaf.stage]
    ranks = tuple(range(stage.first_device, stage.first_device + stage.mesh.num_devices))
    return Placement(spec=leaf.spec, mesh=stage.mesh, devices=ranks).boxes(leaf.value.shape)


def _write_slices(array: np.ndarray, boxes: dict[int, Box], name: str, folder: Path) -> None:
    """One leaf to all ranks; ranks that hold the same slice share a file where the file system can."""
    written: dict[Box, Path] = {}
    for rank, box in boxes.items():
        path = folder / rank_folder(rank) / name
        if box in written:
            try:
                path.hardlink_to(written[box])
                continue
            except OSError:
                pass  # no hard links here: write it again
        np.save(path, array[slices(box)], allow_pickle=False)
        written[box] = path


def raw_array(value: Any, leaf: Leaf) -> np.ndarray:
    """The values as a type that ``.npy`` knows: keys as their words, bfloat16 and such as unsigned integers.

    Raises:
        ExportError: the array's parts are on other processes, or it is gone.
    """
    if getattr(value, "is_deleted", bool)():
        raise ExportError(
            f"the argument {leaf.path!r} was deleted, or donated to a step that ran since. An export stores the values of "
            "arrays. Pass what that step returned, or jax.ShapeDtypeStruct to store none."
        )
    if not getattr(value, "is_fully_addressable", True):
        raise ExportError(
            f"the argument {leaf.path!r} is spread over several processes. An export is written by one process, which must "
            "hold all values. Pass jax.ShapeDtypeStruct for it, or gather it first (multihost_utils.process_allgather)."
        )
    if leaf.value.dtype in KEY_TYPES:
        return np.asarray(jax.random.key_data(value))
    array = np.asarray(value)
    array = array if str(array.dtype) == leaf.value.dtype else array.astype(leaf.value.dtype)
    return array if array.dtype.isbuiltin == 1 else array.view(f"uint{8 * array.dtype.itemsize}")
