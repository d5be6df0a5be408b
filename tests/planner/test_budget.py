"""Tight budgets: a plan fits if its written-out memory does, whatever the solver's own count says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import alpa_lite as al
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.profile import PeakReport
from alpa_lite.errors import MemoryBudgetError
from alpa_lite.intraop import search
from alpa_lite.intraop.problem import IntraOpProblem, Usage
from alpa_lite.intraop.solve import solve
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.planner import budget as within
from alpa_lite.planner.budget import MeshResult, within_budget

ONE = DeviceMesh(shape=(1,), axis_names=("x",))


# -- the search for a limit, on plans given as (price, bytes counted by the solver, bytes needed) -------------------------


class Table:
    """A problem of one decision; every choice is a plan."""

    def __init__(self, plans: list[tuple[int, int, int]]) -> None:
        self.price, self.counted, self.needed = np.array(plans).T

    def solved(self, limit: int | None, proof: bool = True) -> MeshResult:
        problem = IntraOpProblem(node_costs=(self.price.astype(float),))
        if limit is not None:
            usage = Usage(node=0, lo=0, hi=1, size_bytes=self.counted)
            problem = IntraOpProblem(node_costs=problem.node_costs, usages=(usage,), usage_limit=limit, num_times=1)
        solution = solve(problem)
        if not len(solution.choice):
            return MeshResult(mesh=ONE, status=solution.status, solution=solution, problem=problem)
        needed = int(self.needed[solution.choice[0]])
        peak: Any = PeakReport(profile=MemoryProfile(peak=needed), time=0, alive=())
        realised: Any = "written out"
        return MeshResult(
            mesh=ONE,
            status=solution.status,
            objective=solution.objective,
            lower_bound=solution.lower_bound,
            realised=realised,
            peak=peak,
            solution=solution,
            problem=problem,
            used_bytes=needed,
        )

    def rented(self, rent: float, like: Sequence[MeshResult]) -> MeshResult:
        found = int(np.argmin(self.price + rent * self.counted))
        only = Table([(int(self.price[found]), int(self.counted[found]), int(self.needed[found]))]).solved(None)
        assert only.solution is not None
        return replace(only, solution=replace(only.solution, choice=np.array([found])))

    def cheapest(self, budget: float) -> float:
        return float(np.min(self.price.astype(float), where=self.needed <= budget, initial=np.inf))


PLANS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8)


@pytest.mark.medium
@given(plans=PLANS, budget=st.integers(1, 40), rents=st.booleans())
@example(plans=[(5, 30, 20)], budget=20, rents=False)
@example(plans=[(5, 40, 30), (7, 30, 20), (9, 28, 18)], budget=20, rents=False)
@example(plans=[(5, 20, 40), (7, 30, 20), (9, 20, 20)], budget=20, rents=False)  # a bound by the count would be 9
def test_what_is_found_fits_and_what_is_claimed_holds(plans, budget, rents):
    table = Table(plans)
    best = table.cheapest(budget)
    result = within_budget(table.solved, budget, table.rented if rents else None)
    if result.realised is None:
        assert result.status in ("infeasible", "over budget")
        return
    assert result.used_bytes <= budget
    assert result.objective >= best
    assert result.lower_bound <= best
    assert result.status == ("optimal" if result.objective == result.lower_bound else "feasible")
    if result.status == "feasible":
        assert result.solution.trace[-1].found_by == "search"
        assert all(step.lower_bound <= best for step in result.solution.trace)


def test_a_rent_finds_what_limits_miss():
    """The solver counts too little of what it takes under lower limits; the plan that fits lies on the hull."""
    table = Table([(10, 20, 30), (11, 18, 21), (12, 10, 19), (13, 17, 25), (30, 9, 9)])
    with_limits = within_budget(table.solved, 20)
    with_rents = within_budget(table.solved, 20, table.rented)
    assert (with_rents.objective, with_rents.status, with_rents.lower_bound) == (12.0, "feasible", 10.0)
    assert with_limits.objective >= with_rents.objective


def test_limits_are_lowered_from_the_nearest_plan():
    """That by the budget as the limit is 10 too large, one under a rent 1; what fits just below the latter is on no hull."""
    table = Table([(10, 20, 30), (11, 18, 21), (14, 17, 19), (30, 9, 9)])
    assert within_budget(table.solved, 20, table.rented).objective == 14.0


def test_where_nothing_below_the_nearest_plan_fits_limits_above_it_are_tried():
    """Of what fits the solver counts more than of the nearest plan, which is 2 too large."""
    table = Table([(10, 25, 40), (11, 20, 35), (15, 15, 19), (30, 12, 22)])
    assert within_budget(table.solved, 20, table.rented).objective == 15.0


@given(plans=PLANS, over=st.integers(0, 20))
@pytest.mark.slow
def test_a_constant_error_of_the_count_hides_no_plan(plans, over):
    """Too much by the same for every plan: where one fits, one is found."""
    table = Table([(price, needed + over, needed) for price, _, needed in plans])
    for budget in range(int(table.needed.min()) - 1, int(table.needed.max()) + 1):
        result = within_budget(table.solved, budget)
        if math.isinf(table.cheapest(budget)):
            assert result.realised is None
        else:
            assert result.realised is not None
            assert result.used_bytes <= budget
        if over == 0:
            assert result.objective == table.cheapest(budget)


def test_the_limit_is_raised_as_far_as_plans_fit():
    """The solver counts 10 too much: the smallest plan is found first, then the cheapest that fits."""
    table = Table([(1, 60, 50), (5, 40, 30), (7, 30, 20), (9, 28, 18)])
    result = within_budget(table.solved, 21)
    assert (result.objective, result.status, result.lower_bound) == (7.0, "feasible", 1.0)


def test_far_above_the_budget_nothing_is_tried():
    """The cheapest plan is counted right, so that a count of twice the budget is believed."""
    table, limits = Table([(1, 90, 90), (5, 40, 20)]), []

    def solved(limit, proof):
        limits.append(limit)
        return table.solved(limit, proof)

    assert within_budget(solved, 20).status == "infeasible"
    assert limits == [None, 20]


@pytest.mark.parametrize(("slow", "status"), [(False, "infeasible"), (True, "over budget")])
def test_a_search_out_of_time_is_no_proof(slow, status):
    """The solver counts 10 too much, so limits above the budget are tried, for which it has an answer or no time."""
    table = Table([(1, 40, 30), (2, 35, 25)])

    def solved(limit, proof):
        if slow and limit is not None and limit > 24:
            return MeshResult(mesh=ONE, status="no-solution", problem=table.solved(limit).problem)
        return table.solved(limit, proof)

    assert within_budget(solved, 24).status == status


# -- steps ----------------------------------------------------------------------------------------------------------------


def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def plan(cluster: str, *, examples: int = 1024, **settings: Any) -> al.Plan:
    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((examples, 64), jnp.float32)
    return al.plan(step, *args, cluster=al.Cluster.parse(cluster), options=al.PlanOptions(**settings))


@pytest.mark.parametrize("cluster", ["1x1:h100-sxm", "1x1:cpu"])
def test_on_one_device_the_only_plan_fits_its_own_peak_and_nothing_less(cluster):
    peak = plan(cluster).memory.peak
    kept = plan(cluster, memory_budget_bytes=peak)
    assert (kept.memory.peak, kept.status) == (peak, "optimal")
    with pytest.raises(MemoryBudgetError, match="1 B too much"):
        plan(cluster, memory_budget_bytes=peak - 1)


@pytest.mark.medium
@pytest.mark.parametrize("share", [1.0, 0.95, 0.85])
def test_on_four_devices_tight_budgets_are_kept(share):
    free = plan("1x4:h100-sxm", mesh_shape=(4,))
    budget = share * free.memory.peak
    tight = plan("1x4:h100-sxm", mesh_shape=(4,), memory_budget_bytes=budget)
    assert tight.memory.peak <= budget
    assert free.objective <= tight.objective and tight.lower_bound <= tight.objective


def two_by_two(depth: int, width: int, examples: int, budget: float) -> al.Plan:
    """Layers up to four times the width and back, on a mesh of four devices, within a budget that binds."""

    def train(weights, batch):
        def loss(weights):
            y = batch[0]
            for up, down in weights:
                y = jnp.tanh(y @ up) @ down
            return jnp.mean((y - batch[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    shape = jax.ShapeDtypeStruct
    weights = [(shape((width, 4 * width), "float32"), shape((4 * width, width), "float32"))] * depth
    options = al.PlanOptions(memory_budget_bytes=budget, mesh_shape=(2, 2))
    batch = (shape((examples, width), "float32"),) * 2
    found = al.plan(train, weights, batch, cluster=al.Cluster.parse("1x4:h100-sxm"), options=options, donate_argnums=0)
    assert found.memory.peak <= budget
    return found


@pytest.mark.medium
def test_mixtures_of_plans_are_cheaper_than_each(monkeypatch):
    """Plans under rents and limits differ in what they save on; a mixture saves here as one of them, there as another."""
    found = two_by_two(3, 128, 256, 3_696_232)
    monkeypatch.setattr(within, "_MIXED", 0)
    assert found.objective < 0.97 * two_by_two(3, 128, 256, 3_696_232).objective


@pytest.mark.medium
def test_choices_that_cost_little_more_are_looked_at_under_limits(monkeypatch):
    found = two_by_two(1, 64, 64, 313_344)
    monkeypatch.setattr(search, "look_near", lambda *_: None)
    assert found.objective < 0.97 * two_by_two(1, 64, 64, 313_344).objective


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_on_cpu_where_the_solver_only_estimates_memory_budgets_are_kept(share):
    free = plan("1x8:cpu", examples=128, mesh_shape=(8,), memory_budget_bytes=math.inf)
    tight = plan("1x8:cpu", examples=128, mesh_shape=(8,), memory_budget_bytes=share * free.memory.peak)
    assert tight.memory.peak <= share * free.memory.peak
    assert tight.objective >= free.objective
    if share == 1.0:
        assert (tight.objective, tight.memory.peak) == (free.objective, free.memory.peak)


def test_the_excess_is_the_peak_minus_the_budget():
    """The solver counts more than the peak of the only plan; the message speaks of the plan."""
    peak = plan("1x1:h100-sxm").memory.peak
    with pytest.raises(MemoryBudgetError) as error:
        plan("1x1:h100-sxm", memory_budget_bytes=peak - 1024)
    assert "1.00 KiB too much" in str(error.value)
