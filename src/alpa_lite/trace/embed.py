"""Whether a shard holds all that its part of the result needs, asked without running the op on a shard's shapes.

The shard stands in its place in a whole operand; everything outside is noise (for blocks of results) or the neutral element
(for partial results). The op runs on whole shapes, so an op whose attributes hold sizes can be asked too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa_lite.core.rule import FactorKind
from alpa_lite.trace.influence import block_slice
from alpa_lite.trace.samples import Sampler
from alpa_lite.trace.tiles import JOINS, close

_BLOCKS = 6  # of a fine split that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One factor under test: the dim of each operand and result that it splits (None: whole), and what joins the parts."""

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduce_op: str = ""
    size: int

    @property
    def kind(self) -> FactorKind:
        return FactorKind.REDUCTION if self.reduce_op else FactorKind.PASS_THROUGH


def embedded_agrees(fn: Callable[..., Sequence[Any]], sampler: Sampler, found: Found) -> bool:
    """Whether the factor holds on one fresh set of operands."""
    args = sampler.draw()
    whole = [np.asarray(r) for r in fn(*args)]
    if found.reduce_op:
        return any(_joins(fn, args, whole, found, first) for first in _kept_once(found))
    blocks = sampler.rng.permutation(found.size)[:_BLOCKS] if found.size > _BLOCKS else range(found.size)
    for block in map(int, blocks):
        noisy = [
            _embedded(sampler.fresh(i), a, d, block, found.size)
            for i, (a, d) in enumerate(zip(args, found.operands, strict=True))
        ]
        for got, want, dim in zip(fn(*noisy), whole, found.results, strict=True):
            at = (slice(None),) * dim + (block_slice(want.shape[dim], block, found.size),) if dim is not None else ()
            if not close(np.asarray(got)[at], want[at]):
                return False
    return True


def _kept_once(found: Found) -> Iterator[int | None]:
    """None, and each whole operand that may have to count once only (what a scatter-add adds to)."""
    yield None
    if found.reduce_op == "add":
        yield from (i for i, d in enumerate(found.operands) if d is None)


def _joins(
    fn: Callable[..., Sequence[Any]], args: Sequence[Any], whole: Sequence[np.ndarray], found: Found, once: int | None
) -> bool:
    total: list[np.ndarray] = []
    for block in range(found.size):
        part = [
            np.zeros_like(a)
            if i == once and block
            else _embedded(_neutral(a, found.reduce_op), a, d, block, found.size)
            for i, (a, d) in enumerate(zip(args, found.operands, strict=True))
        ]
        made = [np.asarray(r) for r in fn(*part)]
        total = [JOINS[found.reduce_op](t, m) for t, m in zip(total, made, strict=True)] if total else made
    return all(close(t, w) for t, w in zip(total, whole, strict=True))


def _neutral(a: Any, reduce_op: str) -> Any:
    a = np.asarray(a)
    if reduce_op in ("add", "mul"):
        return np.full_like(a, 0 if reduce_op == "add" else 1)
    if a.dtype == np.bool_:
        return np.full_like(a, reduce_op == "min")
    if a.dtype.kind in "iu":
        info = np.iinfo(a.dtype)
        return np.full_like(a, info.min if reduce_op == "max" else info.max)
    return np.full_like(a, -np.inf if reduce_op == "max" else np.inf)


def _embedded(filler: Any, a: Any, dim: int | None, block: int, num_blocks: int) -> Any:
    """``a`` where it is whole or in its block, ``filler`` elsewhere."""
    if dim is None:
        return a
    out = np.array(filler)
    at = (slice(None),) * dim + (block_slice(out.shape[dim], block, num_blocks),)
    out[at] = np.asarray(a)[at]
    return out
