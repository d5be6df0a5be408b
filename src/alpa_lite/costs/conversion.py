"""Conversions between sharding specs on one mesh: the cheapest sequence of collectives, its price and its steps.

The specs of one tensor are the nodes of a graph whose arcs are single steps:

=================== =========================================== =============================================
step                effect on the spec                          collective
=================== =========================================== =============================================
slice               append an unused axis to a dim              none
all-gather          drop the last axes of a dim                 all-gather over them
all-to-all          move the last axes of a dim behind another  all-to-all over them
all-reduce          drop unreduced axes                         all-reduce over them
reduce-scatter      move unreduced axes behind a dim            reduce-scatter over them
collective-permute  same tile grid, other devices               collective-permute over the axes that changed
=================== =========================================== =============================================

Prices come from the cost model's ``linear(kind, axes)``; the cheapest sequence is a shortest path (Floyd-Warshall for all
pairs, walked back for the steps). One engine serves the ILP and lowering, so what is priced is what runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec

if TYPE_CHECKING:
    from alpa_lite.costs.model import CostModel

_SLICE_S = 1e-12  # a slice moves nothing between devices; the epsilon prefers fewer steps among equal prices


@dataclass(eq=False, slots=True)
class SpecSpace:
    """All specs of tensors of one rank on one mesh, numbered, and the single steps between them.

    Axes of size 1 never appear: splitting over them changes nothing.
    """

    mesh: DeviceMesh
    rank: int
    specs: list[ShardingSpec] = field(default_factory=list)
    index: dict[ShardingSpec, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    shards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    parts: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [spec, dim] number of tiles

    def __post_init__(self) -> None:
        axes = tuple(a for a, n in zip(self.mesh.axis_names, self.mesh.shape, strict=True) if n > 1)
        self.specs = list(_all_specs(axes, self.rank))
        self.index = {s: i for i, s in enumerate(self.specs)}
        self.parts = np.array([[self.mesh.axes_size(d) for d in s.dims] for s in self.specs], dtype=np.int64).reshape(
            len(self.specs), self.rank
        )
        self.shards = self.parts.prod(axis=1) if self.rank else np.ones(len(self.specs), dtype=np.int64)
        for spec in self.specs:
            self.steps += _steps_from(spec, self.mesh, axes)
        self.steps += self._permutes()

    def valid(self, shape: tuple[int, ...]) -> np.ndarray:
        """Which specs divide a shape evenly; a dim of size 0 is never split."""
        sizes = np.array(shape, dtype=np.int64)
        return ((sizes % self.parts == 0) & ((sizes > 0) | (self.parts == 1))).all(axis=1)

    def _permutes(self) -> Iterator[Step]:
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, spec in enumerate(self.specs):
            groups.setdefault((tuple(self.parts[i]), spec.unreduced), []).append(i)
        for members in groups.values():
            for a, b in itertools.permutations(members, 2):
                before, after = self.specs[a], self.specs[b]
                axes = self.mesh.sort_axes(
                    {x for p, q in zip(before.dims, after.dims, strict=True) if p != q for x in p + q}
                )
                yield Step(kind=CollectiveKind.COLLECTIVE_PERMUTE, axes=axes, before=before, after=after)


def _all_specs(axes: tuple[str, ...], rank: int) -> Iterator[ShardingSpec]:
    """Every spec, replicated first; each axis sits on a dim, is unreduced, or is unused."""
    places = range(-2, rank)  # -2 unused, -1 unreduced
    for choice in itertools.product(places, repeat=len(axes)):
        unreduced = tuple(a for a, p in zip(axes, choice, strict=True) if p == -1)
        orders = [
            list(itertools.permutations([a for a, p in zip(axes, choice, strict=True) if p == d])) for d in range(rank)
        ]
        for dims in itertools.product(*orders):
            yield ShardingSpec(tuple(dims), unreduced)


def _replace_dim(spec: ShardingSpec, changes: dict[int, tuple[str, ...]], unreduced: tuple[str, ...]) -> ShardingSpec:
    return ShardingSpec(tuple(changes.get(d, axes) for d, axes in enumerate(spec.dims)), unreduced)


def _steps_from(spec: ShardingSpec, mesh: DeviceMesh, axes: tuple[str, ...]) -> Iterator[Step]:
    kinds = CollectiveKind
    rank = spec.rank
    unused = [a for a in axes if a not in spec.sharded_axes and a not in spec.unreduced]
    for dim, a in itertools.product(range(rank), unused):
        after = _replace_dim(spec, {dim: (*spec.dims[dim], a)}, spec.unreduced)
        yield Step(kind=None, axes=(a,), target_dim=dim, before=spec, after=after)
    for dim in range(rank):
        for cut in range(len(spec.dims[dim])):
            kept, moved = spec.dims[dim][:cut], spec.dims[dim][cut:]
            after = _replace_dim(spec, {dim: kept}, spec.unreduced)
            yield Step(kind=kinds.ALL_GATHER, axes=moved, source_dim=dim, before=spec, after=after)
            for other in range(rank):
                if other != dim:
                    after = _replace_dim(spec, {dim: kept, other: spec.dims[other] + moved}, spec.unreduced)
                    yield Step(
                        kind=kinds.ALL_TO_ALL, axes=moved, source_dim=dim, target_dim=other, before=spec, after=after
                    )
    for count in range(1, len(spec.unreduced) + 1):
        for some in itertools.permutations(spec.unreduced, count):
            left = tuple(a for a in spec.unreduced if a not in some)
            if some == mesh.sort_axes(set(some)):
                yield Step(kind=kinds.ALL_REDUCE, axes=some, before=spec, after=_replace_dim(spec, {}, left))
            for dim in range(rank):
                after = _replace_dim(spec, {dim: spec.dims[dim] + some}, left)
                yield Step(kind=kinds.REDUCE_SCATTER, axes=some, target_dim=dim, before=spec, after=after)


@dataclass(eq=False, slots=True)
class Conversions:
    """Prices and steps of all conversions on one mesh under one cost model; memoised by rank, divisibility and bytes."""

    mesh: DeviceMesh
    costs: CostModel
    _spaces: dict[int, SpecSpace] = field(default_factory=dict)
    _arcs: dict[int, tuple[np.ndarray, ...]] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _by_type: dict[tuple[tuple[int, ...], int], np.ndarray] = field(default_factory=dict)
    _paths: dict[tuple[object, ...], tuple[Step, ...]] = field(default_factory=dict)

    def space(self, rank: int) -> SpecSpace:
        if rank not in self._spaces:
            self._spaces[rank] = SpecSpace(mesh=self.mesh, rank=rank)
        return self._spaces[rank]

    def table(self, shape: tuple[int, ...], itemsize: int) -> np.ndarray:
        """Seconds from every spec to every spec (``[from, to]``), inf where a spec does not divide or cannot be reached."""
        found = self._by_type.get((shape, itemsize))
        if found is None:
            space = self.space(len(shape))
            valid = space.valid(shape)
            key = (len(shape), math.prod(shape) * itemsize, valid.tobytes())
            if key not in self._tables:
                self._tables[key] = self._all_pairs(space, valid, math.prod(shape) * itemsize)
            found = self._by_type[(shape, itemsize)] = self._tables[key]
        return found

    def _arc_arrays(self, rank: int) -> tuple[np.ndarray, ...]:
        """Per step: from, to, alpha, beta and the number of tiles whose bytes the collective is sized by."""
        if rank not in self._arcs:
            space = self.space(rank)
            source = np.array([space.index[s.before] for s in space.steps], dtype=np.int64)
            target = np.array([space.index[s.after] for s in space.steps], dtype=np.int64)
            linear = [
                (_SLICE_S, 0.0) if s.kind is None else self.costs.linear(s.kind, self.mesh.sort_axes(set(s.axes)))
                for s in space.steps
            ]
            gather = np.array([s.kind is CollectiveKind.ALL_GATHER for s in space.steps], dtype=bool)
            tiles = np.where(gather, space.shards[target], space.shards[source]) if len(source) else source
            alpha, beta = (np.array([x[i] for x in linear], dtype=np.float64) for i in (0, 1))
            self._arcs[rank] = (source, target, alpha, beta, tiles)
        return self._arcs[rank]

    def _step_times(self, rank: int, size_bytes: int) -> np.ndarray:
        _, _, alpha, beta, tiles = self._arc_arrays(rank)
        with np.errstate(invalid="ignore"):  # inf * 0 for a forbidden collective of an empty tensor
            return alpha + beta * (size_bytes / np.maximum(tiles, 1))

    def _all_pairs(self, space: SpecSpace, valid: np.ndarray, size_bytes: int) -> np.ndarray:
        n = len(space.specs)
        dist = np.full((n, n), np.inf)
        source, target, *_ = self._arc_arrays(space.rank)
        if len(source):
            ok = valid[source] & valid[target]
            np.minimum.at(dist, (source[ok], target[ok]), self._step_times(space.rank, size_bytes)[ok])
        np.fill_diagonal(dist, np.where(valid, 0.0, np.inf))
        for k in np.flatnonzero(valid):
            np.minimum(dist, dist[:, k, None] + dist[None, k, :], out=dist)
        dist[dist < 64 * _SLICE_S] = 0.0
        return dist

    def time_s(self, before: ShardingSpec, after: ShardingSpec, shape: tuple[int, ...], itemsize: int) -> float:
        space = self.space(len(shape))
        return float(self.table(shape, itemsize)[space.index[before], space.index[after]])

    def steps(
        self, before: ShardingSpec, after: ShardingSpec, shape: tuple[int, ...], itemsize: int
    ) -> tuple[Step, ...]:
        """The cheapest sequence (ties: fewest steps, then first in step order); ``ValueError`` if there is none."""
        if before == after:
            return ()
        key = (before, after, shape, itemsize)
        if key not in self._paths:
            size_bytes = math.prod(shape) * itemsize
            space = self.space(len(shape))
            valid = space.valid(shape)
            self._paths[key] = self._shortest(space, valid, size_bytes, space.index[before], space.index[after])
        return self._paths[key]

    def _shortest(
        self, space: SpecSpace, valid: np.ndarray, size_bytes: int, start: int, goal: int
    ) -> tuple[Step, ...]:
        """Bellman-Ford over the few hundred steps; deterministic."""
        source, target, *_ = self._arc_arrays(space.rank)
        ok = np.flatnonzero(valid[source] & valid[target])
        times = self._step_times(space.rank, size_bytes)
        best = np.full(len(space.specs), np.inf)
        best[start] = 0.0
        via = np.full(len(space.specs), -1, dtype=np.int64)
        for _ in range(len(space.specs)):
            offer = best[source[ok]] + times[ok]
            changed = False
            for arc in ok[offer < best[target[ok]] - 1e-18]:
                new = best[source[arc]] + times[arc]
                if new < best[target[arc]] - 1e-18:
                    best[target[arc]], via[target[arc]], changed = new, arc, True
            if not changed:
                break
        if not np.isfinite(best[goal]):
            raise ValueError(f"no conversion from {space.specs[start]} to {space.specs[goal]}")
        steps: list[Step] = []
        while goal != start:
            steps.append(space.steps[via[goal]])
            goal = int(source[via[goal]])
        return tuple(steps[::-1])


def step_size_bytes(step: Step, shape: tuple[int, ...], itemsize: int, mesh: DeviceMesh) -> int:
    """Bytes of a step's collective by the convention of ``core/collective.py``."""
    spec = step.after if step.kind is CollectiveKind.ALL_GATHER else step.before
    return spec.local_size_bytes(shape, itemsize, mesh)
