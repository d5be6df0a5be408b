"""Plans one program on one device mesh: graph -> prices -> ILP -> written-out plan, memory checked on the result.

The ILP's memory rows are an estimate; what counts is measured on the written-out plan (``budget.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite._jax_compat import CPU_KEEPS_BARRIERS
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import TIE, Conversions
from alpa_lite.costs.late_order import has_barriers
from alpa_lite.costs.memory import Timeline
from alpa_lite.costs.model import CostModel
from alpa_lite.costs.overlap_order import overlap_order
from alpa_lite.costs.profile import memory_profile
from alpa_lite.intraop.decision_graph import DecisionGraph
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.in_step import reduced_together
from alpa_lite.intraop.known_shape import KnownShape
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.intraop.problem import IntraOpProblem, Solution, check_problem, evaluate, scaled
from alpa_lite.intraop.repeated import repeated
from alpa_lite.intraop.repeats import node_classes
from alpa_lite.intraop.solve import greedy_step, solve
from alpa_lite.intraop.state import LARGE_GAP
from alpa_lite.plan.pins import PinnedDims, ResolvedPins, parse_dims
from alpa_lite.plan.records import LeafRole, SearchStep
from alpa_lite.planner.budget import MeshResult, within_budget
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.realise import Realised, realise
from alpa_lite.planner.rent import bytes_at, with_rent
from alpa_lite.planner.shared import Shared

Posed = tuple[CostModel, Pricer, Callable[[int | None], IntraOpProblem]]
"""Prices, what prices the decisions, and what is to be solved under a limit of the solver's own count of memory."""
Rent = Callable[[Pricer, IntraOpProblem], Sequence[np.ndarray]]
"""Costs of all nodes with what they are charged beside their prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshTask:
    """What is to be planned: everything but the mesh and its prices.

    ``ignored_pin_ops`` are paths of ``al.pin`` ops that do not count (when a clash is explained). ``shared`` is of the program.
    Without ``proof`` a price is enough, some percent too dear at most times. ``rent`` gives costs to be added to those of nodes
    when plans are compared; prices of the plan are without it.
    """

    program: Program
    line: Timeline
    roles: tuple[LeafRole, ...]
    pins: ResolvedPins
    options: PlanOptions
    budget: float
    shared: Shared
    ignored_pin_ops: frozenset[str] = frozenset()
    proof: bool = True
    rent: Rent | None = None


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
    in_units = [scaled(problem, _units(costs)) for (costs, _, _), problem in zip(posed, problems, strict=True)]
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
) -> MeshResult:
    """Solve one mesh. Infeasible and unsolved are results, not errors; bad pins raise ``PinError``.

    Args:
        task: what is to be planned.
        cluster, mesh: the devices, and their logical grid.
        cutoff: the search of a large problem may end once it is known to cost more than this.
        dearest: what must cost more than this, whatever the budget, is not written out.
        begun: what has been done of it (``begin_together``; no rent), so that it is not done again.
    """
    begin = time.perf_counter()
    costs, pricer, problem_within = begun.posed if begun else pose(task, cluster, mesh)

    def found(problem: IntraOpProblem, charged: IntraOpProblem, proof: bool = True) -> MeshResult:
        asked = replace(task, proof=task.proof and proof)
        return _found(asked, costs, pricer, problem, charged, begin, cutoff, dearest=dearest)

    def solved(limit: int | None, proof: bool) -> MeshResult:
        """The best plan by the solver's own count of memory, written out."""
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
    if not len(solution.choice) or solution.lower_bound > dearest:
        return MeshResult(
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
    return _write_out(task, costs, pricer.graph, problem, solution, begin)


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


def pose(task: MeshTask, cluster: Cluster, mesh: DeviceMesh, shared: Sequence[int] = ()) -> Posed:
    """The problem of one mesh; ``shared``: arguments that will be fixed where several programs want them (``joint.py``)."""
    task.pins.check(mesh)
    costs = task_costs(task, cluster, mesh)
    rules = costs.rules
    posed = task.shared.posed(Conversions(mesh=mesh, costs=costs), rules, task.pins.ties)
    program, graph, weights = posed.program, posed.graph, posed.weights
    pricer = Pricer(program=program, graph=graph, costs=costs, slots=posed.slots)
    pinned = task.shared.facts.of(pin_ops, program)
    allowed = allowed_choices(pinned, graph, task.pins, task.ignored_pin_ops)
    if rules.replicated_ends:
        _replicate_ends(task, graph, weights | frozenset(shared), allowed)

    def problem_within(limit: int | None) -> IntraOpProblem:
        line = task.line if limit is not None and rules.budget == "peak" else None
        problem = pricer.problem(allowed=allowed, timeline=line, usage_limit=limit)
        if rules.budget == "weights":
            problem = replace(problem, usages=tuple(pricer.weight_usages(weights)), num_times=1)
        return replace(problem, classes=node_classes(problem) if allowed else posed.classes)

    return costs, pricer, problem_within


def task_costs(task: MeshTask, cluster: Cluster, mesh: DeviceMesh) -> CostModel:
    """The prices that the options ask for, on one mesh."""
    options = task.options
    return cost_model(
        options.costs,
        cluster,
        mesh,
        forbid=options.forbid,
        replication_penalty=options.replication_penalty,
        require_sharded_contractions=options.require_sharded_contractions,
        compute=options.compute,
    )


def solve_in_units(
    problem: IntraOpProblem,
    costs: CostModel,
    options: PlanOptions,
    cutoff: float,
    *,
    proof: bool = True,
    shape: KnownShape | None = None,
    reduced: CostGraph | None = None,
    large_gap: float = LARGE_GAP,
) -> Solution:
    """Solve; where slices are free and prices whole, of equally dear choices the one with the fewest slices.

    Each slice then has the price ``TIE``. All prices are brought to whole numbers, which the solver proves to the
    convention's unit, and the answer is brought back to it. (Where a search is needed, it stops at a proof of the price:
    there may be a plan of that price with fewer slices.)
    """
    scale = _units(costs)
    solution = solve(
        scaled(problem, scale),
        time_limit_s=options.time_limit_s,
        seed=options.seed,
        cutoff=cutoff * scale,
        unit=scale,
        proof=proof,
        shape=shape,
        reduced=reduced,
        large_gap=large_gap,
    )
    if scale == 1.0:
        return solution

    def own(value: float) -> float:
        return float(math.floor(value * TIE)) if math.isfinite(value) else value

    # True prices are whole, so the bound without the slices may be rounded up.
    slices = math.fsum(_largest_fraction(edge.costs) for edge in problem.edges)
    bound = solution.lower_bound * TIE - slices
    bound = float(math.ceil(bound)) if math.isfinite(bound) else bound
    trace = tuple(replace(s, objective=own(s.objective), lower_bound=own(s.lower_bound)) for s in solution.trace)
    return replace(solution, objective=own(solution.objective), lower_bound=bound, trace=trace)


def _units(costs: CostModel) -> float:
    """By which prices are brought to whole numbers; 1 where that is not done."""
    return 1.0 / TIE if in_ties(costs) else 1.0


def in_ties(costs: CostModel) -> bool:
    """Whether prices are whole but for those of slices."""
    return costs.rules.whole and not costs.slice_price


def _largest_fraction(costs: np.ndarray) -> float:
    finite = costs[np.isfinite(costs)]
    return float((finite - np.floor(finite)).max(initial=0.0))


def _replicate_ends(
    task: MeshTask, graph: DecisionGraph, placed: frozenset[int], allowed: dict[int, np.ndarray]
) -> None:
    """Arguments but for those ``placed``, and results, lie whole on every device unless a pin says otherwise."""
    aliased = {o for _, o in task.program.aliases}
    pinned = {
        n for n, pin in zip(graph.outputs, task.pins.outputs, strict=True) if not pin.is_free
    }  # maybe arguments' too
    ends = [(n, pin) for i, (n, pin) in enumerate(zip(graph.inputs, task.pins.inputs, strict=True)) if i not in placed]
    ends += [
        (n, pin) for o, (n, pin) in enumerate(zip(graph.outputs, task.pins.outputs, strict=True)) if o not in aliased
    ]
    for port, pin in ends:
        if pin.is_free and port not in pinned:
            node = graph.nodes[port]
            assert node.specs is not None
            specs = graph.conversions.space(node.rank).specs
            whole = np.array([specs[i].is_replicated for i in node.specs])
            allowed[port] = allowed[port] & whole if port in allowed else whole


def pin_ops(program: Program) -> list[tuple[str, Op]]:
    """Every ``al.pin`` inside a program, with its path."""
    return [(path, op) for path, _, op in program.walk() if op.primitive == "pin"]


def allowed_choices(
    pinned: Sequence[tuple[str, Op]],
    graph: DecisionGraph,
    pins: ResolvedPins,
    ignored_pin_ops: frozenset[str] = frozenset(),
) -> dict[int, np.ndarray]:
    """Per pinned node, the mask of choices that keep to its pins; ``pinned``: as of ``pin_ops``."""
    masks: dict[int, np.ndarray] = {}
    mesh = graph.conversions.mesh

    def restrict(node: int, mask: np.ndarray) -> None:
        masks[node] = masks[node] & mask if node in masks else mask

    for ports, given in ((graph.inputs, pins.inputs), (graph.outputs, pins.outputs)):
        for node, pin in zip(ports, given, strict=True):
            if not pin.is_free:
                n = graph.nodes[node]
                assert n.specs is not None
                space = graph.conversions.space(n.rank)
                restrict(node, _mask(pin, mesh, lambda i, s=space: s.specs[i], n.specs))
    for path, op in pinned:
        if path not in ignored_pin_ops:
            node = graph.op_nodes[path]
            strategies = graph.nodes[node].strategies
            assert strategies is not None
            shape = graph.nodes[node].program.values[op.inputs[0]].shape  # type: ignore[union-attr]
            pin = PinnedDims(path=path, shape=shape, dims=parse_dims(op.pinned), origin=f"al.pin at {op.source}")
            pin.check(mesh, op.source)
            space = graph.conversions.space(len(shape))
            restrict(node, _mask(pin, mesh, lambda i, s=space: s.specs[i], strategies.results[0]))
    return masks


def _mask(pin: PinnedDims, mesh: DeviceMesh, spec_of: Callable[[int], ShardingSpec], numbers: np.ndarray) -> np.ndarray:
    return np.array([pin.allows(spec_of(int(i)), mesh) for i in numbers])


def _write_out(
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
