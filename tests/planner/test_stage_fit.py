"""Fitting a stage into its memory: the cheapest plan, plans under a rising rent, mixtures of plans, plans under limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.profile import PeakReport
from alpa_lite.intraop.problem import IntraOpProblem, Solution, Usage
from alpa_lite.intraop.solve import solve
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.planner import pipeline, stage_fit, ties
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.posing import MeshTask
from alpa_lite.planner.stage_costs import StageCosts
from benchmarks import published
from benchmarks.models import pipelined

CLUSTER, MESH = al.Cluster.parse("1x4:cpu"), DeviceMesh(shape=(4,), axis_names=("x",))
# (price, bytes); all but the last are corners of their hull. Of those the rents that rise find 1000, 700, 500 and 400 bytes.
PLANS = np.array([(100, 1000), (100.2, 700), (101, 600), (103.5, 500), (120, 400), (160, 300), (112, 480)])
LAYER = np.array([(100, 1000), (120, 400)])
STACKED = 5000  # bytes that the solver counts and the stage does not take


class Planner:
    """Plans of equal decisions in the place of ``plan_once``; keeps what it was asked. Every plan takes ``seconds``."""

    def __init__(self, plans: np.ndarray, count: int, seconds: float, size_of: Callable[[float], float]) -> None:
        self.plans, self.count, self.seconds, self.size_of = plans, count, seconds, size_of
        self.asked: list[tuple[int | None, bool, int]] = []  # limit, under a rent, among so many
        self.allowed_s: list[float] = []
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def plan(
        self,
        task: MeshTask,
        cluster: Any,
        mesh: DeviceMesh,
        *,
        limit: int | None = None,
        among: Sequence[np.ndarray] = (),
    ) -> MeshResult:
        del cluster
        self.asked.append((limit, task.rent is not None, len(among)))
        self.allowed_s.append(task.options.time_limit_s)
        self.now += self.seconds
        prices, sizes = self.plans[:, 0], self.plans[:, 1].astype(np.int64)
        allowed = [{int(choice[k]) for choice in among} or set(range(len(prices))) for k in range(self.count)]
        costs = [np.array([p if i in picks else np.inf for i, p in enumerate(prices)]) for picks in allowed]
        usages = [Usage(node=k, lo=0, hi=1, size_bytes=sizes) for k in range(self.count)]
        problem = IntraOpProblem(
            node_costs=tuple(costs),
            usages=tuple(usages) if limit is not None else (),
            usage_limit=None if limit is None else max(0, limit - STACKED),
            num_times=1,
        )
        charged = task.rent(None, problem) if task.rent else costs  # type: ignore[arg-type]
        solution = solve(replace(problem, node_costs=tuple(charged)))
        if not len(solution.choice):
            return MeshResult(mesh=mesh, status=solution.status, solution=solution, problem=problem)
        price, size = self.plans[solution.choice].sum(axis=0)
        peak: Any = PeakReport(profile=MemoryProfile(peak=int(self.size_of(size))), time=0, alive=())
        made: Any = "written out"
        found = {"objective": float(price), "lower_bound": float(price), "realised": made, "peak": peak}
        return MeshResult(mesh=mesh, status="optimal", solution=solution, problem=problem, **found)

    def counted(self, task: Any, cluster: Any, mesh: Any, choice: np.ndarray) -> int:
        del task, cluster, mesh
        return STACKED + int(self.plans[choice][:, 1].sum())


def fitted(
    monkeypatch: pytest.MonkeyPatch,
    budget: float,
    plans: np.ndarray = PLANS,
    count: int = 1,
    seconds: float = 0.0,
    size_of: Callable[[float], float] = float,
) -> tuple[stage_fit.StageFit, Planner]:
    planner = Planner(plans, count, seconds, size_of)
    monkeypatch.setattr(stage_fit, "plan_once", planner.plan)
    monkeypatch.setattr(stage_fit, "counted_bytes", planner.counted)
    monkeypatch.setattr(stage_fit, "time", planner)
    nothing: Any = None
    task = MeshTask(
        program=nothing, line=nothing, roles=(), pins=nothing, options=PlanOptions(), budget=budget, shared=nothing
    )

    def costs_of(result: MeshResult) -> StageCosts:
        numbers = dict.fromkeys(("forward_s", "backward_s", "weight_s", "once_s"), 0.0)
        return StageCosts(**numbers, residual_bytes=0, halves_bytes=0, memory=result.peak_profile)

    held = dict.fromkeys(range(count), plans[:, 1])
    return stage_fit.fit_stage(task, CLUSTER, MESH, lambda _: held, costs_of), planner


def test_the_cheapest_plan_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 1000)
    assert fit.fitting is not None and fit.fitting[0].objective == 100.0 and not fit.fitting[0].restricted
    assert planner.asked == [(None, False, 0)]


def test_a_near_plan_under_a_rent_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 800)
    assert fit.fitting is not None
    result = fit.fitting[0]
    assert (result.objective, result.lower_bound, result.status) == (100.2, 100.0, "feasible") and result.restricted
    assert all(limit is None for limit, _, _ in planner.asked)


def test_a_corner_of_the_hull_between_two_rents(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 650)
    assert fit.fitting is not None and fit.fitting[0].objective == 101.0
    assert all(limit is None for limit, _, _ in planner.asked)


def test_no_limits_where_the_hull_promises_little(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 505)
    assert fit.fitting is not None and fit.fitting[0].objective == 103.5
    assert all(limit is None for limit, _, _ in planner.asked)


def test_a_mixture_lets_some_layers_be_lean(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 2800, LAYER, count=4)
    assert fit.fitting is not None
    result = fit.fitting[0]
    assert (result.objective, result.lower_bound, result.status) == (440.0, 400.0, "feasible") and result.restricted
    limits = [(rent, among > 1) for limit, rent, among in planner.asked if limit is not None]
    assert limits == [(False, True)]  # the line between the sizes meets the budget there at once


def test_limits_of_mixtures_close_in_on_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stage takes is no line of what the solver counts: the first limit is too low, the second too high."""
    fit, planner = fitted(monkeypatch, 9000, LAYER, count=16, size_of=lambda counted: counted**2 / 16_000)
    assert fit.fitting is not None
    assert fit.fitting[0].objective == 9 * 100 + 7 * 120  # no cheaper one fits
    sizes = [result.peak_profile.peak for result in fit.results]
    assert [size <= 9000 for size in sizes[-3:]] == [True, False, True]
    assert sum(limit is not None for limit, _, _ in planner.asked) == 3


