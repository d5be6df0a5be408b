"""Joins layers to stages: contiguous groups with balanced work and few bytes between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.program import Program
from alpa_lite.errors import LayerError, user_line
from alpa_lite.interop import cluster_layers
from alpa_lite.planner.even_layers import UNEVEN, even_layers
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.pinned_stages import check_stage_pins, pinned_cuts
from alpa_lite.trace.auto_layers import LayerCuts
from alpa_lite.trace.layers import Layered
from alpa_lite.trace.program import value_of
from alpa_lite.trace.stage_pin import StagePin

# Of a function without boundaries whose stages are searched: as many as devices, within these.
_FEWEST_LAYERS, _MOST_LAYERS = 4, 16
_UNEVEN_TO_JOIN = 1.0  # of layers which stages are made of
# With n layers, all recomputed, the values at n boundaries are kept and one layer's own are made again at a time.
_RECOMPUTED_LAYERS = 8


def layer_cuts(
    num_layers: int,
    stage_layers: Sequence[int] = (),
    at_least: int | None = None,
    source: str = "",
    tolerance: float = UNEVEN,
) -> LayerCuts:
    """Chooses where a function without boundaries of its own is cut into ``num_layers`` layers, or ``at_least`` so many.

    Where it pins values to stages, these have ``stage_layers`` layers each, by default one. ``tolerance``: as of ``even_layers``.
    """

    def chosen(
        flops: Sequence[float], cut_bytes: Sequence[float], pins: Sequence[StagePin] = (), *, forward: bool = False
    ) -> tuple[int, ...]:
        if pins:
            return pinned_cuts(flops, cut_bytes, pins, stage_layers or (1,) * num_layers, forward=forward)
        possible = 1 + sum(map(math.isfinite, cut_bytes))
        wanted = num_layers if at_least is None else max(at_least, min(num_layers, possible))
        if wanted > possible:
            raise LayerError(
                f"{wanted} layers were asked of a function that can be cut into at most {possible}, between ops that its "
                "gradient, or without one its result, passes. A stage has at least one layer. At "
                f"{source or user_line()}. Ask for fewer stages or layers."
            )
        return even_layers(flops, cut_bytes, wanted, forward=forward, tolerance=tolerance)

    return chosen


def searched_layers(cluster: Cluster, num_stages: int = 1, source: str = "") -> LayerCuts:
    """How a function without boundaries of its own is cut where stages, at least ``num_stages``, are searched.

    Where it pins values to stages, into as many layers as these are.
    """
    most = max(num_stages, min(_MOST_LAYERS, max(_FEWEST_LAYERS, cluster.num_devices)))

    def chosen(
        flops: Sequence[float], cut_bytes: Sequence[float], pins: Sequence[StagePin] = (), *, forward: bool = False
    ) -> Sequence[int]:
        if pins:
            cuts = layer_cuts(max(num_stages, 1 + max(pin.stage for pin in pins)))
            return cuts(flops, cut_bytes, pins, forward=forward)
        cuts = layer_cuts(most, at_least=num_stages, source=source, tolerance=_UNEVEN_TO_JOIN)
        return cuts(flops, cut_bytes, forward=forward)

    return chosen


def layers_asked(options: PlanOptions, source: str) -> LayerCuts | None:
    """How a function without boundaries of its own is cut; None without stages.

    One layer per stage if stages are alike; else layers small enough to give each stage work by its number of devices.
    """
    count = options.stage_count
    if count is None or count == 1:
        return None
    if options.stage_layers is not None:
        return layer_cuts(sum(options.stage_layers), options.stage_layers, source=source)
    sizes = [math.prod(submesh) for submesh in options.fixed_submeshes or ((1, 1),) * count]
    return layer_cuts(sum(sizes) // math.gcd(*sizes), (1,) * count, count, source)


def layers_to_recompute(num_layers: int = _RECOMPUTED_LAYERS, at_least: int | None = None) -> LayerCuts:
    """How a function without boundaries of its own is cut for recomputation on one mesh, where pins to stages mean nothing."""
    whole = layer_cuts(num_layers, at_least=at_least)
    return lambda flops, cut_bytes, pins=(), **_: whole(flops, cut_bytes)


def check_enough_layers(num_stages: int, layered: Layered, source: str) -> None:
    """Refuse more stages than layers, with a LayerError."""
    if num_stages > layered.num_layers:
        raise LayerError(
            f"num_stages={num_stages} for a step of {layered.num_layers} layers. A stage has at least one layer. At {source}. "
            f"Mark more layers with al.layer_boundary, or ask for at most {layered.num_layers} stages."
        )


def balanced_stages(layered: Layered, body: Program, num_devices: Sequence[int], source: str) -> tuple[int, ...]:
    """The stage of each layer: work by number of devices.

    Args:
        layered: the layers of the microbatch loop.
        body: the loop's body; its ops are those of ``layered``.
        num_devices: of each stage.
        source: the user's line.

    Raises:
        LayerError: there are fewer layers than stages, or pins to stages that cannot be kept.
    """
    num_stages = len(num_devices)
    check_enough_layers(num_stages, layered, source)
    assert [op.primitive for op in body.ops] == [op.name for op in layered.flat.ops]
    flops = [0.0] * layered.num_layers
    for op, layer in zip(body.ops, layered.layer, strict=True):
        flops[layer] += op.flops + sum(o.flops * op.trip_count for inner in op.bodies for _, _, o in inner.walk())
    check_stage_pins(layered.pins, layered.num_layers, num_stages)
    if len(set(num_devices)) > 1 or layered.pins:
        pinned = {pin.place: pin.stage for pin in layered.pins}
        return _stages_by_devices(flops, _cut_bytes(layered), num_devices, pinned)
    groups = cluster_layers(flops, _cut_bytes(layered), num_stages)
    return tuple(stage for stage, (first, last) in enumerate(groups.layers) for _ in range(first, last + 1))


def _stages_by_devices(
    flops: Sequence[float],
    cut_bytes: Sequence[float],
    num_devices: Sequence[int],
    pinned: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """The least work per device of the stage that has most; between equals, met on the way, fewer bytes, then early cuts.

    best[s, j] is that of the first j layers in stages 0..s: min over i of max(best[s - 1, i], work(i, j) / devices of s).
    """
    work = np.concatenate([[0.0], np.cumsum(flops)])
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        0: (0.0, 0.0, ())
    }  # end of the stages so far -> (most work per device, bytes, ends)
    for stage, devices in enumerate(num_devices):
        other = {layer for layer, s in (pinned or {}).items() if s != stage}
        further: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (most, crossing, ends) in best.items():
            for end in range(start + 1, min([len(work), *(layer + 1 for layer in other if layer >= start)])):
                cut = cut_bytes[end - 1] if end < len(flops) else 0.0
                found = max(most, (work[end] - work[start]) / devices), crossing + cut, (*ends, end)
                further[end] = min(further.get(end, found), found)
        best = further
    starts = (0, *best[len(flops)][2])
    return tuple(stage for stage, (a, b) in enumerate(pairwise(starts)) for _ in range(a, b))


def boundary_bytes(layered: Layered) -> list[float]:
    """Per boundary, the bytes that cross it for one microbatch, forward and back."""
    return [2 * size for size in _cut_bytes(layered)]


def _cut_bytes(layered: Layered) -> list[float]:
    """Per boundary, the bytes that cross it in the forward pass."""
    flat, found = layered.flat, [0.0] * (layered.num_layers - 1)
    made = {o: k for op, k in zip(flat.ops, layered.layer, strict=True) for o in op.outputs if o >= 0}
    last: dict[int, int] = {}
    for op, layer, back in zip(flat.ops, layered.layer, layered.backward, strict=True):
        for value in op.inputs if not back else ():
            if isinstance(value, int) and value in made:
                last[value] = max(last.get(value, 0), layer)
    for value, layer in last.items():
        for cut in range(made[value], layer):
            found[cut] += value_of(flat.avals[value]).size_bytes
    return found
