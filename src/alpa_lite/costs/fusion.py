"""Which values of a program ever lie in memory: XLA fuses cheap producers into their consumers.

A value is *fused* (no buffer, no bytes moved) when its producer is elementwise or only moves indices, and every consumer
can take it in.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from alpa_lite.core.program import Op, Program

# Producers without operands worth storing: XLA repeats them inside every consumer.
_SOURCES = frozenset(["iota", "broadcast_in_dim"])
_INDEXING = frozenset(["reshape", "squeeze", "expand_dims", "transpose", "slice", "pad", "rev", "dynamic_slice"])
_REDUCTIONS = frozenset(
    ["reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"]
)
_BARRIERS = frozenset(["optimization_barrier", "pin", "copy_p"])
_VIEWS = frozenset(["reshape", "squeeze", "expand_dims", "name"])
# Elementwise, but too dear to compute once per reader. XLA:GPU weighs the time against that of the bytes, which it can spare
# for the lighter ones; XLA:CPU never repeats any of them (``IsExpensive`` in xla/hlo/ir/hlo_instruction.cc).
_COSTLY_ON_GPU = frozenset(
    [
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "cos",
        "cosh",
        "digamma",
        "erf",
        "erf_inv",
        "erfc",
        "lgamma",
        "pow",
        "sin",
        "sinh",
        "tan",
        "tanh",
    ]
)
_COSTLY = (
    frozenset(
        [
            "div",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log1p",
            "logistic",
            "rem",
            "rsqrt",
            "sqrt",
        ]
    )
    | _COSTLY_ON_GPU
)
# Smaller than this, or in full precision, XLA:GPU rather computes values again than moves them. Seen on the H100 compiler: a
# bfloat16 tanh of 67 MB is kept, a float32 tanh of 0.5 MB is not.
_WORTH_KEEPING_BYTES = 2**22


def takes_producers(op: Op) -> bool:
    """Whether the op can compute cheap operands itself, as it reads them."""
    return joins_consumers(op) or is_reduction(op)


def is_reduction(op: Op) -> bool:
    return op.primitive in _REDUCTIONS


def joins_consumers(op: Op) -> bool:
    """Whether the op can be computed inside those that read it."""
    return op.primitive not in _BARRIERS and (op.elementwise or op.primitive in _SOURCES or op.primitive in _INDEXING)


def is_view(op: Op) -> bool:
    """A pure relabelling of its operand's buffer."""
    return op.primitive in _VIEWS or op.primitive in _BARRIERS


def is_update(op: Op) -> bool:
    """Whether it writes into its first operand, where nobody reads that later."""
    return op.primitive.startswith("scatter") or op.primitive == "dynamic_update_slice"


def fused_values(program: Program, *, gpu: bool = False, stacked: Collection[int] = ()) -> tuple[bool, ...]:
    """Per value of this program (not of its bodies): whether it never lies in memory. ``gpu``: as XLA:GPU fuses.

    ``stacked``: results of a loop's body that are written straight into the loop's stacked result, where they are computed.
    """
    costly = _COSTLY_ON_GPU if gpu else _COSTLY
    consumers: dict[int, list[bool]] = defaultdict(list)
    sunk = _constants_for_loops(program) if gpu else frozenset()
    widened = {op.outputs[0] for op in program.ops if _widens(op, program)} if gpu else frozenset[int]()
    for op in program.ops:
        for value in set(op.inputs):
            inside = (value in sunk and bool(op.bodies)) or (value in widened and op.primitive == "dot_general")
            consumers[value].append(takes_producers(op) or inside)
    for value in stacked:
        consumers[value].append(True)
    for value in _held_by_barriers(program) if gpu else ():
        consumers[value].append(False)
    fused = [False] * len(program.values)
    outputs = set(program.outputs) - set(stacked)
    made: dict[int, str] = {}
    for op in program.ops:
        for value in op.outputs:
            if value >= 0 and joins_consumers(op) and value not in outputs:
                uses = consumers[value]
                fused[value] = bool(uses) and all(uses) and (len(uses) == 1 or _repeatable(op, program, made, costly))
            if value >= 0:
                made[value] = op.primitive
    if gpu:
        _fuse_into_single_kernels(program, fused, consumers, outputs)
    return tuple(fused)


def _held_by_barriers(program: Program) -> list[int]:
    """Gradients that lowering passes through a barrier (``lowering/lower.py``), but for widening casts, which follow it."""
    barriers = [index for index, op in enumerate(program.ops) if op.primitive == "optimization_barrier"]
    if not barriers:
        return []
    last = {i: index for index, op in enumerate(program.ops) for i in op.inputs}
    last |= dict.fromkeys(program.outputs, len(program.ops))
    found = []
    for index, op in enumerate(program.ops[: barriers[-1]]):
        if "transpose(" in op.scope and not _widens(op, program):
            after = barriers[bisect(barriers, index)]
            found += [o for o in op.outputs if o >= 0 and last.get(o, -1) > after]
    return found


