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
from functools import lru_cache

import numpy as np

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op
from alpa_lite.core.rule import FactorKind, OpShardingRule
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import Conversions, numbered_specs
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
    """

    assignment: np.ndarray
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]
    used: tuple[tuple[str, ...], ...]
    reduce_axes: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.used)

    def split(self, mesh: DeviceMesh) -> np.ndarray:
        """Per strategy, over how many devices the op's work is split (float64)."""
        return np.array([mesh.axes_size(axes) for axes in self.used], dtype=np.float64)


class KnownStrategies:
    """Strategies of rules, each rule enumerated once for all meshes with the same axes: of what axes could do, their sizes
    decide which part they can do.

    Attributes:
        over: axes of a mesh that are enumerated together, for meshes as well on which some of them have one device.
    """

    def __init__(self) -> None:
        self.over: tuple[str, ...] = ()
        self._names: tuple[DeviceMesh, tuple[str, ...], tuple[str, ...]] | None = None  # of the last mesh
        self._axes: dict[tuple[str, ...], _Axes] = {}
        self._every: dict[tuple[object, ...], _Assignments] = {}
        self._by_rule: dict[tuple[object, ...], tuple[OpShardingRule, _Assignments]] = {}

    def of(
        self,
        rule: OpShardingRule,
        mesh: DeviceMesh,
        *,
        unreduced_inputs: tuple[bool, ...],
        sharded_contractions: bool = False,
    ) -> StrategySet:
        """All strategies of ``rule`` on ``mesh``.

        Args:
            unreduced_inputs: per operand, whether its producer can leave it unreduced at all (prunes dead strategies).
            sharded_contractions: keep only strategies that use every mesh axis (Alpa: no repeated matmuls), if there are any.
        """
        known = self._names
        if known is None or known[0] is not mesh or known[1] != self.over:
            names = tuple(a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1)
            known = self._names = mesh, self.over, self.over if set(self.over).issuperset(names) else names
        names = known[2]
        quick = id(rule), names, unreduced_inputs
        found = self._by_rule.get(quick)
        if found is None:
            found = self._by_rule[quick] = rule, self._assignments(rule, names, unreduced_inputs)
        return found[1].on(mesh, sharded_contractions)

    def _assignments(
        self, rule: OpShardingRule, names: tuple[str, ...], unreduced_inputs: tuple[bool, ...]
    ) -> _Assignments:
        key = rule.operands, rule.results, rule.factors, rule.reduce_op, rule.linear, names, unreduced_inputs
        if key not in self._every:
            axes = self._axes.setdefault(names, _Axes(names))
            self._every[key] = _Assignments(rule, axes, unreduced_inputs)
        return self._every[key]


