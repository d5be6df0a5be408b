"""Stages that are equal but for the names of their arguments share one plan."""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.core.program import Program
from alpa_lite.plan.identity import fingerprint
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.planner.budget import MeshResult


def content_key(program: Program, pins: ResolvedPins) -> object:
    """Equal for programs and pins that differ in paths alone."""
    nameless = replace(
        program, input_paths=("",) * len(program.input_paths), output_paths=("",) * len(program.output_paths)
    )
    dims = tuple(tuple((pin.dims, pin.is_free) for pin in side) for side in (pins.inputs, pins.outputs))
    return fingerprint(nameless), dims, pins.ties


def renamed(result: MeshResult, planned: Program, program: Program) -> MeshResult:
    """The plan of one program as that of an equal one: collectives on arguments name these by path."""
    written = result.realised
    if written is None or planned.input_paths == program.input_paths:
        return result
    names = dict(zip(planned.input_paths, program.input_paths, strict=True))
    collectives = tuple(replace(c, tensor=names.get(c.tensor, c.tensor)) for c in written.collectives)
    return replace(result, realised=replace(written, collectives=collectives))
