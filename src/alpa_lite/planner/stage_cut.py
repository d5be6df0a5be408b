"""Which layers each stage has and which part of the cluster: what a pipeline is planned for.

In come what the user gave (``PlanOptions``), the cluster and the step's layers; out comes a ``StageCut``. A search makes the
same record from a table of stage costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.program import Program
from alpa_lite.errors import LayerError, SlicingError
from alpa_lite.interop import PlacedSubmesh, place_submeshes
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.stage_layers import balanced_stages
from alpa_lite.schedule import Schedule, make_schedule
from alpa_lite.trace.layers import Layered
from alpa_lite.units import numbers_text


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """Layers -> stages -> submeshes.

    Attributes:
        stage_of_layer: per layer, from 0 on, rising by 0 or 1.
        submeshes: per stage (hosts, devices per host), together all devices of the cluster.
        places: per stage the number of its submesh, from 0 on; stages of one number share it. Empty: each has its own.
        mesh_shapes: per stage the shape of its logical mesh; None = searched.
        recomputed: stages that were found to be best recomputed; they are planned otherwise only where that does not fit.
    """

    stage_of_layer: tuple[int, ...]
    submeshes: tuple[tuple[int, int], ...]
    mesh_shapes: tuple[tuple[int, ...] | None, ...]
    places: tuple[int, ...] = ()
    recomputed: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        assert self.stage_of_layer and self.stage_of_layer[0] == 0
        assert all(b - a in (0, 1) for a, b in pairwise(self.stage_of_layer)), self.stage_of_layer
        assert self.stage_of_layer[-1] + 1 == len(self.submeshes) == len(self.mesh_shapes)
        for (hosts, devices), shape in zip(self.submeshes, self.mesh_shapes, strict=True):
            assert shape is None or math.prod(shape) <= hosts * devices

    @property
    def num_stages(self) -> int:
        return len(self.submeshes)

    def placed(self, cluster: Cluster) -> tuple[PlacedSubmesh, ...]:
        """Where on the cluster each stage lies."""
        places = self.places or tuple(range(self.num_stages))
        placed = place_submeshes(_distinct(self.submeshes, places), cluster.num_hosts, cluster.devices_per_host)
        return tuple(placed[place] for place in places)

    def cluster_of(self, stage: int, cluster: Cluster) -> Cluster:
        """A stage's submesh as a cluster of its own."""
        hosts, devices = self.submeshes[stage]
        return replace(cluster, num_hosts=hosts, devices_per_host=devices)


def given_cut(options: PlanOptions, cluster: Cluster, layered: Layered, body: Program, source: str) -> StageCut:
    """The cut that a user asked for; where layers are not given, each stage gets work by its number of devices.

    Args:
        options: with a number of stages, submeshes, or layers per stage.
        cluster: that the submeshes are parts of.
        layered: the layers of the microbatch loop.
        body: the loop's body.
        source: the user's line.

    Raises:
        LayerError: the cluster has no such parts, or the step not so many layers.
    """
    submeshes = given_submeshes(options, cluster, source)
    if options.stage_layers is not None:
        stage_of_layer = _given_layers(options.stage_layers, layered, source)
    else:
        sizes = [math.prod(submesh) for submesh in submeshes]
        stage_of_layer = balanced_stages(layered, body, sizes, source)
    shapes = given_mesh_shapes(options, submeshes, source)
    return StageCut(
        stage_of_layer=stage_of_layer, submeshes=submeshes, mesh_shapes=shapes, places=stage_places(options)
    )


def stage_places(options: PlanOptions) -> tuple[int, ...]:
    """Per stage the number of its submesh, as the schedule says."""
    assert options.stage_count is not None
    return asked_schedule(options).mesh_of_stage() if options.has_stages else tuple(range(options.stage_count))


def asked_schedule(options: PlanOptions) -> Schedule:
    """The table of ``options``, which have stages and a number of microbatches.

    Raises:
        ScheduleError: it is none for so many stages and microbatches.
    """
    assert options.stage_count is not None and options.num_microbatches != "auto"
    return make_schedule(options.schedule, options.stage_count, options.num_microbatches, options.num_chunks)


def _distinct(submeshes: Sequence[tuple[int, int]], places: Sequence[int]) -> list[tuple[int, int]]:
    """One entry per submesh, of one per stage."""
    return [submeshes[places.index(place)] for place in range(1 + max(places))]


