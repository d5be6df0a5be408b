"""Pins of a step -> pins of its parts, and of what each stage has of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alpa_lite.core.program import Program
from alpa_lite.errors import PinError
from alpa_lite.plan.pins import PinnedDims, ResolvedPins
from alpa_lite.trace.stages import StageProgram
from alpa_lite.trace.unstack import LayeredStep, LeafPart


def pins_of_parts(pins: ResolvedPins, step: LayeredStep) -> ResolvedPins:
    """Every part of a leaf is pinned as the leaf is.

    Raises:
        PinError: ``pin_like`` ties leaves that lie on the stages in other parts.
    """

    def of_part(part: LeafPart, pinned: Sequence[PinnedDims]) -> PinnedDims:
        whole = pinned[part.leaf]
        if part.stop < 0:
            return whole
        return replace(whole, path=part.path(whole.path), shape=(part.stop - part.start, *whole.shape[1:]))

    parts: dict[int, list[int]] = {}
    for position, part in enumerate(step.arguments):
        parts.setdefault(part.leaf, []).append(position)
    ties: list[tuple[int, int]] = []
    for a, b in pins.ties:
        rows = [[(step.arguments[p].start, step.arguments[p].stop) for p in parts[leaf]] for leaf in (a, b)]
        if rows[0] != rows[1]:
            first, second = (pins.inputs[leaf].path for leaf in (a, b))
            raise PinError(
                f"pin_like ties {first!r} to {second!r}, and only one of them lies by layers on the stages. Tied leaves must be "
                f"stacked and updated alike. At {pins.source}. Leave this leaf out of pin_like, or pin it."
            )
        ties += zip(parts[a], parts[b], strict=True)
    return replace(
        pins,
        inputs=tuple(of_part(part, pins.inputs) for part in step.arguments),
        outputs=tuple(of_part(part, pins.outputs) for part in step.results),
        ties=tuple(ties),
    )


def stage_pins(pins: ResolvedPins, part: StageProgram, program: Program) -> ResolvedPins:
    """The pins of the leaves that a stage has; what it receives and sends is free, also a copy of another stage's leaf."""

    def free(path: str, value: int) -> PinnedDims:
        shape = program.values[value].shape if value >= 0 else ()
        return PinnedDims(path=path, shape=shape, dims=(None,) * len(shape))

    received = list(zip(program.input_paths, program.inputs, strict=True))[len(part.args) :]
    sent = list(zip(program.output_paths, program.outputs, strict=True))[len(part.results) :]
    starts = [c.argument for c in part.received if c.when == "start"]
    position = {a: i for i, a in enumerate((*part.args, *starts))}
    return replace(
        pins,
        inputs=(*(pins.inputs[a] for a in part.args), *(free(p, v) for p, v in received)),
        outputs=(*(pins.outputs[r] for r in part.results), *(free(p, v) for p, v in sent)),
        ties=tuple((position[a], position[b]) for a, b in pins.ties if a in position and b in position),
    )
