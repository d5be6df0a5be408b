"""``plan.export`` for a plan with several stages: every program of every stage, and what the driver does with them.

In: a plan, the traced function, its stages, and the leaves of its arguments. Out: a folder that is there whole or not at all.
``docs/export.md`` lists the files; ``load_stages.py`` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec

from alpa_lite.executor.calls import calls_csv, driver_calls
from alpa_lite.executor.export import lowered_for, stored_leaves, write_folder
from alpa_lite.executor.load_stages import PROGRAMS, ProgramRow
from alpa_lite.executor.serialize import serialize_step
from alpa_lite.executor.verify_stages import part_index
from alpa_lite.lowering.stage import LoweredStage, StagePart, first_equal, lowered_stages
from alpa_lite.plan.answers import partition_specs
from alpa_lite.plan.json_text import json_text
from alpa_lite.plan.manifest import PIPELINE
from alpa_lite.plan.plan import Plan
from alpa_lite.trace.program import Traced
from alpa_lite.trace.staged import StagedStep


def write_stages(
    plan: Plan, traced: Traced, staged: StagedStep, leaves: Sequence[Any], out_dir: Path, *, overwrite: bool
) -> None:
    """Writes the folder; arguments and errors as ``export.write_export``, ``staged`` is the traced step in stages."""
    stages = lowered_stages(staged, plan)
    first = first_equal(stages)
    step, calls = driver_calls(staged, plan, stages)
    programs = lowered_for(plan, lambda platform: distinct_programs(stages, first, platform))
    rows = program_rows(stages, first)
    files: dict[str, str | bytes] = {
        PROGRAMS: json_text([msgspec.to_builtins(row) for row in rows]),
        PIPELINE: calls_csv(calls),
        "instructions.txt": str(step.instructions),
        "scheme.txt": f"{plan}\nSchedule\n{plan.layout_schedule()}",
        "program.txt": str(traced.program),
        "partition_specs.json": partition_specs(plan),
    }
    files |= {f"stage_{number}/program.txt": str(program) for number, program in enumerate(staged.programs)}
    files |= {
        f"{stem}_{platform}.jax_export": data for platform in programs for stem, data in programs[platform].items()
    }
    write_folder(
        plan, traced, files, tuple(programs), stored_leaves(_parts(traced, leaves)), out_dir, overwrite=overwrite
    )


def _run(stage: LoweredStage) -> list[StagePart]:
    """The programs that the driver runs: those that make something."""
    return [part for part in stage.parts if part.results]


def _row(stage: int, made_for: int, part: StagePart) -> ProgramRow:
    donated = [position for position, pair in enumerate(part.segment.reads, 1) if pair in part.donated]
    return ProgramRow(stage=stage, program=part.name, file=_stem(made_for, part.name), donated=donated)


def _stem(stage: int, name: str) -> str:
    return f"stage_{stage}/{name.replace(', ', '_').replace(' ', '_')}"


def program_rows(stages: Sequence[LoweredStage], first: Sequence[int]) -> list[ProgramRow]:
    """Of every stage; ``first`` says which stage's programs it shares."""
    return [_row(number, first[number], part) for number in range(len(stages)) for part in _run(stages[first[number]])]


def distinct_programs(stages: Sequence[LoweredStage], first: Sequence[int], platform: str) -> dict[str, bytes]:
    """Each distinct program once, by the name of its file."""
    return {
        _stem(number, part.name): serialize_step(part.function, (part_index(part), *part.structs(part.mesh)), platform)
        for number in sorted(set(first))
        for part in _run(stages[number])
    }


def _parts(traced: Traced, leaves: Sequence[Any]) -> list[Any]:
    """The leaves as the plan has them: of a stacked parameter whose layers lie on several stages, the rows of each."""
    assert traced.parts is not None
    found = []
    for part in traced.parts.arguments:
        leaf = leaves[part.leaf]
        if part.stop >= 0 and isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = jax.ShapeDtypeStruct((part.stop - part.start, *leaf.shape[1:]), leaf.dtype)
        elif part.stop >= 0:
            leaf = leaf[part.start : part.stop]
        found.append(leaf)
    return found