def one_stage(options: PlanOptions, cluster: Cluster, source: str) -> PlanOptions:
    """The options of a step on one mesh, where they name that one stage; else as they are.

    Raises:
        LayerError: as for several stages.
    """
    if options.stage_count is None:
        return options
    (shape,) = given_mesh_shapes(options, given_submeshes(options, cluster, source), source)
    return replace(options, mesh_shape=shape, stage_mesh_shapes=None)


def given_mesh_shapes(
    options: PlanOptions, submeshes: Sequence[tuple[int, int]], source: str
) -> tuple[tuple[int, ...] | None, ...]:
    """Per stage the shape of its mesh that a user asked for; None = searched. A LayerError if it does not fit its submesh."""
    shapes = options.stage_mesh_shapes or (options.mesh_sizes if options.mesh_shape else None,) * len(submeshes)
    for stage, (shape, submesh) in enumerate(zip(shapes, submeshes, strict=True)):
        if options.stage_mesh_shapes and shape is not None and math.prod(shape) != math.prod(submesh):
            raise LayerError(
                f"stage_mesh_shapes={shapes}: stage {stage} has {math.prod(shape)} devices in the mesh {shape} and "
                f"{math.prod(submesh)} in its submesh {submesh}. They must be as many. At {source}. Give submeshes="
                "((hosts, devices per host), ...) beside it, or a shape whose product is the stage's number of devices."
            )
    return tuple(shapes)


def given_submeshes(options: PlanOptions, cluster: Cluster, source: str) -> tuple[tuple[int, int], ...]:
    """The user's submeshes, or equal ones.

    Raises:
        LayerError: they are no parts of the cluster, do not use all its devices, or cannot lie on its hosts.
    """
    places = stage_places(options)
    given = options.fixed_submeshes
    if given is None:
        return (_equal_submesh(cluster, 1 + max(places), source),) * len(places)
    distinct = _distinct(given, places)
    if tuple(distinct[place] for place in places) != given:
        raise LayerError(
            f"submeshes={given} and the schedule puts the stages on the submeshes {places}. Stages of one submesh "
            f"have the same entry. At {source}. Give them equal entries, or another schedule."
        )
    try:
        place_submeshes(distinct, cluster.num_hosts, cluster.devices_per_host)
    except SlicingError as error:
        raise LayerError(
            f"submeshes={given} for the cluster {cluster}: {error.args[0].split('. ')[0]}. Each must be (1, devices "
            f"of one host) or (hosts, {cluster.devices_per_host}), together all {cluster.num_devices} devices, each host full. "
            f"At {source}. Give one (hosts, devices per host) per stage that does so."
        ) from error
    return given


def _equal_submesh(cluster: Cluster, num_stages: int, source: str) -> tuple[int, int]:
    """One of ``num_stages`` equal parts: whole hosts, or equal parts of a host."""
    hosts, per_host = cluster.num_hosts, cluster.devices_per_host
    if hosts % num_stages == 0:
        return hosts // num_stages, per_host
    parts, rest = divmod(num_stages, hosts)
    if rest == 0 and per_host % parts == 0:
        return 1, per_host // parts
    allowed = {n for n in range(1, hosts + 1) if hosts % n == 0} | {
        hosts * n for n in range(1, per_host + 1) if per_host % n == 0
    }
    raise LayerError(
        f"num_stages={num_stages} does not cut the cluster {cluster} in equal submeshes. Each must have whole hosts or an equal "
        f"part of one, so that {numbers_text(sorted(allowed))} stages are allowed. At {source}. Give one of these numbers, or "
        "submeshes=((hosts, devices per host), ...)."
    )


def _given_layers(stage_layers: Sequence[int], layered: Layered, source: str) -> tuple[int, ...]:
    if sum(stage_layers) != layered.num_layers:
        raise LayerError(
            f"stage_layers={tuple(stage_layers)} has {sum(stage_layers)} layers, the step has {layered.num_layers}: one more "
            f"than it has boundaries. Every layer must be in one stage. At {source}. Change stage_layers, or mark other "
            "layers with al.layer_boundary."
        )
    given = tuple(stage for stage, count in enumerate(stage_layers) for _ in range(count))
    for pin in layered.pins:
        if given[pin.place] != pin.stage:
            raise LayerError(
                f"stage_layers={tuple(stage_layers)} puts layer {pin.place} on stage {given[pin.place]}, {pin.reason} "
                f"on stage {pin.stage}. Both must hold. At {source}. Change stage_layers, or drop the pin."
            )
    return given
