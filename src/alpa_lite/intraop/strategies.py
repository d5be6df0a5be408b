"""Strategies of one op: every assignment of mesh axes to the factors of its sharding rule.

Each axis goes to one factor, to one linear group (partial sums pass through), or to nothing (the op is repeated along it).
From the assignment follow the specs of all operands and results:

- a pass-through factor splits every dim that contains it;
- a reduction factor splits operands; the results are unreduced over the axis (``reduce_op == "add"``) or reduced at once by
  an all-reduce inside the op (max, min);
- a linear group makes its operands and all results unreduced over the axis.

In a dim of several factors a minor factor may be split only when all factors before it are split completely; otherwise
the tiles would not be contiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op
from alpa_lite.core.rule import FactorKind, OpShardingRule
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import Conversions
from alpa_lite.errors import PinError

UNUSED = -1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StrategySet:
    """All strategies of one op.

    Attributes:
        assignment: per strategy, per mesh axis: factor index, ``UNUSED``, or ``-2 - g`` for linear group g.
        operands, results: per tensor, the spec number (in the conversions' ``SpecSpace`` of its rank) per strategy.
        used: per strategy, the mesh axes that split the op's work.
        reduce_axes: per strategy, the axes of the all-reduce inside the op (max, min); mostly ().
        ruled_out: factors that no axis divides, as (factor, axis) pairs, for the report.
    """

    assignment: np.ndarray
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]
    used: tuple[tuple[str, ...], ...]
    reduce_axes: tuple[tuple[str, ...], ...]
    ruled_out: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return len(self.used)

    def split(self, mesh: DeviceMesh) -> np.ndarray:
        """Per strategy, over how many devices the op's work is split (float64)."""
        return np.array([mesh.axes_size(axes) for axes in self.used], dtype=np.float64)


def enumerate_strategies(
    rule: OpShardingRule,
    mesh: DeviceMesh,
    conversions: Conversions,
    *,
    unreduced_inputs: tuple[bool, ...],
    sharded_contractions: bool = False,
) -> StrategySet:
    """All strategies of ``rule`` on ``mesh``.

    Args:
        unreduced_inputs: per operand, whether its producer can leave it unreduced at all (prunes dead strategies).
        sharded_contractions: keep only strategies that use every mesh axis (Alpa: no repeated matmuls), if there are any.
    """
    axes = tuple(a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1)
    choices, ruled_out = _choices(rule, mesh, axes, unreduced_inputs)
    maker = _SpecNumbers(rule, mesh, axes, conversions)
    rows: list[tuple[int, ...]] = []
    specs: list[tuple[int, ...]] = []
    for row in itertools.product(*choices):
        made = maker.of(row)
        if made is not None:
            rows.append(row)
            specs.append(made)
    if sharded_contractions:
        full = [i for i, row in enumerate(rows) if UNUSED not in row]
        rows, specs = ([rows[i] for i in full], [specs[i] for i in full]) if full else (rows, specs)
    return _pack(rule, axes, rows, specs, ruled_out)


class KnownStrategies:
    """Strategies of rules on meshes with the same axes, each enumerated once.

    Where every dim has one factor, all that a mesh's sizes decide is which axes together divide which factors. A mesh that
    divides no more than one before it leaves some of its strategies, in the same order.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[tuple[frozenset[tuple[int, int]], StrategySet]]] = {}

    def of(
        self,
        rule: OpShardingRule,
        mesh: DeviceMesh,
        conversions: Conversions,
        *,
        unreduced_inputs: tuple[bool, ...],
        sharded_contractions: bool,
    ) -> StrategySet:
        """As ``enumerate_strategies``."""
        simple = not sharded_contractions and all(len(d) < 2 for dims in (*rule.operands, *rule.results) for d in dims)
        axes = tuple(a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1)
        divided = axes if simple else mesh_class(mesh, frozenset(factor.size for factor in rule.factors))
        key = (rule.operands, rule.results, rule.factors, rule.reduce_op, rule.linear, mesh.axis_names)
        known = self._known.setdefault((*key, divided, unreduced_inputs, sharded_contractions), [])
        places = _places(rule, mesh, axes) if simple else frozenset()
        for more, strategies in known:
            if more == places:
                return strategies
        larger = next(((more, strategies) for more, strategies in known if more >= places), None)
        if larger is None:
            found = enumerate_strategies(
                rule,
                mesh,
                conversions,
                unreduced_inputs=unreduced_inputs,
                sharded_contractions=sharded_contractions,
            )
        else:
            found = _without(larger[1], larger[0] - places, _choices(rule, mesh, axes, unreduced_inputs)[1])
        known.append((places, found))
        return found


def _places(rule: OpShardingRule, mesh: DeviceMesh, axes: tuple[str, ...]) -> frozenset[tuple[int, int]]:
    """(Factor, bit mask of axes) for all axes that together divide a factor."""
    groups = [
        (mask, mesh.axes_size(tuple(a for i, a in enumerate(axes) if mask >> i & 1)))
        for mask in range(1, 1 << len(axes))
    ]
    sizes = [(i, f.size) for i, f in enumerate(rule.factors) if f.size and f.kind is not FactorKind.REPLICATED]
    return frozenset((i, mask) for i, size in sizes for mask, parts in groups if size % parts == 0)


def _without(
    strategies: StrategySet, gone: frozenset[tuple[int, int]], ruled_out: tuple[tuple[int, str], ...]
) -> StrategySet:
    """The strategies less those that place just these axes on these factors."""
    bits = 1 << np.arange(strategies.assignment.shape[1])
    stays = np.ones(len(strategies), dtype=bool)
    for factor in {factor for factor, _ in gone}:
        masks = (strategies.assignment == factor) @ bits
        stays &= ~np.isin(masks, [mask for f, mask in gone if f == factor])
    kept = np.flatnonzero(stays)
    return StrategySet(
        assignment=strategies.assignment[kept],
        operands=tuple(specs[kept] for specs in strategies.operands),
        results=tuple(specs[kept] for specs in strategies.results),
        used=tuple(strategies.used[i] for i in kept.tolist()),
        reduce_axes=tuple(strategies.reduce_axes[i] for i in kept.tolist()),
        ruled_out=ruled_out,
    )


def mesh_class(mesh: DeviceMesh, sizes: frozenset[int]) -> Hashable:
    """Equal for two meshes on which a program of these sizes has the same strategies, and so the same decision graph.

    What groups of axes divide decides on layouts. That they split a size completely matters if other axes are left, which may
    then split the rest of the same dim.
    """
    axes = [a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1]
    groups = [mesh.axes_size(some) for count in range(1, len(axes) + 1) for some in itertools.combinations(axes, count)]
    divided = tuple(frozenset(s for s in sizes if s % size == 0) for size in groups)
    return mesh.axis_names, tuple(axes), divided, tuple(size if size in sizes else 0 for size in groups[:-1])


def fixed_strategy(op: Op, mesh: DeviceMesh, conversions: Conversions) -> StrategySet:
    """The one strategy of a user's ``shard_map``.

    Raises:
        PinError: the op was written for another mesh.
    """
    assert op.layout is not None
    own = op.layout.mesh
    if set(zip(own.axis_names, own.shape, strict=True)) != set(zip(mesh.axis_names, mesh.shape, strict=True)):
        raise PinError(
            f"the jax.shard_map at {op.source} runs on the mesh {own}, the plan is for the mesh {mesh}. A shard_map fixes "
            "its own layout, so the plan's mesh must have the same axes. Plan with PlanOptions("
            f"mesh_shape={own.shape}, axis_names={own.axis_names}), or take the shard_map out."
        )

    def numbers(specs: tuple[ShardingSpec, ...]) -> tuple[np.ndarray, ...]:
        split = [ShardingSpec(tuple(tuple(a for a in d if mesh.axis_size(a) > 1) for d in s.dims)) for s in specs]
        return tuple(np.array([conversions.space(s.rank).index[s]], dtype=np.int64) for s in split)

    used = mesh.sort_axes({a for s in (*op.layout.operands, *op.layout.results) for a in s.sharded_axes})
    return StrategySet(
        assignment=np.full((1, sum(n > 1 for n in mesh.shape)), UNUSED, dtype=np.int64),
        operands=numbers(op.layout.operands),
        results=numbers(op.layout.results),
        used=(used,),
        reduce_axes=((),),
    )


def _choices(
    rule: OpShardingRule, mesh: DeviceMesh, axes: tuple[str, ...], unreduced_inputs: tuple[bool, ...]
) -> tuple[list[list[int]], tuple[tuple[int, str], ...]]:
    groups = [-2 - g for g, group in enumerate(rule.linear) if all(unreduced_inputs[i] for i in group)]
    choices: list[list[int]] = []
    ruled_out = []
    for axis in axes:
        options = [UNUSED]
        for i, factor in enumerate(rule.factors):
            if factor.kind is FactorKind.REPLICATED:
                continue
            if factor.size == 0 or factor.size % mesh.axis_size(axis):
                ruled_out.append((i, axis))
            else:
                options.append(i)
        choices.append(options + groups)
    return choices, tuple(ruled_out)


class _SpecNumbers:
    """Numbers of the specs of all tensors of one rule, under one assignment after the other.

    Most assignments agree in what concerns a tensor, so its specs are remembered by that.
    """

    def __init__(self, rule: OpShardingRule, mesh: DeviceMesh, axes: tuple[str, ...], conversions: Conversions) -> None:
        self.rule, self.mesh, self.axes = rule, mesh, axes
        self.tensors = (*rule.operands, *rule.results)
        self.factors = [tuple(f for dim in dims for f in dim) for dims in self.tensors]
        self.spaces = [conversions.space(len(dims)) for dims in self.tensors]
        self.known: list[dict[tuple[object, ...], int | None]] = [{} for _ in self.tensors]
        self.sizes: dict[tuple[str, ...], int] = {}

    def size(self, axes: tuple[str, ...]) -> int:
        if axes not in self.sizes:
            self.sizes[axes] = self.mesh.axes_size(axes)
        return self.sizes[axes]

    def of(self, row: tuple[int, ...]) -> tuple[int, ...] | None:
        """Of operands, then results; None where the assignment cannot be carried out."""
        rule, pairs = self.rule, tuple(zip(self.axes, row, strict=True))
        by_factor: dict[int, tuple[str, ...]] = {}
        for axis, choice in pairs:
            if choice >= 0:
                by_factor[choice] = (*by_factor.get(choice, ()), axis)
        for factor, used in by_factor.items():
            if rule.factors[factor].size % self.size(used):
                return None
        grouped = [(axis, -2 - choice) for axis, choice in pairs if choice <= -2]
        partial = tuple(a for a, c in pairs if c >= 0 and rule.factors[c].kind is FactorKind.REDUCTION)
        leftover = tuple(a for a, _ in grouped) + (partial if rule.reduce_op == "add" else ())
        numbers = []
        for position in range(len(self.tensors)):
            unreduced = leftover
            if position < len(rule.operands):
                unreduced = tuple(axis for axis, g in grouped if position in rule.linear[g])
            number = self.number(position, by_factor, unreduced)
            if number is None:
                return None
            numbers.append(number)
        return tuple(numbers)

    def number(self, position: int, by_factor: dict[int, tuple[str, ...]], unreduced: tuple[str, ...]) -> int | None:
        key = (unreduced, *(by_factor.get(f) for f in self.factors[position]))
        known = self.known[position]
        if key not in known:
            spec = self.spec(self.tensors[position], by_factor, unreduced)
            known[key] = None if spec is None else self.spaces[position].index[spec]
        return known[key]

    def spec(
        self, dims: tuple[tuple[int, ...], ...], by_factor: dict[int, tuple[str, ...]], unreduced: tuple[str, ...]
    ) -> ShardingSpec | None:
        spec: list[tuple[str, ...]] = []
        for dim in dims:
            used: tuple[str, ...] = ()
            complete = True
            for factor in dim:
                here = by_factor.get(factor, ())
                if here and not complete:
                    return None
                complete = complete and self.size(here) == self.rule.factors[factor].size
                used += here
            spec.append(used)
        return ShardingSpec(tuple(spec), unreduced)


def _pack(
    rule: OpShardingRule,
    axes: tuple[str, ...],
    rows: list[tuple[int, ...]],
    specs: list[tuple[int, ...]],
    ruled_out: tuple[tuple[int, str], ...],
) -> StrategySet:
    numbers = np.array(specs, dtype=np.int64).reshape(len(rows), -1)
    tensors = tuple(numbers[:, i].copy() for i in range(len(rule.operands) + len(rule.results)))
    operands, results = tensors[: len(rule.operands)], tensors[len(rule.operands) :]
    split = [tuple((axis, choice) for axis, choice in zip(axes, row, strict=True) if choice >= 0) for row in rows]
    at_once = rule.reduce_op != "add"
    reduced = {i for i, factor in enumerate(rule.factors) if at_once and factor.kind is FactorKind.REDUCTION}
    return StrategySet(
        assignment=np.array(rows, dtype=np.int64).reshape(len(rows), len(axes)),
        operands=operands,
        results=results,
        used=tuple(tuple(axis for axis, _ in pairs) for pairs in split),
        reduce_axes=tuple(tuple(axis for axis, factor in pairs if factor in reduced) for pairs in split),
        ruled_out=ruled_out,
    )
