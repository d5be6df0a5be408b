"""The instructions that XLA:CPU sees on one device under a plan: ops, conversions, and the copies that XLA adds.

In goes a program with its decisions and conversions, out comes an ``InstructionGraph`` per region: what each instruction
reads, how many bytes its result has on one device, and what fusion needs to know of it. What becomes an instruction of its
own follows XLA:CPU's passes (OpenXLA, ``xla/service``): ``dot_decomposer`` and ``conv_canonicalization`` transpose operands
whose dims are not in the order of the library calls, ``layout_assignment`` lays the gathered or scattered dim of a
collective outermost (one copy there, one back), ``all_to_all_decomposer`` splits an all-to-all into slices and a
concatenation, ``copy_insertion`` gives every loop carry and every stacked result a buffer of its own.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.dim_orders import conv_orders, dot_orders
from alpa_lite.costs.fusion import is_update
from alpa_lite.plan.records import OpDecision

_BARRIER = "optimization_barrier"
_VIEWS = frozenset(["reshape", "squeeze", "expand_dims", "stop_gradient", "pin", "copy", "name", _BARRIER])
_SOURCES = frozenset(["iota", "broadcast_in_dim"])
_INDEXING = frozenset(
    ["transpose", "slice", "pad", "rev", "dynamic_slice", "gather", "concatenate", "dynamic_update_slice"]
)
_REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min", "reduce_prod"])
_PRODUCTS = frozenset(["mul", "square", "integer_pow"])
# ``CpuInstructionFusion::IsExpensive``.
_EXPENSIVE = frozenset(["acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "sinh", "tanh"])
_EXPENSIVE |= frozenset(["div", "rem", "pow", "cbrt", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log1p"])
_EXPENSIVE |= frozenset(["erf", "erfc", "erf_inv", "logistic", "digamma", "lgamma", "gather"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What fusion needs to know of an instruction.

    Attributes:
        loop: whether it can be computed inside a loop fusion, and compute cheap operands itself.
        elementwise: result element i depends on operand elements i only.
        expensive: too dear to compute once per reader.
        source: without operands worth storing (broadcast, iota).
        reduction, product: handled by the CPU library, which takes products into its reductions.
        joined: a concatenation, which is not computed once per reader.
        updates: writes into its first operand if nobody reads that later (scatter).
        held: its memory is counted elsewhere: an argument, a constant, or an input of a body.
    """

    loop: bool = False
    elementwise: bool = False
    expensive: bool = False
    source: bool = False
    reduction: bool = False
    product: bool = False
    joined: bool = False
    updates: bool = False
    held: bool = False


CALL = Traits()  # a call or collective: reads and writes memory
LOOP = Traits(loop=True)
COPY = Traits(elementwise=True)
BROADCAST = Traits(loop=True, source=True)
JOIN = Traits(loop=True, joined=True)
HELD = Traits(held=True)


@dataclass(eq=False, slots=True)
class Instruction:
    """One instruction on one device.

    Attributes:
        name: of its tensor.
        operands: numbers of the instructions whose results it reads.
        size_bytes: of its result on one device; 0 where it writes into a buffer that is made elsewhere.
        elements, rank: of its result on one device; dims of size 1 do not count.
        traits: what fusion needs to know.
        buffer: the instruction whose memory holds the result too (what a loop leaves in its state); -1 for its own.
        bodies: of a loop or branch.
        scope, shape: name stack of the op and global shape of the tensor, for reports.
    """

    name: str
    operands: list[int]
    size_bytes: int = 0
    elements: int = 0
    rank: int = 0
    traits: Traits = CALL
    buffer: int = -1
    bodies: tuple[InstructionGraph, ...] = ()
    scope: str = ""
    shape: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class InstructionGraph:
    """Instructions of one region, operands before readers.

    Attributes:
        instructions: all of them.
        outputs: numbers of the results, -1 for a literal; may repeat.
        previous: result -> the input whose memory it is to take: of a loop body that with its value of the last iteration, of the
            step a donated argument.
    """

    instructions: list[Instruction]
    outputs: list[int]
    previous: dict[int, int]


def instruction_graph(
    program: Program,
    mesh: DeviceMesh,
    *,
    in_specs: Sequence[ShardingSpec],
    out_specs: Sequence[ShardingSpec],
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    barriers_copy: bool = False,
) -> InstructionGraph:
    """The whole step, loops and branches as instructions with bodies.

    ``barriers_copy``: whether what passes a joint barrier is copied, see ``lowering/remat_barrier.py``.
    """
    by_op: dict[str, list[Conversion]] = defaultdict(list)
    for conversion in conversions:
        by_op[conversion.op].append(conversion)
    region = _Region(program, "", mesh, {d.path: d for d in decisions}, by_op, barriers_copy)
    donated = {o: i for i, o in program.aliases if program.donated and program.donated[i]}
    return region.graph(in_specs, out_specs, replaces=donated)


