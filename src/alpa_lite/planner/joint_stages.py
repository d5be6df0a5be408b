"""Stages of several graphs that share parameters: one cut of their layers for all, then one layout per stage.

The layers of the graphs are the same ones: layer k of each reads the same shared leaves, so that where layers lie says where
parameters lie. A stage of all graphs is one joint problem (``joint.py``) on one submesh.

Formulation of the cut, for graphs g with weights w_g, layers k, stages s on submeshes m(s), which are given or searched::

    minimise   max over s of  sum over k in s of  p(k, m(s)), and of equals the sum over all s
    where      p(k, m) = min over meshes of m of the joint problem's sum_g w_g * cost_g(layer k)
    such that  stages are contiguous layers, each has one, layers that are pinned lie on their stage, the submeshes have all
               devices, and what a stage's shared leaves hold at least fits its devices

The largest sum is what the busiest stage works per unit of traffic: where calls follow one another through the stages, it sets
the pace. What a run of layers costs is the sum of its layers, as where stages of a training step are searched; equal layers are
priced once. The search is that of ``interop``, asked for so many calls that the busiest stage is nearly all that counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import LayerError, PinError, SlicingError
from alpa_lite.interop import slice_stages
from alpa_lite.intraop.strategies import KnownStrategies
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.planner.joint import JointAnswer, solve_jointly
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import mesh_candidates, mesh_task
from alpa_lite.planner.posing import MeshTask
from alpa_lite.planner.stage_pins import stage_pins
from alpa_lite.planner.stage_reuse import content_key
from alpa_lite.trace.staged import StagedStep

_CALLS = 1 << 20  # that follow one another

LeafKey = tuple[int, tuple[int, int] | None]
"""A shared leaf, by its number, and rows of it; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStages:
    """One graph, cut.

    Attributes:
        name: of the graph.
        step: its stages.
        pins: of its leaves.
        options: as for one mesh.
        weight: how much it counts.
        leaves: position of a shared leaf among the step's arguments -> its key.
        strategies: known of its ops.
    """

    name: str
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
    keys, positions, tasks = stage_tasks(graphs, stage, cluster, shape)
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


def stage_tasks(
    graphs: Sequence[GraphStages], stage: int, cluster: Cluster, shape: tuple[int, ...] | None
) -> tuple[list[LeafKey], list[list[int]], list[MeshTask]]:
    """The shared leaves of a stage, per graph their positions there, and its task; arguments as of ``stage_layout``.

    Raises:
        LayerError: the graphs do not have the same shared leaves there.
    """
    shared = [graph.shared(stage) for graph in graphs]
    for graph, other in zip(graphs, shared, strict=True):
        for key in sorted(set(other) ^ set(shared[0]), key=str):
            raise LayerError(_elsewhere(key, stage, graphs[0], graph))
    keys = sorted(shared[0], key=str)
    positions = [[own[key] for key in keys] for own in shared]
    return keys, positions, [graph.task(stage, cluster, shape) for graph in graphs]


def _elsewhere(key: LeafKey, stage: int, first: GraphStages, other: GraphStages) -> str:
    """Why two graphs cannot share a leaf that only one of them has on a stage."""

    def lies(graph: GraphStages) -> str:
        stages = [str(n) for n in range(graph.step.num_stages) if key in graph.shared(n)]
        return f"on stage {' and '.join(stages) or 'none'} in the graph {graph.name!r}"

    position = next(i for i, k in first.leaves.items() if k == key)
    return (
        f"the shared leaf {first.step.whole.input_paths[position]!r} lies {lies(first)} and {lies(other)}, so that stage {stage} "
        f"has other leaves in one than in the other. At {first.pins.source}. A shared leaf lies on one stage in all graphs. Read "
        "it in the same layers of both, plan functions without a gradient, or take this leaf out of shared."
    )


def layer_prices(
    graphs: Sequence[GraphStages], submeshes: Sequence[Cluster], shapes: Sequence[tuple[int, ...] | None]
) -> list[list[float]]:
    """Per submesh and layer the weighted sum of what the graphs cost there; inf where pins keep a layer from a mesh.

    Args:
        graphs: with every layer a stage of its own.
        submeshes, shapes: of what the stages may lie on.
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


def layer_bytes(graphs: Sequence[GraphStages]) -> list[int]:
    """Per layer, what its shared leaves hold on all devices together, each on one of them; ``graphs`` as of ``layer_prices``."""
    first = graphs[0]
    return [
        sum(program.values[program.inputs[i]].size_bytes for i in first.shared(layer).values())
        for layer, program in enumerate(first.step.programs)
    ]


def best_cut(
    prices: Sequence[Sequence[float]],
    sizes: Sequence[int],
    num_devices: int,
    pinned: Mapping[int, int],
    *,
    num_stages: int,
    submeshes: Sequence[int] | None = None,
    holds: Sequence[int] | None = None,
    budget: float = math.inf,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The stage of each layer, and the number of the submesh of each stage; None if there is no such cut.

    Args:
        prices: per submesh, of every layer.
        sizes: devices of each submesh.
        num_devices: of all stages together.
        pinned: layer -> its stage.
        num_stages: how many.
        submeshes: per stage the number of its submesh, where they are known.
        holds: bytes that each layer holds at least, on all devices of its submesh together.
        budget: bytes of one device.
    """
    given, room = np.array(prices, dtype=np.float64), budget * np.array(sizes, dtype=np.float64)
    barred, held = np.isinf(given), np.zeros((1, given.shape[1])) if holds is None else np.array([holds])
    costs = np.maximum(_of_runs(np.where(barred, 0.0, given)), 0.0)
    forbidden = (_of_runs(barred) > 0) | (_of_runs(held) > room[:, None, None])
    cost_s = np.moveaxis(np.where(forbidden, np.inf, costs), 0, 2)[..., None]
    try:
        found = slice_stages(
            cost_s,
            np.full(cost_s.shape, num_stages),
            sizes,
            num_devices,
            _CALLS,
            num_stages=num_stages,
            layer_stage=pinned,
            stage_submeshes=submeshes,
        )
    except SlicingError:
        return None
    stages = tuple(stage for stage, (first, last, *_) in enumerate(found.stages) for _ in range(first, last + 1))
    return stages, tuple(stage[2] for stage in found.stages)


def _of_runs(layers: np.ndarray) -> np.ndarray:
    """(submesh, layer) -> (submesh, first, last): sums over runs of layers; what ends before it begins is no run."""
    before = np.concatenate([np.zeros((len(layers), 1)), np.cumsum(layers, axis=1)], axis=1)
    return np.asarray(before[:, None, 1:] - before[:, :-1, None])
