"""Where the conversions of an annotated program go: before or after the op, each once, shared by all that read it.

In: a program, the layout of each tensor, one conversion engine per mesh. Out: ``PlacedConversions``. The ops are taken in
order. For an op whose pairs are not all the same, the layouts in which it could run without communication are listed
(``ways``), each proven by the sameness analysis, and the one whose conversions cost least is taken; a conversion that is
already there costs nothing again. Prices and steps come from the engine that the solver and lowering use. Only conversions
are priced, not the work that an op repeats; the planner weighs both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions, step_price
from alpa_lite.costs.layouts import TensorLayout, ends, layouts_of, require_layouts
from alpa_lite.costs.patterns import unsupported
from alpa_lite.costs.sameness import Judge
from alpa_lite.costs.tiles import Placement, TilePlan, plan_tiles
from alpa_lite.costs.ways import Way, proven, ways
from alpa_lite.errors import ArgumentsError
from alpa_lite.units import format_bytes

Where = Literal["cheaper", "before", "after"]
DEFAULT_DEVICE = "h100-sxm"  # of meshes for which no engine is given
NOT_CONVERTED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedConversion:
    """One conversion of one tensor.

    Attributes:
        op: path of the op beside which it runs.
        side: "before" that op, or "after" it.
        value: the tensor.
        source, target: its layouts.
        steps: on one mesh, what is done.
        tiles: between meshes, which part goes where; None on one mesh. Stages are taken to share no device.
        time_s: of the steps, in the cost model's unit.
        readers: (op, operand) that read it.
    """

    op: str
    side: Literal["before", "after"]
    value: int
    source: TensorLayout
    target: TensorLayout
    steps: tuple[Step, ...]
    tiles: TilePlan | None
    time_s: float
    readers: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        how = ", ".join(str(s.kind or "slice") for s in self.steps)
        if self.tiles is not None:
            how = f"sending {format_bytes(self.tiles.moved_bytes)}"
        readers = f", read by {', '.join(f'{op}#{i}' for op, i in self.readers)}" if self.readers else ""
        return f"{self.side} {self.op}: %{self.value} {self.source.spec} -> {self.target.spec} by {how}{readers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedConversions:
    """All conversions of a program; prints one line each.

    Attributes:
        conversions: in the order in which they run.
        reads: per (op, operand) the layout in which the op reads it.
        makes: per (op, result) the layout in which the op makes it.
    """

    conversions: tuple[PlacedConversion, ...]
    reads: Mapping[tuple[str, int], TensorLayout]
    makes: Mapping[tuple[str, int], TensorLayout]

    @property
    def time_s(self) -> float:
        """Of all conversions, in the cost model's unit."""
        return sum(c.time_s for c in self.conversions)

    def __str__(self) -> str:
        return "".join(f"{conversion}\n" for conversion in self.conversions)


def place_conversions(
    program: Program,
    specs: Mapping[int | str, Any],
    mesh: DeviceMesh | None = None,
    *,
    conversions: Iterable[Conversions] = (),
    place: Where = "cheaper",
) -> PlacedConversions:
    """Where to convert so that every op runs on what lies on its device.

    Args:
        program, specs, mesh: as for ``needs_resharding``.
        conversions: engines with their prices, at most one per mesh; a mesh without one gets H100 devices of one host.
        place: "cheaper"; "before": an op makes its results as the specs say, wherever it can; "after": an op reads its
            operands as they lie, wherever it can.

    Returns:
        The conversions. An op between two meshes runs on the mesh of its results.

    Raises:
        UnsupportedPattern, ArgumentsError: as for ``needs_resharding``.

    Example:
        >>> program = al.analysis.trace(lambda t: t + t, t)
        >>> print(al.analysis.place_conversions(program, {"0": "[x,_]", "out": "[_,x]"}, mesh, place="before"))
        before 0: %0 [x,_] -> [_,x] by all-to-all, read by 0#0, 0#1
    """
    if place not in ("cheaper", "before", "after"):
        raise ArgumentsError(
            f"place={place!r} is not known. Allowed are 'cheaper', 'before' and 'after'. In the call of place_conversions. "
            "Leave it out for 'cheaper'."
        )
    layouts = layouts_of(program, specs, mesh)
    require_layouts(program, layouts)
    placer = _Placer(
        program=program,
        layouts=layouts,
        engines={c.mesh: c for c in conversions},
        place=place,
        judge=Judge(program=program),
    )
    for index, op in enumerate(program.ops):
        placer.visit(str(index), op)
    return PlacedConversions(conversions=tuple(placer.placed), reads=placer.reads, makes=placer.makes)


