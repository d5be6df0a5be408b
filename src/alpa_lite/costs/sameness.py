"""Do the layouts of two neighbouring tensors agree, so that the op between them needs no communication?

In: a program and the layout of each of its tensors. Out: one ``Verdict`` per producer-consumer pair (an operand and a
result of one op). Pairs are judged one by one, so that the work is linear in their number; no layout is searched for.

A pair is the same only if that is *proven*: along every mesh axis, the place of the axis on the factors of the op's sharding
rule must be equal on both sides (``factor_map``). Both directions count: an axis that splits only the operand and one that
splits only the result are both a resharding. An axis on a dim that the rule does not map proves nothing, hence resharding.
Partial sums are the same where the op makes them: it sums over the axis, or is linear in operands that hold partial sums.
What the analysis cannot speak about raises ``UnsupportedPattern`` (``patterns``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.rule import Factor, OpShardingRule
from alpa_lite.costs.factor_map import PARTIAL, WHOLE, FactorBoundary, FactorMap, Place, TensorDims
from alpa_lite.costs.layouts import TensorLayout, layouts_of, require_layouts
from alpa_lite.costs.patterns import Change, Side, pattern_of, unsupported
from alpa_lite.costs.verdicts import Difference, Verdict, Verdicts
from alpa_lite.errors import ArgumentsError, user_line

Places = Mapping[str, Place]


def needs_resharding(program: Program, specs: Mapping[int | str, Any], mesh: DeviceMesh | None = None) -> Verdicts:
    """Which producer-consumer pairs of a program need a resharding, along which axes, and why.

    Args:
        program: straight-line; ``al.analysis.trace(fn, *args)`` makes one. Bodies of control flow are programs of their own.
        specs: per tensor (value number, or path of an argument or result) a ``ShardingSpec``, its text, a ``PartitionSpec``
            or a ``TensorLayout``, which names another mesh. Scalars that are not mentioned are whole.
        mesh: of all specs that do not name one.

    Raises:
        UnsupportedPattern: naming the pattern (``al.analysis.patterns()``).
        ArgumentsError: specs that do not fit the program.

    Example:
        >>> program = al.analysis.trace(lambda a, b: a @ b, a, b)
        >>> print(al.analysis.needs_resharding(program, {"0": "[x,_]", "1": "[_,_]", "out": "[x,_]"}, mesh))
        0 of 2 pairs need resharding
    """
    if not isinstance(program, Program):
        raise ArgumentsError(
            f"needs_resharding was given {program!r:.60} as its program. It must be what al.analysis.trace(fn, *args) returns. "
            f"At {user_line()}. Trace the function first."
        )
    layouts = layouts_of(program, specs, mesh)
    require_layouts(program, layouts)
    judge = Judge(program=program)
    return Verdicts(tuple(v for i, op in enumerate(program.ops) for v in judge.verdicts(str(i), op, layouts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Judges the pairs of one program's ops; remembers prepared rules."""

    program: Program
    _maps: dict[int, FactorMap] = field(default_factory=dict)

    def map_of(self, rule: OpShardingRule) -> FactorMap:
        """Prepared once per rule object, of which thousands of ops share a few hundred."""
        found = self._maps.get(id(rule))
        if found is None:
            found = self._maps[id(rule)] = FactorMap.of(rule)
        return found

    def splits(self, path: str, op: Op, operand: int, layout: TensorLayout) -> dict[int, tuple[str, ...]]:
        """Axes by factor of one operand; see ``FactorMap.splits``."""
        factors = self.map_of(op.rule)
        return factors.splits(self._places(path, op, factors, op.rule.operands[operand], op.inputs[operand], layout))

    def result_splits(self, path: str, op: Op, result: int, layout: TensorLayout) -> dict[int, tuple[str, ...]]:
        """The same of one result."""
        factors = self.map_of(op.rule)
        return factors.splits(self._places(path, op, factors, op.rule.results[result], op.outputs[result], layout))

    def verdicts(self, path: str, op: Op, layouts: Mapping[int, TensorLayout]) -> Iterator[Verdict]:
        """Of all pairs of one op, each value laid out as ``layouts`` says."""
        operands = [layouts[v] if v >= 0 else None for v in op.inputs]
        results = [layouts[v] if v >= 0 else None for v in op.outputs]
        for operand, result, differences in self.compare(path, op, operands, results):
            yield Verdict(
                op=path,
                primitive=op.primitive,
                operand=operand,
                result=result,
                producer=op.inputs[operand],
                consumer=op.outputs[result],
                differences=differences,
                source=op.source,
            )

    def compare(
        self, path: str, op: Op, operands: Sequence[TensorLayout | None], results: Sequence[TensorLayout | None]
    ) -> Iterator[tuple[int, int, tuple[Difference, ...]]]:
        """(operand, result, differences) of all pairs of one op whose tensors lie as given (None: a literal, dropped)."""
        some = any(o is not None for o in operands) and any(r is not None for r in results)
        if op.bodies and some:
            raise unsupported(
                "control flow", f"the program has a {op.primitive}", f"{path} {op.primitive} ({op.source})"
            )
        if op.layout is not None:
            yield from self._compare_with_shard_map(path, op, operands, results)
            return
        factors = self.map_of(op.rule)
        have = [
            self._places(path, op, factors, dims, value, layout)
            for dims, value, layout in zip(op.rule.operands, op.inputs, operands, strict=True)
        ]
        for j, made in enumerate(results):
            if made is None:
                continue
            result = self._places(path, op, factors, op.rule.results[j], op.outputs[j], made)
            question = _Question(
                path=path, op=op, factors=factors, layouts=operands, have=have, made=made, result=result
            )
            for i, layout in enumerate(operands):
                if layout is not None:
                    yield i, j, question.differences(i, layout)

    def _compare_with_shard_map(
        self, path: str, op: Op, operands: Sequence[TensorLayout | None], results: Sequence[TensorLayout | None]
    ) -> Iterator[tuple[int, int, tuple[Difference, ...]]]:
        """The user wrote how the op's tensors lie; each is compared with that."""
        assert op.layout is not None
        first = next((o for o in operands if o is not None), None)
        if first is None:
            return
        if set(zip(first.mesh.axis_names, first.mesh.shape, strict=True)) != set(
            zip(op.layout.mesh.axis_names, op.layout.mesh.shape, strict=True)
        ):
            raise unsupported(
                "shard_map of another mesh",
                f"an operand lies as {first}, the shard_map is for the mesh {op.layout.mesh}",
                f"{path} {op.primitive} ({op.source})",
            )
        wanted = [replace(first, spec=spec) for spec in op.layout.operands]
        made = [replace(first, spec=spec) for spec in op.layout.results]
        into = [self._moved(path, op, v, a, b) for v, a, b in zip(op.inputs, operands, wanted, strict=True)]
        out = [self._moved(path, op, v, a, b) for v, a, b in zip(op.outputs, made, results, strict=True)]
        for j, result in enumerate(results):
            for i, operand in enumerate(operands):
                if operand is not None and result is not None:
                    yield i, j, into[i] + out[j]

    def _moved(
        self, path: str, op: Op, value: int, before: TensorLayout | None, after: TensorLayout | None
    ) -> tuple[Difference, ...]:
        """Differences between two layouts of one tensor."""
        if before is None or after is None:
            return ()
        moved = replace(
            op, inputs=(value,), outputs=(value,), rule=_identity(self.program.values[value].shape), layout=None
        )
        ((_, _, differences),) = self.compare(path, moved, [before], [after])
        return differences

    def _places(
        self, path: str, op: Op, factors: FactorMap, dims: TensorDims, value: int, layout: TensorLayout | None
    ) -> Places:
        if layout is None or layout.spec.is_replicated:
            return {}
        try:
            return factors.places(dims, self.program.values[value].shape, layout.spec, layout.mesh)
        except FactorBoundary as boundary:
            dim, axis = boundary.args
            sizes = " * ".join(str(op.rule.factors[f].size) for f in dims[dim])
            raise unsupported(
                "tile across factors",
                f"%{value} lies as {layout}; its dim {dim} consists of the factors {sizes}, and the tiles along {axis!r} "
                "end inside of a factor",
                f"{path} {op.primitive} ({op.source})",
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One result of an op beside all of its operands."""

    path: str
    op: Op
    factors: FactorMap
    layouts: Sequence[TensorLayout | None]
    have: Sequence[Places]
    made: TensorLayout
    result: Places

    def differences(self, i: int, layout: TensorLayout) -> tuple[Difference, ...]:
        """Of operand i and this result."""
        if not layout.same_devices(self.made):
            return (self._across(i, layout),)
        have = self.have[i]
        if not have and not self.result:
            return ()
        need = {axis: self._needed(i, axis, place) for axis, place in self.result.items()}
        changed = [
            axis
            for axis in self.made.mesh.axis_names
            if (axis in have or axis in need) and self._differs(axis, have, need)
        ]
        return tuple(self._difference(i, axis, changed, have, need) for axis in changed)

    def _differs(self, axis: str, have: Places, need: Places) -> bool:
        place = have.get(axis, WHOLE)
        result = self.result.get(axis, WHOLE)
        return place != need.get(axis, WHOLE) or place.blocked or result.blocked

    def _needed(self, i: int, axis: str, result: Place) -> Place:
        if result.partial:
            return self._explain(axis)[i]
        return self.factors.needed(i, result)

    def _explain(self, axis: str) -> list[Place]:
        """How every operand must lie along an axis over which the result is partial: the explanation that fits best.

        Either all operands that have the summed factors are split over them alike and the others are whole, or all
        operands of one linear group hold partial sums and the others are whole.
        """
        actual = [
            places.get(axis, WHOLE) if layout is not None and layout.same_devices(self.made) else WHOLE
            for places, layout in zip(self.have, self.layouts, strict=True)
        ]
        offers: list[list[Place]] = []
        for place in dict.fromkeys(actual):
            summed = {piece.factor for piece in place.pieces}
            if summed and summed <= self.factors.summed and self.op.rule.reduce_op == "add":
                offers.append([place if own & summed else WHOLE for own in self.factors.operand_factors])
        for group in self.op.rule.linear:
            offers.append([PARTIAL if i in group else WHOLE for i in range(len(self.have))])

        def misfits(offer: list[Place]) -> tuple[int, int]:
            wrong = [need for place, need in zip(actual, offer, strict=True) if place != need]
            return (wrong.count(PARTIAL), len(wrong))  # nothing becomes partial sums

        best = min(offers, key=misfits, default=None)
        if best is None:
            raise unsupported(
                "partial sums through a non-linear op",
                f"the result %{self.op.outputs[0]} lies as {self.made}",
                f"{self.path} {self.op.primitive} ({self.op.source})",
            )
        return best

    def _difference(self, i: int, axis: str, changed: list[str], have: Places, need: Places) -> Difference:
        place, wanted = have.get(axis, WHOLE), need.get(axis, WHOLE)
        result = self.result.get(axis, WHOLE)
        if wanted.partial:
            raise unsupported(
                "whole to partial sums",
                f"the operand %{self.op.inputs[i]} lies as {self.layouts[i]} and the result as {self.made}",
                f"{self.path} {self.op.primitive} ({self.op.source})",
            )
        dims_split = self.factors.dims_split
        here, there = dims_split(i, place), dims_split(i, wanted)
        change = Change(
            have=self._side(place, result),
            need=Side.UNMAPPED if result.blocked else self._side(wanted, PARTIAL),
            result_split=bool(result.pieces) or result.blocked,
            same_dim=here == there,
            swapped=any(
                dims_split(i, have.get(b, WHOLE)) == there and dims_split(i, need.get(b, WHOLE)) == here
                for b in changed
                if b != axis
            ),
        )
        text = f"{_words(change.have, here)}, needed {_words(change.need, there)}"
        return Difference(axes=(axis,), pattern=pattern_of(change).name, text=text)

    def _side(self, place: Place, result: Place) -> Side:
        """A split of a summed dim is a split like any other where the result holds the partial sums."""
        if place.partial:
            return Side.PARTIAL
        if place.blocked:
            return Side.UNMAPPED
        if not place.pieces:
            return Side.WHOLE
        summed = any(piece.factor in self.factors.summed for piece in place.pieces)
        return Side.SUMMED if summed and not result.partial else Side.SPLIT

    def _across(self, i: int, layout: TensorLayout) -> Difference:
        """The two tensors lie on different devices."""
        if self.made.spec.unreduced:
            raise unsupported(
                "partial sums on another mesh",
                f"the operand %{self.op.inputs[i]} lies as {layout} and the result as {self.made}",
                f"{self.path} {self.op.primitive} ({self.op.source})",
            )
        need = [self.factors.needed(i, place) for place in self.result.values()]
        blocked = any(place.blocked for place in self.result.values())
        sides = {self._side(place, WHOLE) for place in self.have[i].values()}
        wanted = {self._side(place, PARTIAL) for place in need} | ({Side.UNMAPPED} if blocked else set())
        order = (Side.PARTIAL, Side.SUMMED, Side.UNMAPPED, Side.SPLIT, Side.WHOLE)
        change = Change(
            have=min(sides, key=order.index, default=Side.WHOLE),
            need=min(wanted, key=order.index, default=Side.WHOLE),
            other_mesh=True,
            same_tiles=not blocked and _ways(self.have[i].values()) == _ways(need),
        )
        axes = tuple(dict.fromkeys((*layout.mesh.axis_names, *self.made.mesh.axis_names)))
        return Difference(axes=axes, pattern=pattern_of(change).name, text=f"{layout}, needed for {self.made}")


def _ways(places: Iterable[Place]) -> dict[int, int]:
    """Into how many parts each factor is split."""
    ways: dict[int, int] = {}
    for place in places:
        for piece in place.pieces:
            ways[piece.factor] = ways.get(piece.factor, 1) * piece.extent
    return ways


def _words(side: Side, dims: tuple[int, ...]) -> str:
    if not dims:
        return side.value
    on = f"dim {', '.join(map(str, dims))}"
    return {Side.SPLIT: f"split on {on}", Side.SUMMED: f"split on {on}, which the op reduces"}.get(
        side, f"split on {on}, which the rule does not map"
    )


def _identity(shape: tuple[int, ...]) -> OpShardingRule:
    dims = (tuple((d,) for d in range(len(shape))),)
    return OpShardingRule(operands=dims, results=dims, factors=tuple(Factor(size=n) for n in shape), linear=((0,),))
