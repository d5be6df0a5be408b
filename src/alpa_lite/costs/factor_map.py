"""Where each mesh axis of a spec lies on the factors of an op's sharding rule.

In: the dims of one tensor as the rule lists them (products of factors) and its spec. Out: per mesh axis a ``Place``. Two
tensors of one op are laid out alike exactly if every axis has the same place on the factors that they share, because a
place says, in units of the factor, which part of it each coordinate along the axis stands for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.rule import FactorKind, OpShardingRule
from alpa_lite.core.spec import ShardingSpec

TensorDims = tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """A digit of an axis on a factor: the factor, already split ``before`` ways, is split ``extent`` ways more.

    The device at coordinate ``c`` of the axis holds part ``c // stride % extent``. An axis has several digits only where
    it covers one factor and part of the next.
    """

    factor: int
    before: int
    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class Place:
    """What one mesh axis does to one tensor; all defaults: nothing, the tensor is whole along it.

    Attributes:
        pieces: the factors that it splits.
        partial: the devices along it hold partial sums.
        blocked: it splits something that the rule does not map to the op's other tensors.
    """

    pieces: tuple[Piece, ...] = ()
    partial: bool = False
    blocked: bool = False


WHOLE = Place()
PARTIAL = Place(partial=True)


class FactorBoundary(Exception):
    """Tiles of a dim end inside of a factor that is not the last one split; ``args``: dim, axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorMap:
    """A rule, prepared for many questions.

    Attributes:
        rule: the rule.
        blocked: factors that prove nothing: not splittable, or without a counterpart.
        summed: factors whose partial results add up or are otherwise joined.
        operand_factors: per operand the factors that it has.
        operand_dims: per operand the dim of each of its factors.
    """

    rule: OpShardingRule
    blocked: frozenset[int]
    summed: frozenset[int]
    operand_factors: tuple[frozenset[int], ...]
    operand_dims: tuple[Mapping[int, int], ...]

    @classmethod
    def of(cls, rule: OpShardingRule) -> FactorMap:
        made = frozenset(f for tensor in rule.results for dim in tensor for f in dim)
        operand_factors = tuple(frozenset(f for dim in tensor for f in dim) for tensor in rule.operands)
        read = frozenset().union(*operand_factors)
        summed = frozenset(i for i in rule.reduction_factors if rule.reduce_op and i not in made)
        fixed = {i for i, f in enumerate(rule.factors) if f.kind is FactorKind.REPLICATED}
        unjoined = {i for i in rule.reduction_factors if i not in summed}
        return cls(
            rule=rule,
            blocked=frozenset(fixed | unjoined | (read - made - summed)),
            summed=summed,
            operand_factors=operand_factors,
            operand_dims=tuple({f: d for d, dim in enumerate(tensor) for f in dim} for tensor in rule.operands),
        )

    def places(
        self, dims: TensorDims, shape: tuple[int, ...], spec: ShardingSpec, mesh: DeviceMesh
    ) -> Mapping[str, Place]:
        """Place of every axis (of size > 1) that the spec uses; absent axes are ``WHOLE``. The spec must divide.

        Raises:
            FactorBoundary: a tile is no product of parts of factors.
        """
        found: dict[str, Place] = {}
        for number, (axes, factors) in enumerate(zip(spec.dims, dims, strict=True)):
            if axes:
                self._place_dim(number, tuple(a for a in axes if mesh.axis_size(a) > 1), factors, shape, mesh, found)
        for axis in spec.unreduced:
            if mesh.axis_size(axis) > 1:
                found[axis] = PARTIAL
        return found

    def _place_dim(
        self,
        number: int,
        axes: tuple[str, ...],
        factors: tuple[int, ...],
        shape: tuple[int, ...],
        mesh: DeviceMesh,
        found: dict[str, Place],
    ) -> None:
        """The axes of one dim, major first, use up its factors, major first."""
        sizes = [self.rule.factors[f].size for f in factors]
        if math.prod(sizes) != shape[number]:  # a dim without (all of) its factors must stay whole
            found.update((axis, Place(blocked=True)) for axis in axes)
            return
        at, before = 0, 1
        for axis in axes:
            stride = mesh.axis_size(axis)
            pieces: list[Piece] = []
            blocked = False
            while stride > 1:
                while before == sizes[at]:
                    at, before = at + 1, 1
                left = sizes[at] // before
                extent = math.gcd(left, stride)
                blocked = blocked or factors[at] in self.blocked
                if extent not in (left, stride):
                    if blocked or any(f in self.blocked for f in factors):
                        found.update((other, Place(blocked=True)) for other in axes[axes.index(axis) :])
                        return
                    raise FactorBoundary(number, axis)
                stride //= extent
                pieces.append(Piece(factors[at], before, extent, stride))
                before *= extent
            found[axis] = Place(tuple(pieces), blocked=blocked)

    def dims_split(self, operand: int, place: Place) -> tuple[int, ...]:
        """Dims of an operand that a place splits."""
        dims = self.operand_dims[operand]
        return tuple(sorted({dims[piece.factor] for piece in place.pieces if piece.factor in dims}))

    def needed(self, operand: int, result: Place) -> Place:
        """Where an axis must lie on an operand so that the op makes ``result``, not partial, without communication."""
        if result.blocked or not result.pieces:
            return WHOLE
        own = self.operand_factors[operand]
        kept = tuple(piece for piece in result.pieces if piece.factor in own)
        return Place(kept) if kept else WHOLE

    def splits(self, places: Mapping[str, Place]) -> dict[int, tuple[str, ...]]:
        """Axes by factor, major first; axes that are blocked or lie on several factors are left out."""
        found: dict[int, list[tuple[int, str]]] = {}
        for axis, place in places.items():
            if len(place.pieces) == 1 and not place.blocked:
                found.setdefault(place.pieces[0].factor, []).append((place.pieces[0].before, axis))
        return {factor: tuple(axis for _, axis in sorted(axes)) for factor, axes in found.items()}

    def spec(
        self, dims: TensorDims, splits: Mapping[int, tuple[str, ...]], partial: tuple[str, ...], mesh: DeviceMesh
    ) -> ShardingSpec:
        """The spec of a tensor whose factors are split so. A minor factor is split only if those before it are used up."""
        made: list[tuple[str, ...]] = []
        for dim in dims:
            axes: tuple[str, ...] = ()
            for factor in dim:
                here = splits.get(factor, ())
                axes += here
                if mesh.axes_size(here) != self.rule.factors[factor].size:
                    break
            made.append(axes)
        return ShardingSpec(tuple(made), partial)
