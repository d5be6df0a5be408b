"""Which inputs of a program die with it, so that its results may take their memory."""

from __future__ import annotations

from collections.abc import Mapping

from alpa_lite.schedule.actions import ActionKind
from alpa_lite.schedule.instructions import BufferId, Free, Instruction, Instructions, Run, Send


def donated_inputs(instructions: Instructions) -> Mapping[tuple[int, ActionKind], tuple[str, ...]]:
    """Names of the inputs that each (stage, kind) may overwrite, sorted.

    What a program changes in place is one of them. Others must be freed right after the RUN on its mesh and never be sent,
    because a transfer may still be reading them; and that for every microbatch, because one compiled program serves all.
    """
    found: dict[tuple[int, ActionKind], set[str]] = {}
    for each in instructions.meshes:
        sent = {i.buffer for i in each.instructions if isinstance(i, Send)}
        for place, run in enumerate(each.instructions):
            if isinstance(run, Run):
                dead = _freed_after(each.instructions, place) - sent
                names = {buffer.name for buffer in run.reads if buffer in dead or buffer in run.writes}
                key = run.action.stage, run.action.kind
                found[key] = found[key] & names if key in found else names
    return {key: tuple(sorted(names)) for key, names in found.items()}


def _freed_after(instructions: tuple[Instruction, ...], place: int) -> set[BufferId]:
    """Buffers that are freed between a RUN and the next."""
    freed = set()
    for instruction in instructions[place + 1 :]:
        if isinstance(instruction, Run):
            break
        if isinstance(instruction, Free):
            freed.add(instruction.buffer)
    return freed
