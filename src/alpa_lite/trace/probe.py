"""``al.rules.probe``: the sharding rule of a function that nobody described (a custom call, a kernel, a user's op).

Three steps. *Index analysis* (``trace.influence``) proposes which dims may be split together; *running the function on shards*
and putting the results together, as copies, blocks, or joined by add, max, min or mul, keeps what gives the same values;
*a re-check* of the whole rule on fresh data, all factors split at once, has the last word. After hidet's rule discovery (RFC
0003, issue #335): the shard runs the same code, so "whole operands, split result" is no rule but a slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from alpa_lite.core.rule import Factor, FactorKind, OpShardingRule
from alpa_lite.errors import RuleError
from alpa_lite.trace.embed import Found, embedded_agrees
from alpa_lite.trace.influence import Influence, Place, influence
from alpa_lite.trace.rule_check import ROUNDS, compare, flat_function
from alpa_lite.trace.samples import Sampler
from alpa_lite.trace.tiles import JOINS, TileRun, smallest_split

Shapes = Sequence[tuple[int, ...]]
_MOST_TILES = 1024
_MOST_CHOICES = 4096  # of dims to split together; beyond, for functions of very many operands, dims stay whole
_MOST_BYTES = 2**28  # of all partial results at once


def probe(
    fn: Callable[..., Any], *args: Any, num_shards: int = 4, seed: int = 0, same_code: bool = True
) -> OpShardingRule:
    """Find out how ``fn`` may be split, by running it.

    Args:
        fn: a function of pytrees of arrays that gives the same results for the same arguments.
        args: arrays or ``jax.ShapeDtypeStruct`` pytrees; values are drawn at random, integers from the argument's own
            values (they may be indices). Only shapes matter otherwise; small ones are quick (all is run some hundred times).
        num_shards: into how many shards dims are split to look; dims that it does not divide stay whole.
        seed: of the random data.
        same_code: a shard runs ``fn`` itself, with local shapes. False asks only whether a shard holds all that its part of
            the result needs, for ops whose attributes (a reshape's sizes) a lowering would adapt.

    Returns:
        A rule with ``origin="probed"``; what was not proven stays whole. Only the major factor of a dim is looked for. Data
        are random, so a function that behaves otherwise on other values can deceive it.

    Example:
        >>> rule = al.rules.probe(my_kernel, x, w)
        >>> [str(layout) for layout in al.rules.enumerate_sharded(rule, 4)]
    """
    if num_shards < 1:
        raise RuleError(f"al.rules.probe: num_shards={num_shards} was given; it must be at least 1. Leave it at 4.")
    leaves, flat = flat_function(fn, args)
    return _Probe(flat, Sampler(leaves, seed), num_shards, same_code).rule(f"probed with {num_shards} shards")


class _Probe:
    """The state of one probing: the function, its data, what was seen."""

    def __init__(self, fn: Callable[..., list[Any]], sampler: Sampler, num_shards: int, same_code: bool) -> None:
        self.fn, self.compiled, self.sampler = fn, jax.jit(fn), sampler
        self.num_shards, self.same_code = num_shards, same_code
        self.operands: Shapes = sampler.shapes
        self.found: list[Found] = []
        self.results: Shapes = [np.shape(r) for r in self.compiled(*sampler.draw())]
        self.seen: Influence = influence(self.compiled, sampler, self.results, num_shards)

    def rule(self, reason: str) -> OpShardingRule:
        for candidate in itertools.chain(self.following(), self.mixing()):
            if self.is_free(candidate) and self.holds(candidate):
                self.found.append(self.grown(candidate))
        return replace(self.together(self.found), origin="probed", reason=reason)

    # -- candidates -----------------------------------------------------------------------------------------------------

    def following(self) -> Iterator[Found]:
        """Result dims with the operand dims that follow them, most operands first."""
        for results in itertools.product(*([None, *self.divisible(shape)] for shape in self.results)):
            targets = [(r, d) for r, d in enumerate(results) if d is not None]
            if not targets or any(old.results[r] == d for old in self.found for r, d in targets):
                continue
            for operands in self.choices(lambda place, t=targets: self.may_follow(place, t)):
                places = [(a, d) for a, d in enumerate(operands) if d is not None]
                moved = all(any(self.seen.reaches(p, r) for p in places) for r, _ in targets)
                constant = not self.same_code and not places and all(t in self.seen.constant for t in targets)
                if moved or constant:
                    yield Found(operands=operands, results=results, size=self.num_shards)

    def may_follow(self, place: Place, targets: list[Place]) -> bool:
        split = {r for r, _ in targets}
        whole = (r for r in range(len(self.results)) if r not in split)
        return all(self.seen.follows(place, t) for t in targets) and not any(self.seen.reaches(place, r) for r in whole)

    def mixing(self) -> Iterator[Found]:
        """Operand dims of which every block reaches the same elements: sums, maxima, minima, products."""
        for operands in self.choices(self.seen.mixes):
            none = (None,) * len(self.results)
            partial = [Found(operands=operands, results=none, reduce_op=op, size=self.num_shards) for op in JOINS]
            if any(d is not None for d in operands) and (not self.same_code or self.fits(partial[0])):
                yield from partial

    def choices(self, allowed: Callable[[Place], bool]) -> list[tuple[int | None, ...]]:
        """Per operand an allowed dim that has no factor yet, or None; those that split most operands that matter first."""
        options: list[list[int | None]] = [[] for _ in self.operands]
        for a, d in self.seen.masks:
            if allowed((a, d)) and not any(old.operands[a] == d for old in self.found):
                options[a].append(d)
        chosen = itertools.islice(itertools.product(*([*dims, None] for dims in options)), _MOST_CHOICES)

        def rank(dims: tuple[int | None, ...]) -> tuple[int, int]:
            places = [(a, d) for a, d in enumerate(dims) if d is not None]
            used = sum(any(self.seen.reaches(p, r) for r in range(len(self.results))) for p in places)
            return (-used, len(places))

        return sorted(chosen, key=rank)

    def divisible(self, shape: tuple[int, ...]) -> list[int]:
        return [d for d, n in enumerate(shape) if self.num_shards > 1 and n % self.num_shards == 0]

    def is_free(self, new: Found) -> bool:
        """Whether its dims have no factor yet, and its partial results are joined like others; a rule holds no more."""
        for old in self.found:
            pairs = zip((*old.operands, *old.results), (*new.operands, *new.results), strict=True)
            if any(a is not None and a == b for a, b in pairs):
                return False
            if old.reduce_op and new.reduce_op and old.reduce_op != new.reduce_op:
                return False
        return True

    # -- tests ----------------------------------------------------------------------------------------------------------

    def holds(self, candidate: Found) -> bool:
        """Whether tiles give the values of the whole, on fresh data."""
        if not self.same_code:
            return all(embedded_agrees(self.compiled, self.sampler, candidate) for _ in range(ROUNDS))
        rule = build_rule([candidate], self.operands, self.results)
        return self.fits(candidate) and self.agrees(rule, {0: candidate.size})

    def fits(self, candidate: Found) -> bool:
        """Whether JAX accepts the tile's shapes at all; cheap, and it rules out most wrong combinations."""

        def shapes(split: Sequence[int | None], whole: Shapes) -> list[tuple[int, ...]]:
            return [
                tuple(n // candidate.size if d == dim else n for d, n in enumerate(shape))
                for dim, shape in zip(split, whole, strict=True)
            ]

        local = shapes(candidate.operands, self.operands)
        structs = [jax.ShapeDtypeStruct(s, d) for s, d in zip(local, self.sampler.dtypes, strict=True)]
        try:
            made = jax.eval_shape(self.fn, *structs)
        except Exception:
            return False
        return [tuple(m.shape) for m in made] == shapes(candidate.results, self.results)

    def agrees(self, rule: OpShardingRule, parts: dict[int, int]) -> bool:
        return not compare(self.compiled, TileRun(self.fn, rule, parts), self.sampler)

    def grown(self, found: Found) -> Found:
        """The same factor, as finely split as can be shown."""
        shapes, dims = (*self.operands, *self.results), (*found.operands, *found.results)
        sizes = [shape[d] for shape, d in zip(shapes, dims, strict=True) if d is not None]
        whole = math.gcd(*sizes)
        for size in sorted((n for n in range(found.size, whole + 1, found.size) if whole % n == 0), reverse=True):
            finer = replace(found, size=size)
            if size == found.size or (self.affordable(finer) and self.holds(finer)):
                return finer
        return found

    def affordable(self, found: Found) -> bool:
        elements = sum(math.prod(shape) for shape in self.results)
        copies = found.size if found.reduce_op else 1
        return found.size <= _MOST_TILES and copies * elements * 8 <= _MOST_BYTES

    # -- one rule of all factors ----------------------------------------------------------------------------------------

    def together(self, found: Sequence[Found]) -> OpShardingRule:
        """The factors as one rule; one that does not hold beside the others, on fresh data, stays whole."""
        rule = build_rule(found, self.operands, self.results)
        if not self.same_code or len(found) < 2:
            return rule
        parts: dict[int, int] = {}
        for number in range(len(found)):
            least = smallest_split(rule, number)
            assert least is not None, "found factors are the major ones of their dims"
            if self.agrees(rule, parts | least):
                parts |= least
        kept = [f for number, f in enumerate(found) if number in parts]
        return rule if len(kept) == len(found) else build_rule(kept, self.operands, self.results)


def build_rule(found: Sequence[Found], operands: Shapes, results: Shapes) -> OpShardingRule:
    """Found factors first (number i is ``found[i]``), then what is left of every dim, which may not be split."""
    factors = [Factor(size=f.size, kind=f.kind) for f in found]

    def tensor(position: int, shape: tuple[int, ...], side: str) -> tuple[tuple[int, ...], ...]:
        dims = []
        for d, size in enumerate(shape):
            major = [i for i, f in enumerate(found) if getattr(f, side)[position] == d]
            left = size // math.prod(factors[i].size for i in major)
            if left > 1:
                factors.append(Factor(size=left, kind=FactorKind.REPLICATED))
                major.append(len(factors) - 1)
            dims.append(tuple(major))
        return tuple(dims)

    ins = tuple(tensor(p, s, "operands") for p, s in enumerate(operands))
    outs = tuple(tensor(p, s, "results") for p, s in enumerate(results))
    joins = [f.reduce_op for f in found if f.reduce_op]
    return OpShardingRule(operands=ins, results=outs, factors=tuple(factors), reduce_op=joins[0] if joins else "")