@dataclass(slots=True, kw_only=True)
class _Placer:
    """Goes through the ops and keeps the copies of every tensor that are there by now."""

    program: Program
    layouts: Mapping[int, TensorLayout]
    engines: dict[DeviceMesh, Conversions]
    place: Where
    judge: Judge
    placed: list[PlacedConversion] = field(default_factory=list)
    reads: dict[tuple[str, int], TensorLayout] = field(default_factory=dict)
    makes: dict[tuple[str, int], TensorLayout] = field(default_factory=dict)
    _plans: dict[tuple[int, TensorLayout, TensorLayout], TilePlan] = field(default_factory=dict)
    _copies: dict[int, dict[TensorLayout, int]] = field(default_factory=dict)  # per value: layout -> index in `placed`

    def visit(self, path: str, op: Op) -> None:
        """Decide one op."""
        paired = any(ends(op))
        given = Way(
            operands=tuple(self.layouts[v] if v >= 0 and paired else None for v in op.inputs),
            results=tuple(self.layouts[v] if v >= 0 and paired else None for v in op.outputs),
        )
        way = given
        if not proven(self.judge, path, op, given):
            offers = ways(self.judge, path, op, given)
            way = min(offers, key=lambda offer: self._rank(op, offer, given))
            if math.isinf(self._costs(op, way, given)[0]):
                raise unsupported(
                    "whole to partial sums",
                    f"the result of {op.primitive} lies as {next(filter(None, given.results))}",
                    f"{path} {op.primitive} ({op.source})",
                )
        for position, (value, wanted) in enumerate(zip(op.inputs, way.operands, strict=True)):
            if wanted is not None:
                self._read(path, position, value, wanted)
        for position, (value, made) in enumerate(zip(op.outputs, way.results, strict=True)):
            if made is not None:
                self.makes[path, position] = made
                if made != self.layouts[value]:
                    self._copies[value] = {made: NOT_CONVERTED}
                    self._convert(path, "after", value, made, self.layouts[value])

    def _rank(self, op: Op, way: Way, given: Way) -> tuple[float, ...]:
        """Smallest first: what is sent between meshes, whose links are the slower ones, then time.

        Ties as nvFuser: after an op of one operand, before one of several.
        """
        time_s, moved_bytes, num_before, num_after = self._costs(op, way, given)
        unreachable = math.isinf(time_s)
        if self.place == "before":
            return (unreachable, num_after, moved_bytes, time_s, num_before)
        if self.place == "after":
            return (unreachable, num_before, moved_bytes, time_s, num_after)
        single = sum(v >= 0 for v in op.inputs) == 1
        return (unreachable, moved_bytes, time_s, num_before + num_after, num_before if single else num_after)

    def _costs(self, op: Op, way: Way, given: Way) -> tuple[float, int, int, int]:
        """Time, bytes between meshes, and number before and after the op, of the conversions that a way adds."""
        wanted = dict.fromkeys((v, w) for v, w in zip(op.inputs, way.operands, strict=True) if w is not None)
        new = [(v, w) for v, w in wanted if w not in self._available(v)]
        made = [
            (v, m, g)
            for v, m, g in zip(op.outputs, way.results, given.results, strict=True)
            if m is not None and g is not None and m != g
        ]
        moves = [(v, self._source(v, w), w) for v, w in new] + made
        time_s = sum(self._time_s(*move) for move in moves)
        tiles = [self._tiles(*move) for move in moves if math.isfinite(time_s)]
        return time_s, sum(t.moved_bytes for t in tiles if t is not None), len(new), len(made)

    def _available(self, value: int) -> dict[TensorLayout, int]:
        return {self.layouts[value]: NOT_CONVERTED} | self._copies.get(value, {})

    def _source(self, value: int, wanted: TensorLayout) -> TensorLayout:
        """The copy that is converted: the cheapest on the same devices, else the tensor as it was given."""
        near = [copy for copy in self._available(value) if copy.same_devices(wanted)]
        return min(near, key=lambda copy: self._time_s(value, copy, wanted), default=self.layouts[value])

    def _time_s(self, value: int, source: TensorLayout, target: TensorLayout) -> float:
        """Of the steps on one mesh, inf if there are none; what is sent between meshes has no price here."""
        tensor = self.program.values[value]
        if not source.same_devices(target):
            joined = replace(source, spec=ShardingSpec(source.spec.dims))
            if target.spec.unreduced:
                return math.inf
            return self._time_s(value, source, joined) if joined != source else 0.0
        engine = self._engine(source.mesh)
        try:
            steps = engine.steps(source.spec, target.spec, tensor.shape, tensor.itemsize)
        except ValueError:  # to partial sums, or only by forbidden collectives
            return math.inf
        # Summed up here, because the engine's table holds epsilons for slices, which must not decide between ways.
        return sum(step_price(step, tensor.shape, tensor.itemsize, engine.mesh, engine.costs) for step in steps)

    def _tiles(self, value: int, source: TensorLayout, target: TensorLayout) -> TilePlan | None:
        """What goes where, once partial sums are joined; None on one mesh."""
        if source.same_devices(target):
            return None
        key = (value, source, target)
        if key not in self._plans:
            tensor = self.program.values[value]
            num_source, num_target = source.mesh.num_devices, target.mesh.num_devices
            first = 0 if source.stage == target.stage else num_source
            self._plans[key] = plan_tiles(
                tensor.shape,
                tensor.itemsize,
                Placement(spec=ShardingSpec(source.spec.dims), mesh=source.mesh, devices=tuple(range(num_source))),
                Placement(spec=target.spec, mesh=target.mesh, devices=tuple(range(first, first + num_target))),
            )
        return self._plans[key]

    def _engine(self, mesh: DeviceMesh) -> Conversions:
        if mesh not in self.engines:
            cluster = Cluster.parse(f"1x{mesh.num_devices}:{DEFAULT_DEVICE}")
            self.engines[mesh] = Conversions(mesh=mesh, costs=cost_model("roofline", cluster, mesh))
        return self.engines[mesh]

    def _read(self, path: str, position: int, value: int, wanted: TensorLayout) -> None:
        """Note who reads what; convert where nobody has done so yet."""
        self.reads[path, position] = wanted
        if wanted not in self._available(value):
            source = self._source(value, wanted)
            if not source.same_devices(wanted) and source.spec.unreduced:
                joined = replace(source, spec=ShardingSpec(source.spec.dims))
                if joined not in self._available(value):
                    self._convert(path, "before", value, source, joined)
                source = joined
            self._convert(path, "before", value, source, wanted)
        index = self._available(value)[wanted]
        if index != NOT_CONVERTED:
            found = self.placed[index]
            self.placed[index] = replace(found, readers=(*found.readers, (path, position)))

    def _convert(
        self, path: str, side: Literal["before", "after"], value: int, source: TensorLayout, target: TensorLayout
    ) -> None:
        tensor = self.program.values[value]
        steps: tuple[Step, ...] = ()
        if source.same_devices(target):
            steps = self._engine(source.mesh).steps(source.spec, target.spec, tensor.shape, tensor.itemsize)
        made = PlacedConversion(
            op=path,
            side=side,
            value=value,
            source=source,
            target=target,
            steps=steps,
            tiles=self._tiles(value, source, target),
            time_s=self._time_s(value, source, target),
        )
        self._copies.setdefault(value, {})[target] = len(self.placed)
        self.placed.append(made)
