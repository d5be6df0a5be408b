"""A lowered region, cut in segments that run as functions of their own.

A pipeline runs the forward and the backward half of a loop's body at different times, and the update in rounds between which
stages exchange values. All of them are ranges of one region's ops, under one plan. What a segment reads of earlier ones are
(value, layout) pairs, so a value that lies in two layouts at the cut is handed on in those that are read.

Partial sums cross a cut as they are: an array with a leading dim over their unreduced axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite._jax_compat import Literal
from alpa_lite.core.collective import Collective
from alpa_lite.core.conversion import Conversion
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.lowering.lower import Lowering, Region
from alpa_lite.trace.flatten import FlatJaxpr

Pair = tuple[int, ShardingSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Ops ``start`` to ``stop`` of a region.

    Attributes:
        reads: (value, layout) made before it that it reads.
        writes: made by it, for later segments or as results of the region.
        out: conversions of results that are made in it.
    """

    start: int
    stop: int
    reads: tuple[Pair, ...]
    writes: tuple[Pair, ...]
    out: tuple[Conversion, ...]


@dataclass(frozen=True)
class CutRegion:
    """A region and the ops at which it is cut.

    Attributes:
        lowering: decisions and conversions of its stage.
        flat, prefix: the region; op ``i`` has the path ``prefix + str(i)``.
        cuts: numbers of the ops at which a new segment starts, rising; ends with the number of ops.
        in_specs, out_specs: of its inputs and results.
        skipped: numbers of ops that are run by others (the loop itself); what they make counts as given.
    """

    lowering: Lowering
    flat: FlatJaxpr
    prefix: str
    cuts: tuple[int, ...]
    in_specs: tuple[ShardingSpec, ...]
    out_specs: tuple[ShardingSpec, ...]
    skipped: frozenset[int] = frozenset()

    @cached_property
    def results(self) -> tuple[Pair | None, ...]:
        """Per result of the region; None for a literal."""
        pairs = zip(self.flat.outputs, self.out_specs, strict=True)
        return tuple(None if isinstance(v, Literal) else (v, spec) for v, spec in pairs)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        ranges = list(zip((0, *self.cuts[:-1]), self.cuts, strict=True))
        made = [self._made(start, stop) for start, stop in ranges]
        outs = self._out_conversions(made)
        wanted = {pair for pair in self.results if pair is not None}
        wanted |= {pair for i in self.skipped for pair in self._operands(i)}
        found: list[Segment] = []
        for (start, stop), own, out in reversed(list(zip(ranges, made, outs, strict=True))):
            own = own | {(c.value, c.target) for c in out}
            read = self._read(start, stop, out)
            pairs = {"reads": _sorted(read - own), "writes": _sorted(own & wanted)}
            found.append(Segment(start=start, stop=stop, out=out, **pairs))
            wanted |= read
        return tuple(reversed(found))

    def _conversions(self, op: int) -> list[Conversion]:
        return self.lowering.conversions.get(f"{self.prefix}{op}", [])

    def _operands(self, op: int) -> set[Pair]:
        decision = self.lowering.decisions[f"{self.prefix}{op}"]
        pairs = zip(self.flat.ops[op].inputs, decision.operands, strict=True)
        return {(v, spec) for v, spec in pairs if not isinstance(v, Literal)}

    def _results(self, op: int) -> set[Pair]:
        decision = self.lowering.decisions[f"{self.prefix}{op}"]
        return {(v, spec) for v, spec in zip(self.flat.ops[op].outputs, decision.results, strict=True) if v >= 0}

    def _run(self, start: int, stop: int) -> list[int]:
        return [i for i in range(start, stop) if i not in self.skipped]

    def _made(self, start: int, stop: int) -> set[Pair]:
        made = {(c.value, c.target) for i in self._run(start, stop) for c in self._conversions(i)}
        return made.union(*(self._results(i) for i in self._run(start, stop)))

    def _read(self, start: int, stop: int, out: tuple[Conversion, ...]) -> set[Pair]:
        read = {(c.value, c.source) for c in out}
        read |= {(c.value, c.source) for i in self._run(start, stop) for c in self._conversions(i)}
        read = read.union(*(self._operands(i) for i in self._run(start, stop)))
        return {(v, s) for v, s in read if v not in self.flat.constants}

    def _out_conversions(self, made: list[set[Pair]]) -> list[tuple[Conversion, ...]]:
        """Per segment, what it converts at its end: operands of a skipped op that comes next, and results of the region as
        soon as their source exists, for others may wait for them."""
        left = list(self.lowering.conversions.get(f"{self.prefix}out", []))
        have = set(zip(self.flat.inputs, self.in_specs, strict=True))
        found, start = [], 0
        for pairs, stop in zip(made, self.cuts, strict=True):
            have |= pairs.union(*(self._results(i) for i in self.skipped if start <= i < stop))
            now = [c for i in self.skipped if i == stop for c in self._conversions(i)]
            for conversion in left:
                if (conversion.value, conversion.source) in have:
                    now.append(conversion)
                    have.add((conversion.value, conversion.target))
            left = [c for c in left if c not in now]
            found.append(tuple(now))
            start = stop
        assert not left, f"results that are never made: {left}"
        return found

    def structs(self, number: int, sliced: Collection[Pair], trips: int, mesh: Any) -> list[Any]:
        """What ``function`` takes after the index, as shapes with their shardings."""
        found = []
        for value, spec in self.segments[number].reads:
            aval = self.flat.avals[value]
            stacked = bool(self.prefix) and (value, spec) in sliced
            lead = [math.prod(mesh.shape[a] for a in spec.unreduced)] if spec.unreduced else []
            shape = (*lead, *([trips] if stacked else []), *aval.shape)
            sharding = NamedSharding(mesh, crossing_spec(spec, stacked=stacked))
            found.append(jax.ShapeDtypeStruct(shape, aval.dtype, sharding=sharding))
        return found

    def collectives(self, number: int, planned: Sequence[Collective], trips: int) -> tuple[Collective, ...]:
        """Those of ``planned`` that the segment holds, counted for one run of it."""
        segment = self.segments[number]
        paths = {f"{self.prefix}{i}" for i in self._run(segment.start, segment.stop)}
        placed = [c for path in paths for c in self.lowering.conversions.get(path, ())]
        numbers = {n for c in (*placed, *segment.out) for n in c.collectives if n >= 0}
        inside = {op for op in self.lowering.inside if op in paths}
        deeper = {path for path in (*self.lowering.inside, *self.lowering.conversions) if self._holder(path) in paths}
        numbers |= {self.lowering.inside[op] for op in (*inside, *deeper) if op in self.lowering.inside}
        numbers |= {n for op in deeper for c in self.lowering.conversions.get(op, ()) for n in c.collectives if n >= 0}
        times = trips if self.prefix else 1
        return tuple(replace(planned[n], count=max(planned[n].count // times, 1)) for n in sorted(numbers))

    def _holder(self, path: str) -> str:
        """The op of this region in whose body the op ``path`` stands; "" if in none."""
        rest = path.removeprefix(self.prefix)
        if not path.startswith(self.prefix) or "." not in rest:
            return ""
        return f"{self.prefix}{rest.split('.')[0]}"

    def function(
        self,
        number: int,
        mesh: Any,
        *,
        sliced: Collection[Pair] = (),
        donated: Sequence[Pair] = (),
        marked: bool = False,
    ) -> Callable[..., Any]:
        """Segment ``number`` as a jitted function of global arrays, in the order of ``reads``, to a list in that of ``writes``.

        What is in ``sliced`` is given stacked, and the function takes the slice at its first argument, an index. ``donated``
        arrays are gone afterwards. A ``marked`` function has one more result, which nobody donates: it is there when all are.
        """
        segment = self.segments[number]
        cut = frozenset(sliced)

        def local(index: Any, *tiles: Any) -> list[Any]:
            have: dict[int, dict[ShardingSpec, Any]] = {}
            for (value, spec), tile in zip(segment.reads, tiles, strict=True):
                tile = lax.dynamic_index_in_dim(tile, index, 0, keepdims=False) if (value, spec) in cut else tile
                have.setdefault(value, {})[spec] = tile[0] if spec.unreduced else tile
            region = Region(self.lowering, self.flat, self.prefix)
            region.run_segment(have, segment.start, segment.stop, self.skipped, segment.out)
            out = [region.tiles[value][spec] for value, spec in segment.writes]
            out = [tile[None] if spec.unreduced else tile for tile, (_, spec) in zip(out, segment.writes, strict=True)]
            return [*out, index + 1] if marked else out

        return jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(PartitionSpec(), *(crossing_spec(pair[1], stacked=pair in cut) for pair in segment.reads)),
                out_specs=[*(crossing_spec(s) for _, s in segment.writes), *([PartitionSpec()] * marked)],
                check_vma=False,
            ),
            donate_argnums=tuple(i for i, pair in enumerate(segment.reads, 1) if pair in set(donated)),
            keep_unused=True,  # the index says where to run
        )


def crossing_spec(spec: ShardingSpec, *, stacked: bool = False) -> PartitionSpec:
    """Of an array that holds a value between segments; partial sums have a leading dim, stacked values another."""
    dims = [None if not d else d[0] if len(d) == 1 else d for d in spec.dims]
    lead = [spec.unreduced] if spec.unreduced else []
    assert not (stacked and lead)
    return PartitionSpec(*lead, *([None] if stacked else []), *dims)


def crossing_sharding(spec: ShardingSpec, mesh: Any) -> NamedSharding:
    return NamedSharding(mesh, crossing_spec(spec))


def _sorted(pairs: set[Pair]) -> tuple[Pair, ...]:
    return tuple(sorted(pairs, key=lambda pair: (pair[0], str(pair[1]))))
