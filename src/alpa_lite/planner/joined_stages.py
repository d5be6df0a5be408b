"""One plan of stages that were planned: leaves of the whole step, transfers, and the simulated schedule.

In: a step's stages with their plans on their submeshes. Out: the ``Plan``, whose objective is the schedule's simulated time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.program import Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.roles import roles_of
from alpa_lite.interop import PlacedSubmesh
from alpa_lite.plan.identity import fingerprint
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf, LeafRole, Pipeline, StagePlan, StageTransfer
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import (
    LITERAL,
    Versions,
    decisions_of,
    identity_of,
    op_texts,
    reports,
)
from alpa_lite.planner.stage_costs import StageCosts
from alpa_lite.schedule import (
    Action,
    ActionKind,
    Schedule,
    chain_step,
    simulate_schedule,
    table_rows,
    timeline_text,
)
from alpa_lite.trace.staged import StagedStep
from alpa_lite.trace.stages import StageProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage with its plan on its submesh, which lies at ``place``."""

    part: StageProgram
    program: Program
    cluster: Cluster
    place: PlacedSubmesh
    result: MeshResult
    costs: StageCosts
    recomputed: bool = False

    @property
    def hosts(self) -> range:
        return range(self.place.first_host, self.place.first_host + self.cluster.num_hosts)


def joined_plan(
    step: StagedStep,
    stages: Sequence[PlannedStage],
    schedule: Schedule,
    cluster: Cluster,
    pins: ResolvedPins,
    options: PlanOptions,
    versions: Versions,
    notes: tuple[str, ...],
) -> Plan:
    """The plan of the whole step, not checked yet."""
    at = schedule.mesh_of_stage()
    transfers = _transfers(step, stages, at, cluster)
    makespan, bubble, rows = _simulated(schedule, stages, transfers)
    own = [_stage_plan(stage, number, cluster.devices_per_host) for number, stage in enumerate(stages)]
    inputs = _step_leaves(
        step.whole.input_paths, [p.inputs[: len(s.part.args)] for p, s in zip(own, stages, strict=True)]
    )
    outputs = _step_leaves(
        step.whole.output_paths, [p.outputs[: len(s.part.results)] for p, s in zip(own, stages, strict=True)]
    )
    roles = {leaf.path: role for leaf, role in zip(inputs, roles_of(step.whole), strict=True)}
    owner = dict(step.whole.aliases)
    inputs = tuple(replace(leaf, role=roles[leaf.path]) for leaf in inputs)
    by_result = {o: inputs[i].role for i, o in owner.items()}
    outputs = tuple(replace(leaf, role=by_result.get(o, LeafRole.OUTPUT)) for o, leaf in enumerate(outputs))
    # A stage does its own part whatever the others do; the bound is for this choice of stages.
    bound = max(stage.result.lower_bound for stage in stages)
    said = "the lower bound holds for these stages: each stage's own bound, the largest of them"
    if not step.is_training:  # one stage after the other, and what is sent has its size in any layout
        bound = makespan - math.fsum(stage.result.objective - stage.result.lower_bound for stage in stages)
        said = "the lower bound holds for these stages: the sum of each stage's own bound and of what is sent"
    status = "optimal stages" if all(s.result.status == "optimal" for s in stages) else "feasible"
    return Plan(
        stages=tuple(own),
        objective=makespan,
        lower_bound=min(bound, makespan),
        status=status,
        unit=stages[0].result.unit,
        costs=options.costs,
        inputs=inputs,
        outputs=outputs,
        pipeline=Pipeline(
            num_microbatches=step.num_microbatches,
            schedule=schedule.name,
            num_chunks=options.num_chunks,
            table=table_rows(schedule),
            stage_of_layer=step.stage_of_layer,
            transfers=transfers,
            bubble_share=bubble,
            timeline=rows,
        ),
        identity=identity_of(fingerprint(step.whole), cluster, versions),
        options=options.changed(),
        pins=pins.keys,
        notes=(
            *notes,
            *pins.notes,
            *reports(step.whole, [(stage.program, stage.result.mesh) for stage in stages], options),
            *_out_of_time(stages, options),
            said,
        ),
    )


def _out_of_time(stages: Sequence[PlannedStage], options: PlanOptions) -> tuple[str, ...]:
    solutions = [stage.result.solution for stage in stages]
    late = [str(n) for n, solution in enumerate(solutions) if solution is not None and solution.limit_used == "time"]
    if not late:
        return ()
    found = "the best plan found by then; another run may find another"
    return (f"time_limit_s={options.time_limit_s:g} ended the search for stage {', '.join(late)}: {found}",)


