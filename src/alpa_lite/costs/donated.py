"""Donated arguments on XLA:GPU: what their memory and that of their next values needs beside them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.fusion import fused_values, is_update, is_view
from alpa_lite.costs.memory import Timeline
from alpa_lite.costs.tensors import Overwritten, Stored, overwritten_arguments, tile_bytes


def saved_arguments(facts: Facts, line: Timeline, mesh: DeviceMesh, in_specs: Sequence[ShardingSpec]) -> list[Stored]:
    """Copies of donated arguments that are overwritten before their last reader has run.

    Where collectives overlap only if a loop is both: XLA:GPU has been seen to order other readers first.
    """
    program, saved = facts.program, []
    for argument in facts.of(overwritten_arguments, program):
        if line.fills_early and not argument.row_by_row:
            continue
        value = program.inputs[argument.position]
        overwritten = (line.start if argument.row_by_row else line.end)[argument.maker]
        end = line.last_read.get(("", value), 0)
        if overwritten < end:
            size = tile_bytes(program, value, in_specs[argument.position], mesh)
            first = min(line.start[reader] for reader in argument.readers)
            saved.append(Stored(first, end, size, ShardingSpec(()), f"%{value} saved", "temporaries"))
    return saved


def copied_results(facts: Facts, line: Timeline, in_specs: Sequence[ShardingSpec]) -> list[Stored]:
    """Results that are made of the argument whose memory they are to take, by another way than element by element: each has a
    buffer of its own first. Those that one kernel makes, as it does gathers by equal indices, have theirs at once."""
    program = facts.program
    kernels: dict[Hashable, list[Overwritten]] = {}
    for argument in facts.of(rewritten_arguments, program):
        maker = program.ops[int(argument.maker)]
        shape = program.values[program.inputs[argument.position]].shape
        alike: Hashable = argument.position
        if maker.primitive == "gather":
            alike = facts.of(_expressions, program).get(maker.inputs[1]), shape
        kernels.setdefault(alike, []).append(argument)
    found = []
    for arguments in kernels.values():
        begin = min(line.start[a.maker] for a in arguments)
        end = max(begin + 1, *(line.end[a.maker] for a in arguments))
        for argument in arguments:
            value = program.inputs[argument.position]
            size, spec = program.values[value].size_bytes, in_specs[argument.position]
            found.append(Stored(begin, end, size, spec, f"%{value} made anew", "temporaries"))
    return found


def _expressions(program: Program) -> dict[int, int]:
    """Value -> a number that is the same for values which XLA finds equal: made by the same ops of the same values."""
    known: dict[Hashable, int] = {}
    found: dict[int, int] = {}
    for op in program.ops:
        given = tuple(found.get(v, -2 - v) for v in op.inputs)  # literals are -1, arguments below
        for position, value in enumerate(op.outputs):
            if value >= 0:
                key = (op.primitive, position, program.values[value].shape, given) if not op.bodies else value
                found[value] = known.setdefault(key, len(known))
    return found


def rewritten_arguments(program: Program) -> tuple[Overwritten, ...]:
    """Those that the kernel of their next value reads otherwise than element by element."""
    fused = fused_values(program, gpu=True)
    maker = {o: op for op in program.ops for o in op.outputs if o >= 0}

    def rereads(made: int, argument: int) -> bool:
        ahead, seen = [(made, True)], set()
        while ahead:
            value, straight = ahead.pop()
            op = maker[value]
            straight = straight and (op.elementwise or is_view(op))
            for v in op.inputs:
                if v == argument and not straight:
                    return True
                if v in maker and (fused[v] or is_view(op)) and (v, straight) not in seen:
                    seen.add((v, straight))
                    ahead.append((v, straight))
        return False

    found = []
    for a in overwritten_arguments(program):
        op = program.ops[int(a.maker)]
        if not op.bodies and not is_update(op) and rereads(program.outputs[a.result], program.inputs[a.position]):
            found.append(a)
    return tuple(found)