def _widens(op: Op, program: Program) -> bool:
    if op.primitive != "convert_element_type" or op.inputs[0] < 0:
        return False
    return program.values[op.inputs[0]].itemsize < program.values[op.outputs[0]].itemsize


def _fuse_into_single_kernels(
    program: Program, fused: list[bool], consumers: Mapping[int, Sequence[bool]], outputs: Collection[int]
) -> None:
    """Values that several ops read, all of them computed inside of one kernel: it computes the value once."""
    several = -1
    kernel: dict[int, int] = {}  # index of the op that stores what is computed from a value
    for index in range(len(program.ops) - 1, -1, -1):
        op = program.ops[index]
        here = index
        if len(op.outputs) == 1 and op.outputs[0] >= 0:
            value = op.outputs[0]
            if joins_consumers(op) and value not in outputs and consumers.get(value) and all(consumers[value]):
                fused[value] = fused[value] or kernel.get(value, several) != several
            if fused[value]:
                here = kernel.get(value, several)
        for i in set(op.inputs):
            kernel[i] = here if kernel.get(i, here) == here else several


def joined_updates(program: Program, *, fused: tuple[bool, ...]) -> frozenset[int]:
    """Indices of the ops that one kernel computes beside an earlier op: results made of one gradient, as in an optimizer.

    ``fused``: of the program, on GPUs.
    """
    maker = makers_of(program)
    results = set(program.outputs)
    seen: set[tuple[int, int]] = set()
    found = set()
    for index, op in enumerate(program.ops):
        if not op.elementwise or op.outputs[0] not in results:
            continue
        size = program.values[op.outputs[0]].size_bytes
        gradients = {(value, size) for value in stored_operands(op, program, fused, maker, size) if value in maker}
        if not seen.isdisjoint(gradients):
            found.add(index)
        seen |= gradients
    return frozenset(found)


def updating_products(program: Program, *, fused: tuple[bool, ...]) -> list[int]:
    """Indices of products that one kernel alone reads, which makes a result of nothing else but arguments: XLA:GPU computes the
    result in the product (``GemmFusion``), as in a plain step down a gradient.

    ``fused``: of the program, on GPUs.
    """
    maker, given, results = makers_of(program), {*program.inputs, *program.constants}, set(program.outputs)
    readers: dict[int, list[Op]] = defaultdict(list)
    for op in program.ops:
        for value in set(op.inputs):
            readers[value].append(op)
    found = []
    for index, op in enumerate(program.ops):
        if op.primitive != "dot_general":
            continue
        ahead = op.outputs[0]  # read by one op after the other, as far as the result
        while ahead not in results and len(readers[ahead]) == 1 and joins_consumers(readers[ahead][0]):
            ahead = readers[ahead][0].outputs[0]
        if ahead in results and ahead in maker and ahead != op.outputs[0] and maker[ahead].elementwise:
            size = program.values[ahead].size_bytes
            if stored_operands(maker[ahead], program, fused, maker, size) - given == {op.outputs[0]}:
                found.append(index)
    return found


def makers_of(program: Program) -> dict[int, Op]:
    """Value -> the op of this program that makes it."""
    return {o: op for op in program.ops for o in op.outputs if o >= 0}


def stored_operands(op: Op, program: Program, fused: Sequence[bool], maker: Mapping[int, Op], size: int) -> set[int]:
    """Tensors in memory, of at least ``size`` bytes, that an op's kernel reads."""
    pending, seen, found = [op], set(), set()
    while pending:
        for value in pending.pop().inputs:
            if value < 0 or value in seen or program.values[value].size_bytes < size:
                continue
            seen.add(value)
            if value in maker and (fused[value] or is_view(maker[value])):
                pending.append(maker[value])
            else:
                found.add(value)
    return found


def _constants_for_loops(program: Program) -> frozenset[int]:
    """Tensors filled with one number that loops read unchanged: XLA fills them inside of the loop (constant sinking)."""
    filled = {
        o
        for op in program.ops
        if op.primitive == "broadcast_in_dim" and all(i < 0 or not program.values[i].shape for i in op.inputs)
        for o in op.outputs
    }
    for op in program.ops:
        filled -= set(op.inputs[op.num_consts :] if op.primitive == "scan" else op.inputs if op.bodies else ())
    return frozenset(filled)


def _repeatable(op: Op, program: Program, made: dict[int, str], costly: frozenset[str]) -> bool:
    """Whether XLA computes the op once per reader: cheap, and at most one operand as large as the result to read again."""
    result = program.values[op.outputs[0]]
    size = result.size_bytes
    if op.primitive in costly and (costly is _COSTLY or (result.itemsize < 4 and size > _WORTH_KEEPING_BYTES)):
        return False
    large = [i for i in set(op.inputs) if i >= 0 and made.get(i) not in _SOURCES]
    return sum(program.values[i].size_bytes >= size for i in large) <= 1


