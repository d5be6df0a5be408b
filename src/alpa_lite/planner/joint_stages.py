"""Stages of several graphs that share parameters: one cut of their layers for all, then one layout per stage.

The layers of the graphs are the same ones: layer k of each reads the same shared leaves, so that where layers lie says where
parameters lie. A stage of all graphs is one joint problem (``joint.py``) on one submesh.

Formulation of the cut, for graphs g with weights w_g, layers k, stages s on submeshes of d_s devices::

    minimise   max over s of  sum over k in s of  p(k, s)
    where      p(k, s) = min over meshes of the submesh of the joint problem's sum_g w_g * cost_g(layer k)
    such that  stages are contiguous layers, each has one, and layers that are pinned lie on their stage

The largest sum is what the busiest stage works per unit of traffic: where calls follow one another through the stages, it sets
the pace. What a run of layers costs is the sum of its layers, as where stages of a training step are searched; equal layers are
priced once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import LayerError, PinError
from alpa_lite.intraop.strategies import KnownStrategies
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.planner.joint import JointAnswer, solve_jointly
from alpa_lite.planner.one_mesh import MeshTask
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import mesh_candidates, mesh_task
from alpa_lite.planner.stage_pins import stage_pins
from alpa_lite.planner.stage_reuse import content_key
from alpa_lite.trace.staged import StagedStep

LeafKey = tuple[int, tuple[int, int] | None]
"""A shared leaf, by its number, and rows of it; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStages:
    """One graph, cut.

    Attributes:
        step: its stages.
        pins: of its leaves.
        options: as for one mesh.
        weight: how much it counts.
        leaves: position of a shared leaf among the step's arguments -> its key.
        strategies: known of its ops.
    """

    step: StagedStep
    pins: ResolvedPins
    options: PlanOptions
    weight: float
    leaves: Mapping[int, LeafKey]
    strategies: KnownStrategies

    def shared(self, stage: int) -> dict[LeafKey, int]:
        """The shared leaves of a stage -> position among the arguments of its program."""
        return {self.leaves[a]: i for i, a in enumerate(self.step.stages[stage].args) if a in self.leaves}

    def task(self, stage: int, cluster: Cluster, shape: tuple[int, ...] | None) -> MeshTask:
        part, program = self.step.stages[stage], self.step.programs[stage]
        options = replace(self.options, mesh_shape=shape)
        return mesh_task(program, cluster, stage_pins(self.pins, part, program), options, self.strategies)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Of one stage: its mesh, and how its shared leaves lie.

    Attributes:
        mesh: of the submesh.
        specs: of the shared leaves that lie there.
        objective, lower_bound: weighted sums over the graphs of what the stage costs; the bound is of all meshes.
    """

    mesh: DeviceMesh
    specs: Mapping[LeafKey, ShardingSpec]
    objective: float
    lower_bound: float


def stage_layout(
    graphs: Sequence[GraphStages], stage: int, cluster: Cluster, shape: tuple[int, ...] | None, limit: int | None = None
) -> StageLayout | None:
    """The best layout of a stage's shared leaves for all graphs; None if nothing keeps the limit.

    Args:
        graphs: cut alike.
        stage: of them.
        cluster: its submesh.
        shape: of its mesh; None = searched.
        limit: as for ``solve_jointly``.

    Raises:
        LayerError: the graphs do not have the same shared leaves there.
        PinError: no mesh holds the pins.
    """
    shared = [graph.shared(stage) for graph in graphs]
    for other in shared:
        if set(other) != set(shared[0]):
            raise LayerError(f"stage {stage} has other shared leaves in one graph than in the others.")
    keys = sorted(shared[0], key=str)
    positions = [[own[key] for key in keys] for own in shared]
    tasks = [graph.task(stage, cluster, shape) for graph in graphs]
    found: list[tuple[DeviceMesh, JointAnswer]] = []
    refused: list[PinError] = []
    for mesh in mesh_candidates(cluster, tasks[0].pins, tasks[0].options):
        try:
            answer = solve_jointly(tasks, [graph.weight for graph in graphs], positions, cluster, mesh, limit)
        except PinError as error:
            refused.append(error)
            continue
        if answer.status != "infeasible" and math.isfinite(answer.objective):
            found.append((mesh, answer))
    if not found:
        if refused:
            raise refused[0]
        return None
    mesh, best = min(found, key=lambda pair: pair[1].objective)
    return StageLayout(
        mesh=mesh,
        specs=dict(zip(keys, best.specs, strict=True)),
        objective=best.objective,
        lower_bound=min(answer.lower_bound for _, answer in found),
    )


def layer_prices(
    graphs: Sequence[GraphStages], submeshes: Sequence[Cluster], shapes: Sequence[tuple[int, ...] | None]
) -> list[list[float]]:
    """Per stage and layer the weighted sum of what the graphs cost there; inf where pins keep a layer from a mesh.

    Args:
        graphs: with every layer a stage of its own.
        submeshes, shapes: of the stages that are to be.
    """
    known: dict[object, float] = {}
    layers = range(graphs[0].step.num_stages)
    contents = [tuple(_content(graph, layer) for graph in graphs) for layer in layers]

    def price(layer: int, cluster: Cluster, shape: tuple[int, ...] | None) -> float:
        key = contents[layer], cluster, shape
        if key not in known:
            try:
                found = stage_layout(graphs, layer, cluster, shape)
            except PinError:
                found = None
            known[key] = math.inf if found is None else found.objective
        return known[key]

    return [
        [price(layer, cluster, shape) for layer in layers] for cluster, shape in zip(submeshes, shapes, strict=True)
    ]


def _content(graph: GraphStages, layer: int) -> object:
    part, program = graph.step.stages[layer], graph.step.programs[layer]
    shared = tuple(i in graph.shared(layer).values() for i in range(len(program.inputs)))
    return content_key(program, stage_pins(graph.pins, part, program)), shared


def best_cut(prices: Sequence[Sequence[float]], pinned: Mapping[int, int]) -> tuple[int, ...] | None:
    """The stage of each layer; None if no cut keeps the pins.

    best[s][j] = min over i < j of max(best[s - 1][i], prices[s] of layers i to j - 1), with layers before j in stages up to s;
    between equals the first.

    Args:
        prices: per stage, of every layer.
        pinned: layer -> its stage.
    """
    count = len(prices[0])
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # end of the stages so far -> (largest sum, ends)
    for stage, own in enumerate(prices):
        further: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (most, ends) in best.items():
            total = 0.0
            for end in range(start + 1, count + 1):
                if pinned.get(end - 1, stage) != stage:
                    break
                total += own[end - 1]
                further[end] = min(further.get(end, (math.inf, (count,))), (max(most, total), (*ends, end)))
        best = {end: found for end, found in further.items() if math.isfinite(found[0])}
    if count not in best:
        return None
    starts = (0, *best[count][1])
    return tuple(s for s, (a, b) in enumerate(pairwise(starts)) for _ in range(a, b))
