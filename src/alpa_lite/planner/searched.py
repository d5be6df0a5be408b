"""A step whose number of stages is searched: the best cuts are planned exactly, "no pipeline" is one of them.

Cuts are found by a formula that hides transfers and compared by an estimate that does not; cuts on equal submeshes, as a user
would give them, are among them.

What the search found is kept with the plan: per number of stages what a step takes, planned or estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import MemoryBudgetError
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import StageCount
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.pinned_stages import check_stage_pins
from alpa_lite.planner.pipeline import KnownStages, plan_pipeline
from alpa_lite.planner.plan_step import Versions, budget_bytes
from alpa_lite.planner.stage_layers import boundary_bytes, check_enough_layers
from alpa_lite.planner.stage_prices import RunPrices
from alpa_lite.planner.stage_remat import plan_with_remat
from alpa_lite.planner.stage_search import FoundCut, StageSearch, counts_to_compare
from alpa_lite.trace.layers import Layered
from alpa_lite.trace.program import Traced
from alpa_lite.trace.remat_step import RecomputedStages, all_recomputed, with_recomputed_layers
from alpa_lite.trace.stage_runs import LayerRuns
from alpa_lite.trace.staged import StagedStep, layers_of, staged_step
from alpa_lite.units import format_bytes

SEARCHED_SCHEDULES = ("gpipe", "1f1b", "eager-1f1b")
_CANDIDATES = 2  # cuts that are planned exactly
_WORTH = 0.01  # share of the estimate that another number of stages must promise by its bound
_COMPARED = 4  # numbers of stages of which cuts are estimated, or tried in hope
_ROUNDS = 4  # of searching again, where a cut has no plan within the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """A step whose stages are searched.

    Attributes:
        traced: with its layers.
        one_stage: plans the step without a pipeline.
        notes: for the plan.
        progress: told what is being done.
    """

    traced: Traced
    cluster: Cluster
    pins: ResolvedPins
    options: PlanOptions
    versions: Versions
    one_stage: Callable[[], Plan]
    notes: tuple[str, ...] = ()
    progress: Callable[[str], None] | None = None


def is_searched(options: PlanOptions, cluster: Cluster) -> bool:
    """Whether stages are searched: microbatches are given, and neither stages with their submeshes nor a mesh for all devices."""
    return (
        (options.stage_count is None or (options.has_stages and options.submeshes == "auto"))
        and isinstance(options.num_microbatches, int)
        and options.num_microbatches > 1
        and options.mesh_shape is None
        and options.costs in ("roofline", "measured")
        and options.schedule in SEARCHED_SCHEDULES
        and cluster.num_devices > 1
    )


def plan_with_stages_searched(task: SearchTask) -> Plan:
    """The best plan over numbers of stages, or of the number asked for, with the table of them.

    Raises:
        MemoryBudgetError, PinError, PinClashError, SolverError: as for one mesh, where no cut has a plan either.
        MemoryBudgetError: no cut into the number of stages asked for has a plan within the memory.
        LayerError: there are fewer layers than stages asked for.
    """
    search, count = _Searched(task), task.options.stage_count
    return search.run() if count is None else search.run_fixed(count)


class _Searched:
    def __init__(self, task: SearchTask) -> None:
        self.task, options = task, task.options
        traced, saved = task.traced, options.remat if isinstance(options.remat, tuple) else ()
        assert traced.layered is not None
        flat = traced.layered
        self.layered = kept = layers_of(flat)
        self.remat = remat = all_recomputed(kept, saved, task.pins.source)
        labels = tuple(tuple(str(pin.dims) for pin in side) for side in (task.pins.inputs, task.pins.outputs))

        def runs_of(layered: Layered) -> LayerRuns:
            return LayerRuns(traced.program, flat, layered, options.rules, (labels[0], labels[1]), traced.known)

        def recomputed() -> LayerRuns:
            return runs_of(with_recomputed_layers(flat, kept, remat))  # without ``self``, which would keep itself

        runs = runs_of(kept) if options.remat in ("auto", "none") else recomputed()
        again = recomputed if options.remat == "auto" and remat.layers else None
        prices = RunPrices(runs, task.cluster, task.pins, options, task.progress, again)
        budget = budget_bytes(task.cluster, options)
        pins = {pin.place: pin.stage for pin in self.layered.pins}
        if pins:
            fewest = options.stage_count or 1 + max(pins.values())
            check_stage_pins(self.layered.pins, self.layered.num_layers, fewest)
        self.search = StageSearch(prices, budget, boundary_bytes(self.layered), pins)
        self.rows: dict[int, StageCount] = {}
        self.plans: dict[int, Plan] = {}
        self.stages: KnownStages = {}

    def run(self) -> Plan:
        if self.layered.num_layers == 1:
            return self.task.one_stage()
        best = self.search.best()
        if best is not None:
            self.plan_best(best)
        if not self.plans:
            self.plan_in_hope(self.counts(2))
        if not self.plans:
            return self.task.one_stage()  # which says what is missing
        plan = min(self.plans.values(), key=lambda plan: (plan.objective, len(plan.stages)))
        return replace(plan, stage_counts=tuple(self.rows[count] for count in sorted(self.rows)))

    def counts(self, best: int) -> list[int]:
        return counts_to_compare(self.layered.num_layers, self.task.cluster.num_devices, best)

    def plan_best(self, best: FoundCut) -> None:
        """Plan the best cuts by the table, and no pipeline where that may be better."""
        counts = self.counts(best.cut.num_stages)
        bounds = {count: self.search.bound_s(count) for count in counts}
        for count, bound in bounds.items():
            status = "no less" if math.isfinite(bound) else "no cut fits the memory"
            objective = bound if math.isfinite(bound) else None
            self.rows[count] = StageCount(num_stages=count, objective=objective, status=status)
        ranked = sorted((n for n, bound in bounds.items() if n > 1 and bound < math.inf), key=lambda n: (bounds[n], n))
        for found in self.compared(best, ranked, bounds)[:_CANDIDATES]:
            if found.estimate_s < self.least():
                self.plan(found)
        for count in ranked:  # as many as it takes where memory refuses them
            untried = self.rows[count].status in ("no less", "estimated")
            if not self.plans and untried and (cut := self.search.best(count)) is not None:
                self.plan(cut)
        if 1 not in self.plans and (not self.plans or bounds.get(1, math.inf) < self.least()):
            self.may_be_one_stage()

    def plan_in_hope(self, counts: Sequence[int]) -> None:
        """Plan a cut that fits by none of the rents of the table: a stage that is planned whole is fitted with many more."""
        self.search.hope()
        bounds = {count: self.search.bound_s(count) for count in counts if count > 1}
        ranked = sorted((n for n in bounds if math.isfinite(bounds[n])), key=lambda n: (bounds[n], n))
        for count in ranked[:_COMPARED]:
            promises = len(self.plans) < _CANDIDATES and bounds[count] < self.least()
            if promises and (cut := self.search.best(count)) is not None:
                self.plan(cut)

    def compared(self, best: FoundCut, ranked: Sequence[int], bounds: Mapping[int, float]) -> list[FoundCut]:
        """One cut per number of stages, by what they are estimated to take: the best by the formula, on any or on equal
        submeshes; and of other numbers of stages as far as their bounds allow a better one."""
        found: list[FoundCut] = [best]
        own = best.cut.num_stages
        for count in [own, *(n for n in ranked if n != own)][:_COMPARED]:
            least = min(cut.estimate_s for cut in found)
            if count == 1 or (count != own and bounds[count] >= (1 - _WORTH) * least):
                continue
            found += self.cuts(count)
        least_of: dict[int, FoundCut] = {}
        for cut in sorted(found, key=lambda cut: (cut.estimate_s, cut.cut.num_stages)):
            least_of.setdefault(cut.cut.num_stages, cut)
        for count, cut in least_of.items():
            self.rows[count] = StageCount(num_stages=count, objective=cut.estimate_s, status="estimated")
        return list(least_of.values())

    def cuts(self, count: int) -> list[FoundCut]:
        """The best cuts into so many stages, on any submeshes or near that by the estimate, and on equal submeshes."""
        any_cut = self.search.best(count)
        if any_cut is None:
            return []
        equal_cut = None if any_cut.on_equal else self.search.best_on_equal(count)
        return [self.search.near(any_cut), *([] if equal_cut is None else [equal_cut])]

    def run_fixed(self, count: int) -> Plan:
        source = self.task.pins.source
        check_enough_layers(count, self.layered, source)
        if cuts := self.cuts(count):
            self.plan(min(cuts, key=lambda cut: cut.estimate_s))
        if count not in self.plans and count > 1:
            self.plan_in_hope([count])
        if count not in self.plans:
            raise MemoryBudgetError(
                f"no cut of {self.layered.num_layers} layers into {count} stages on {self.task.cluster} was found that fits "
                f"{format_bytes(self.search.budget)} per device. All of the cluster's devices must be used. At {source}. Ask for "
                "another number of stages, or num_stages='auto'; raise memory_budget_bytes; or give stage_layers and submeshes, "
                "whose refusal names the largest tensors."
            )
        return replace(self.plans[count], stage_counts=(self.rows[count],))

    def least(self) -> float:
        return min((plan.objective for plan in self.plans.values()), default=math.inf)

    def may_be_one_stage(self) -> None:
        """No pipeline, unless its estimate is above a pipeline that is planned."""
        cut = self.search.best(1)
        estimate = math.inf if cut is None else cut.estimate_s
        if not self.plans or estimate < self.least():
            self.plan_one_stage()
        elif cut is not None:
            self.rows[1] = StageCount(num_stages=1, objective=estimate, bubble_share=0.0, status="estimated")

    def plan(self, found: FoundCut) -> None:
        """Plan a cut exactly; where it does not fit the memory, the next best one into as many stages."""
        count = found.cut.num_stages
        if count == 1:
            self.plan_one_stage()
            return
        for _ in range(_ROUNDS):
            try:
                self.keep(count, self.exact(found))
                return
            except MemoryBudgetError as error:
                self.search.forbid(found, error.stage)
                again = self.search.best_on_equal(count) if found.equal else self.search.best(count)
                if again is None or again.estimate_s >= self.least():
                    break
                found = again
        if count not in self.plans:
            self.rows[count] = StageCount(num_stages=count, status="no plan within the memory was found")

    def exact(self, found: FoundCut) -> Plan:
        task = self.task
        assert task.traced.layered is not None
        step = staged_step(
            task.traced.program,
            task.traced.layered,
            self.layered,
            found.cut.stage_of_layer,
            task.options.rules,
            known=task.traced.known,
        )
        again = RecomputedStages(step, task.traced.layered, self.layered, self.remat, task.options.rules)

        def planned(step: StagedStep, recompute: RecomputedStages | None) -> Plan:
            return plan_pipeline(
                step,
                found.cut,
                task.cluster,
                task.pins,
                task.options,
                task.versions,
                recompute=recompute,
                notes=task.notes,
                progress=task.progress,
                earlier=self.stages,
                strategies=self.search.prices.strategies,
            )

        plan = plan_with_remat(planned, again, task.options.remat)
        return replace(plan, notes=(*plan.notes, *_note(found)))

    def plan_one_stage(self) -> None:
        try:
            self.keep(1, self.task.one_stage())
        except MemoryBudgetError:
            self.rows[1] = StageCount(num_stages=1, status="no plan fits the memory")

    def keep(self, count: int, plan: Plan) -> None:
        if count in self.plans and self.plans[count].objective <= plan.objective:
            return
        bubble = 0.0 if plan.pipeline is None else plan.pipeline.bubble_share
        self.plans[count] = plan
        self.rows[count] = StageCount(num_stages=count, objective=plan.objective, bubble_share=bubble, status="planned")


def _note(found: FoundCut) -> tuple[str, ...]:
    if not found.composed:
        return ()
    stages = ", ".join(map(str, found.composed))
    return (
        f"stages were searched; prices of stages {stages} were composed there of solved runs of one and two layers. All "
        "numbers of this plan are of its stages planned whole",
    )
