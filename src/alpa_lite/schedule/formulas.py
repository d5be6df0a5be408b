"""Closed forms of the generators, for a planner that weighs schedules before it has one, and to test tables against.

``p`` meshes, ``m`` microbatches, ``v`` chunks per mesh. Bubbles hold for stages of equal time with a weight half no longer than
the forward or the input half, transfers that take no time, and m >= p; the counts hold for any times.
"""

from __future__ import annotations

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule.generators import GENERATORS


def bubble_s(
    name: str, num_meshes: int, forward_s: float, input_s: float, weight_s: float, num_chunks: int = 1
) -> float:
    """Seconds of a step in which each mesh is idle.

    Args:
        name: of a generator.
        num_meshes: ``p``.
        forward_s, input_s, weight_s: one microbatch's forward, input half and weight half through all chunks of one mesh.
        num_chunks: ``v``.

    Raises:
        ScheduleError: an unknown name.

    Example:
        >>> bubble_s("zb-h1", 4, 1.0, 1.0, 1.0)
        3.0
    """
    _check_name(name)
    whole = forward_s + input_s + weight_s
    return (num_meshes - 1) * {
        "zb-h1": forward_s + input_s - weight_s,
        "interleaved-1f1b": whole / num_chunks,
        "inference": forward_s,
    }.get(name, whole)


def peak_residuals(name: str, num_meshes: int, num_microbatches: int, mesh: int, num_chunks: int = 1) -> int:
    """Microbatches whose residuals a mesh holds at its peak, counted once per chunk that holds them.

    Args:
        name: of a generator.
        num_meshes, num_microbatches, num_chunks: ``p``, ``m``, ``v``.
        mesh: which one, 0 is the first stage's.

    Raises:
        ScheduleError: an unknown name.
    """
    _check_name(name)
    later, per_round = num_meshes - 1 - mesh, num_microbatches // max(1, num_microbatches // num_meshes)
    most = {
        "1f1b": later + 1,
        "eager-1f1b": 2 * later + 1,
        "interleaved-1f1b": (num_chunks - 1) * per_round + 2 * later + 1,
        "zb-h1": num_meshes,
        "inference": 0,
    }.get(name, num_microbatches)
    return min(most, num_microbatches * num_chunks)


def _check_name(name: str) -> None:
    if name not in GENERATORS:
        raise ScheduleError(
            f"there is no closed form for {name!r}. Allowed are {', '.join(map(repr, GENERATORS))}. It was asked for by name: "
            "simulate tables of other schedules instead.",
            "unknown",
        )
