"""A sharded op on one machine: tiles of whole arrays, the op run on every tile, results put together again.

``parts`` says into how many each factor is split. This is what a rule promises, carried out word for word; probing and the
re-check of rules compare it with the op on whole arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.core.rule import FactorKind, OpShardingRule

Parts = Mapping[int, int]
Slices = tuple[slice, ...]
JOINS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
}

_ROUNDING = 256.0  # allowed error in units of the type's epsilon times the largest value


class TilesDisagree(Exception):
    """The op on tiles is not the op on whole arrays; the message says how."""


def smallest_split(rule: OpShardingRule, factor: int) -> dict[int, int] | None:
    """The fewest parts of ``factor``, with what must be split beside it; None if it can never be split."""
    size = rule.factors[factor].size
    if size < 2 or rule.factors[factor].kind is FactorKind.REPLICATED:
        return None
    return contiguous(rule, {factor: _smallest_prime(size)})


def contiguous(rule: OpShardingRule, parts: Parts) -> dict[int, int] | None:
    """``parts``, and every factor that stands before a split one in some dim split completely, or tiles would have gaps.

    None if one of those must stay whole.
    """
    out = dict(parts)
    while True:
        before = {
            f
            for tensor in (*rule.operands, *rule.results)
            for dim in tensor
            for last in [max((n for n, f in enumerate(dim) if f in out), default=0)]
            for f in dim[:last]
        }
        if any(rule.factors[f].kind is FactorKind.REPLICATED for f in before):
            return None
        more = out | {f: rule.factors[f].size for f in before}
        if more == out:
            return out
        out = more


def _smallest_prime(size: int) -> int:
    return next((p for p in range(2, math.isqrt(size) + 1) if size % p == 0), size)


def tile_shape(
    rule: OpShardingRule, dims: Sequence[tuple[int, ...]], parts: Parts, shape: Sequence[int]
) -> tuple[int, ...]:
    """Shape of one tile of a tensor with these dims (() for a scalar literal)."""
    return tuple(n // math.prod(parts.get(f, 1) for f in dim) for n, dim in zip(shape, dims, strict=False))


def tile_slices(dims: Sequence[tuple[int, ...]], parts: Parts, shape: Sequence[int], at: Mapping[int, int]) -> Slices:
    """Where the tile at coordinates ``at`` (per split factor) lies in the whole tensor."""
    out = []
    for size, dim in zip(shape, dims, strict=False):
        index, count = 0, 1
        for f in dim:
            if f in parts:
                index, count = index * parts[f] + at[f], count * parts[f]
        local = size // count
        out.append(slice(index * local, (index + 1) * local))
    return tuple(out)


def coordinates(parts: Parts) -> Iterator[dict[int, int]]:
    for index in itertools.product(*(range(n) for n in parts.values())):
        yield dict(zip(parts, index, strict=True))


class TileRun:
    """``fn`` run on every tile, results put together as the rule says; compiled once, run on many operands.

    Args:
        fn: arrays in, sequence of arrays out; traced at the tile's shapes.
        parts: into how many each factor is split.
    """

    def __init__(self, fn: Callable[..., Sequence[Any]], rule: OpShardingRule, parts: Parts) -> None:
        self.rule, self.parts = rule, parts

        def all_tiles(args: list[Any], starts: list[Any]) -> list[Any]:
            sizes = [tile_shape(rule, dims, parts, a.shape) for a, dims in zip(args, rule.operands, strict=True)]
            return jax.lax.map(lambda start: list(fn(*map(_cut, args, start, sizes))), starts)

        self.compiled = jax.jit(all_tiles)

    def __call__(self, args: Sequence[Any], whole: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Results for these operands; ``whole`` are the unsharded ones, for their shapes and types.

        Raises:
            TilesDisagree: the function refuses a tile, gives another shape than the rule says, or gives different values
                to devices that should hold the same tile.
        """
        rule, parts, places = self.rule, self.parts, list(coordinates(self.parts))
        starts = [
            np.array([[s.start for s in tile_slices(dims, parts, a.shape, at)] for at in places], dtype=np.int32)
            for a, dims in zip(args, rule.operands, strict=True)
        ]
        sizes = [list(tile_shape(rule, dims, parts, a.shape)) for a, dims in zip(args, rule.operands, strict=True)]
        try:
            made = [np.asarray(r) for r in self.compiled(list(args), starts)]
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise TilesDisagree(f"the function fails on tiles {sizes}: {type(error).__name__}: {first}") from error
        wanted = [list(tile_shape(rule, dims, parts, w.shape)) for dims, w in zip(rule.results, whole, strict=True)]
        if (shapes := [list(m.shape[1:]) for m in made]) != wanted:
            raise TilesDisagree(f"on tiles {sizes} it gives results {shapes}, the rule says {wanted}")
        return [_assemble(m, w, rule, d, parts) for m, w, d in zip(made, whole, rule.results, strict=True)]


def _cut(a: Any, start: Any, sizes: tuple[int, ...]) -> Any:
    return jax.lax.dynamic_slice(a, list(start), sizes) if sizes else a


def _assemble(
    tiles: np.ndarray, whole: np.ndarray, rule: OpShardingRule, dims: Sequence[tuple[int, ...]], parts: Parts
) -> np.ndarray:
    """One result from its tiles: partial results joined, equal tiles compared."""
    out = np.zeros(whole.shape, whole.dtype)
    seen: dict[tuple[int, ...], dict[tuple[int, ...], np.ndarray]] = {}
    reduced = [f for f in parts if rule.factors[f].kind is FactorKind.REDUCTION]
    for at, tile in zip(coordinates(parts), tiles, strict=True):
        slices = tile_slices(dims, parts, whole.shape, at)
        group = seen.setdefault(tuple(s.start for s in slices), {})
        partial = tuple(at[f] for f in reduced)
        if partial in group:
            if not close(group[partial], tile):
                raise TilesDisagree("devices that should hold the same tile of a result get different values")
            continue
        out[slices] = JOINS[rule.reduce_op](out[slices], tile) if group else tile
        group[partial] = tile
    return out


def close(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether two results agree: integers exactly, floats up to the rounding of sums in another order."""
    return difference(got, want) <= 1.0


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over what rounding may explain; infinite where integers, infinities or NaNs differ."""
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return 0.0 if np.array_equal(got, want) else math.inf
    bound = _ROUNDING * float(jnp.finfo(want.dtype).eps)
    kind = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = got.astype(kind), want.astype(kind)
    odd = ~np.isfinite(b)
    if not np.array_equal(a[odd], b[odd], equal_nan=True) or not np.isfinite(a[~odd]).all():
        return math.inf
    if not (~odd).any():
        return 0.0
    return float(np.max(np.abs(a[~odd] - b[~odd]))) / (bound * max(1.0, float(np.max(np.abs(b[~odd])))))
