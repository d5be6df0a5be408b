"""Matmuls that XLA:GPU splits along their contraction, and the partial products that lie in memory until they are added.

A product of few tiles and a long contraction keeps few cores busy, so XLA:GPU makes it a batch of shorter products and adds
their results (``SplitkRewriter`` in OpenXLA). Into how many is decided by a cost model, whose weights for Hopper are here;
other GPUs' are close. The sum is computed wherever it is read, if that is elementwise and saves time: then the partial
products live as long as the result would. Else they are there for a moment, beside the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.fusion import fused_values, is_view, takes_producers

_CANDIDATES = tuple(2**power for power in range(12))
_TILE = 128
_CORES = 132
_COMPUTE_WEIGHT = 100.0  # per operation of one tile
_MEMORY_WEIGHT = 0.194136  # per byte
_SUM_WEIGHT = 193.1384  # per byte that the sum moves
_SUM_LAUNCH = 4.36e7
_ACCUMULATOR_BYTES = 4
# Bytes that pass memory while one more kernel is launched: a sum that its readers repeat may cost so much more.
_LAUNCH_BYTES = 3.3e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """One device's share of a product: sizes, and bytes per element of the operands and of the result."""

    batch: int
    rows: int
    columns: int
    contracted: int
    operand_bytes: tuple[int, int]
    result_bytes: int

    @property
    def elements(self) -> int:
        return self.batch * self.rows * self.columns


def number_of_parts(product: Matmul) -> int:
    """Into how many products XLA:GPU splits this one; 1: it does not."""
    if _waves(product, 1) >= 1.0:  # all cores are busy: parts would compute as much, and have to be added up
        return 1
    return min(_CANDIDATES, key=lambda parts: _cost(product, parts))


def _waves(product: Matmul, parts: int) -> float:
    """How often the tiles fill all cores."""
    rows, columns = min(product.rows, _TILE), min(product.columns, _TILE)
    tiles = product.batch * parts * math.ceil(product.rows / _TILE) * math.ceil(product.columns / _TILE)
    return tiles * rows * columns / (_CORES * _TILE * _TILE)


def _cost(product: Matmul, parts: int) -> float:
    rows, columns = min(product.rows, _TILE), min(product.columns, _TILE)
    waves = max(1.0, _waves(product, parts))
    compute = 2 * rows * columns * math.ceil(product.contracted / parts) * waves * _COMPUTE_WEIGHT
    left, right = product.operand_bytes
    read = product.batch * product.contracted * (product.rows * left + product.columns * right)
    summed = product.elements * parts * _ACCUMULATOR_BYTES
    result = product.elements * product.result_bytes
    written = summed if parts > 1 else result
    dot = max(compute, (read + written) * _MEMORY_WEIGHT)
    return dot if parts == 1 else dot + _SUM_LAUNCH + (summed + result) * _SUM_WEIGHT


def local_matmul(op: Op, program: Program, operands: Sequence[ShardingSpec], mesh: DeviceMesh) -> Matmul | None:
    """What of a matmul one device computes, its operands in these layouts; None for other ops and integers."""
    if op.primitive != "dot_general" or any(i < 0 for i in op.inputs) or op.outputs[0] < 0:
        return None
    values = [program.values[i] for i in op.inputs]
    result = program.values[op.outputs[0]]
    if not result.dtype.startswith(("float", "bfloat")):
        return None
    sizes: list[dict[int, int]] = []
    for value, spec, dims in zip(values, operands, op.rule.operands, strict=True):
        local = [size // mesh.axes_size(axes) for size, axes in zip(value.shape, spec.dims, strict=True)]
        sizes.append({dim[0]: size for dim, size in zip(dims, local, strict=True) if dim})
    left, right = sizes
    made = {factor for dim in op.rule.results[0] for factor in dim}

    def product(factors: Iterable[int], of: Mapping[int, int]) -> int:
        return math.prod(of[f] for f in factors)

    return Matmul(
        batch=product(left.keys() & right.keys() & made, left),
        rows=product(left.keys() - right.keys(), left),
        columns=product(right.keys() - left.keys(), right),
        contracted=product((left.keys() & right.keys()) - made, left),
        operand_bytes=(values[0].itemsize, values[1].itemsize),
        result_bytes=result.itemsize,
    )


def sum_is_repeated(product: Matmul, parts: int, readers: Sequence[Op]) -> bool:
    """Whether every reader adds the partial products for itself, instead of one kernel that stores the sum."""
    if not readers or not all(takes_producers(reader) for reader in readers):
        return False
    partial = product.elements * parts * _ACCUMULATOR_BYTES
    result = product.elements * product.result_bytes
    more = len(readers) * partial - (partial + result + len(readers) * result)
    return more < _LAUNCH_BYTES


def workspace_bytes(product: Matmul, parts: int) -> int:
    """Of all partial products together."""
    return product.elements * parts * _ACCUMULATOR_BYTES


def readers_of(program: Program) -> dict[int, list[int]]:
    """Value -> indices of the ops that read it."""
    found: dict[int, list[int]] = {}
    for index, op in enumerate(program.ops):
        for value in set(op.inputs):
            found.setdefault(value, []).append(index)
    return found


def kernels_that_read(
    program: Program, fused: Sequence[bool], readers: Mapping[int, Sequence[int]], value: int
) -> list[int]:
    """Indices of the ops that read a value, also through fused values and views, and store what they make."""
    found: set[int] = set()
    results = set(program.outputs)
    pending, seen = [value], {value}
    while pending:
        wanted = pending.pop()
        for index in readers.get(wanted, ()):
            op = program.ops[index]
            passed = [o for o in op.outputs if o >= 0 and o not in results and (fused[o] or is_view(op))]
            if not passed:
                found.add(index)
            pending += [o for o in passed if o not in seen]
            seen.update(passed)
    return sorted(found)


def known_kernels(facts: Facts, region: Program, value: int) -> list[int]:
    """As ``kernels_that_read``, once per value."""
    known = facts.of(_known_kernels, region)
    if value not in known:
        fused, readers = facts.of(fused_values, region, gpu=True), facts.of(readers_of, region)
        known[value] = kernels_that_read(region, fused, readers, value)
    return known[value]


def _known_kernels(region: Program) -> dict[int, list[int]]:
    """Value of a region -> its kernels, filled as they are asked for."""
    return {}
