"""The order of dims in which XLA:CPU's library reads matmuls and convolutions (``dot_decomposer``, ``conv_canonicalization``).

Each function gives, for both operands and the result of an op, the dims of the tensor in the library's order; where that is
not their own order, XLA:CPU makes a transposed copy.
"""

from __future__ import annotations

import math

from alpa_lite.core.program import Op, Program


def dot_orders(op: Op) -> tuple[tuple[int, ...], ...]:
    """Matmuls read (batch, kept, contracted) and (batch, contracted, kept), each one dim or joined to one.

    Dims of size 1, which have no factors, do not count.
    """
    left, right, result = ([frozenset(d) for d in dims if d] for dims in (*op.rule.operands, op.rule.results[0]))

    def roles(mine: list[frozenset[int]], other: list[frozenset[int]]) -> tuple[list[int], list[int], list[int]]:
        batch = [i for dim in result for i, own in enumerate(mine) if own == dim and own in other]
        contracted = [i for i, own in enumerate(mine) if own in other and own not in result]
        kept = [i for i in range(len(mine)) if i not in batch and i not in contracted]
        return batch, kept, contracted

    (batch, kept, contracted), (batch_r, kept_r, contracted_r) = roles(left, right), roles(right, left)
    contracted_r = [right.index(left[i]) for i in contracted]

    def order(size: int, batch: list[int], kept: list[int], contracted: list[int], swap: bool) -> tuple[int, ...]:
        # One kept and one contracted dim behind the batch: the library reads either order (``TransposeFolding``).
        if batch == list(range(len(batch))) and len(kept) <= 1 and len(contracted) <= 1:
            return tuple(range(size))
        return (*batch, *contracted, *kept) if swap else (*batch, *kept, *contracted)

    return (
        order(len(left), batch, kept, contracted, swap=False),
        order(len(right), batch_r, kept_r, contracted_r, swap=True),
        tuple(range(len(result))),
    )


def conv_orders(op: Op, program: Program) -> tuple[tuple[int, ...], ...]:
    """Images lie as (batch, space, features), kernels as (space, in, out).

    A kernel that covers more space than the image changes places with it and is reversed
    (``AlgebraicSimplifierVisitor::SwapConvOperands``).
    """
    image, kernel, result = ([frozenset(dim) for dim in dims] for dims in (*op.rule.operands, op.rule.results[0]))

    def of(mine: list[frozenset[int]], other: list[frozenset[int]], third: list[frozenset[int]]) -> list[int]:
        return [i for i, own in enumerate(mine) if own and own in other and own not in third][:1]

    def order(rank: int, first: list[int], last: list[int]) -> tuple[int, ...]:
        return (*first, *(i for i in range(rank) if i not in first and i not in last), *last)

    shapes = [program.values[i].shape if i >= 0 else () for i in (*op.inputs, *op.outputs)]
    ends = [
        (of(image, result, kernel), of(image, kernel, result)),
        ([], [*of(kernel, image, result), *of(kernel, result, image)]),
        (of(result, image, kernel), of(result, kernel, image)),
    ]
    space = [
        math.prod(n for i, n in enumerate(s) if i not in (*e[0], *e[1])) for s, e in zip(shapes, ends, strict=True)
    ]
    if space[1] > space[0]:
        same = tuple(range(len(image)))
        return same, same[::-1], same
    return tuple(order(len(s), *e) for s, e in zip(shapes, ends, strict=True))