def _stage_plan(stage: PlannedStage, number: int, devices_per_host: int) -> StagePlan:
    program, written = stage.program, stage.result.realised
    assert written is not None

    def leaves(paths: Sequence[str], values: Sequence[int], specs: Sequence[ShardingSpec]) -> tuple[Leaf, ...]:
        kinds = (program.values[v] if v >= 0 else LITERAL for v in values)
        return tuple(Leaf(path=p, value=v, spec=s, stage=number) for p, v, s in zip(paths, kinds, specs, strict=True))

    return StagePlan(
        mesh=stage.result.mesh,
        submesh=(stage.cluster.num_hosts, stage.cluster.devices_per_host),
        first_device=stage.place.first_host * devices_per_host + stage.place.first_device,
        layers=stage.part.layers,
        memory=stage.costs.memory,
        collectives=written.collectives,
        decisions=decisions_of(stage.result, op_texts(program)),
        conversions=written.conversions,
        compute_s=stage.result.compute,
        penalty=stage.result.penalty,
        inputs=leaves(program.input_paths, program.inputs, written.in_specs),
        outputs=leaves(program.output_paths, program.outputs, written.out_specs),
        forward_s=stage.costs.forward_s,
        backward_s=stage.costs.backward_s,
        weight_s=stage.costs.weight_s,
        once_s=stage.costs.once_s,
    )


def _step_leaves(paths: Sequence[str], stages: Sequence[Sequence[Leaf]]) -> tuple[Leaf, ...]:
    """Leaves of the step, each as its stage lays it out; what several stages read of the batch as the first of them does."""
    found: dict[str, Leaf] = {}
    for leaves in stages:
        for leaf in leaves:
            found.setdefault(leaf.path, leaf)
    return tuple(found[path] for path in paths)


def _transfers(
    step: StagedStep, stages: Sequence[PlannedStage], at: Sequence[int], cluster: Cluster
) -> tuple[StageTransfer, ...]:
    """What stages on different submeshes send each other, and its time on the link there; ``at``: submesh of each stage."""
    found = []
    for target, stage in enumerate(stages):
        for crossing in (c for c in stage.part.received if at[c.source] != at[target]):
            value = step.value_of(crossing)
            found.append(
                StageTransfer(
                    tensor=str(value),
                    source=crossing.source,
                    target=target,
                    when=crossing.when,
                    size_bytes=value.size_bytes,
                    time_s=_transfer_s(value.size_bytes, stages[crossing.source], stage, cluster),
                )
            )
    return tuple(found)


def _transfer_s(size_bytes: int, sender: PlannedStage, receiver: PlannedStage, cluster: Cluster) -> float:
    """Every device sends its share at once: as many lanes as the smaller side has devices, or hosts where these have the link."""
    sides = (sender, receiver)
    lanes = min(side.result.mesh.num_devices for side in sides)
    link = cluster.inside
    if len({host for side in sides for host in side.hosts}) > 1:
        link = cluster.between
        if link.per_host:
            lanes = min(side.cluster.num_hosts for side in sides)
    return link.setup_s + link.latency_s + size_bytes / (lanes * link.single_bytes_per_s)


def _simulated(
    schedule: Schedule, stages: Sequence[PlannedStage], transfers: Sequence[StageTransfer]
) -> tuple[float, float, tuple[str, ...]]:
    """(time of one step, share of it that devices wait, the step as text)."""
    between: dict[tuple[int, int], float] = {}
    for t in transfers:
        if t.when == "loop":
            between[t.source, t.target] = between.get((t.source, t.target), 0.0) + t.time_s

    def duration(action: Action) -> float:
        costs = stages[action.stage].costs
        match action.kind:
            case ActionKind.F:
                return costs.forward_s
            case ActionKind.B:
                return costs.backward_s
            case ActionKind.I:
                return costs.backward_s - costs.weight_s
            case ActionKind.W:
                return costs.weight_s
            case ActionKind.UPDATE:
                return costs.once_s
        return 0.0

    step = chain_step(schedule)  # what is sent is priced above, not by its bytes
    pairs = {f"x{s}": (s, s + 1) for s in range(schedule.num_stages)}
    pairs |= {f"dx{s}": (s, s - 1) for s in range(schedule.num_stages)}
    line = simulate_schedule(schedule, duration, lambda t: between.get(pairs[t.buffer.name], 0.0), step)
    once = sum(t.time_s for t in transfers if t.when != "loop")
    makespan = line.makespan_s + once
    rows = tuple(timeline_text(line.events).splitlines())
    return makespan, line.bubble_share if makespan else 0.0, rows
