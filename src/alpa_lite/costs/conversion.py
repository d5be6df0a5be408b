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
collective-permute  other tiles, whole or cut from the old ones collective-permute over the axes crossed
=================== =========================================== =============================================

A collective-permute moves tiles of the new spec: where the old tiles are larger, each of the devices that hold the same
one cuts out another part of it, so that together they send every part once.

Prices come from the cost model's ``linear(kind, axes)``; the cheapest sequence is a shortest path (Floyd-Warshall for the
prices of all pairs, Bellman-Ford from one source for the steps). One engine serves the ILP and lowering, so what is priced
is what runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.model import linear_price
from alpa_lite.costs.permutes import moved_axes

if TYPE_CHECKING:
    from alpa_lite.costs.model import CostModel

_SLICE_S = 1e-12  # a slice moves nothing between devices; the epsilon prefers fewer steps among equal prices
# Among equal prices, the larger tensor moves along its first dim: along any other one its result has to be copied together.
_INNER_DIM = 1 + 1e-8
TIE = 2.0**-16  # the same where prices are whole numbers: sums stay exact, and thousands of slices stay below one unit
_LESS = 1 - 4e-15  # sums in another order differ by this much
_TABLE_ENTRIES = 1 << 16  # of tables that are made together; more would leave the processor's cache
_SIZED_BY_RESULT = (CollectiveKind.ALL_GATHER, CollectiveKind.COLLECTIVE_PERMUTE)


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
    ends: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))  # [step] numbers of the specs before and after

    def __post_init__(self) -> None:
        axes = self._axes
        self.specs, self.index, steps, ends = _layouts(axes, self.rank)
        self.parts = np.array([[self.mesh.axes_size(d) for d in s.dims] for s in self.specs], dtype=np.int64).reshape(
            len(self.specs), self.rank
        )
        self.shards = self.parts.prod(axis=1) if self.rank else np.ones(len(self.specs), dtype=np.int64)
        permutes = list(self._permutes())
        self.steps = [*steps, *(step for step, _ in permutes)]
        self.ends = np.array([*ends, *(pair for _, pair in permutes)], dtype=np.int64).reshape(-1, 2)

    @property
    def _axes(self) -> tuple[str, ...]:
        return tuple(a for a, n in zip(self.mesh.axis_names, self.mesh.shape, strict=True) if n > 1)

    @property
    def gathered(self) -> np.ndarray:
        """bool ``[before, after]``: whether the dims after follow from those before by all-gathers, and are no partial sums."""
        return _gathered(self._axes, self.rank)

    def valid(self, shape: Sequence[int] | Sequence[tuple[int, ...]]) -> np.ndarray:
        """Which specs divide a shape evenly, or each of several (``[shape, spec]``); a dim of size 0 is never split."""
        sizes = np.array(shape, dtype=np.int64)[..., None, :]
        return ((sizes % self.parts == 0) & ((sizes > 0) | (self.parts == 1))).all(axis=-1)

    def _permutes(self) -> Iterator[tuple[Step, tuple[int, int]]]:
        kinds = {spec.unreduced: i for i, spec in enumerate(self.specs)}
        unreduced = np.array([kinds[spec.unreduced] for spec in self.specs])
        finer = (self.parts[None] % self.parts[:, None] == 0).all(axis=2) & (unreduced[:, None] == unreduced[None])
        axes = self._axes
        for a, b in np.argwhere(finer).tolist():
            changed = _changed_dims(axes, self.rank, a, b)
            if not changed:
                continue  # slices do it
            before, after, moved = self.specs[a], self.specs[b], _moved_axes(changed, self.mesh)
            step = Step(kind=CollectiveKind.COLLECTIVE_PERMUTE, axes=moved, before=before, after=after)
            yield step, (a, b)


@lru_cache(maxsize=64)
def _layouts(
    axes: tuple[str, ...], rank: int
) -> tuple[list[ShardingSpec], dict[ShardingSpec, int], list[Step], list[tuple[int, int]]]:
    """What no size of the axes changes: all specs, their numbers, all steps but permutes, and the numbers at their ends."""
    specs = list(_all_specs(axes, rank))
    index = {spec: i for i, spec in enumerate(specs)}
    steps = [step for spec in specs for step in _steps_from(spec, axes)]
    return specs, index, steps, [(index[step.before], index[step.after]) for step in steps]


def numbered_specs(axes: tuple[str, ...], rank: int) -> dict[ShardingSpec, int]:
    """The number of every spec over axes of more than one device, as ``SpecSpace`` has it, in order."""
    return _layouts(axes, rank)[1]


@lru_cache(maxsize=1024)
def _moved_axes(changed: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...], mesh: DeviceMesh) -> tuple[str, ...]:
    """Of a permute between two specs, by the axes of the dims that change; neither the others nor their order matter."""
    before, after = zip(*changed, strict=True)
    return moved_axes(ShardingSpec(before), ShardingSpec(after), mesh)


