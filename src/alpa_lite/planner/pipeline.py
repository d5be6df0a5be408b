"""Plans a step as stages on submeshes: layers -> stages -> a plan for each -> one simulated pipeline.

Each stage is planned by the same code as a whole step (``one_mesh``), on its part of the step. What a pipeline adds is the
memory of microbatches in flight, transfers between stages, and the schedule, whose simulated time is the objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.program import Program
from alpa_lite.errors import LayerError, MemoryBudgetError, PinError, ScheduleError
from alpa_lite.interop import PlacedSubmesh
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.intraop.strategies import KnownStrategies
from alpa_lite.plan.check import check_plan
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.chunk_memory import within_budget
from alpa_lite.planner.joined_stages import PlannedStage, joined_plan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import (
    Versions,
    budget_bytes,
    mesh_candidates,
    mesh_task,
    no_plan,
)
from alpa_lite.planner.rent import Held
from alpa_lite.planner.stage_costs import StageCosts, stage_costs
from alpa_lite.planner.stage_cut import StageCut
from alpa_lite.planner.stage_fit import fit_stage
from alpa_lite.planner.stage_pins import stage_pins
from alpa_lite.planner.stage_remat import kept_or_recomputed
from alpa_lite.planner.stage_rent import held_bytes
from alpa_lite.planner.stage_reuse import content_key, renamed
from alpa_lite.schedule import (
    ActionKind,
    InFlight,
    Schedule,
    forward_schedule,
    in_flight,
    make_schedule,
)
from alpa_lite.trace.remat_step import RecomputedStages
from alpa_lite.trace.staged import StagedStep
from alpa_lite.trace.stages import StageProgram

KnownStages = dict[object, PlannedStage]
"""Planned stages by what they are and the microbatches in flight that they were planned for."""


def plan_pipeline(
    step: StagedStep,
    cut: StageCut,
    cluster: Cluster,
    pins: ResolvedPins,
    options: PlanOptions,
    versions: Versions,
    *,
    recompute: RecomputedStages | None = None,
    notes: tuple[str, ...] = (),
    progress: Callable[[str], None] | None = None,
    earlier: KnownStages | None = None,
    strategies: KnownStrategies | None = None,
) -> Plan:
    """The plan for ``step``, whose layers are already joined to stages as ``cut`` says.

    ``recompute``: the same step with layers recomputed, for stages that are cheaper so, or fit the memory budget only so.
    ``earlier``: stages planned for other cuts of the step under the same options; new ones are added.
    ``strategies``: of ops that other programs of the step have too; new ones are added.

    Raises:
        LayerError: a stage has no ops.
        SlicingError: the submeshes cannot be placed on the cluster.
        MemoryBudgetError, PinError, PinClashError, SolverError: as for one mesh, for some stage.
    """
    _check_work(step, pins.source)
    tell = progress or (lambda text: None)
    assert step.stage_of_layer == cut.stage_of_layer
    schedule = _schedule_of(step, options, pins.source)
    flying = in_flight(schedule)
    known: dict[object, tuple[InFlight, PlannedStage]] = {}
    earlier = {} if earlier is None else earlier
    strategies = KnownStrategies() if strategies is None else strategies

    def plan_all(budgets: Sequence[float]) -> list[PlannedStage]:
        def planned(step: StagedStep, number: int) -> PlannedStage:
            limit = budgets[number]
            return _planned(step, number, cut, cluster, pins, options, flying, limit, known, earlier, strategies, tell)

        found = []
        for number in range(step.num_stages):
            try:
                found.append(kept_or_recomputed(planned, step, recompute, number, cut.recomputed))
            except MemoryBudgetError as error:
                error.stage = number
                raise
        return found

    stages = within_budget(plan_all, schedule, flying, budget_bytes(cluster, options), pins.source)
    remat = None
    if recompute is not None and any(stage.recomputed for stage in stages):
        layers = {k for stage in stages if stage.recomputed for k in stage.part.layers}
        step, remat = recompute.only(layers)
        stages = [
            replace(stage, part=part, program=program)
            for stage, part, program in zip(stages, step.stages, step.programs, strict=True)
        ]
    plan = joined_plan(step, stages, schedule, cluster, pins, options, versions, notes)
    plan = replace(plan, remat=remat)
    check_plan(plan, step.whole, step.programs)
    return plan


def _check_work(step: StagedStep, source: str) -> None:
    """Of functions without a gradient; a gradient passes through all layers."""
    for number, program in enumerate(step.programs):
        if not program.inputs and not program.outputs:
            raise LayerError(
                f"stage {number} has nothing to do: what stands after its al.layer_boundary needs nothing that the boundary "
                f"gives, and so runs in an earlier stage. Each stage has work. At {source}. Give the boundary all that the next "
                "layer takes, or leave it out."
            )


def _planned(
    step: StagedStep,
    number: int,
    cut: StageCut,
    cluster: Cluster,
    pins: ResolvedPins,
    options: PlanOptions,
    flying: Sequence[InFlight],
    limit: float,
    known: dict[object, tuple[InFlight, PlannedStage]],
    earlier: KnownStages,
    strategies: KnownStrategies,
    tell: Callable[[str], None],
) -> PlannedStage:
    """A stage with at most ``limit`` bytes per device; equal stages are planned once and kept in ``known``."""
    part, program, place = step.stages[number], step.programs[number], cut.placed(cluster)[number]
    own, count = stage_pins(pins, part, program), flying[number]
    submesh, shape = cut.cluster_of(number, cluster), cut.mesh_shapes[number]
    key = content_key(program, own), submesh, shape, limit
    # What fits with more microbatches in flight fits with fewer, and equal stages stay one program.
    if key not in known or not _holds(known[key][0], count):
        same = key, count.inputs, count.residuals, count.halves
        if same not in earlier:
            tell(f"planning stage {number} of {step.num_stages}, {len(program.ops)} ops")
            mine = replace(options, mesh_shape=shape, submeshes=None, stage_mesh_shapes=None)
            earlier[same] = _plan_stage(part, program, submesh, place, own, mine, count, limit, strategies)
        known[key] = count, earlier[same]
    return _same_plan(known[key][1], part, program, place, count)


def _schedule_of(step: StagedStep, options: PlanOptions, source: str) -> Schedule:
    if step.is_training:
        schedule = make_schedule(options.schedule, step.num_stages, step.num_microbatches, options.num_chunks)
        check_possible(schedule, source)
        return schedule
    if options.schedule != PlanOptions().schedule or options.num_chunks > 1:
        raise ScheduleError(
            f"schedule={options.schedule!r} and num_chunks={options.num_chunks} were given for a function without "
            "al.value_and_grad. It has forward passes alone, one stage after the other. At "
            f"{source}. Leave schedule and num_chunks out.",
            "kinds",
        )
    return forward_schedule(step.num_stages, step.num_microbatches)


def check_possible(schedule: Schedule, source: str) -> None:
    """Refuse a table that is sound but no order in which a training step of ours can run."""
    there = {action.kind for column in schedule.columns for action in column}
    fault = ""
    if ActionKind.RECOMPUTE in there:
        fault = "recomputes; here that is a part of the backward pass, where jax.checkpoint asks for it"
    if not schedule.is_training:
        fault = "has no backward pass, and the step takes gradients"
    if fault:
        raise ScheduleError(
            f"the schedule {schedule.name!r} {fault}. A table of F, B, I, W, GRADSYNC and UPDATE is allowed. At {source}. "
            "Give such a table as schedule=..., or the name of one.",
            "kinds",
        )


def _holds(planned: InFlight, flying: InFlight) -> bool:
    return planned.residuals >= flying.residuals and planned.halves >= flying.halves


def _runs_alike(one: StageProgram, other: StageProgram) -> bool:
    """Whether two stages of equal programs exchange values at the same times and are cut at the same ops."""
    cuts = [(p.loop, p.num_forward, p.weight_half, p.rounds) for p in (one, other)]
    times = [([c.when for c in p.received], [c.when for c in p.sent]) for p in (one, other)]
    return cuts[0] == cuts[1] and times[0] == times[1]


def _same_plan(
    stage: PlannedStage, part: StageProgram, program: Program, place: PlacedSubmesh, flying: InFlight
) -> PlannedStage:
    """The plan of an equal stage for this one."""
    result = renamed(stage.result, stage.program, program)
    if _runs_alike(stage.part, part) and result.peak is not None:
        costs = stage.costs.with_flying(result.peak.profile, flying)
    else:
        on_cpu = stage.cluster.device.platform == "cpu"
        costs = stage_costs(part, program, result, flying, on_cpu=on_cpu, own=stage.costs.own)
    return replace(stage, part=part, program=program, place=place, result=result, costs=costs)


def _plan_stage(
    part: StageProgram,
    program: Program,
    cluster: Cluster,
    place: PlacedSubmesh,
    pins: ResolvedPins,
    options: PlanOptions,
    flying: InFlight,
    budget: float,
    strategies: KnownStrategies,
) -> PlannedStage:
    """The cheapest plan over the meshes of the submesh, with so many microbatches in flight, in ``budget`` bytes per device."""
    task = mesh_task(program, cluster, pins, options, strategies)
    task = replace(task, budget=min(task.budget, budget))
    found: list[PlannedStage] = []
    results: list[MeshResult] = []
    refused: list[PinError] = []
    least = math.inf

    def costs_of(result: MeshResult) -> StageCosts:
        on_cpu = cluster.device.platform == "cpu"
        return stage_costs(part, program, result, flying, on_cpu=on_cpu, known=task.shared.parts)

    def held_of(pricer: Pricer) -> Held:
        return held_bytes(pricer, part, program, flying.residuals)

    for mesh in sorted(mesh_candidates(cluster, pins, options), key=lambda mesh: sum(mesh.shape)):
        try:
            fit = fit_stage(task, cluster, mesh, held_of, costs_of)
        except PinError as error:
            refused.append(error)
            continue
        results += fit.results
        least = min(least, fit.least_bytes)
        if fit.fitting is not None:
            result, costs = fit.fitting
            found.append(
                PlannedStage(part=part, program=program, cluster=cluster, place=place, result=result, costs=costs)
            )
    if found:
        return min(found, key=lambda stage: stage.result.objective)
    if not results:
        raise refused[0]
    if math.isfinite(least):
        training = flying.residuals > 0
        with_flying = f" with {flying.residuals} microbatches in flight" if training else ""
        smaller = "more microbatches, jax.checkpoint around layers" if training else "smaller inputs (batch, slots)"
        raise MemoryBudgetError(
            f"no plan of the stage of layers {part.layers[0]}-{part.layers[-1]}{with_flying} was found that fits: the smallest "
            f"peak found is {least:,.0f} bytes, the budget {task.budget:,.0f} per device ({cluster}). At {pins.source}. Give "
            f"more stages, {smaller}, or a larger memory_budget_bytes.",
            proven=False,
        )
    raise no_plan(task, results, cluster)