def test_limits_find_what_lies_close_to_the_cheapest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No corner of the hull, so no rent finds it, and no mixture has it."""
    fit, planner = fitted(monkeypatch, 995, np.array([(100, 1000), (130, 400), (101, 990)]))
    assert fit.fitting is not None and fit.fitting[0].objective == 101.0
    assert planner.asked[-1] == (STACKED + 995, False, 0)


def test_limits_where_no_rent_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, _ = fitted(monkeypatch, 350)
    assert fit.fitting is not None and fit.fitting[0].objective == 160.0


def test_limits_where_the_cheapest_plan_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only what is sent has a price: a share of nothing is no rent, and no gain is small beside it."""
    fit, planner = fitted(monkeypatch, 2200, np.array([(0, 1000), (20, 400)]), count=4)
    assert fit.fitting is not None and fit.fitting[0].objective == 60.0
    assert not any(rent for _, rent, _ in planner.asked)


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, _ = fitted(monkeypatch, 200)
    assert fit.fitting is None and fit.least_bytes == 400
    assert fit.results[-1].status == "infeasible"


def test_the_time_limit_is_of_all_solves_together(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 2800, LAYER, count=4, seconds=10)
    assert planner.allowed_s == [60.0, 50.0, 40.0, 30.0, 20.0, 10.0]
    assert all(limit is None for limit, _, _ in planner.asked)  # the sixth plan is the last: no mixture
    assert fit.fitting is not None
    result = fit.fitting[0]
    assert (result.objective, result.lower_bound, result.status) == (480.0, 400.0, "feasible")
    assert result.solution is not None and result.solution.limit_used == "time"


def test_what_fits_is_found_though_time_has_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 2800, LAYER, count=4, seconds=50)
    assert planner.allowed_s == [60.0, 10.0, 6.0, 6.0, 6.0]
    assert fit.fitting is not None and fit.fitting[0].objective == 480.0


def test_a_plan_that_the_time_limit_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.fit_stage

    def late(*args: Any) -> stage_fit.StageFit:
        fit = real(*args)
        assert fit.fitting is not None and fit.fitting[0].solution is not None
        result, costs = fit.fitting
        return replace(fit, fitting=(replace(result, solution=replace(result.solution, limit_used="time")), costs))

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(al.layer_boundary(jnp.tanh(x @ w["a"])) @ w["b"])

    def step(w: Any, x: Any) -> Any:
        return al.value_and_grad(loss)(w, x)

    shapes = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in "ab"}
    args = shapes, jax.ShapeDtypeStruct((12, 8), jnp.float32)
    options = al.PlanOptions(num_stages=2, num_microbatches=2, time_limit_s=7)
    for fit, count in ((real, 0), (late, 1)):
        monkeypatch.setattr(pipeline, "fit_stage", fit)
        plan = al.plan(step, *args, cluster=CLUSTER, options=options)
        assert sum("time_limit_s=7 ended the search for stage 0, 1" in note for note in plan.notes) == count


@pytest.mark.slow
def test_few_solves_for_stages_of_a_gpt_in_tight_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT 1.3B on 8 V100s as four stages in 5.5 GB: every stage is too large at its cheapest and much dearer under a rent."""
    limited: list[list[bool]] = []  # of every stage, whether solves had a limit
    real_fit, real_solve = pipeline.fit_stage, ties.solve

    def fit(*args: Any) -> stage_fit.StageFit:
        limited.append([])
        return real_fit(*args)

    def counted(problem: IntraOpProblem, **given: Any) -> Solution:
        limited[-1].append(problem.usage_limit is not None)
        return real_solve(problem, **given)

    monkeypatch.setattr(pipeline, "fit_stage", fit)
    monkeypatch.setattr(ties, "solve", counted)
    step, args = pipelined(published.config_of(4))
    # 300 s is no limit here, whatever else the machine does.
    options = al.PlanOptions(num_stages=4, num_microbatches=128, memory_budget_bytes=5.5e9, time_limit_s=300)
    plan = al.plan(step, *args, cluster=published.cluster_of(8), donate_argnums=(0,), options=options)
    assert all(stage.memory.peak <= 5.5e9 for stage in plan.stages)
    assert plan.status == "feasible" and not any("time_limit_s" in note for note in plan.notes)
    assert plan.objective < 29.0  # under rents alone 30.2
    assert len(limited) == 3 and any(map(any, limited))
    for solves in limited:
        assert (
            sum(solves) <= 4 + 4 and len(solves) - sum(solves) <= 1 + 4 + 4
        )  # mixtures, limits; the cheapest, rents, corners