@lru_cache(maxsize=1 << 14)
def _changed_dims(
    axes: tuple[str, ...], rank: int, a: int, b: int
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """The axes of all dims before and after that differ between two specs, in order; nothing if slices make them differ."""
    before, after = (_layouts(axes, rank)[0][number].dims for number in (a, b))
    changed = sorted(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    return () if all(new[: len(old)] == old for old, new in changed) else tuple(changed)


@lru_cache(maxsize=64)
def _gathered(axes: tuple[str, ...], rank: int) -> np.ndarray:
    specs = _layouts(axes, rank)[0]
    dims = {dim: number for number, dim in enumerate(dict.fromkeys(d for spec in specs for d in spec.dims))}
    begins = np.array([[old[: len(new)] == new for new in dims] for old in dims], dtype=bool)
    found = np.repeat([[not spec.unreduced for spec in specs]], len(specs), axis=0)
    for dim in range(rank):
        of = np.array([dims[spec.dims[dim]] for spec in specs])
        found &= begins[of[:, None], of[None, :]]
    found.setflags(write=False)  # it is cached
    return found


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


def _steps_from(spec: ShardingSpec, axes: tuple[str, ...]) -> Iterator[Step]:
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
            if some == tuple(a for a in axes if a in some):
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
    _trees: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)

    def space(self, rank: int) -> SpecSpace:
        if rank not in self._spaces:
            self._spaces[rank] = SpecSpace(mesh=self.mesh, rank=rank)
        return self._spaces[rank]

    def table(self, shape: tuple[int, ...], itemsize: int) -> np.ndarray:
        """Seconds from every spec to every spec (``[from, to]``), inf where a spec does not divide or cannot be reached."""
        if (shape, itemsize) not in self._by_type:
            self.tables([(shape, itemsize)])
        return self._by_type[shape, itemsize]

    def tables(self, types: Sequence[tuple[tuple[int, ...], int]]) -> list[np.ndarray]:
        """The tables of several (shape, itemsize); those that are new are made together."""
        new: dict[int, dict[tuple[object, ...], tuple[np.ndarray, float]]] = {}
        keys = {}
        unknown = [kind for kind in types if kind not in self._by_type]
        by_rank: dict[int, list[tuple[int, ...]]] = {}
        for shape, _ in unknown:
            by_rank.setdefault(len(shape), []).append(shape)
        divided: dict[tuple[int, ...], np.ndarray] = {}
        for rank, shapes in by_rank.items():
            divided.update(zip(shapes, self.space(rank).valid(shapes), strict=True))
        for shape, itemsize in unknown:
            valid, volume = divided[shape], self.costs.volume(shape, itemsize)
            key = keys[shape, itemsize] = (len(shape), volume, valid.tobytes())
            if key not in self._tables:
                new.setdefault(len(shape), {})[key] = valid, volume
        for rank, found in new.items():
            space, pairs = self.space(rank), list(found.values())
            count = max(1, _TABLE_ENTRIES // len(space.specs) ** 2)
            parts = [pairs[p : p + count] for p in range(0, len(pairs), count)]
            made = [self._all_pairs(space, *map(np.array, zip(*part, strict=True))) for part in parts]
            self._tables.update(zip(found, itertools.chain.from_iterable(made), strict=True))
        self._by_type.update((kind, self._tables[key]) for kind, key in keys.items())
        return [self._by_type[kind] for kind in types]

    def _arc_arrays(self, rank: int) -> tuple[np.ndarray, ...]:
        """Per step: from, to, alpha, beta and the number of tiles whose bytes the collective is sized by."""
        if rank not in self._arcs:
            space = self.space(rank)
            source, target = space.ends.T.copy()
            inner = [is_inner(s) for s in space.steps]
            kinds = [(s.kind, s.axes, along) for s, along in zip(space.steps, inner, strict=True)]
            linear = {kind: self._linear(*kind) for kind in dict.fromkeys(kinds)}
            by_after = np.array([s.kind in _SIZED_BY_RESULT for s in space.steps], dtype=bool)
            tiles = np.where(by_after, space.shards[target], space.shards[source]) if len(source) else source
            alpha, beta = np.array([linear[kind] for kind in kinds]).reshape(-1, 2).T.copy()
            if not self.costs.rules.whole:
                beta *= np.where(inner, _INNER_DIM, 1.0)
            self._arcs[rank] = (source, target, alpha, beta, tiles)
        return self._arcs[rank]

    def _linear(self, kind: CollectiveKind | None, axes: tuple[str, ...], inner: bool) -> tuple[float, float]:
        """(alpha, beta) of a step, with what is added along other dims than the first."""
        if kind is None:
            return self.costs.slice_price or (TIE if self.costs.rules.whole else _SLICE_S), 0.0
        ordered = self.mesh.sort_axes(set(axes))
        price = self.costs.linear(kind, ordered)
        extra = self.costs.inner_extra(kind, ordered) if inner else (0.0, 0.0)
        return price[0] + extra[0], price[1] + extra[1]

    def _step_times(self, rank: int, volume: float | np.ndarray) -> np.ndarray:
        _, _, alpha, beta, tiles = self._arc_arrays(rank)
        with np.errstate(invalid="ignore"):  # inf * 0 for a forbidden collective of an empty tensor
            moved = beta * (volume / np.maximum(tiles, 1))
            return alpha + (np.floor(moved) if self.costs.rules.whole else moved)

    def _all_pairs(self, space: SpecSpace, valid: np.ndarray, volume: np.ndarray) -> np.ndarray:
        """[table, from, to] for several tables, by what divides (``[table, spec]``) and the volumes."""
        count, n = valid.shape
        dist = np.full((count, n, n), np.inf)
        source, target, *_ = self._arc_arrays(space.rank)
        if len(source):
            times = np.where(valid[:, source] & valid[:, target], self._step_times(space.rank, volume[:, None]), np.inf)
            order = np.lexsort((target, source))  # of steps between the same specs the cheapest counts
            first = np.flatnonzero(np.diff(source[order] * n + target[order], prepend=-1))
            dist[:, source[order[first]], target[order[first]]] = np.minimum.reduceat(times[:, order], first, axis=1)
        dist[:, np.arange(n), np.arange(n)] = np.where(valid, 0.0, np.inf)
        for k in np.flatnonzero(valid.any(axis=0)):
            np.minimum(dist, dist[:, :, k, None] + dist[:, None, k, :], out=dist)
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
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self._walk_back(self.space(len(shape)), shape, itemsize, before, after)
        return found

    def _walk_back(
        self, space: SpecSpace, shape: tuple[int, ...], itemsize: int, before: ShardingSpec, after: ShardingSpec
    ) -> tuple[Step, ...]:
        start, goal = space.index[before], space.index[after]
        valid, volume = space.valid(shape), self.costs.volume(shape, itemsize)
        key = (space.rank, volume, valid.tobytes(), start)
        if key not in self._trees:
            self._trees[key] = self._shortest(space, valid, volume, start)
        via = self._trees[key]
        source = self._arc_arrays(space.rank)[0]
        steps: list[Step] = []
        while goal != start:
            if via[goal] < 0:
                raise ValueError(f"no conversion from {before} to {after}")
            steps.append(space.steps[via[goal]])
            goal = int(source[via[goal]])
        return tuple(steps[::-1])

    def _shortest(self, space: SpecSpace, valid: np.ndarray, volume: float, start: int) -> np.ndarray:
        """Bellman-Ford from ``start``: per spec the step that reaches it cheapest, -1 for none. Deterministic."""
        source, target, *_ = self._arc_arrays(space.rank)
        via = np.full(len(space.specs), -1, dtype=np.int64)
        arcs = np.flatnonzero(valid[source] & valid[target])
        times = self._step_times(space.rank, volume)[arcs]
        best = np.full(len(space.specs), np.inf)
        best[start] = 0.0
        while True:
            offers = best[source[arcs]] + times
            round_best = np.full(len(space.specs), np.inf)
            np.minimum.at(round_best, target[arcs], offers)
            better = round_best < best * _LESS - 1e-18
            if not better.any():
                return via
            winners = np.flatnonzero(better[target[arcs]] & (offers == round_best[target[arcs]]))[::-1]
            via[target[arcs][winners]] = arcs[winners]  # of several equal ones the first is written last
            best = np.where(better, round_best, best)


def sizing_spec(step: Step) -> ShardingSpec:
    """The layout whose tile is the size of a step's collective."""
    return step.after if step.kind in _SIZED_BY_RESULT else step.before


def is_inner(step: Step) -> bool:
    """Whether a step joins or cuts another dim than the first, for which its result or operand is copied together.

    An all-to-all counts by the dim that it cuts, as it is measured.
    """
    return (step.source_dim if step.kind is CollectiveKind.ALL_GATHER else step.target_dim) > 0


def step_size_bytes(step: Step, shape: tuple[int, ...], itemsize: int, mesh: DeviceMesh) -> int:
    """Bytes of a step's collective by the convention of ``core/collective.py``."""
    return sizing_spec(step).local_size_bytes(shape, itemsize, mesh)


def step_price(step: Step, shape: tuple[int, ...], itemsize: int, mesh: DeviceMesh, costs: CostModel) -> float:
    """Price of one execution of a step, in the cost model's unit."""
    if step.kind is None:
        return costs.slice_price
    volume = costs.volume(shape, itemsize) / sizing_spec(step).num_shards(mesh)
    axes = mesh.sort_axes(step.axes)
    price = float(costs.collective(step.kind, axes, volume))
    return price + linear_price(costs.inner_extra(step.kind, axes), volume) if is_inner(step) else price