def _traits(op: Op) -> Traits:
    name = op.primitive
    return Traits(
        loop=op.elementwise or name in _SOURCES or name in _INDEXING,
        elementwise=op.elementwise,
        expensive=name in _EXPENSIVE,
        source=name in _SOURCES,
        reduction=name in _REDUCTIONS,
        product=name in _PRODUCTS,
        joined=name == "concatenate",
        updates=is_update(op),
    )


class _Region:
    def __init__(
        self,
        program: Program,
        prefix: str,
        mesh: DeviceMesh,
        decisions: dict[str, OpDecision],
        conversions: dict[str, list[Conversion]],
        barriers_copy: bool,
    ) -> None:
        self.program, self.prefix, self.mesh = program, prefix, mesh
        self.barriers_copy = barriers_copy
        self.decisions, self.conversions = decisions, conversions
        self.instructions: list[Instruction] = []
        self.tiles: dict[tuple[int, ShardingSpec], int] = {}
        self.shapes: dict[tuple[int, ShardingSpec], tuple[int, ...]] = {}
        self.traits: dict[tuple[str, bool], Traits] = {}
        self.copies: dict[tuple[int, tuple[int, ...]], int] = {}
        self.broadcasts: dict[tuple[int, tuple[int, ...]], int] = {}
        self.transposes: dict[int, tuple[int, tuple[int, ...]]] = {}  # of transpose ops: what they read, and its dims
        self.scatters: set[int] = set()  # scatter-adds to a constant, whose results have one reader
        self.readers = Counter(v for op in program.ops for v in op.inputs) + Counter(program.outputs)

    def graph(
        self,
        in_specs: Sequence[ShardingSpec],
        out_specs: Sequence[ShardingSpec],
        *,
        replaces: Mapping[int, int] = MappingProxyType({}),
        num_sliced: int = 0,
        num_stacked: int = 0,
    ) -> InstructionGraph:
        """``replaces``: position of a result -> position of the input whose memory it is to take; the last ``num_sliced`` inputs
        are slices of arrays outside, and the last ``num_stacked`` results are written into arrays outside."""
        inputs = []
        for value in self.program.constants:
            spec = ShardingSpec.replicated(len(self.program.values[value].shape))
            self.tiles[value, spec] = self.add(value, spec, [], HELD)
        for position, (value, spec) in enumerate(zip(self.program.inputs, in_specs, strict=True)):
            inputs.append(self.add(value, spec, [], HELD))
            self.tiles[value, spec] = inputs[-1]
            if position >= len(in_specs) - num_sliced:
                self.tiles[value, spec] = self.add(value, spec, [inputs[-1]], LOOP)
        group: list[tuple[int, ShardingSpec]] = []
        for index, op in enumerate(self.program.ops):
            path = f"{self.prefix}{index}"
            self.convert(path)
            self.op(op, self.decisions[path])
            if op.primitive == _BARRIER:
                group.append((op.outputs[0], self.decisions[path].results[0]))
                if [o.primitive for o in self.program.ops[index + 1 : index + 2]] != [_BARRIER]:
                    self.hold(group)
                    group = []
        self.convert(f"{self.prefix}out")
        outputs = []
        for position, (value, spec) in enumerate(zip(self.program.outputs, out_specs, strict=True)):
            made = self.tiles[value, spec] if value >= 0 else -1
            if made >= 0 and position >= len(out_specs) - num_stacked:
                made = self.add(value, spec, [made], LOOP)
                self.instructions[made].size_bytes = 0
            outputs.append(made)
        previous = {outputs[p]: inputs[i] for p, i in replaces.items() if outputs[p] >= 0}
        return InstructionGraph(self.instructions, outputs, previous)

    def add(self, value: int, spec: ShardingSpec, operands: list[int], traits: Traits = CALL, scope: str = "") -> int:
        """A new instruction; returns its number."""
        v = self.program.values[value]
        local = self.local(value, spec)
        self.instructions.append(
            Instruction(
                name=f"{self.prefix}%{value}",
                operands=operands,
                size_bytes=math.prod(local) * v.itemsize,
                elements=math.prod(local),
                rank=sum(n != 1 for n in local),
                traits=traits,
                scope=scope,
                shape=v.shape,
            )
        )
        return len(self.instructions) - 1

    def local(self, value: int, spec: ShardingSpec) -> tuple[int, ...]:
        """Shape of the tensor's tile."""
        key = (value, spec)
        if key not in self.shapes:
            self.shapes[key] = spec.local_shape(self.program.values[value].shape, self.mesh)
        return self.shapes[key]

    def op(self, op: Op, decision: OpDecision) -> None:
        reads = [
            self.tiles[value, spec] for value, spec in zip(op.inputs, decision.operands, strict=True) if value >= 0
        ]
        if op.bodies:
            self.control_flow(op, decision, reads)
            return
        if self.is_view(op, decision, reads):
            self.tiles[op.outputs[0], decision.results[0]] = reads[0]
            return
        if op.primitive in ("dot_general", "conv_general_dilated") and len(reads) == 2:
            self.contraction(op, decision, reads)
            return
        if op.primitive in ("add", "add_any") and self.scattered(op, decision, reads):
            return
        kind = (op.primitive, op.elementwise)
        if kind not in self.traits:
            self.traits[kind] = _traits(op)
        for value, spec in zip(op.outputs, decision.results, strict=True):
            if value >= 0:
                operands = self.stretched(reads, value, spec) if op.elementwise else reads
                self.tiles[value, spec] = made = self.add(value, spec, operands, self.traits[kind], op.scope)
                if (
                    op.primitive == "scatter-add"
                    and self.instructions[reads[0]].traits.source
                    and self.readers[value] == 1
                ):
                    self.scatters.add(made)
                if op.primitive == "transpose" and reads:
                    dims = [*op.rule.operands[0]]
                    self.transposes[made] = (
                        reads[0],
                        tuple(dims.index(dim) if dim else -1 for dim in op.rule.results[0]),
                    )

    def scattered(self, op: Op, decision: OpDecision, reads: list[int]) -> bool:
        """Whether the sum is no instruction: a scatter-add to zeros, as of a table's gradient, starts from what its result is
        added to (``AlgebraicSimplifier``)."""
        for made, other in itertools.permutations(reads, 2):
            if made in self.scatters and other < made:
                self.scatters.remove(made)
                self.instructions[made].operands[0] = other
                self.tiles[op.outputs[0], decision.results[0]] = made
                return True
        return False

    def hold(self, group: list[tuple[int, ShardingSpec]]) -> None:
        """Results of one joint barrier, to be read only once all operands are there: their buffers, or copies of what others
        read later (a loop keeps its state in buffers of its own)."""
        through = [self.tiles[key] for key in group]
        if self.barriers_copy:
            through = [self.add(value, spec, [t], COPY) for (value, spec), t in zip(group, through, strict=True)]
        for (value, spec), tile in zip(group, through, strict=True):
            held = self.add(value, spec, [tile, *(t for t in dict.fromkeys(through) if t != tile)])
            self.instructions[held].size_bytes, self.instructions[held].buffer = 0, tile
            self.tiles[value, spec] = held

    def is_view(self, op: Op, decision: OpDecision, reads: list[int]) -> bool:
        """Whether the result is the operand's buffer under another shape."""
        if op.primitive == "broadcast_in_dim" and reads and op.outputs[0] >= 0:
            return math.prod(self.local(op.outputs[0], decision.results[0])) == self.instructions[reads[0]].elements
        return op.primitive in _VIEWS and bool(reads)

    def stretched(self, reads: list[int], value: int, spec: ShardingSpec) -> list[int]:
        """Elementwise operands in the result's shape; what is smaller is broadcast, once for all that want it."""
        shape = self.local(value, spec)
        elements = math.prod(shape)
        found = []
        for read in reads:
            if self.instructions[read].elements != elements:
                if (read, shape) not in self.broadcasts:
                    self.broadcasts[read, shape] = self.add(value, spec, [read], BROADCAST)
                read = self.broadcasts[read, shape]
            found.append(read)
        return found

    def contraction(self, op: Op, decision: OpDecision, reads: list[int]) -> None:
        """A matmul or convolution reads its operands in the library's order of dims, transposed first where need be."""
        orders = dot_orders(op) if op.primitive == "dot_general" else conv_orders(op, self.program)
        for position, order in enumerate(orders[:2]):
            if order != tuple(range(len(order))):
                value, spec = op.inputs[position], decision.operands[position]
                reads[position] = self.copy(value, spec, reads[position], order, op.scope)
            elif op.primitive == "dot_general":
                reads[position] = self.folded(reads[position])
        value, spec = op.outputs[0], decision.results[0]
        if value < 0:
            return
        made = self.add(value, spec, reads, scope=op.scope)
        if orders[2] != tuple(range(len(orders[2]))):
            made = self.add(value, spec, [made], LOOP, op.scope)
        self.tiles[value, spec] = made

    def folded(self, read: int) -> int:
        """Matmuls read what a transpose of the last two dims reads (``TransposeFolding``)."""
        source, dims = self.transposes.get(read, (read, ()))
        swap = (*range(len(dims) - 2), len(dims) - 1, len(dims) - 2)
        return source if dims == swap else read

    def copy(self, value: int, spec: ShardingSpec, read: int, order: tuple[int, ...], scope: str = "") -> int:
        """The tensor with its dims in another order; made once for all that want it."""
        if (read, order) not in self.copies:
            self.copies[read, order] = self.add(value, spec, [read], LOOP, scope)
        return self.copies[read, order]

    def convert(self, path: str) -> None:
        for conversion in self.conversions.get(path, ()):
            value = conversion.value
            made = self.tiles[value, conversion.source]
            outermost = -1  # the dim that lies outermost instead of the first
            for step in conversion.steps:
                dim = self.moved_dim(step, value)
                if dim != outermost and step.kind is not None:
                    if outermost >= 0:
                        made = self.add(value, step.before, [made], LOOP)
                    if dim >= 0:
                        made = self.copy(value, step.before, made, (dim,))
                    outermost = dim
                made = self.step(step, value, made)
            if outermost >= 0:
                made = self.add(value, conversion.target, [made], LOOP)
            self.tiles[value, conversion.target] = made

    def moved_dim(self, step: Step, value: int) -> int:
        """The dim that XLA:CPU wants outermost for this step; -1 for the order as it is."""
        if step.kind is CollectiveKind.ALL_GATHER:
            dim = step.source_dim
        elif step.kind is CollectiveKind.REDUCE_SCATTER:
            dim = step.target_dim
        else:
            return -1
        return -1 if all(n == 1 for n in self.local(value, step.before)[:dim]) else dim

    def step(self, step: Step, value: int, read: int) -> int:
        if step.kind is None:
            return self.add(value, step.after, [read], LOOP)
        if step.kind is not CollectiveKind.ALL_TO_ALL:
            return self.add(value, step.after, [read])
        pieces = self.add(value, step.before, [read], LOOP)
        exchanged = self.add(value, step.after, [pieces])
        return self.add(value, step.after, [exchanged], JOIN)

    def control_flow(self, op: Op, decision: OpDecision, reads: list[int]) -> None:
        """A loop keeps its state and stacked results in buffers that are made before it; a branch has results."""
        bodies = tuple(self.body(op, decision, number) for number in range(len(op.bodies)))
        loops = op.primitive in ("scan", "while")
        buffers = [self.loop_buffer(op, decision, position) for position in range(len(op.outputs) if loops else 0)]
        operands = [*dict.fromkeys([*reads, *(b for b in buffers if b >= 0)])]
        self.instructions.append(Instruction(name=f"{self.prefix}{op.primitive}", operands=operands, bodies=bodies))
        number = len(self.instructions) - 1
        for position, (value, spec) in enumerate(zip(op.outputs, decision.results, strict=True)):
            if value >= 0:
                self.tiles[value, spec] = made = self.add(value, spec, [number], scope=op.scope)
                if loops:
                    left = self.instructions[made]
                    left.size_bytes, left.buffer = 0, buffers[position]
                    left.operands.append(buffers[position])

    def loop_buffer(self, op: Op, decision: OpDecision, position: int) -> int:
        """The buffer of one result: a copy of the state's first value, or an array that depends on nothing."""
        carries = op.num_carry if op.primitive == "scan" else len(op.outputs)
        if position < carries:
            place = _first_carry(op) + position
            value, spec = op.inputs[place], decision.operands[place]
            if value >= 0:
                return self.add(value, spec, [self.tiles[value, spec]], COPY, op.scope)
        value, spec = op.outputs[position], decision.results[position]
        return self.add(value, spec, [], scope=op.scope) if value >= 0 else -1

    def body(self, op: Op, decision: OpDecision, number: int) -> InstructionGraph:
        region = _Region(
            op.bodies[number],
            f"{decision.path}.{number}.",
            self.mesh,
            self.decisions,
            self.conversions,
            self.barriers_copy,
        )
        operands, results = list(decision.operands), list(decision.results)
        first = _first_carry(op)
        if op.primitive == "scan":
            fixed = first + op.num_carry
            return region.graph(
                operands[:fixed] + [_drop_leading(s) for s in operands[fixed:]],
                results[: op.num_carry] + [_drop_leading(s) for s in results[op.num_carry :]],
                replaces=dict(enumerate(range(first, fixed))),
                num_sliced=len(operands) - fixed,
                num_stacked=len(results) - op.num_carry,
            )
        if op.primitive != "while":
            return region.graph(operands[1:], results)
        carry = operands[first:]
        consts = len(op.bodies[0].inputs) - len(carry)  # of the test; those of the body follow
        if number == 0:
            return region.graph([*operands[:consts], *carry], [ShardingSpec.replicated(0)])
        state = range(first - consts, len(operands) - consts)
        return region.graph(operands[consts:], results, replaces=dict(enumerate(state)))


def _first_carry(op: Op) -> int:
    return op.num_consts if op.primitive == "scan" else len(op.inputs) - len(op.outputs)


def _drop_leading(spec: ShardingSpec) -> ShardingSpec:
    return ShardingSpec(spec.dims[1:], spec.unreduced)
