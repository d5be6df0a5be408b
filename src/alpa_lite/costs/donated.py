"""Donated arguments on XLA:GPU: what their memory and that of their next values needs beside them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.fusion import fused_values, is_update, is_view, makers_of
from alpa_lite.costs.memory import Timeline
from alpa_lite.costs.split_matmul import readers_of
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
    maker = makers_of(program)

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


class Transposed(NamedTuple):
    """A donated argument whose next value, an update of it, matmuls read in another order of dims.

    Attributes:
        position: of the argument.
        maker: path of the op that updates it.
        readers: paths of the matmuls.
    """

    position: int
    maker: str
    readers: list[str]


def transposed_arguments(program: Program) -> tuple[Transposed, ...]:
    """Caches with their tokens before their heads, for one: matmuls read tensors whose batch dims come first. So XLA updates a
    transposed copy, and transposes that back.
    """
    readers = readers_of(program)
    found = []
    for a in overwritten_arguments(program):
        made = program.outputs[a.result]
        if is_update(program.ops[int(a.maker)]):
            reading = [i for i in readers.get(made, ()) if _reads_transposed(program.ops[i], made)]
            if reading:
                found.append(Transposed(a.position, a.maker, list(map(str, reading))))
    return tuple(found)


def _reads_transposed(op: Op, value: int) -> bool:
    """Whether the op is a matmul that has this operand's batch dims behind others; dims of size 1 do not count."""
    if op.primitive != "dot_general":
        return False
    place = op.inputs.index(value)
    other, result = ({f for dim in dims for f in dim} for dims in (op.rule.operands[1 - place], op.rule.results[0]))
    is_batch = [not (other & result).isdisjoint(dim) for dim in op.rule.operands[place] if dim]
    return is_batch != sorted(is_batch, reverse=True)


def transposed_copies(facts: Facts, line: Timeline, in_specs: Sequence[ShardingSpec]) -> list[Stored]:
    """Of ``transposed_arguments``, while matmuls read them; later ones lie where the arguments of earlier ones were."""
    program = facts.program
    found = []
    for argument in facts.of(transposed_arguments, program):
        value, end = program.inputs[argument.position], max(line.end[reader] for reader in argument.readers)
        size, spec = program.values[value].size_bytes, in_specs[argument.position]
        found.append(Stored(line.start[argument.maker], end, size, spec, f"%{value} transposed", "temporaries"))
    return found
