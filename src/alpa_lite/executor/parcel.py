"""What a worker needs to run its part of a step, as bytes: the programs, and what is done in which order.

In: a plan and the step that it was made for. Out: a ``Parcel``; ``read_parcel`` checks every part against its digest. Nothing in
it is Python code: programs are ``jax.export`` artefacts, everything else is JSON and CSV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite._version import __version__
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import WorkerError
from alpa_lite.executor.calls import Call, calls_csv, driver_calls, parse_calls
from alpa_lite.executor.export import lowered_for
from alpa_lite.executor.export_stages import distinct_programs, program_rows
from alpa_lite.executor.load_stages import ProgramRow
from alpa_lite.executor.serialize import abstract_step, serialize_step
from alpa_lite.executor.sites import Site, sites_of
from alpa_lite.lowering.stage import first_equal, lowered_stages
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf
from alpa_lite.trace.program import Traced
from alpa_lite.trace.staged import StagedStep

STEP = "step"
_WIDE = ("float64", "int64", "uint64", "complex128")


class StageMesh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mesh of a stage, and its first device in the cluster."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    first_device: int

    @property
    def logical(self) -> DeviceMesh:
        return DeviceMesh(shape=self.shape, axis_names=self.axis_names)

    @property
    def devices(self) -> tuple[int, ...]:
        """Of the cluster."""
        return tuple(range(self.first_device, self.first_device + self.logical.num_devices))


class ValueType(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An argument or result: its type, and how the stage that holds it does so."""

    dtype: str
    shape: tuple[int, ...]
    spec: str
    stage: int


class Parcel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A planned step on its way to workers.

    Attributes:
        stages: their meshes.
        sites: the processes.
        inputs, outputs: leaves of the plan.
        platform: what the programs were lowered for: "cpu" or "cuda".
        programs: digest -> ``jax.export`` artefact.
        rows: which program of which stage is which; ``file`` is a digest.
        calls: of one step, as CSV.
        digest: of the calls.
        jax_version, alpa_lite_version: of the process that made it; a worker must have the same.
        wide: whether values have 64 bits.
    """

    stages: tuple[StageMesh, ...]
    sites: tuple[Site, ...]
    inputs: tuple[ValueType, ...]
    outputs: tuple[ValueType, ...]
    platform: str
    programs: dict[str, bytes]
    rows: list[ProgramRow]
    calls: str
    digest: str
    jax_version: str
    alpa_lite_version: str
    wide: bool

    def read_calls(self) -> tuple[Call, ...]:
        return parse_calls(self.calls)


def make_parcel(plan: Plan, traced: Traced, staged: StagedStep | None) -> Parcel:
    """The step for the devices of the plan's cluster.

    Args:
        plan: with one stage or several.
        traced: the step as it was planned.
        staged: the step in stages; None for a plan without a pipeline.

    Raises:
        ExportError: the step holds what ``jax.export`` does not take.
    """
    platform = Cluster.parse(plan.identity.cluster).device.platform
    if staged is None:
        stored, rows, calls = _one_mesh(plan, traced, platform)
    else:
        stored, rows, calls = _stages(plan, staged, platform)
    digests = {name: digest_text(data) for name, data in stored.items()}
    text = calls_csv(calls)
    return Parcel(
        stages=tuple(StageMesh(s.mesh.shape, s.mesh.axis_names, s.first_device) for s in plan.stages),
        sites=sites_of(plan),
        inputs=_types(plan.inputs),
        outputs=_types(plan.outputs),
        platform=platform,
        programs={digests[name]: data for name, data in stored.items()},
        rows=[ProgramRow(row.stage, row.program, digests[row.file], row.donated) for row in rows],
        calls=text,
        digest=digest_text(text.encode()),
        jax_version=jax.__version__,
        alpa_lite_version=__version__,
        wide=any(leaf.value.dtype in _WIDE for leaf in (*plan.inputs, *plan.outputs)),
    )


def read_parcel(data: bytes) -> Parcel:
    """What ``msgspec.msgpack.encode`` made of a parcel, checked.

    Raises:
        WorkerError: it was changed on its way, or was made by another version.
    """
    try:
        parcel = msgspec.msgpack.decode(data, type=Parcel)
    except msgspec.MsgspecError as error:
        raise WorkerError(
            f"a worker was given a step that it cannot read: {error}. Driver and workers must have the same alpa_lite. Install "
            "the same version on all hosts."
        ) from error
    check_version(parcel.alpa_lite_version, __version__, "alpa_lite")
    check_version(parcel.jax_version, jax.__version__, "JAX")
    found = {digest: digest_text(program) for digest, program in parcel.programs.items()}
    found[parcel.digest] = digest_text(parcel.calls.encode())
    damaged = [digest for digest, real in found.items() if digest != real]
    if damaged:
        raise WorkerError(
            f"{len(damaged)} of {len(found)} parts of a step that a worker was given differ from their digests. They must arrive "
            "as they were sent. Run the step again; if this repeats, check the host's memory and network."
        )
    return parcel


def check_version(driver: str, worker: str, package: str) -> None:
    """Refuse a worker whose packages are others than the driver's: artefacts of one need not run in the other."""
    if driver != worker:
        raise WorkerError(
            f"the driver has {package} {driver}, a worker has {package} {worker}. Both must have the same version, as compiled "
            f"programs travel between them. Install {package} {driver} on all hosts, e.g. in the image of the cluster."
        )


def digest_text(data: bytes) -> str:
    """ "sha256:" and 64 hex digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _stages(
    plan: Plan, staged: StagedStep, platform: str
) -> tuple[Mapping[str, bytes], Sequence[ProgramRow], Sequence[Call]]:
    stages = lowered_stages(staged, plan)
    first = first_equal(stages)
    _, calls = driver_calls(staged, plan, stages)
    programs = lowered_for(plan, lambda p: distinct_programs(stages, first, p), (platform,))[platform]
    return programs, program_rows(stages, first), calls


def _one_mesh(
    plan: Plan, traced: Traced, platform: str
) -> tuple[Mapping[str, bytes], Sequence[ProgramRow], Sequence[Call]]:
    """One program for the whole step, called as those of stages are: with an index, which it does not read."""
    step, args = abstract_step(traced, plan)
    mesh = jax.tree.leaves(args)[0].sharding.mesh
    index = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))

    def indexed(_: Any, *args: Any) -> Any:
        return step(*args)

    programs = lowered_for(plan, lambda p: {STEP: serialize_step(indexed, (index, *args), p)}, (platform,))[platform]
    donated = [i for i, _ in traced.program.aliases if traced.program.donated[i]]
    row = ProgramRow(stage=0, program=STEP, file=STEP, donated=[i + 1 for i in donated])
    given = tuple(f"v{i}" for i in range(len(plan.inputs)))
    made = tuple(f"v{i + len(given)}" for i in range(len(plan.outputs)))
    calls = [
        Call(kind="place", reads=(f"a{i}",), writes=(given[i],), spec=str(leaf.spec))
        for i, leaf in enumerate(plan.inputs)
    ]
    calls.append(Call(kind="run", program=STEP, reads=given, writes=made))
    calls += [Call(kind="return", reads=(name,), value=str(i)) for i, name in enumerate(made)]
    return programs, [row], calls


def _types(leaves: Sequence[Leaf]) -> tuple[ValueType, ...]:
    return tuple(ValueType(leaf.value.dtype, leaf.value.shape, str(leaf.spec), leaf.stage) for leaf in leaves)
