"""What of a memory profile follows from the program alone: what its tensors are called, who makes and who reads them.

Ops are numbered as ``facts.located`` lists them; a tensor is a (region, value) pair.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.facts import located
from alpa_lite.costs.fusion import takes_producers
from alpa_lite.costs.split_matmul import readers_of


def category_of(scope: str, parameter_shaped: bool) -> str:
    if "transpose(" in scope:
        return "gradients" if parameter_shaped else "temporaries"
    return "activations" if "jvp(" in scope else "temporaries"


def regions_of(program: Program) -> dict[str, Program]:
    found = {"": program}
    found.update((f"{path}.{b}.", body) for path, _, op in program.walk() for b, body in enumerate(op.bodies))
    return found


class Stored(NamedTuple):
    """A tensor that is neither argument nor result, in one layout, from ``lo`` until ``hi``."""

    lo: int
    hi: int
    whole_bytes: int
    spec: ShardingSpec
    name: str
    category: str


class MadeTensor(NamedTuple):
    """A tensor that op number ``op`` (of ``located``) makes as its result number ``result``."""

    op: int
    result: int
    size_bytes: int
    name: str
    category: str


def tensors_of(program: Program, *, parameter_shapes: frozenset[tuple[int, ...]]) -> dict[tuple[str, int], MadeTensor]:
    """(Region, value) -> what is made by ops."""
    found = {}
    for index, (prefix, _, owner, op) in enumerate(located(program)):
        for result, o in enumerate(op.outputs):
            if o >= 0:
                value = owner.values[o]
                category = category_of(op.scope, value.shape in parameter_shapes)
                found[prefix, o] = MadeTensor(index, result, value.size_bytes, f"{prefix}%{o}", category)
    return found


def reads_of(program: Program) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """(Region, value) -> (number of an op, operand) for each time that it is read."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for index, (prefix, _, _, op) in enumerate(located(program)):
        for operand, i in enumerate(op.inputs):
            if i >= 0:
                found.setdefault((prefix, i), []).append((index, operand))
    return found


def products_of(program: Program) -> list[tuple[int, int]]:
    """Numbers of the ops that are matmuls, and a number that equal ones share."""
    kinds: dict[tuple[object, ...], int] = {}
    found = []
    for index, (_, _, owner, op) in enumerate(located(program)):
        if op.primitive == "dot_general":
            values = tuple(owner.values[v] if v >= 0 else None for v in (*op.inputs, *op.outputs))
            found.append((index, kinds.setdefault((id(op.rule), values), len(kinds))))
    return found


def takers_of(program: Program) -> list[bool]:
    """Per op whether it can compute what it reads itself."""
    return [takes_producers(op) for _, _, op in program.walk()]


def donated_results(program: Program) -> frozenset[int]:
    """Positions of the results that lie in the memory of a donated argument."""
    return frozenset(o for i, o in program.aliases if program.donated and program.donated[i])


class Overwritten(NamedTuple):
    """A donated argument that is read, and what lies in its memory afterwards.

    Attributes:
        position, result: of the argument and of the result.
        maker, readers: paths of the ops that make the result and that read the argument.
        stacked: whether the maker is a loop that stacks the result up, in a buffer that is there before it starts.
    """

    position: int
    result: int
    maker: str
    readers: list[str]
    stacked: bool

    @property
    def row_by_row(self) -> bool:
        """Whether a loop reads the one while it stacks up the other."""
        return self.stacked and self.maker in self.readers


def overwritten_arguments(program: Program) -> list[Overwritten]:
    """The donated arguments that some op reads before another, or the same one, makes what lies there afterwards."""
    makers = {o: index for index, op in enumerate(program.ops) for o in op.outputs if o >= 0}
    readers = readers_of(program)
    found = []
    for position, result in program.aliases:
        value, made = program.inputs[position], program.outputs[result]
        if program.donated and program.donated[position] and made in makers and value != made and value in readers:
            maker = program.ops[makers[made]]
            stacked = maker.primitive == "scan" and made in maker.outputs[maker.num_carry :]
            found.append(Overwritten(position, result, str(makers[made]), list(map(str, readers[value])), stacked))
    return found


def tile_bytes(program: Program, value: int, spec: ShardingSpec, mesh: DeviceMesh) -> int:
    """Of a value on one device."""
    v = program.values[value]
    shards = mesh.axes_size(spec.sharded_axes)
    return math.prod(v.shape) * v.itemsize // shards
