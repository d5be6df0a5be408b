"""Plans one program on one device mesh: graph -> prices -> ILP -> written-out plan, memory checked on the result.

The ILP's memory rows are an estimate; what counts is measured on the written-out plan (``budget.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.model import CostModel
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.in_step import reduced_together
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.intraop.problem import IntraOpProblem, check_problem, evaluate, scaled
from alpa_lite.intraop.repeats import node_classes
from alpa_lite.intraop.solve import greedy_step
from alpa_lite.plan.records import SearchStep
from alpa_lite.planner.budget import MeshResult, within_budget
from alpa_lite.planner.posing import MeshTask, Posed, pose, task_costs
from alpa_lite.planner.rent import bytes_at, with_rent
from alpa_lite.planner.ties import in_ties, scale_of, solve_in_units
from alpa_lite.planner.write_out import write_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A mesh whose problem has been posed, without a limit, and reduced together with those of others.

    ``reduced`` is of the problem as it is solved (``solve_in_units``), which changes it.
    """

    posed: Posed
    problem: IntraOpProblem
    reduced: CostGraph | None


def begin_together(tasks: Sequence[tuple[MeshTask, Cluster, DeviceMesh]]) -> list[Begun]:
    """Meshes with one decision graph, to be handed to ``plan_on_mesh``. Bad pins raise ``PinError``."""
    posed = [pose(*task) for task in tasks]
    problems = [problem_within(None) for _, _, problem_within in posed]
    check_problem(problems[0])  # what is reduced together has the same shapes
    in_units = [scaled(problem, scale_of(costs)) for (costs, _, _), problem in zip(posed, problems, strict=True)]
    of_each = zip(posed, problems, reduced_together(in_units), strict=True)
    return [Begun(posed=p, problem=problem, reduced=graph) for p, problem, graph in of_each]


def plan_on_mesh(
    task: MeshTask,
    cluster: Cluster,
    mesh: DeviceMesh,
    *,
    cutoff: float = math.inf,
    dearest: float = math.inf,
    begun: Begun | None = None,
    priced: MeshResult | None = None,
) -> MeshResult:
    """Solve one mesh. Infeasible and unsolved are results, not errors; bad pins raise ``PinError``.

    Args:
        task: what is to be planned.
        cluster, mesh: the devices, and their logical grid.
        cutoff: the search of a large problem may end once it is known to cost more than this.
        dearest: what must cost more than this, whatever the budget, is not written out.
        begun: what has been done of it (``begin_together``; no rent), so that it is not done again.
        priced: what was found without a limit, and not written out.
    """
    begin = time.perf_counter()
    costs, pricer, problem_within = begun.posed if begun else pose(task, cluster, mesh)

    def found(problem: IntraOpProblem, charged: IntraOpProblem, proof: bool = True) -> MeshResult:
        asked = replace(task, proof=task.proof and proof)
        return _found(asked, costs, pricer, problem, charged, begin, cutoff, dearest=dearest)

    def solved(limit: int | None, proof: bool) -> MeshResult:
        """The best plan by the solver's own count of memory, written out."""
        if priced and limit is None:
            return _written(task, costs, pricer, priced, begin, dearest)
        if begun and limit is None:  # once, as it is changed
            return _found(task, costs, pricer, begun.problem, begun.problem, begin, cutoff, begun.reduced, dearest)
        problem = problem_within(limit)
        return replace(found(problem, _charged(task, pricer, problem), proof), limit=limit)

    def charged(
        problem: IntraOpProblem, counted: IntraOpProblem, like: Sequence[MeshResult], rent: float
    ) -> MeshResult:
        """The cheapest plan where a byte that lies there when one of the plans is fullest, as ``counted``, costs ``rent``."""
        times = {evaluate(counted, choice).peak_time for choice in _choices(like)}
        held = bytes_at(counted, times | {r.fullest for r in like})
        return found(problem, replace(problem, node_costs=tuple(with_rent(problem, held, rent))))

    def rented(rent: float, like: Sequence[MeshResult]) -> MeshResult:
        counted = problem_within(int(task.budget))
        free = replace(counted, usages=(), usage_limit=None, num_times=0)
        return replace(charged(free, counted, like, rent), restricted=True)

    def mixed(limit: int, among: Sequence[MeshResult], rent: float) -> MeshResult:
        counted = problem_within(limit)
        return replace(charged(_restricted(counted, _choices(among)), counted, among, rent), limit=limit)

    own = task.rent is None
    return within_budget(solved, task.budget, rented if own else None, mixed if own else None)


