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
from collections.abc import Hashable, Iterator
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
    rows: list[tuple[int, ...]] = []
    specs: list[tuple[tuple[ShardingSpec, ...], tuple[ShardingSpec, ...]]] = []
    for row in itertools.product(*choices):
        made = _specs_of(rule, mesh, axes, row)
        if made is not None:
            rows.append(row)
            specs.append(made)
    if sharded_contractions:
        full = [i for i, row in enumerate(rows) if UNUSED not in row]
        rows, specs = ([rows[i] for i in full], [specs[i] for i in full]) if full else (rows, specs)
    return _pack(rule, conversions, axes, rows, specs, ruled_out)


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


def _specs_of(
    rule: OpShardingRule, mesh: DeviceMesh, axes: tuple[str, ...], row: tuple[int, ...]
) -> tuple[tuple[ShardingSpec, ...], tuple[ShardingSpec, ...]] | None:
    """Specs of all tensors under one assignment, or None where it cannot be carried out."""
    by_factor: dict[int, tuple[str, ...]] = {}
    for axis, choice in zip(axes, row, strict=True):
        if choice >= 0:
            by_factor[choice] = (*by_factor.get(choice, ()), axis)
    for factor, used in by_factor.items():
        if rule.factors[factor].size % mesh.axes_size(used):
            return None
    grouped = [(axis, -2 - choice) for axis, choice in zip(axes, row, strict=True) if choice <= -2]
    partial = tuple(
        a for a, c in zip(axes, row, strict=True) if c >= 0 and rule.factors[c].kind is FactorKind.REDUCTION
    )
    operands = []
    for position, dims in enumerate(rule.operands):
        unreduced = tuple(axis for axis, g in grouped if position in rule.linear[g])
        spec = _tensor_spec(rule, mesh, dims, by_factor, unreduced)
        if spec is None:
            return None
        operands.append(spec)
    leftover = tuple(a for a, _ in grouped) + (partial if rule.reduce_op == "add" else ())
    results = []
    for dims in rule.results:
        spec = _tensor_spec(rule, mesh, dims, by_factor, leftover)
        if spec is None:
            return None
        results.append(spec)
    return tuple(operands), tuple(results)


def _tensor_spec(
    rule: OpShardingRule,
    mesh: DeviceMesh,
    dims: tuple[tuple[int, ...], ...],
    by_factor: dict[int, tuple[str, ...]],
    unreduced: tuple[str, ...],
) -> ShardingSpec | None:
    spec: list[tuple[str, ...]] = []
    for dim in dims:
        used: tuple[str, ...] = ()
        complete = True
        for factor in dim:
            here = by_factor.get(factor, ())
            if here and not complete:
                return None
            complete = complete and mesh.axes_size(here) == rule.factors[factor].size
            used += here
        spec.append(used)
    return ShardingSpec(tuple(spec), unreduced)


def _pack(
    rule: OpShardingRule,
    conversions: Conversions,
    axes: tuple[str, ...],
    rows: list[tuple[int, ...]],
    specs: list[tuple[tuple[ShardingSpec, ...], tuple[ShardingSpec, ...]]],
    ruled_out: tuple[tuple[int, str], ...],
) -> StrategySet:
    def numbers(tensors: Iterator[ShardingSpec], rank: int) -> np.ndarray:
        index = conversions.space(rank).index
        return np.array([index[s] for s in tensors], dtype=np.int64)

    operands = tuple(numbers((s[0][i] for s in specs), len(d)) for i, d in enumerate(rule.operands))
    results = tuple(numbers((s[1][i] for s in specs), len(d)) for i, d in enumerate(rule.results))
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
