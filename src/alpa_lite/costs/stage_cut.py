"""A stage's part of a step, cut into what a pipeline runs at different times, and how long each value is wanted.

The outer region is what comes before the loop over microbatches (segment 0) and the rounds of the update. The loop's body is the
forward pass and the backward pass, or the halves of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Value
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.cuts import Cut, Pair


def passes_of(num_forward: int, halves: tuple[int, ...], num_ops: int) -> tuple[int, ...]:
    """Where the passes of a loop's body end: one pass where nothing is differentiated."""
    return (num_forward, *halves, num_ops) if num_forward < num_ops or halves else (num_ops,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopInputs:
    """Inputs of the loop's body: the same for all microbatches, sums, slices of stacks, and what other stages send."""

    consts: tuple[Pair, ...]
    carries: tuple[Pair, ...]
    slices: tuple[Pair, ...]
    received: tuple[Pair, ...]


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """One stage under its plan.

    Attributes:
        mesh: of its submesh.
        outer, body: the regions.
        outer_values, body_values: shapes and types of their values.
        loop: number of the loop in the outer region; it reads ``num_consts`` and ``num_carry`` values, then stacks.
        num_args: how many of the outer region's inputs are arguments of the step; the others are received.
        received: when each of these comes: "start", "loop" or "end".
        num_sent: how many results of the body are sent to other stages; they are the last ones.
        replaced: (position of an argument, position of the result that may take its buffer) of donated state.
    """

    mesh: DeviceMesh
    outer: Cut
    body: Cut
    outer_values: Sequence[Value]
    body_values: Sequence[Value]
    loop: int
    num_consts: int
    num_carry: int
    num_args: int
    received: tuple[str, ...]
    num_sent: int
    replaced: tuple[tuple[int, int], ...] = ()

    @property
    def outer_names(self) -> tuple[str, ...]:
        """Of the outer region's segments."""
        return ("before", *(f"update {k}" for k in range(len(self.outer.cuts) - 1)))

    @property
    def pass_names(self) -> tuple[str, ...]:
        """Of the body's segments."""
        halves = ("backward, inputs", "backward, weights") if len(self.body.cuts) == 3 else ("backward",)
        return ("forward", *(halves if len(self.body.cuts) > 1 else ()))

    @cached_property
    def loop_inputs(self) -> LoopInputs:
        inputs = tuple(zip(self.body.inputs, self.body.in_specs, strict=True))
        first, sums = self.num_consts, self.num_consts + self.num_carry
        last = len(inputs) - self.received.count("loop")
        return LoopInputs(
            consts=inputs[:first], carries=inputs[first:sums], slices=inputs[sums:last], received=inputs[last:]
        )

    def operands(self, start: int, stop: int) -> tuple[Pair | None, ...]:
        """Inputs of the loop in the region around it: (value, layout), None for a literal."""
        specs = self.outer.decisions[f"{self.loop}"].operands[start:stop]
        given = zip(self.outer.ops[self.loop][0][start:stop], specs, strict=True)
        return tuple(None if v < 0 else (v, spec) for v, spec in given)

    def wanted_after(self, number: int) -> frozenset[Pair]:
        """What later segments of the outer region than ``number``, the loop or the step's results read."""
        return self.wanted_after_loop | self._loop_reads if number == 0 else self._wanted(number)

    @cached_property
    def wanted_after_loop(self) -> frozenset[Pair]:
        return self._wanted(0)

    def _wanted(self, number: int) -> frozenset[Pair]:
        reads = (pair for segment in self.outer.segments[number + 1 :] for pair in segment.reads)
        return frozenset((*reads, *(pair for pair in self.outer.results if pair is not None)))

    @cached_property
    def _loop_reads(self) -> frozenset[Pair]:
        last = len(self.body.inputs) - len(self.loop_inputs.received)
        return frozenset(pair for pair in self.operands(0, last) if pair is not None)

    @cached_property
    def moved_starts(self) -> frozenset[Pair]:
        """What a sum starts from and nothing else reads, so that the sum may take its buffer: what segment 0 makes, and donated
        state of which the loop makes the next value."""
        inputs = self.loop_inputs
        first, last = len(inputs.consts), len(inputs.consts) + len(inputs.carries)
        starts = [pair for pair in self.operands(first, last) if pair is not None]
        others = {*self.operands(0, first), *self.operands(last, last + len(inputs.slices)), *self.wanted_after_loop}
        made = {*self.outer.segments[0].writes, *self._donated_starts} - others
        return frozenset(pair for pair in starts if pair in made and starts.count(pair) == 1)

    @cached_property
    def carried_state(self) -> frozenset[Pair]:
        """Those of them that are arguments of the step."""
        return self.moved_starts & self._donated_starts

    @cached_property
    def _donated_starts(self) -> frozenset[Pair]:
        """Donated arguments that a carry of the loop starts from, where the step's result is that carry, in the same layout."""
        first, outer = self.num_consts, self.outer
        ends = zip(outer.ops[self.loop][1], outer.decisions[f"{self.loop}"].results, strict=True)
        next_of = dict(zip(self.operands(first, first + self.num_carry), ends, strict=False))
        found = set()
        for position, result in self.replaced:
            pair, made = (outer.inputs[position], outer.in_specs[position]), outer.results[result]
            if made is not None and made == next_of.get(pair) and made[1] == pair[1]:
                found.add(pair)
        return frozenset(found)

    @cached_property
    def kept(self) -> tuple[frozenset[Pair], ...]:
        """Per pass, what it makes of a microbatch for the later passes."""
        segments, found = self.body.segments, []
        for number, segment in enumerate(segments):
            later = {pair for other in segments[number + 1 :] for pair in other.reads}
            found.append(frozenset(set(segment.writes) & later - set(self.loop_inputs.carries)))
        return tuple(found)

    @cached_property
    def freed(self) -> tuple[tuple[tuple[Pair, Pair], ...], ...]:
        """Per segment of the outer region: what it is the last to read, with what it makes that may take the buffer: donated
        state with its next value; then sums over microbatches and what earlier rounds made, with results of the same type."""
        return tuple(self._freed(number) for number in range(len(self.outer.segments)))

    def _freed(self, number: int) -> tuple[tuple[Pair, Pair], ...]:
        segment = self.outer.segments[number]
        later = {pair for other in self.outer.segments[number + 1 :] for pair in other.reads}
        pairs = []
        for position, result in self.replaced:
            pair, out = (self.outer.inputs[position], self.outer.in_specs[position]), self.outer.results[result]
            last = pair in segment.reads and pair not in later
            if last and out is not None and out[1] == pair[1] and out in segment.writes:
                pairs.append((pair, out))
        kept = later | {pair for pair in self.outer.results if pair is not None}
        taken = {out for _, out in pairs}
        free: defaultdict[tuple[Value, ShardingSpec], list[Pair]] = defaultdict(list)
        for pair in segment.writes:
            if pair not in taken:
                free[self._type(pair)].append(pair)
        made_before = self._made_before(number)
        for pair in segment.reads:
            if pair in made_before and pair not in kept:
                last, fitting = self.outer.last_read(number, pair), free[self._type(pair)]
                if (out := next((o for o in fitting if self.outer.maker(number, o) > last), None)) is not None:
                    pairs.append((pair, out))
                    fitting.remove(out)
        return tuple(pairs)

    @cached_property
    def added(self) -> tuple[tuple[tuple[Pair, Pair], ...], ...]:
        """Per pass: sums over microbatches before it and after it."""
        found: list[tuple[tuple[Pair, Pair], ...]] = []
        for segment in self.body.segments:
            pairs: dict[Pair, Pair] = {}
            for old, new in zip(self.loop_inputs.carries, self.body.results, strict=False):
                if new is None or new[1] != old[1] or new in pairs.values():
                    continue
                if old in segment.reads and new in segment.writes:
                    pairs[old] = new
            found.append(tuple(pairs.items()))
        return tuple(found)

    def _type(self, pair: Pair) -> tuple[Value, ShardingSpec]:
        return self.outer_values[pair[0]], pair[1]

    def _made_before(self, number: int) -> frozenset[Pair]:
        """Of what segment ``number`` of the outer region finds: results of the loop, each an array of its own, and what rounds
        before it made. The caller's arguments and what other stages sent belong to others."""
        if number == 0:
            return frozenset()
        specs = self.outer.decisions[f"{self.loop}"].results
        made = zip(self.outer.ops[self.loop][1], specs, self.body.results, strict=False)
        of_loop = {(v, s) for v, s, inside in made if self.body.results.count(inside) == 1}
        return frozenset(of_loop.union(*(segment.writes for segment in self.outer.segments[1:number])))

    def size(self, pair: Pair, *, inside: bool) -> int:
        """Bytes per device of a value of the body (``inside``) or of the outer region."""
        if (size := self._sizes.get((pair, inside))) is None:
            value = (self.body_values if inside else self.outer_values)[pair[0]]
            size = self._sizes[pair, inside] = pair[1].local_size_bytes(value.shape, value.itemsize, self.mesh)
        return size

    @cached_property
    def _sizes(self) -> dict[tuple[Pair, bool], int]:
        return {}
