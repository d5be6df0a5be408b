"""How even layers must be: a training step waits for the largest of them, one call of a function without a gradient for all.

Such a call takes as long as all its layers and what is sent between them, however they are balanced; balance matters to calls
that follow one another. Ten percent, as for a training step, is less than a layer where a stage has few of them, and would cut
within one, where more is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from alpa_lite.interop import cluster_layers

EVEN = 0.1  # share by which the largest may be larger than the mean
UNEVEN = 0.35  # two layers and one
_WORTH = 2  # by how much fewer bytes are sent

Cuts = TypeVar("Cuts")


def fewer_bytes(even: Cuts, even_bytes: float, uneven: Cuts, uneven_bytes: float) -> Cuts:
    """Which of two ways to cut a function without a gradient."""
    return uneven if _WORTH * uneven_bytes <= even_bytes else even


def even_layers(
    flops: Sequence[float], cut_bytes: Sequence[float], num_layers: int, *, forward: bool, tolerance: float = UNEVEN
) -> tuple[int, ...]:
    """The ops that start layers of balanced FLOPs with few bytes between them.

    Args:
        flops, cut_bytes, num_layers: as of ``cluster_layers``.
        forward: whether there is no gradient.
        tolerance: what is allowed then if it halves the bytes.
    """
    even = cluster_layers(flops, cut_bytes, num_layers, tolerance=EVEN)
    if not forward:
        return even.cuts
    uneven = cluster_layers(flops, cut_bytes, num_layers, tolerance=tolerance)
    return fewer_bytes(even.cuts, even.cut_bytes, uneven.cuts, uneven.cut_bytes)
