"""A region of a planned program cut into segments that run at different times: which values cross from one to the next.

Values cross as (value, layout): what a plan decided for whole regions holds for the segments together, and each of its
conversions is in exactly one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from alpa_lite.core.conversion import Conversion
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.records import OpDecision

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


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A region and the ops at which it is cut.

    Attributes:
        inputs, outputs: values of the region; -1 for a literal, as in what ``ops`` read.
        ops: per op what it reads and makes; op ``i`` has the path ``prefix + str(i)``.
        constants: values that are captured.
        decisions, conversions: by path, of the plan.
        cuts: numbers of the ops at which a new segment starts, rising; ends with the number of ops.
        in_specs, out_specs: of its inputs and results.
        skipped: numbers of ops that are run by others (the loop itself); what they make counts as given.
        late: inputs that come after these, from other stages.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    ops: Sequence[tuple[Sequence[int], Sequence[int]]]
    constants: frozenset[int]
    decisions: Mapping[str, OpDecision]
    conversions: Mapping[str, Sequence[Conversion]]
    prefix: str
    cuts: tuple[int, ...]
    in_specs: tuple[ShardingSpec, ...]
    out_specs: tuple[ShardingSpec, ...]
    skipped: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()

    @cached_property
    def results(self) -> tuple[Pair | None, ...]:
        """Per result of the region; None for a literal."""
        pairs = zip(self.outputs, self.out_specs, strict=True)
        return tuple(None if v < 0 else (v, spec) for v, spec in pairs)

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

    def _conversions(self, op: int) -> Sequence[Conversion]:
        return self.conversions.get(f"{self.prefix}{op}", ())

    def _operands(self, op: int) -> set[Pair]:
        decision = self.decisions[f"{self.prefix}{op}"]
        pairs = zip(self.ops[op][0], decision.operands, strict=True)
        return {(v, spec) for v, spec in pairs if v >= 0}

    def _results(self, op: int) -> set[Pair]:
        decision = self.decisions[f"{self.prefix}{op}"]
        return {(v, spec) for v, spec in zip(self.ops[op][1], decision.results, strict=True) if v >= 0}

    def run(self, start: int, stop: int) -> list[int]:
        """Numbers of the ops that are not skipped."""
        return [i for i in range(start, stop) if i not in self.skipped]

    def last_read(self, number: int, pair: Pair) -> int:
        """The last op of segment ``number`` that reads a pair which others made; its end for what it converts there."""
        return self._last_reads[number][pair]

    def maker(self, number: int, pair: Pair) -> int:
        """The op of segment ``number`` that makes or converts to a pair; its end for what it converts there."""
        return self._makers[number].get(pair, self.segments[number].stop)

    @cached_property
    def _last_reads(self) -> tuple[dict[Pair, int], ...]:
        """Per segment, the last op that reads each pair."""
        found = []
        for segment in self.segments:
            last = {pair: i for i in self.run(segment.start, segment.stop) for pair in self._read(i, i + 1, ())}
            found.append(last | {(c.value, c.source): segment.stop for c in segment.out})
        return tuple(found)

    @cached_property
    def _makers(self) -> tuple[dict[Pair, int], ...]:
        """Per segment, the first op that makes or converts to each pair."""
        rows = [reversed(self.run(segment.start, segment.stop)) for segment in self.segments]
        return tuple({pair: i for i in row for pair in self._made(i, i + 1)} for row in rows)

    def _made(self, start: int, stop: int) -> set[Pair]:
        made = {(c.value, c.target) for i in self.run(start, stop) for c in self._conversions(i)}
        return made.union(*(self._results(i) for i in self.run(start, stop)))

    def _read(self, start: int, stop: int, out: tuple[Conversion, ...]) -> set[Pair]:
        read = {(c.value, c.source) for c in out}
        read |= {(c.value, c.source) for i in self.run(start, stop) for c in self._conversions(i)}
        read = read.union(*(self._operands(i) for i in self.run(start, stop)))
        return {(v, s) for v, s in read if v not in self.constants}

    def _out_conversions(self, made: list[set[Pair]]) -> list[tuple[Conversion, ...]]:
        """Per segment, what it converts at its end: operands of a skipped op that comes next, and results of the region as
        soon as their source exists, for others may wait for them."""
        left = list(self.conversions.get(f"{self.prefix}out", ()))
        given = set(zip(self.inputs, self.in_specs, strict=True))
        have = {pair for pair in given if pair[0] not in self.late}
        found, start = [], 0
        for pairs, stop in zip(made, self.cuts, strict=True):
            passed = [i for i in self.skipped if start <= i < stop]
            have |= pairs.union(*map(self._results, passed), given if passed else ())
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


def _sorted(pairs: set[Pair]) -> tuple[Pair, ...]:
    return tuple(sorted(pairs, key=lambda pair: (pair[0], str(pair[1]))))