def plan_once(
    task: MeshTask,
    cluster: Cluster,
    mesh: DeviceMesh,
    *,
    limit: int | None = None,
    among: Sequence[np.ndarray] = (),
) -> MeshResult:
    """One solve, written out; nobody looks whether that keeps the budget. Bad pins raise ``PinError``.

    Args:
        task: what is to be planned; its budget is not used.
        cluster, mesh: the devices, and their logical grid.
        limit: bytes by the solver's own count; None = without memory.
        among: choices of plans; with them every node chooses as one of them did.
    """
    begin = time.perf_counter()
    costs, pricer, problem_within = pose(task, cluster, mesh)
    problem = problem_within(limit)
    if among:
        problem = _restricted(problem, among)
    return replace(_found(task, costs, pricer, problem, _charged(task, pricer, problem), begin), limit=limit)


def counted_bytes(task: MeshTask, cluster: Cluster, mesh: DeviceMesh, choice: np.ndarray) -> int:
    """The peak of a choice by the solver's own count."""
    return evaluate(pose(task, cluster, mesh)[2](0), choice).peak_bytes


def _charged(task: MeshTask, pricer: Pricer, problem: IntraOpProblem) -> IntraOpProblem:
    """With the task's rent."""
    return problem if task.rent is None else replace(problem, node_costs=tuple(task.rent(pricer, problem)))


def _found(
    task: MeshTask,
    costs: CostModel,
    pricer: Pricer,
    problem: IntraOpProblem,
    charged: IntraOpProblem,
    begin: float,
    cutoff: float = math.inf,
    reduced: CostGraph | None = None,
    dearest: float = math.inf,
) -> MeshResult:
    if reduced is None:  # else it has been checked
        check_problem(problem)
    known = task.shared.shape
    solution = solve_in_units(charged, costs, task.options, cutoff, proof=task.proof, shape=known, reduced=reduced)
    result = MeshResult(
        mesh=pricer.graph.conversions.mesh,
        status=solution.status,
        objective=solution.objective,
        lower_bound=solution.lower_bound,
        solution=solution,
        problem=problem,
        seconds=time.perf_counter() - begin,
        unit=costs.unit,
        budgeted=costs.rules.budget,
    )
    return _written(task, costs, pricer, result, begin, dearest)


def _written(
    task: MeshTask, costs: CostModel, pricer: Pricer, result: MeshResult, begin: float, dearest: float
) -> MeshResult:
    """A search, with its plan written out unless there is none or it must cost more than ``dearest``."""
    assert result.solution is not None and result.problem is not None
    if not len(result.solution.choice) or result.lower_bound > dearest:
        return result
    return write_out(task, costs, pricer.graph, result.problem, result.solution, begin)


def _choices(results: Sequence[MeshResult]) -> list[np.ndarray]:
    """Of those that have a plan."""
    return [r.solution.choice for r in results if r.solution is not None and len(r.solution.choice)]


def _restricted(problem: IntraOpProblem, among: Sequence[np.ndarray]) -> IntraOpProblem:
    """A problem in which every node chooses as in one of the given choices; arrays that were shared stay shared."""
    made: dict[tuple[int, frozenset[int]], np.ndarray] = {}
    node_costs = []
    for costs, *picks in zip(problem.node_costs, *(choice.tolist() for choice in among), strict=True):
        key = id(costs), frozenset(picks)
        if key not in made:
            kept = np.full(len(costs), np.inf)
            kept[list(key[1])] = costs[list(key[1])]
            made[key] = kept
        node_costs.append(made[key])
    problem = replace(problem, node_costs=tuple(node_costs))
    return replace(problem, classes=node_classes(problem))


def greedy_first(task: MeshTask, cluster: Cluster, result: MeshResult) -> SearchStep | None:
    """What deciding op by op costs under the limit of ``result``, to stand before its trace; None if that says nothing.

    Made here, after all meshes, as it takes its time and only the plan that is returned shows it.
    """
    assert result.solution is not None
    problem = result.problem
    if problem is None:  # a number of a symbolic plan, which keeps none
        problem = pose(task, cluster, result.mesh)[2](result.limit)
    step = greedy_step(problem, result.solution)
    if step is None or not in_ties(task_costs(task, cluster, result.mesh)):
        return step
    return replace(step, objective=float(math.floor(step.objective)))
