"""Tensors that XLA:GPU writes a second time, as kernels want their dims in another order (beside ``dim_order.py``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from alpa_lite.core.conversion import Conversion
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.dim_order import gathers_features, is_turned, sums_rows
from alpa_lite.costs.facts import Facts, located, numbers_of, region_of
from alpa_lite.costs.fusion import fused_values, is_view, makers_of, stored_operands, takes_producers
from alpa_lite.costs.memory import Timeline, times_of
from alpa_lite.costs.split_matmul import known_kernels, local_matmul, number_of_parts
from alpa_lite.costs.tensors import Stored, reads_of, regions_of
from alpa_lite.plan.records import OpDecision

_JOINED_BYTES = 2**25  # of the results of products that are joined (``xla_gpu_dot_merger_threshold_mb``)


def turned_copies(
    facts: Facts, line: Timeline, decisions: Sequence[OpDecision], conversions: Sequence[Conversion]
) -> list[Stored]:
    """Of tensors that were gathered row by row and are joined to others that lie feature by feature, as in the backward pass of
    a norm: a copy in their order, for as long as reductions over the rows need it."""
    regions = facts.of(regions_of, facts.program)
    ops, reads = facts.of(located, facts.program), facts.of(reads_of, facts.program)
    gathered: dict[str, set[int]] = {prefix: set() for prefix in regions}
    for conversion in conversions:
        prefix = region_of(conversion.op)
        if gathers_features(conversion, regions[prefix]):
            gathered[prefix].add(conversion.value)
    others = {prefix: _made_of(values, regions[prefix]) for prefix, values in gathered.items()}
    found = []
    for conversion in conversions:
        prefix, value = region_of(conversion.op), conversion.value
        region = regions[prefix]
        if not others[prefix] or not is_turned(conversion, region):
            continue
        kernels: set[int] = set()
        for number, operand in reads.get((prefix, value), ()):
            if decisions[number].operands[operand] == conversion.target:
                _, path, _, op = ops[number]
                kernels.update(_kernels_of(facts, region, op, int(path[len(prefix) :])))
        joins = [k for k in kernels if takes_producers(region.ops[k])]
        ends = [line.end[f"{prefix}{k}"] for k in joins if sums_rows(region.ops[k])]
        size = region.values[value].size_bytes
        fused, maker = facts.of(fused_values, region, gpu=True), facts.of(makers_of, region)
        met = set[int]().union(*(stored_operands(region.ops[k], region, fused, maker, size) for k in joins)) - {value}
        if ends and not others[prefix].isdisjoint(met):
            _, lo = times_of(conversion, line)
            name = f"{prefix}%{value} turned"
            found.append(Stored(lo, max(lo + 1, *ends), size, conversion.target, name, "temporaries"))
    return found


def _kernels_of(facts: Facts, region: Program, op: Op, index: int) -> list[int]:
    """The kernels that compute an op of a region: itself, or those that take it in."""
    fused = facts.of(fused_values, region, gpu=True)
    inside = [o for o in op.outputs if o >= 0 and fused[o]]
    return [k for o in inside for k in known_kernels(facts, region, o)] if inside else [index]


def _made_of(values: set[int], region: Program) -> set[int]:
    """Values of a region, and what is made of them element by element."""
    found = set(values)
    for op in region.ops if found else ():
        if op.elementwise and op.outputs[0] >= 0:
            shape = region.values[op.outputs[0]].shape
            if any(i in found and region.values[i].shape == shape for i in op.inputs):
                found.add(op.outputs[0])
    return found


def head_copies(
    facts: Facts,
    mesh: DeviceMesh,
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    stored: Sequence[Stored],
) -> list[Stored]:
    """Of results of products of one tensor, which XLA:GPU joins (``DotMerger``), as are queries, keys and values.

    Products of several heads want them head by head, so each is written out once more. Where one is wanted in two orders, as
    keys are forward and backward, the joined result stays until the second is made of it.
    """
    converted = {(region_of(c.op), c.value) for c in conversions}
    numbers = facts.of(numbers_of, facts.program)
    made = {t.name: t for t in reversed(stored)}
    found = []
    for prefix, region in facts.of(regions_of, facts.program).items():
        reads, read_products = facts.of(_reads_by_head, region)
        joined: dict[tuple[int, ShardingSpec], dict[int, int]] = defaultdict(dict)
        for op, number in ((region.ops[i], numbers[f"{prefix}{i}"]) for i in read_products):
            value, operands = op.outputs[0], decisions[number].operands
            product = local_matmul(op, region, operands, mesh)
            if (
                product is not None
                and product.batch == number_of_parts(product) == 1
                and (prefix, value) not in converted
            ):
                for operand in zip(op.inputs, operands, strict=True):
                    joined[operand][value] = product.elements * product.result_bytes
        for sizes in joined.values():
            if len(sizes) == 1 or sum(sizes.values()) > _JOINED_BYTES:
                continue
            orders: dict[int, set[tuple[int, ...]]] = {value: set() for value in sizes}
            for value in sizes:
                for read in reads[value]:
                    spec = decisions[numbers[f"{prefix}{read.op}"]].operands[read.operand]
                    local = spec.local_shape(region.values[region.ops[read.op].inputs[read.operand]].shape, mesh)
                    if all(local[d] > 1 for d in read.heads):
                        orders[value].add(tuple(d for d in read.dims if local[d] > 1))
            if any(len(wanted) > 1 for wanted in orders.values()):
                once = [f"{prefix}%{value}" for value, wanted in orders.items() if len(wanted) == 1]
                found += [made[name]._replace(name=f"{name} by head") for name in once if name in made]
    return found


class _HeadRead(NamedTuple):
    """Operand number ``operand`` of a product of several heads, op number ``op`` of its region.

    ``heads``: its batch dims. ``dims``: all, in the order of the library: batch dims, then rows and contracted ones, or of the
    second operand contracted ones and columns.
    """

    op: int
    operand: int
    heads: tuple[int, ...]
    dims: tuple[int, ...]


def _reads_by_head(region: Program) -> tuple[dict[int, frozenset[_HeadRead]], list[int]]:
    """Value -> where products of several heads read it, or what is made of it element by element before, if any do; and indices
    of the products among them."""
    found: dict[int, frozenset[_HeadRead]] = {}
    for index in range(len(region.ops) - 1, -1, -1):
        op = region.ops[index]
        if op.primitive == "dot_general":
            for operand, value in enumerate(op.inputs):
                read = _head_read(index, op, operand)
                if len(read.heads) > 1:
                    found[value] = found.get(value, frozenset()) | {read}
        elif op.elementwise or is_view(op):
            ahead = frozenset[_HeadRead]().union(*(found[o] for o in op.outputs if o in found))
            for value in op.inputs if ahead else ():
                found[value] = found.get(value, frozenset()) | ahead
    return found, [i for i, op in enumerate(region.ops) if op.primitive == "dot_general" and op.outputs[0] in found]


def _head_read(index: int, op: Op, operand: int) -> _HeadRead:
    mine, others = op.rule.operands[operand], {f for dim in op.rule.operands[1 - operand] for f in dim}
    kept = {f for dim in op.rule.results[0] for f in dim}
    batch = [d for d, dim in enumerate(mine) if dim and dim[0] in others and dim[0] in kept]
    summed = [d for d, dim in enumerate(mine) if dim and dim[0] in others and dim[0] not in kept]
    free = [d for d, dim in enumerate(mine) if dim and dim[0] not in others]
    return _HeadRead(index, operand, (*batch,), (*batch, *free, *summed) if operand == 0 else (*batch, *summed, *free))
