"""Fitting a stage into its memory: the cheapest plan, then plans under a rising rent, then plans under limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.profile import PeakReport
from alpa_lite.intraop.problem import IntraOpProblem
from alpa_lite.intraop.solve import solve
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.planner import stage_fit
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.one_mesh import MeshTask
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.stage_costs import StageCosts

CLUSTER, MESH = al.Cluster.parse("1x4:cpu"), DeviceMesh(shape=(4,), axis_names=("x",))
# (price, bytes); all but the last are corners of their hull. Of those the rents that rise find 1000, 700, 500 and 400 bytes.
PLANS = np.array([(100, 1000), (100.2, 700), (101, 600), (103.5, 500), (120, 400), (160, 300), (112, 480)])


class Planner:
    """Plans of one decision in the place of ``plan_on_mesh``; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, bool]] = []

    def plan(self, task: MeshTask, cluster: Any, mesh: DeviceMesh) -> MeshResult:
        del cluster
        self.asked.append((task.budget, task.rent is not None))
        prices = np.where(PLANS[:, 1] <= task.budget, PLANS[:, 0], np.inf)
        problem = IntraOpProblem(node_costs=(prices,))
        charged = task.rent(None, problem)[0] if task.rent else prices  # type: ignore[arg-type]
        solution = solve(IntraOpProblem(node_costs=(charged,)))
        if not len(solution.choice):
            return MeshResult(mesh=mesh, status=solution.status, solution=solution, problem=problem)
        price, size = PLANS[solution.choice[0]]
        peak: Any = PeakReport(profile=MemoryProfile(peak=int(size)), time=0, alive=())
        made: Any = "written out"
        found = {"objective": float(price), "lower_bound": float(price), "realised": made, "peak": peak}
        return MeshResult(mesh=mesh, status="optimal", solution=solution, problem=problem, **found)


def fitted(monkeypatch: pytest.MonkeyPatch, budget: float) -> tuple[stage_fit.StageFit, Planner]:
    planner = Planner()
    monkeypatch.setattr(stage_fit, "plan_on_mesh", planner.plan)
    nothing: Any = None
    task = MeshTask(
        program=nothing, line=nothing, roles=(), pins=nothing, options=PlanOptions(), budget=budget, shared=nothing
    )

    def costs_of(result: MeshResult) -> StageCosts:
        numbers = dict.fromkeys(("forward_s", "backward_s", "weight_s", "once_s"), 0.0)
        return StageCosts(**numbers, residual_bytes=0, halves_bytes=0, memory=result.peak_profile)

    return stage_fit.fit_stage(task, CLUSTER, MESH, lambda _: {0: PLANS[:, 1]}, costs_of), planner


def test_the_cheapest_plan_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 1000)
    assert fit.fitting is not None and fit.fitting[0].objective == 100.0 and not fit.fitting[0].restricted
    assert planner.asked == [(math.inf, False)]


def test_a_near_plan_under_a_rent_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 800)
    assert fit.fitting is not None
    result = fit.fitting[0]
    assert (result.objective, result.lower_bound, result.status) == (100.2, 100.0, "feasible") and result.restricted
    assert all(budget == math.inf for budget, _ in planner.asked)


def test_a_corner_of_the_hull_between_two_rents(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 650)
    assert fit.fitting is not None and fit.fitting[0].objective == 101.0
    assert all(budget == math.inf for budget, _ in planner.asked)


def test_no_limits_where_the_hull_promises_little(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 505)
    assert fit.fitting is not None and fit.fitting[0].objective == 103.5
    assert all(budget == math.inf for budget, _ in planner.asked)


def test_limits_find_what_no_rent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, planner = fitted(monkeypatch, 490)
    assert fit.fitting is not None and fit.fitting[0].objective == 112.0
    assert any(budget < math.inf for budget, _ in planner.asked)


def test_limits_where_no_rent_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, _ = fitted(monkeypatch, 350)
    assert fit.fitting is not None and fit.fitting[0].objective == 160.0


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, _ = fitted(monkeypatch, 200)
    assert fit.fitting is None and fit.least_bytes == 400
