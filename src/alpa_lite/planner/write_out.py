"""A choice, written out as a plan of one mesh, with its memory and its price counted on what was written."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from alpa_lite._jax_compat import CPU_KEEPS_BARRIERS
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.late_order import has_barriers
from alpa_lite.costs.memory import Timeline
from alpa_lite.costs.model import CostModel
from alpa_lite.costs.overlap_order import overlap_order
from alpa_lite.costs.profile import memory_profile
from alpa_lite.intraop.decision_graph import DecisionGraph
from alpa_lite.intraop.problem import IntraOpProblem, Solution
from alpa_lite.intraop.repeated import repeated
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.posing import MeshTask
from alpa_lite.planner.realise import Realised, realise


def write_out(
    task: MeshTask, costs: CostModel, graph: DecisionGraph, problem: IntraOpProblem, solution: Solution, begin: float
) -> MeshResult:
    mesh = graph.conversions.mesh
    facts = task.shared.facts
    written = realise(task.program, graph, solution.choice, costs, facts)
    order = run_order(task, mesh, written)
    peak = memory_profile(
        task.program,
        order,
        mesh,
        in_specs=written.in_specs,
        out_specs=written.out_specs,
        decisions=written.decisions,
        conversions=written.conversions,
        roles=task.roles,
        facts=facts,
        barriers_copy=not CPU_KEEPS_BARRIERS,
    )
    node_prices = _node_prices(graph, problem, solution.choice)
    compute = math.fsum(node_prices.values())
    ends = sorted({*graph.inputs, *graph.outputs})
    penalty = math.fsum(float(problem.node_costs[n][solution.choice[n]]) for n in ends)
    # All-reduces inside ops are part of the ops' own prices.
    objective = math.fsum([*node_prices.values(), *(c.cost for c in written.conversions), penalty])
    return MeshResult(
        mesh=mesh,
        status=solution.status,
        objective=objective,
        lower_bound=min(solution.lower_bound, objective),
        realised=written,
        peak=peak,
        compute=compute,
        penalty=penalty,
        op_times=tuple(node_prices.items()),
        solution=solution,
        problem=problem,
        seconds=time.perf_counter() - begin,
        unit=costs.unit,
        budgeted=costs.rules.budget,
        fullest=_same_time(order, task.line, peak.time) if peak.profile.peak > task.budget else -1,
        used_bytes=solution.peak_bytes if costs.rules.budget == "weights" else peak.profile.peak,
    )


def run_order(task: MeshTask, mesh: DeviceMesh, written: Realised) -> Timeline:
    """When a written-out plan runs its ops: XLA:GPU moves them where there are collectives to hide."""
    if task.line.order.on_cpu or (written.collectives and task.shared.facts.of(has_barriers, task.program)):
        return task.line
    schedule = overlap_order(task.program, mesh, written.decisions, written.conversions, task.shared.facts)
    return task.shared.line(schedule)


def _same_time(order: Timeline, line: Timeline, time: int) -> int:
    """When ``line`` runs the op that ``order`` runs at a time; -1 on CPU, where times are those of instructions."""
    if line.order.on_cpu:
        return -1
    begun = [(start, path) for path, start in order.start.items() if start <= time]
    return line.start[max(begun)[1]] if begun else 0


def _node_prices(graph: DecisionGraph, problem: IntraOpProblem, choice: np.ndarray) -> Mapping[str, float]:
    """Price of every op (all-reduces inside an op included)."""
    costs = np.array(repeated(problem.node_costs).entries(choice))
    return dict(zip(graph.op_nodes, costs[graph.op_choices.node].tolist(), strict=True))
