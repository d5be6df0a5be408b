"""What a user may say about stages, checked against itself; what needs the cluster or the step is checked where it is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

from alpa_lite.numeric import positive


def stage_count(given: Sequence[tuple[str, Any]]) -> int | None:
    """The number of stages that was asked for: given as a number, or as one entry per stage; None if nothing was."""
    for _, value in given:
        if value not in (None, "auto"):
            return int(value) if isinstance(value, Integral) else len(value)
    return None


def stage_faults(
    num_stages: Any, submeshes: Any, stage_layers: Any, stage_mesh_shapes: Any, mesh_shape: Any
) -> Iterator[str]:
    """What is wrong, in sentences; arguments as in ``PlanOptions``."""
    if num_stages != "auto" and not _is_count(num_stages):
        yield (
            f"num_stages={num_stages!r} was given; allowed are 'auto' and numbers from 1. Give the number of "
            "equal parts of the cluster."
        )
        return
    if submeshes == "auto" and (stage_layers, stage_mesh_shapes, mesh_shape) != (None, None, None):
        yield (
            "submeshes='auto' was given beside stage_layers, stage_mesh_shapes or mesh_shape. It searches layers and meshes too. "
            "Leave these out, or give submeshes."
        )
        return
    if submeshes not in (None, "auto") and not (submeshes and all(_is_shape(s) and len(s) == 2 for s in submeshes)):
        yield (
            f"submeshes={submeshes!r} was given; it must have one (hosts, devices per host) per stage, all at least 1, e.g. "
            "((1, 2), (1, 6))."
        )
        return
    if stage_layers is not None and not (stage_layers and all(map(_is_count, stage_layers))):
        yield (
            f"stage_layers={stage_layers!r} was given; it must have the number of layers of each stage, at least 1, e.g. "
            "(4, 2, 2)."
        )
        return
    shapes = stage_mesh_shapes
    if shapes is not None and not (shapes and all(s is None or (_is_shape(s) and len(s) <= 3) for s in shapes)):
        yield (
            f"stage_mesh_shapes={shapes!r} was given; it must have one mesh shape per stage of 1 to 3 sizes, or None where it is "
            "searched, e.g. ((2, 1), (4, 1))."
        )
        return
    if shapes is not None and mesh_shape is not None:
        yield (
            f"mesh_shape={mesh_shape} and stage_mesh_shapes={shapes} were given. The first is that of every stage. Give one "
            "of them."
        )
    named = (
        ("num_stages", num_stages),
        ("submeshes", submeshes),
        ("stage_layers", stage_layers),
        ("stage_mesh_shapes", shapes),
    )
    counts = {f"{name}={value}": stage_count([(name, value)]) for name, value in named if value not in (None, "auto")}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{text} has {count}" for text, count in counts.items())
        yield f"the numbers of stages differ: {told}. There must be one entry per stage. Correct or leave out one of them."


def _is_count(value: Any) -> bool:
    return positive(value) is not None


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(map(_is_count, value))
