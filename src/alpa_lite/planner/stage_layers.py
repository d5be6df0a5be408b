"""Joins layers to stages: contiguous groups with balanced work and few bytes between them."""

from __future__ import annotations

from alpa_lite.core.program import Program
from alpa_lite.errors import LayerError
from alpa_lite.interop import cluster_layers
from alpa_lite.trace.auto_layers import LayerCuts
from alpa_lite.trace.layers import Layered
from alpa_lite.trace.program import value_of


def layer_cuts(num_layers: int) -> LayerCuts:
    """Chooses where a function without boundaries of its own is cut into ``num_layers`` layers."""
    return lambda flops, cut_bytes: cluster_layers(flops, cut_bytes, num_layers).cuts


def balanced_stages(layered: Layered, body: Program, num_stages: int, source: str) -> tuple[int, ...]:
    """The stage of each layer.

    Args:
        layered: the layers of the microbatch loop.
        body: the loop's body; its ops are those of ``layered``.
        num_stages: how many groups.
        source: the user's line.

    Raises:
        LayerError: there are fewer layers than stages.
    """
    if num_stages > layered.num_layers:
        raise LayerError(
            f"num_stages={num_stages} for a step of {layered.num_layers} layers. A stage has at least one layer. At {source}. "
            f"Mark more layers with al.layer_boundary, or ask for at most {layered.num_layers} stages."
        )
    assert [op.primitive for op in body.ops] == [op.name for op in layered.flat.ops]
    flops = [0.0] * layered.num_layers
    for op, layer in zip(body.ops, layered.layer, strict=True):
        flops[layer] += op.flops + sum(o.flops * op.trip_count for inner in op.bodies for _, _, o in inner.walk())
    groups = cluster_layers(flops, _cut_bytes(layered), num_stages)
    return tuple(stage for stage, (first, last) in enumerate(groups.layers) for _ in range(first, last + 1))


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