class _Axes:
    """The axes of more than one device of some meshes; sets of them are bit masks."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.bits = 1 << np.arange(len(names), dtype=np.int64)
        self.subsets = [tuple(a for i, a in enumerate(names) if mask >> i & 1) for mask in range(1 << len(names))]
        self._demands: dict[tuple[int, bool], int] = {(0, False): 0}
        self._met: dict[tuple[int, ...], np.ndarray] = {}
        self._numbers: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        self._among: dict[tuple[tuple[str, ...], int], np.ndarray] = {}
        self._there: dict[DeviceMesh, tuple[tuple[str, ...], list[bool], bool]] = {}
        self._last: tuple[DeviceMesh, int, np.ndarray] | None = None  # mesh, number of demands, which are met

    def demand(self, size: int, *, complete: bool = False) -> int:
        """The number of a demand, to which a set of axes is added: that it divides the size, or splits it completely.

        Number 0 is always met.
        """
        return self._demands.setdefault((size, complete), len(self._demands)) << len(self.names)

    def there(self, mesh: DeviceMesh) -> tuple[tuple[str, ...], list[bool], bool]:
        """The axes of more than one device on a mesh, which of all they are, and whether all."""
        found = self._there.get(mesh)
        if found is None:
            columns = [mesh.axis_size(a) > 1 for a in self.names]
            found = self._there[mesh] = tuple(itertools.compress(self.names, columns)), columns, all(columns)
        return found

    def met(self, mesh: DeviceMesh) -> np.ndarray:
        """bool by number of a demand and its set of axes."""
        last = self._last
        if last is not None and last[0] is mesh and last[1] == len(self._demands):
            return last[2]
        sizes = tuple(map(mesh.axis_size, self.names))
        met = self._met.get(sizes)
        if met is None or len(met) < len(self._demands) << len(self.names):
            parts = np.array([mesh.axes_size(some) for some in self.subsets])
            size, complete = np.array(list(self._demands)).T[:, :, None]
            met = self._met[sizes] = np.where(complete, size == parts, size % parts == 0).ravel()
        self._last = mesh, len(self._demands), met
        return met

    def spec_numbers(self, rank: int, order: tuple[int, ...]) -> np.ndarray:
        """Spec numbers by where each axis is (see ``_Assignments.specs``); of axes of one dim the first in ``order`` is major."""
        if (rank, order) not in self._numbers:
            index, names = numbered_specs(self.names, rank), self.names
            found = []
            for place in itertools.product(range(rank + 2), repeat=len(names)):
                dims = tuple(tuple(names[a] for a in order if place[a] == dim + 2) for dim in range(rank))
                found.append(index[ShardingSpec(dims, tuple(a for a, p in zip(names, place, strict=True) if p == 1))])
            self._numbers[rank, order] = np.array(found, dtype=np.int64)
        return self._numbers[rank, order]

    def numbers_among(self, there: tuple[str, ...], rank: int) -> np.ndarray:
        """Per spec, its number where the other axes have one device; -1 if it names one of them."""
        if (there, rank) not in self._among:
            own = numbered_specs(there, rank)
            found = [own.get(spec, -1) for spec in numbered_specs(self.names, rank)]
            self._among[there, rank] = np.array(found, dtype=np.int64)
        return self._among[there, rank]


class _Assignments:
    """All assignments of axes to the factors of one rule, with what each demands of the axes' sizes."""

    def __init__(self, rule: OpShardingRule, axes: _Axes, unreduced_inputs: tuple[bool, ...]) -> None:
        self.rule, self.axes = rule, axes
        factors = [i for i, f in enumerate(rule.factors) if f.size > 1 and f.kind is not FactorKind.REPLICATED]
        groups = [-2 - g for g, group in enumerate(rule.linear) if all(unreduced_inputs[i] for i in group)]
        self.options = [UNUSED, *factors, *groups]
        self.taken = _tuples(len(self.options), len(axes.names))
        self.rows = np.array(self.options, dtype=np.int64)[self.taken]
        self.demands = self._demands(factors)
        tensors = [self.specs(position) for position in range(len(rule.operands) + len(rule.results))]
        self.tensors = np.array(tensors, dtype=np.int64).reshape(-1, len(self.rows))
        self.used = self._axes_where(self.rows >= 0)
        at_once = [i for i in rule.reduction_factors if rule.reduce_op != "add"]
        self.reduced: list[tuple[str, ...]] = (
            self._axes_where(np.isin(self.rows, at_once)) if at_once else [()] * len(self.rows)
        )
        self._known: dict[tuple[bytes, tuple[str, ...], bool], StrategySet] = {}
        self._on: dict[tuple[DeviceMesh, bool], StrategySet] = {}

    def on(self, mesh: DeviceMesh, sharded_contractions: bool) -> StrategySet:
        """Those that are possible on a mesh."""
        found = self._on.get((mesh, sharded_contractions))
        if found is None:
            found = self._on[mesh, sharded_contractions] = self._possible(mesh, sharded_contractions)
        return found

    def _possible(self, mesh: DeviceMesh, sharded_contractions: bool) -> StrategySet:
        possible = np.logical_and.reduce(self.axes.met(mesh)[self.demands], axis=0)
        there, columns, everywhere = self.axes.there(mesh)
        if not everywhere:
            possible &= (self.rows[:, np.logical_not(columns)] == UNUSED).all(axis=1)
        if sharded_contractions:
            full = possible & (self.rows[:, columns] != UNUSED).all(axis=1)
            possible = full if full.any() else possible
        mask = possible.tobytes()  # one byte each, 0 or 1
        # Ops of both kinds of contractions must not share what differs on other meshes (``derive``).
        key = mask, there, sharded_contractions
        if key not in self._known:
            count = len(self.rule.operands)
            tensors = tuple(self.tensors.compress(possible, axis=1))
            if not everywhere:
                dims = (*self.rule.operands, *self.rule.results)
                tensors = tuple(self.axes.numbers_among(there, len(d))[t] for d, t in zip(dims, tensors, strict=True))
            self._known[key] = StrategySet(
                assignment=self.rows[possible] if everywhere else self.rows[possible][:, columns],
                operands=tensors[:count],
                results=tensors[count:],
                used=tuple(itertools.compress(self.used, mask)),
                reduce_axes=tuple(itertools.compress(self.reduced, mask)),
            )
        return self._known[key]

    def _axes_where(self, chosen: np.ndarray) -> list[tuple[str, ...]]:
        return [self.axes.subsets[mask] for mask in (chosen @ self.axes.bits).tolist()]

    def _demands(self, factors: list[int]) -> np.ndarray:
        """[demand, assignment]: all axes of a factor divide it; those of major factors split them, or minor ones stay whole."""
        sizes = [factor.size for factor in self.rule.factors]
        masks = {factor: (self.rows == factor) @ self.axes.bits for factor in factors}
        found = [np.zeros(len(self.rows), dtype=np.int64)]
        found += [self.axes.demand(sizes[factor]) + mask for factor, mask in masks.items()]
        dims = {dim for dims in (*self.rule.operands, *self.rule.results) for dim in dims if len(dim) > 1}
        ordered = {(major, minor) for dim in dims for major, minor in itertools.combinations(dim, 2) if minor in masks}
        for major, minor in sorted(ordered):
            complete = self.axes.demand(sizes[major], complete=True) + masks.get(major, 0)
            found.append(np.where(masks[minor] > 0, complete, 0))
        return np.array(found)

    def specs(self, position: int) -> np.ndarray:
        """Per assignment, the spec number of a tensor: of an operand, or behind these of a result."""
        rule, names = self.rule, self.axes.names
        dims = (*rule.operands, *rule.results)[position]
        is_result = position >= len(rule.operands)
        places, turns = [], []  # 0: not there, 1: unreduced, 2 and more: dims; and the order of factors in the tensor
        where = {f: (dim + 2, turn) for turn, (dim, f) in enumerate((d, f) for d, fs in enumerate(dims) for f in fs)}
        for option in self.options:
            partial = is_result and option <= -2
            if option <= -2:
                partial |= not is_result and position in rule.linear[-2 - option]
            elif option >= 0 and is_result and rule.reduce_op == "add":
                partial = rule.factors[option].kind is FactorKind.REDUCTION
            place, turn = (1, 0) if partial else where.get(option, (0, 0))
            places.append(place)
            turns.append(turn)
        rank, num_axes = len(dims), len(names)
        number = np.array(places)[self.taken] @ (rank + 2) ** np.arange(num_axes - 1, -1, -1, dtype=np.int64)
        in_order = tuple(range(num_axes))
        found = self.axes.spec_numbers(rank, in_order)[number]
        if any(len(fs) > 1 for fs in dims):
            orders = np.array(turns)[self.taken].argsort(axis=1, kind="stable")
            for order in itertools.permutations(in_order):
                rows = (orders == order).all(axis=1)
                if order != in_order and rows.any():
                    found[rows] = self.axes.spec_numbers(rank, order)[number[rows]]
        return found


@lru_cache(maxsize=64)
def _tuples(count: int, length: int) -> np.ndarray:
    """All tuples of numbers below ``count``, the last one running fastest."""
    return np.indices((count,) * length).reshape(length, count**length).T


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
