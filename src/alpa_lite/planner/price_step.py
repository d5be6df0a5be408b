"""What the cheapest plan of a step costs and where its arguments lie, without the plan.

Writing a plan out takes about as long as searching for it. Where the memory budget is far away, nothing but the plan's text,
memory and collectives comes of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.plan.records import MeshCandidate
from alpa_lite.planner.joint import specs_of
from alpa_lite.planner.one_mesh import counted_bytes
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import KnownTasks, search_meshes
from alpa_lite.planner.posing import pose, task_costs
from alpa_lite.planner.ties import in_ties

# The solver does not count copies of converted tensors: in 5,500 plans of the tests what a plan takes was above its count by up
# to 2.0 times what the largest op reads and writes, unsplit.
_COPIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """Of the cheapest plan; fields as of ``Plan``, ``in_specs`` of all arguments."""

    mesh: DeviceMesh
    objective: float
    in_specs: tuple[ShardingSpec, ...]
    mesh_table: tuple[MeshCandidate, ...]


def price_step(
    program: Program,
    cluster: Cluster,
    pins: ResolvedPins,
    options: PlanOptions,
    known: KnownTasks,
    meshes: Sequence[DeviceMesh],
    progress: Callable[[str], None] | None = None,
) -> StepPrice | None:
    """The price that ``plan_step`` comes to for the same arguments; None where only a plan tells: there is none, the memory
    budget may bind, or prices are rounded. ``known`` keeps what was found for the plan."""
    task = known.task(program, cluster, pins, options)
    convention = task_costs(task, cluster, meshes[0])
    if convention.rules.budget != "peak" or in_ties(convention):
        return None
    results, tried, _ = search_meshes(known, task, cluster, meshes, progress, writes=False)
    best = min(results, key=lambda r: (r.objective, meshes.index(r.mesh)), default=None)
    if best is None or best.solution is None or not len(choice := best.solution.choice):
        return None
    copies = _COPIES * max(map(_largest_op, {id(owner): owner for _, owner, _ in program.walk()}.values()), default=0)
    if counted_bytes(task, cluster, best.mesh, choice) + copies > task.budget:
        return None
    graph = pose(task, cluster, best.mesh)[1].graph
    return StepPrice(
        mesh=best.mesh,
        objective=best.objective,
        in_specs=tuple(specs_of(graph, port)[choice[port]] for port in graph.inputs),
        mesh_table=tuple(tried[mesh] for mesh in meshes),
    )


def _largest_op(region: Program) -> int:
    """Bytes that the largest op of a region reads and writes, unsplit."""
    sizes = [value.size_bytes for value in region.values]
    return max((sum(sizes[v] for v in {*op.inputs, *op.outputs} if v >= 0) for op in region.ops), default=0)
