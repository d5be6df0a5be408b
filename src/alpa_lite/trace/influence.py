"""Index analysis: which elements of the results read which block of an operand's dim, found by changing one block at a time.

Comes in: a compiled function and random operands. Goes out: per operand dim and result, one mask per block. Two questions are
answered from the masks. *Follows*: block s of an operand dim reaches block s of a result dim only, so the two dims can be
split together (a fitting shape alone proves nothing: a reshape that mixes dims has it too). *Mixes*: all blocks reach the same
elements, so a split of the dim can only leave partial results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from alpa_lite.trace.samples import Sampler

ROUNDS = 9
_PUSHES = (0.0, 16.0, -16.0)  # in turn, so that a maximum or a minimum moves
_OVERLAP = 0.6  # of two blocks' masks, intersection over union, to count as the same elements

Place = tuple[int, int]  # (tensor, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """What was seen.

    Attributes:
        masks: per operand dim that divides, per result, a boolean array (blocks, *result shape).
        num_shards: number of blocks.
        constant: result dims along which every result seen was constant.
    """

    masks: dict[Place, tuple[np.ndarray, ...]]
    num_shards: int
    constant: frozenset[Place]

    def reaches(self, place: Place, result: int) -> bool:
        return bool(self.masks[place][result].any())

    def follows(self, place: Place, target: Place) -> bool:
        """Whether block s of the operand dim reaches nothing outside of block s of the result dim."""
        result, dim = target
        return all(_outside(mask, block, dim, self.num_shards) for block, mask in enumerate(self.masks[place][result]))

    def mixes(self, place: Place) -> bool:
        """Whether all blocks of the dim reach about the same elements, at least in one result."""
        reached = [m for m in self.masks[place] if m.any()]
        return bool(reached) and all(_same(masks) for masks in reached)


def influence(
    fn: Callable[..., Sequence[Any]], sampler: Sampler, shapes: Sequence[tuple[int, ...]], num_shards: int
) -> Influence:
    """Run ``fn`` on random operands, and again with one block changed, for every block of every dim that divides."""
    places = [
        (a, d)
        for a, shape in enumerate(sampler.shapes)
        for d, size in enumerate(shape)
        if num_shards > 1 and size % num_shards == 0 and not sampler.is_key(a)
    ]
    masks = {place: tuple(np.zeros((num_shards, *shape), bool) for shape in shapes) for place in places}
    constant = {(r, d) for r, shape in enumerate(shapes) for d in range(len(shape))}

    def look(args: Sequence[Any], base: Sequence[np.ndarray], place: Place, push: float) -> None:
        for block in range(num_shards):
            made = [np.asarray(r) for r in fn(*_changed(sampler, args, place, block, num_shards, push))]
            for mask, before, after in zip(masks[place], base, made, strict=True):
                mask[block] |= _differs(before, after)
            constant.difference_update({(r, d) for r, d in constant if not _is_constant(made[r], d)})

    for number in range(ROUNDS):
        args = sampler.draw()
        base = [np.asarray(r) for r in fn(*args)]
        constant.intersection_update({(r, d) for r, d in constant if _is_constant(base[r], d)})
        for place in places:
            look(args, base, place, _PUSHES[number % len(_PUSHES)])
            # What no ordinary value moves, extreme ones may: a test for finite values, a comparison with a large constant.
            if number == ROUNDS - 1 and not any(mask.any() for mask in masks[place]):
                for push in (np.inf, -np.inf):
                    look(args, base, place, push)
    return Influence(masks=masks, num_shards=num_shards, constant=frozenset(constant))


def block_slice(size: int, block: int, num_blocks: int) -> slice:
    return slice(block * (size // num_blocks), (block + 1) * (size // num_blocks))


def _changed(
    sampler: Sampler, args: Sequence[Any], place: Place, block: int, num_shards: int, push: float
) -> list[Any]:
    """The operands with one block drawn anew; reals are moved by ``push``, an infinite one makes integers extreme."""
    operand, dim = place
    old = np.asarray(args[operand])
    new = np.array(old)
    at = (slice(None),) * dim + (block_slice(old.shape[dim], block, num_shards),)
    fresh = np.asarray(sampler.fresh(operand))[at]
    if push and jnp.issubdtype(fresh.dtype, jnp.inexact):
        fresh = (fresh + np.asarray(push, fresh.dtype)).astype(old.dtype)
    elif np.isinf(push) and jnp.issubdtype(fresh.dtype, jnp.integer):
        limits = jnp.iinfo(fresh.dtype)
        fresh = np.full_like(fresh, limits.max if push > 0 else limits.min)
    new[at] = fresh
    return [new if i == operand else a for i, a in enumerate(args)]


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != b) & ~((a != a) & (b != b))


def _outside(mask: np.ndarray, block: int, dim: int, num_shards: int) -> bool:
    if mask.shape[dim] % num_shards:
        return False
    keep = np.array(mask)
    keep[(slice(None),) * dim + (block_slice(mask.shape[dim], block, num_shards),)] = False
    return not keep.any()


def _same(masks: np.ndarray) -> bool:
    for s, first in enumerate(masks):
        for second in masks[:s]:
            union = np.count_nonzero(first | second)
            if not union or np.count_nonzero(first & second) < _OVERLAP * union:
                return False
    return True


def _is_constant(x: np.ndarray, dim: int) -> bool:
    return x.shape[dim] > 1 and not _differs(x, np.take(x, [0], axis=dim)).any()
