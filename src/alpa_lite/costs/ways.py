"""The ways to run one op on what lies on each device: layouts of its operands and results that are proven the same.

A way assigns mesh axes to factors of the op's rule, as a strategy of the planner does; but only those ways are looked at
that the given layouts suggest, so that the work stays linear. ``follow`` uses them to derive a result's layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.layouts import TensorLayout, ends, layouts_of
from alpa_lite.costs.priced import without_trivial_axes
from alpa_lite.costs.sameness import Judge
from alpa_lite.errors import ArgumentsError, UnsupportedPattern

Splits = Mapping[int, tuple[str, ...]]
_ABOUT_PARTIAL_SUMS = (
    "whole to partial sums",
    "partial sums through a non-linear op",
    "partial sums on another mesh",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The layouts in which an op reads its operands and makes its results (None: a literal, a dropped result)."""

    operands: tuple[TensorLayout | None, ...]
    results: tuple[TensorLayout | None, ...]


def proven(judge: Judge, path: str, op: Op, way: Way) -> bool:
    """Whether all pairs of the op are the same."""
    try:
        return not any(differences for *_, differences in judge.compare(path, op, way.operands, way.results))
    except UnsupportedPattern as error:
        if error.pattern in _ABOUT_PARTIAL_SUMS:
            return False
        raise


def ways(judge: Judge, path: str, op: Op, given: Way) -> list[Way]:
    """Ways that the given layouts suggest, without duplicates; the last resort, everything whole, is always among them."""
    home = next(layout for layout in given.results if layout is not None)
    if op.layout is not None:
        return [_on(home, given, *shard_map_specs(op, home.mesh))]  # as the user wrote it
    maker = _Maker(judge=judge, path=path, op=op, given=given, home=home)
    return [way for way in dict.fromkeys(maker.all()) if proven(judge, path, op, way)]


def _on(home: TensorLayout, given: Way, operands: Iterable[ShardingSpec], results: Iterable[ShardingSpec]) -> Way:
    """These specs on the devices of ``home``, wherever there is a tensor."""

    def laid(
        layouts: tuple[TensorLayout | None, ...], specs: Iterable[ShardingSpec]
    ) -> tuple[TensorLayout | None, ...]:
        return tuple(g and replace(home, spec=s) for g, s in zip(layouts, specs, strict=True))

    return Way(operands=laid(given.operands, operands), results=laid(given.results, results))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """Turns axes of factors into ways of one op; everything runs on the devices of ``home``."""

    judge: Judge
    path: str
    op: Op
    given: Way
    home: TensorLayout

    def all(self) -> Iterator[Way]:
        """First from the results (convert before), then from each operand (convert after), then everything whole."""
        operands, results = self._given_splits()
        summed = self.judge.map_of(self.op.rule).summed if self.op.rule.reduce_op == "add" else frozenset[int]()
        sums = [{f: axes for f, axes in splits.items() if f in summed} for splits in operands]
        wanted = {a for layout in self.given.results if layout is not None for a in layout.spec.unreduced}
        wanted_sums = [{f: axes for f, axes in splits.items() if wanted >= set(axes)} for splits in sums]
        starts: list[list[Splits]] = [results, [*results, *wanted_sums], [*results, *sums]]
        for splits in operands:
            starts += [[splits], [splits, *operands], [splits, *operands, *results]]
        for start in [*starts, []]:
            yield from self._with_partial_sums(merged(start), summed)

    def _given_splits(self) -> tuple[list[Splits], list[Splits]]:
        """What the operands and results that lie on these devices do to the factors."""
        operands: list[Splits] = [
            self.judge.splits(self.path, self.op, i, layout)
            for i, layout in enumerate(self.given.operands)
            if layout is not None and layout.same_devices(self.home)
        ]
        results: list[Splits] = [
            self.judge.result_splits(self.path, self.op, j, layout)
            for j, layout in enumerate(self.given.results)
            if layout is not None and layout.same_devices(self.home)
        ]
        return operands, results

    def _with_partial_sums(self, splits: Splits, summed: frozenset[int]) -> Iterator[Way]:
        """Partial sums that the op makes, and those that a linear op may pass on."""
        made = tuple(axis for factor, axes in splits.items() if factor in summed for axis in axes)
        used = {axis for axes in splits.values() for axis in axes}
        yield self._way(splits, made, (), ())
        for group in self.op.rule.linear:
            layouts = [layout for i in group if (layout := self.given.operands[i]) is not None]
            held = [layout.spec.unreduced for layout in layouts if layout.same_devices(self.home)]
            common = tuple(a for a in (held[0] if held else ()) if all(a in h for h in held) and a not in used)
            if common:
                yield self._way(splits, made, group, common)

    def _way(self, splits: Splits, made: tuple[str, ...], group: tuple[int, ...], passed: tuple[str, ...]) -> Way:
        factors, mesh = self.judge.map_of(self.op.rule), self.home.mesh
        operands = [
            factors.spec(dims, splits, passed if i in group else (), mesh)
            for i, dims in enumerate(self.op.rule.operands)
        ]
        results = [factors.spec(dims, splits, made + passed, mesh) for dims in self.op.rule.results]
        return _on(self.home, self.given, operands, results)