def overwriting_ops(program: Program, fused: Sequence[bool], *, gpu: bool) -> list[bool]:
    """Per op, whether it may write its result over a dying operand of the same size (elementwise loops, updates in place).

    ``gpu``: also over what elementwise ops read that its kernel computes on the way, such as a cast to single and back, but not
    over the operand of a softmax.
    """
    # Of fused values, the tensors that they are computed from, element by element.
    read: dict[int, frozenset[int]] = {}
    # Of the largest elements of rows, and of fused values that are computed from these, the tensors that have the rows.
    rows: dict[int, frozenset[int]] = {}
    found = []
    for op in program.ops:
        operands = [i for i in op.inputs if i >= 0]
        given = frozenset[int]().union(*(read.get(i, frozenset([i])) for i in operands))
        reduced = frozenset[int]().union(*(rows.get(i, frozenset()) for i in operands))
        made = op.outputs[0] if op.outputs else -1
        if gpu and made >= 0 and fused[made]:
            rows[made] = reduced
            if op.elementwise:
                read[made] = given
        elif gpu and _takes_largest_of_rows(op):
            rows[made] = given
        if gpu and "transpose(" not in op.scope:
            given -= reduced  # one kernel of Triton's computes a softmax over the innermost dim, its reductions too
        writes = made >= 0 and not fused[made] and not op.bodies and (op.elementwise or is_update(op))
        found.append(writes and any(program.values[i].size_bytes == program.values[made].size_bytes for i in given))
    return found


def _takes_largest_of_rows(op: Op) -> bool:
    """Whether it reduces the innermost dim to its largest element."""
    if op.primitive != "reduce_max" or op.inputs[0] < 0 or not op.rule.operands[0]:
        return False
    return {factor for dim in op.rule.results[0] for factor in dim}.isdisjoint(op.rule.operands[0][-1])


def moved_bytes_weights(
    op: Op, program: Program, fused: tuple[bool, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """How often each operand and each result passes memory when the op runs (0 for what fusion keeps in registers).

    Indexing ops touch only what they select: a gather reads as much of its operand as it returns, an update writes as much as it
    is given.
    """
    if is_view(op):
        return (0.0,) * len(op.inputs), (0.0,) * len(op.outputs)

    def stored(value: int) -> float:
        return 0.0 if value < 0 or fused[value] else 1.0

    reads = [stored(i) for i in op.inputs]
    writes = [stored(o) for o in op.outputs]
    if op.primitive in ("gather", "dynamic_slice", "slice") and reads:
        picked = math.prod(program.values[op.outputs[0]].shape) if op.outputs[0] >= 0 else 0
        whole = max(1, math.prod(program.values[op.inputs[0]].shape)) if op.inputs[0] >= 0 else 1
        reads[0] *= min(1.0, picked / whole)
    elif is_update(op) and op.outputs[0] >= 0:
        given = op.inputs[1 if op.primitive == "dynamic_update_slice" else 2]
        if given >= 0:
            written = math.prod(program.values[given].shape) / max(1, math.prod(program.values[op.outputs[0]].shape))
            writes[0] = min(1.0, written)
            reads[0] = 0.0 if op.primitive in ("dynamic_update_slice", "scatter") else writes[0]
    return tuple(reads), tuple(writes)


def dims_read_across(op: Op) -> tuple[int, ...]:
    """Contracted dims of a product's first operand where it is read across its rows, as in the gradient of a weight; else ().

    None of a product with batch dims: those are copied to an order of their own, on every mesh alike.
    """
    if op.primitive != "dot_general":
        return ()
    first, second, result = ({f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0]))
    contracted = first & second - result
    dims = op.rule.operands[0]
    if first & second & result or not dims or contracted & set(dims[-1]):
        return ()
    return tuple(d for d, factors in enumerate(dims) if contracted & set(factors))


def patch_passes(op: Op, program: Program) -> float:
    """How many elements the patches of a convolution have for one of its image (the first operand); 0 for other ops.

    The patches are what a library multiplies by the kernel that has no convolution of its own: for each place of the result,
    the window of the image there. They do not depend on the result's features, over which splitting saves none of them.
    """
    if op.primitive != "conv_general_dilated" or op.inputs[0] < 0 or op.outputs[0] < 0:
        return 0.0
    image, kernel, result = ({f for dim in dims for f in dim} for dims in (*op.rule.operands, op.rule.results[0]))
    features = math.prod(op.rule.factors[f].size for f in kernel & result - image)
    patches = op.flops / 2 / features
    return patches / max(1, math.prod(program.values[op.inputs[0]].shape))
