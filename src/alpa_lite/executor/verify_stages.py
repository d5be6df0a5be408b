"""``plan.verify`` for a plan with several stages: every program of every stage, compiled by the target's compiler.

Each distinct program is compiled once, for a submesh of its own size. The report says per stage which collectives were
planned and compiled, and what XLA's memory figures add up to beside the plan's prediction (``stage_memory.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.executor.stage_memory import ProgramBytes, StageMemory, stage_memory
from alpa_lite.executor.verify import CompileJob, TargetCompile, compile_all_for_target, export_step
from alpa_lite.lowering.audit import AuditReport, audit
from alpa_lite.lowering.stage import LoweredStage, StagePart, first_equal, lowered_stages
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule import planned_schedule
from alpa_lite.trace.staged import StagedStep
from alpa_lite.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedProgram:
    """One program of a stage: its name ("forward", "update 0", ...), its audit and what the compiler made of it."""

    name: str
    audit: AuditReport
    target: TargetCompile


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedStage:
    """One stage: its programs, and what their figures add up to."""

    stage: int
    programs: tuple[VerifiedProgram, ...]
    memory: StageMemory

    @property
    def ok(self) -> bool:
        return all(program.audit.ok for program in self.programs)

    def counts(self) -> tuple[int, int, int, int]:
        """Collectives planned, compiled, unplanned and missing, in executions of one run of each program."""
        audits = [program.audit for program in self.programs]
        totals = [total for report in audits for total in report.totals]
        return (
            sum(t.planned_count for t in totals),
            sum(t.compiled_count for t in totals),
            sum(u.count for report in audits for u in report.unplanned),
            sum(count for report in audits for _, count in report.missing),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesReport:
    """What the target's compiler made of a plan with several stages.

    Attributes:
        device: GPU name of the hardware table.
        stages: in order.
        num_compiled: distinct programs; equal stages share theirs.
    """

    device: str
    stages: tuple[VerifiedStage, ...]
    num_compiled: int

    @property
    def ok(self) -> bool:
        """Whether every collective is planned, and every planned one compiled, in all stages."""
        return all(stage.ok for stage in self.stages)

    def __str__(self) -> str:
        head = ("stage", "planned", "compiled", "unplanned", "missing", "predicted", "XLA", "ratio", "at its peak")
        rows = [head, *(_row(stage) for stage in self.stages)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in rows]
        seconds = {id(p.target): p.target.compile_s for stage in self.stages for p in stage.programs}
        wrong = [
            f"\nstage {stage.stage}, {program.name}\n{program.audit}"
            for stage in self.stages
            for program in stage.programs
            if not program.audit.ok
        ]
        return (
            f"Every program of {len(self.stages)} stages, compiled for {self.device}: collectives, and peak memory per device\n"
            + "\n".join(lines)
            + f"\n{self.num_compiled} programs compiled in {sum(seconds.values()):.1f} s\n"
            + "\n".join(wrong)
        )


def _row(stage: VerifiedStage) -> tuple[str, ...]:
    m = stage.memory
    sizes = format_bytes(m.predicted_bytes), format_bytes(m.peak_bytes), f"{m.ratio:.3f}"
    return (str(stage.stage), *map(str, stage.counts()), *sizes, m.program)


def verify_stages(plan: Plan, staged: StagedStep) -> StagesReport:
    """Compile every stage of ``plan`` for its submesh.

    Raises:
        VerificationError: the extra ``aot`` is missing, or the compiler failed.
        ClusterError: the cluster's device has no deviceless compiler (only NVIDIA GPUs have).
    """
    assert plan.pipeline is not None
    device = Cluster.parse(plan.identity.cluster).device.name
    stages = lowered_stages(staged, plan)
    first = first_equal(stages)
    jobs = {(k, part.name): _job(plan, stages[k], k, part) for k in sorted(set(first)) for part in stages[k].parts}
    compiled = dict(zip(jobs, compile_all_for_target(list(jobs.values()), device=device), strict=True))
    found = {(n, name): compiled[k, name] for n, k in enumerate(first) for _, name in (j for j in jobs if j[0] == k)}
    figures = {key: ProgramBytes(argument_bytes=t.argument_bytes, peak_bytes=t.peak_bytes) for key, t in found.items()}
    predicted = [stage.memory.peak for stage in plan.stages]
    memory = stage_memory(stages, planned_schedule(plan.pipeline), figures, predicted)
    verified = []
    for number, stage in enumerate(stages):
        mesh, planned = plan.stages[number].mesh, plan.stages[number].collectives
        programs = [
            VerifiedProgram(
                name=part.name,
                audit=audit(part.collectives(planned), found[number, part.name].hlo_text, mesh),
                target=found[number, part.name],
            )
            for part in stage.parts
        ]
        verified.append(VerifiedStage(stage=number, programs=tuple(programs), memory=memory[number]))
    return StagesReport(device=device, stages=tuple(verified), num_compiled=len(jobs))


def _job(plan: Plan, stage: LoweredStage, number: int, part: StagePart) -> CompileJob:
    planned = plan.stages[number]
    return CompileJob(
        exported=export_step(part.function, (part_index(part), *part.structs(part.mesh))),
        mesh=stage.lowering.mesh,
        devices_per_host=planned.submesh[1],
        donated=tuple(i for i, pair in enumerate(part.segment.reads, 1) if pair in part.donated),
    )


def part_index(part: StagePart) -> jax.ShapeDtypeStruct:
    """The first argument of a part: which microbatch."""
    return jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(part.mesh, PartitionSpec()))