def shard_map_specs(op: Op, mesh: DeviceMesh) -> tuple[list[ShardingSpec], list[ShardingSpec]]:
    """Of the operands and results of a user's ``shard_map``."""
    assert op.layout is not None
    operands, results = (
        [without_trivial_axes(spec, mesh) for spec in side] for side in (op.layout.operands, op.layout.results)
    )
    return operands, results


def merged(parts: Iterable[Splits]) -> Splits:
    """The first that splits a factor, or uses an axis, wins."""
    made: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()
    for part in parts:
        for factor, axes in part.items():
            if factor not in made and not used & set(axes):
                made[factor] = axes
                used |= set(axes)
    return made


def follow(
    program: Program, specs: Mapping[int | str, Any], mesh: DeviceMesh | None = None
) -> dict[int | str, TensorLayout]:
    """Layouts of all tensors from those of some: a result follows its op's operands, the most split one first.

    Partial sums are joined where they arise. What depends on no tensor (an iota, a broadcast literal) follows its first
    reader; arguments and constants that are not mentioned are whole. Nothing is searched: this is a start for
    ``needs_resharding``; to decide well is the planner's work.

    Args:
        program, specs, mesh: as for ``needs_resharding``; ``specs`` may leave tensors out.

    Raises:
        UnsupportedPattern, ArgumentsError: as for ``needs_resharding``.

    Example:
        >>> specs = al.analysis.follow(program, {"0/w": "[_,x]"}, mesh)
    """
    layouts = layouts_of(program, specs, mesh)
    judge = Judge(program=program)
    free: set[int] = set()
    for index, op in enumerate(program.ops):
        if not any(ends(op)):
            free |= {v for v in op.outputs if v >= 0 and v not in layouts}
            continue
        home = next((layouts[v] for v in op.inputs if v in layouts), None) or _anywhere(op, layouts, mesh)
        read = [layouts.get(v) for v in op.inputs]
        for i, value in enumerate(op.inputs):
            if value >= 0 and read[i] is None:
                made = _following(judge, str(index), op, read, home, op.rule.operands[i]) if value in free else None
                spec = made or ShardingSpec.replicated(len(program.values[value].shape))
                layouts[value] = read[i] = replace(home, spec=spec)
        for j, value in enumerate(op.outputs):
            if value >= 0 and value not in layouts:
                made = shard_map_specs(op, home.mesh)[1][j] if op.layout is not None else None
                spec = made or _following(judge, str(index), op, read, home, op.rule.results[j])
                layouts[value] = replace(home, spec=spec)
    return {**layouts}


def _anywhere(op: Op, layouts: Mapping[int, TensorLayout], mesh: DeviceMesh | None) -> TensorLayout:
    """Whole, beside a result of the op or on ``mesh``: where an op runs of whose operands nothing is known."""
    beside = next((layouts[v] for v in op.outputs if v in layouts), None)
    if beside is not None:
        return beside
    if mesh is None:
        raise ArgumentsError(
            f"specs says nothing of the tensors of {op.primitive} at {op.source}, and `mesh` is not given. A tensor without "
            "a spec lies whole on `mesh`. In the call of follow. Give one of the two."
        )
    return TensorLayout(spec=ShardingSpec(()), mesh=mesh)


def _following(
    judge: Judge,
    path: str,
    op: Op,
    read: list[TensorLayout | None],
    home: TensorLayout,
    dims: tuple[tuple[int, ...], ...],
) -> ShardingSpec:
    """Spec of a tensor of the op, given by its dims in the rule, that follows the operands; without partial sums."""
    factors = judge.map_of(op.rule)
    have = [judge.splits(path, op, i, r) for i, r in enumerate(read) if r is not None and r.same_devices(home)]
    kept = [{f: axes for f, axes in splits.items() if f not in factors.summed} for splits in have]
    kept.sort(key=lambda splits: -math.prod(home.mesh.axes_size(axes) for axes in splits.values()))
    return factors.spec(dims, merged(kept), (), home.mesh)
