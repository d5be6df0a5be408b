"""What a stage's devices hold while a pipelined step runs: its programs and the buffers that lie beside them.

In: the cut stages of a submesh, what it runs in which order, and what each program needs. Out: the largest sum over the step of

- what lies on the submesh when the program starts: weights, optimiser state, the batch, sums of gradients, residuals of the
  microbatches in flight, values for later rounds of the update; and
- what the program makes beside its arguments: results and temporaries that take no argument's buffer.

A value that is
received counts from its first reader on, one that is sent until its program ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from alpa_lite.costs.cuts import Pair
from alpa_lite.costs.stage_cut import StageCut


class SubmeshPeak(NamedTuple):
    """The fullest moment of a submesh in bytes per device.

    ``state`` are the step's arguments, its results so far and what the update still reads; ``own`` is what the program ``name``
    of ``stage``, which runs then, needs beside its arguments.
    """

    stage: int
    name: str
    state: int
    gradients: int
    residuals: int
    own: int

    @property
    def held_bytes(self) -> int:
        return self.state + self.gradients + self.residuals

    @property
    def peak_bytes(self) -> int:
        return self.held_bytes + self.own


def submesh_peak(
    cuts: Mapping[int, StageCut], order: Sequence[tuple[int, int, int]], own: Mapping[tuple[int, str], int]
) -> SubmeshPeak:
    """The peak of the stages that share a submesh.

    Args:
        cuts: the stages by number.
        order: (stage, pass, microbatch) of everything that their loops run.
        own: by (stage, name of the program), bytes per device that it needs beside its arguments.
    """
    walk = _Walk(cuts, own)
    for stage in cuts:
        walk.outer(stage, 0)
    for stage, number, microbatch in order:
        walk.run_pass(stage, number, microbatch)
    for held in walk.held.values():
        held.end_loop()
    for number in range(1, len(next(iter(cuts.values())).outer.segments)):
        for stage in cuts:
            walk.outer(stage, number)
    return walk.peak


class _Walk:
    """The stages of one submesh in the order in which they run."""

    def __init__(self, cuts: Mapping[int, StageCut], own: Mapping[tuple[int, str], int]) -> None:
        self.held, self.own = {s: _Held(cut) for s, cut in cuts.items()}, own
        self.peak = SubmeshPeak(0, "", 0, 0, 0, 0)

    def run(self, stage: int, name: str) -> None:
        every = self.held.values()
        state, sums = sum(h.state() for h in every), sum(h.gradients() for h in every)
        residuals = sum(h.residuals() for h in every)
        own = self.own[stage, name]
        now = SubmeshPeak(stage, name, state, sums, residuals, own)
        self.peak = max(self.peak, now, key=lambda peak: peak.peak_bytes)

    def outer(self, stage: int, number: int) -> None:
        one = self.held[stage]
        one.arrive(number)
        self.run(stage, one.cut.outer_names[number])
        one.made(number)
        if number == 0:
            one.start_loop()

    def run_pass(self, stage: int, number: int, microbatch: int) -> None:
        one = self.held[stage]
        one.receive(number, microbatch)
        self.run(stage, one.cut.pass_names[number])
        one.passed(number, microbatch)


class _Held:
    """What one stage has on its devices, in bytes per device."""

    def __init__(self, cut: StageCut) -> None:
        self.cut = cut
        inputs = list(zip(cut.outer.inputs, cut.outer.in_specs, strict=True))
        self.given = set(inputs[: cut.num_args])
        when = dict(zip(inputs[cut.num_args :], cut.received, strict=True))
        starts = cut.operands(cut.num_consts, cut.num_consts + cut.num_carry)
        each = zip(cut.loop_inputs.carries, starts, strict=True)
        self.summed = [pair for pair, start in each if start not in cut.carried_state]
        self.ends = {pair for pair, word in when.items() if word == "end"}
        self.outer = set(self.given) | {pair for pair, word in when.items() if word == "start"}
        self.sums = False
        self.microbatches: dict[int, set[Pair]] = {}
        self.rows = 0

    def state(self) -> int:
        """Arguments of the step, results of finished rounds, and what waits for later ones."""
        return sum(self.cut.size(pair, inside=False) for pair in self.outer)

    def gradients(self) -> int:
        """Sums over microbatches, while the loop runs."""
        return self._inside(self.summed) if self.sums else 0

    def residuals(self) -> int:
        """What microbatches in flight keep, and results per microbatch."""
        return self.rows + sum(map(self._inside, self.microbatches.values()))

    def _inside(self, pairs: Iterable[Pair]) -> int:
        return sum(self.cut.size(pair, inside=True) for pair in pairs)

    def arrive(self, number: int) -> None:
        """What segment ``number`` reads of other stages."""
        self.outer |= set(self.cut.outer.segments[number].reads) & self.ends

    def made(self, number: int) -> None:
        """Segment ``number`` has run; what nothing reads any more is gone, but the caller's arguments."""
        self.given -= {old for old, _ in self.cut.freed[number]}
        made = self.outer | set(self.cut.outer.segments[number].writes)
        self.outer = self.given | (made & self.cut.wanted_after(number))

    def start_loop(self) -> None:
        """Sums take the buffers of what they start from, where nothing else reads it. Of state the next value is state, too."""
        self.outer -= self.cut.moved_starts - self.cut.carried_state
        self.sums = True

    def receive(self, number: int, microbatch: int) -> None:
        pairs = self.microbatches.setdefault(microbatch, set())
        pairs |= set(self.cut.body.segments[number].reads) & set(self.cut.loop_inputs.received)

    def passed(self, number: int, microbatch: int) -> None:
        body, cut = self.cut.body, self.cut
        self.microbatches[microbatch] |= cut.kept[number]
        stacked = body.results[cut.num_carry : len(body.results) - cut.num_sent]
        self.rows += self._inside(set(body.segments[number].writes) & set(stacked))
        if number + 1 == len(body.segments):
            del self.microbatches[microbatch]

    def end_loop(self) -> None:
        """Sums and stacked results are what later segments read; what was sent has left, microbatch by microbatch."""
        self.sums, self.rows = False, 0
        self.given -= self.cut.carried_state
        specs = self.cut.outer.decisions[f"{self.cut.loop}"].results
        results = list(zip(self.cut.outer.ops[self.cut.loop][1], specs, strict=True))
        made = {(v, s) for v, s in results[: len(results) - self.cut.num_sent] if v >= 0}
        self.outer = self.given | ((self.outer | made) & self.cut.wanted_after_loop)
