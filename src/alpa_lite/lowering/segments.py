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
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.cuts import Cut, Pair, Segment
from alpa_lite.lowering.lower import Lowering, Region
from alpa_lite.trace.flatten import FlatJaxpr


@dataclass(frozen=True)
class CutRegion:
    """A region and the ops at which it is cut.

    Attributes:
        lowering: decisions and conversions of its stage.
        flat, prefix: the region; op ``i`` has the path ``prefix + str(i)``.
        cuts: numbers of the ops at which a new segment starts, rising; ends with the number of ops.
        in_specs, out_specs: of its inputs and results.
        skipped, late: as of ``Cut``.
    """

    lowering: Lowering
    flat: FlatJaxpr
    prefix: str
    cuts: tuple[int, ...]
    in_specs: tuple[ShardingSpec, ...]
    out_specs: tuple[ShardingSpec, ...]
    skipped: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()

    @cached_property
    def cut(self) -> Cut:
        def numbers(values: Sequence[Any]) -> tuple[int, ...]:
            return tuple(-1 if isinstance(v, Literal) else v for v in values)

        return Cut(
            inputs=self.flat.inputs,
            outputs=numbers(self.flat.outputs),
            ops=[(numbers(op.inputs), op.outputs) for op in self.flat.ops],
            constants=frozenset(self.flat.constants),
            decisions=self.lowering.decisions,
            conversions=self.lowering.conversions,
            prefix=self.prefix,
            cuts=self.cuts,
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            skipped=self.skipped,
            late=self.late,
        )

    @property
    def results(self) -> tuple[Pair | None, ...]:
        """Per result of the region; None for a literal."""
        return self.cut.results

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return self.cut.segments

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
        paths = {f"{self.prefix}{i}" for i in self.cut.run(segment.start, segment.stop)}
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
        replaced: Sequence[tuple[Pair, Pair]] = (),
        marked: bool = False,
    ) -> Callable[..., Any]:
        """Segment ``number`` as a jitted function of global arrays, in the order of ``reads``, to a list: ``results_in_order``.

        What is in ``sliced`` is given stacked, and the function takes the slice at its first argument, an index. ``replaced``
        are (what is read and gone afterwards, what is written to its buffer). A ``marked`` function has one more result, which
        nobody donates: it is there when all are.
        """
        segment = self.segments[number]
        donated = {old for old, _ in replaced}
        results = results_in_order(segment, replaced)
        cut = frozenset(sliced)

        def local(index: Any, *tiles: Any) -> list[Any]:
            have: dict[int, dict[ShardingSpec, Any]] = {}
            for (value, spec), tile in zip(segment.reads, tiles, strict=True):
                tile = lax.dynamic_index_in_dim(tile, index, 0, keepdims=False) if (value, spec) in cut else tile
                have.setdefault(value, {})[spec] = tile[0] if spec.unreduced else tile
            region = Region(self.lowering, self.flat, self.prefix)
            region.run_segment(have, segment.start, segment.stop, self.skipped, segment.out)
            out = [region.tiles[value][spec] for value, spec in results]
            out = [tile[None] if spec.unreduced else tile for tile, (_, spec) in zip(out, results, strict=True)]
            return [*out, index + 1] if marked else out

        out_specs = [*(crossing_spec(s) for _, s in results), *([PartitionSpec()] * marked)]
        return jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(PartitionSpec(), *(crossing_spec(pair[1], stacked=pair in cut) for pair in segment.reads)),
                out_specs=out_specs,
                check_vma=False,
            ),
            out_shardings=[NamedSharding(mesh, spec) for spec in out_specs],  # else XLA chooses which buffer is taken
            donate_argnums=tuple(i for i, pair in enumerate(segment.reads, 1) if pair in donated),
            keep_unused=True,  # the index says where to run
        )


def results_in_order(segment: Segment, replaced: Sequence[tuple[Pair, Pair]]) -> tuple[Pair, ...]:
    """What a segment writes, first what takes a buffer, in the order in which it reads what lies there.

    JAX gives each donated buffer to the first result of its type that has none: in another order a result would take the buffer
    of a value that is still read, and XLA would copy that first.
    """
    new = dict(replaced)
    first = [new[pair] for pair in segment.reads if pair in new]
    return (*first, *(pair for pair in segment.writes if pair not in first))


def crossing_spec(spec: ShardingSpec, *, stacked: bool = False) -> PartitionSpec:
    """Of an array that holds a value between segments; partial sums have a leading dim, stacked values another."""
    dims = [None if not d else d[0] if len(d) == 1 else d for d in spec.dims]
    lead = [spec.unreduced] if spec.unreduced else []
    assert not (stacked and lead)
    return PartitionSpec(*lead, *([None] if stacked else []), *dims)


def crossing_sharding(spec: ShardingSpec, mesh: Any) -> NamedSharding:
    return NamedSharding(mesh, crossing_spec(spec))
