"""What one mesh asks of the solver: decisions, prices, what pins allow, memory under a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.memory import Timeline
from alpa_lite.costs.model import CostModel
from alpa_lite.intraop.decision_graph import DecisionGraph
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.intraop.problem import IntraOpProblem
from alpa_lite.intraop.repeats import node_classes
from alpa_lite.plan.pins import PinnedDims, ResolvedPins, parse_dims
from alpa_lite.plan.records import LeafRole
from alpa_lite.planner.options import PlanOptions
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
        # A rent is on the bytes that usages see, too.
        problem = pricer.problem(allowed=allowed, timeline=line, usage_limit=limit, counted=task.rent is not None)
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


def _replicate_ends(
    task: MeshTask, graph: DecisionGraph, placed: frozenset[int], allowed: dict[int, np.ndarray]
) -> None:
    """Arguments but for those ``placed``, and results, lie whole on every device unless a pin says otherwise."""
    aliased = {o for _, o in task.program.aliases}
    # Nodes of results that are pinned; a result that is an argument has the argument's.
    pinned = {n for n, pin in zip(graph.outputs, task.pins.outputs, strict=True) if not pin.is_free}
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
