"""A traced step and a stage for every layer -> one program per stage.

Where ops belong is told by ``stage_homes``. A stage's program is the step restricted to its ops, as a step of its own: what it
reads of other stages are further arguments, what others read of it are further results. Inside the loop these are stacked
over microbatches, so that the program means the same as the stage does in a pipeline. The loop's body holds the forward ops
first, then the backward ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alpa_lite._jax_compat import Literal, stacked_aval
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.layers import Layered
from alpa_lite.trace.renumbered import Renumbered, values_of
from alpa_lite.trace.stage_homes import StageHomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that one stage makes and others read.

    Attributes:
        value: its number in the step (of the loop's body, or of the outer program).
        source: the stage that makes it.
        readers: the stages that read it.
        when: "start" (state that another stage owns, sent before the first microbatch), "loop" (once per microbatch) or
            "end" (after the loop).
        argument: position of the step's argument that is sent at the start; -1 else.
    """

    value: int
    source: int
    readers: tuple[int, ...]
    when: str
    argument: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """The step restricted to one stage.

    Attributes:
        flat: its jaxpr; arguments are ``args`` then ``received``; results are ``results`` then ``sent``.
        args: positions of the step's arguments.
        received: values of other stages; those of the loop stacked over microbatches.
        results: positions of the step's results.
        sent: values for other stages.
        loop: number of the loop in ``flat.ops``.
        num_forward: how many ops of the loop's body belong to the forward pass.
        weight_half: number of the op of the body at which the second half of the backward pass starts, where it is split
            (``halves.split_backward``).
        rounds: numbers of the ops at which the rounds of the update end; between rounds stages send each other values.
        layers: of the step.
    """

    flat: FlatJaxpr
    args: tuple[int, ...]
    received: tuple[Crossing, ...]
    results: tuple[int, ...]
    sent: tuple[Crossing, ...]
    loop: int
    num_forward: int
    rounds: tuple[int, ...]
    layers: tuple[int, ...]
    weight_half: int | None = None

    @property
    def late(self) -> frozenset[int]:
        """Inputs of ``flat`` that come after the loop."""
        received = zip(self.flat.inputs[len(self.args) :], self.received, strict=True)
        return frozenset(value for value, crossing in received if crossing.when == "end")


def split_step(
    flat: FlatJaxpr,
    loop: int,
    layered: Layered,
    stage_of_layer: Sequence[int],
    aliases: Iterable[tuple[int, int]],
    owners: Mapping[int, int] | None = None,
) -> tuple[StageProgram, ...]:
    """One program per stage.

    Args:
        flat: the step.
        loop: number of the microbatch loop in ``flat.ops``.
        layered: the loop's body.
        stage_of_layer: rising.
        aliases: (argument, result) positions of state.
        owners: as of ``StageHomes``.
    """
    return _Split(StageHomes(flat, loop, layered, tuple(stage_of_layer), dict(aliases), owners)).run()


def stages_of_step(
    flat: FlatJaxpr,
    loop: int,
    layered: Layered,
    stage_of_layer: Sequence[int],
    aliases: Iterable[tuple[int, int]],
    wanted: Iterable[int],
) -> tuple[StageProgram, ...]:
    """As ``split_step``, the ``wanted`` stages alone."""
    return _Split(StageHomes(flat, loop, layered, tuple(stage_of_layer), dict(aliases))).run(wanted)


@dataclass(slots=True)
class _Needs:
    """What one stage computes and reads."""

    body_ops: set[int] = field(default_factory=set)
    body_received: set[int] = field(default_factory=set)
    outer_ops: set[int] = field(default_factory=set)
    outer_received: set[int] = field(default_factory=set)
    args: set[int] = field(default_factory=set)
    carries: list[int] = field(default_factory=list)
    stacked: list[int] = field(default_factory=list)


class _Split:
    """What every stage computes, and its program."""

    def __init__(self, homes: StageHomes) -> None:
        self.homes = homes
        self.flat, self.loop_index, self.layered = homes.flat, homes.loop_index, homes.layered
        self.loop, self.body = homes.loop, homes.body
        self.num_consts, self.num_carry = homes.num_consts, homes.num_carry
        self.needs = [_Needs() for _ in range(homes.num_stages)]

    def run(self, wanted: Iterable[int] | None = None) -> tuple[StageProgram, ...]:
        for i in range(len(self.body.ops)):
            if not self.homes.shareable[i]:
                self._want_body_op(self.homes.body_stage[i], i)
        for j, value in enumerate(self.body.outputs):
            stage = self.homes.result_stage[j]
            (self.needs[stage].carries if j < self.num_carry else self.needs[stage].stacked).append(j)
            self._want_body(stage, value)
        for i, stage in self.homes.outer_stage.items():
            self._want_outer_op(stage, i)
        self.results: list[list[int]] = [[] for _ in self.needs]
        owned = {r: self.homes.owner[a] for a, r in self.homes.aliases.items()}
        for position, value in enumerate(self.flat.outputs):
            stage = owned.get(position, self.homes.home(value))
            self.results[stage].append(position)
            self._want_outer(stage, value)
        for stage, need in enumerate(self.needs):
            for j in need.carries:
                self._want_outer(stage, self.loop.inputs[self.num_consts + j])
        self._want_inputs_of_bodies()
        self._want_state_from_owners()
        read = set().union(*(need.args for need in self.needs))
        for argument in set(range(len(self.flat.inputs))) - read:  # what nothing reads lies somewhere
            self.needs[self.homes.owner.get(argument, 0)].args.add(argument)
        loop = sorted(set().union(*(need.body_received for need in self.needs)))
        end = sorted(set().union(*(need.outer_received for need in self.needs)))
        self.exchanged = [*(self._crossing(v, "loop") for v in loop), *(self._crossing(v, "end") for v in end)]
        return tuple(self._build(stage) for stage in (range(self.homes.num_stages) if wanted is None else wanted))

    def _want_body_op(self, stage: int, i: int) -> None:
        need = self.needs[stage]
        if i in need.body_ops:
            return
        need.body_ops.add(i)
        for value in values_of(self.body.ops[i]):
            self._want_body(stage, value)

    def _want_body(self, stage: int, value: Any) -> None:
        if isinstance(value, Literal) or value in self.homes.body_position or value in self.body.constants:
            return
        made = self.homes.body_maker[value]
        if self.homes.shareable[made]:
            self._want_body_op(stage, made)
        elif self.homes.body_stage[made] != stage:
            self.needs[stage].body_received.add(value)

    def _want_outer_op(self, stage: int, i: int) -> None:
        need = self.needs[stage]
        if i in need.outer_ops:
            return
        need.outer_ops.add(i)
        for value in values_of(self.flat.ops[i]):
            self._want_outer(stage, value)

    def _want_outer(self, stage: int, value: Any) -> None:
        """An argument, a result of the loop, of an op before it (made wherever it is wanted) or after it."""
        if isinstance(value, Literal) or value in self.flat.constants:
            return
        made = self.homes.maker.get(value)
        if made is None:
            self.needs[stage].args.add(self.homes.position[value])
        elif made < self.loop_index:
            self._want_outer_op(stage, made)
        elif self.homes.home(value) != stage:
            self.needs[stage].outer_received.add(value)

    def _want_inputs_of_bodies(self) -> None:
        for stage, need in enumerate(self.needs):
            for position in self._body_inputs(need):
                self._want_outer(stage, self.loop.inputs[position])

    def _body_inputs(self, need: _Needs) -> list[int]:
        """Positions of the constants and slices that the stage's ops of the loop, or its results, read; and of the carries of
        other stages, in a loop that runs once: what they start from."""
        read = {v for i in need.body_ops for v in values_of(self.body.ops[i])}
        read |= {o for j in (*need.carries, *need.stacked) if not isinstance(o := self.body.outputs[j], Literal)}
        own = {self.num_consts + j for j in need.carries}
        return [p for p, v in enumerate(self.body.inputs) if v in read and p not in own]

    def _want_state_from_owners(self) -> None:
        read = set().union(*(need.args for need in self.needs))
        for argument, owner in self.homes.owner.items():
            if argument in read:
                self.needs[owner].args.add(argument)

    # -- the programs -----------------------------------------------------------------------------------------------

    def _build(self, stage: int) -> StageProgram:
        need = self.needs[stage]
        taken = [a for a in need.args if self.homes.owner.get(a, stage) != stage]
        args = sorted(need.args - set(taken))
        start = [self._crossing(self.flat.inputs[a], "start") for a in sorted(taken)]
        loop = [self._crossing(v, "loop") for v in sorted(need.body_received)]
        end = [self._crossing(v, "end") for v in sorted(need.outer_received)]
        sent = self._sent(stage)
        builder = Renumbered(self.flat.avals)
        inputs = [builder.value(self.flat.inputs[a]) for a in args]
        inputs += [builder.value(c.value) for c in start]
        stacks = [builder.fresh(stacked_aval(self.body.avals[c.value], self.loop.params["length"])) for c in loop]
        inputs += [*stacks, *(builder.value(c.value) for c in end)]
        before = [builder.op(self.flat.ops[i]) for i in sorted(need.outer_ops) if i < self.loop_index]
        made_stacks, loop_op, num_forward = self._loop(
            need, builder, loop, stacks, [c for c in sent if c.when == "loop"]
        )
        late = sorted((self.homes.round_of[i], i) for i in need.outer_ops if i > self.loop_index)
        after = [builder.op(self.flat.ops[i]) for _, i in late]
        first = len(before) + 1
        rounds = tuple(first + sum(r <= last for r, _ in late) for last in range(self.homes.num_rounds))
        outputs = [builder.read(self.flat.outputs[r]) for r in self.results[stage]]
        by_loop = dict(zip((c.value for c in sent if c.when == "loop"), made_stacks, strict=True))
        outputs += [by_loop[c.value] if c.when == "loop" else builder.value(c.value) for c in sent]
        constants = {builder.value(v): c for v, c in self.flat.constants.items() if v in builder.number}
        return StageProgram(
            flat=FlatJaxpr(builder.avals, [*before, loop_op, *after], inputs, outputs, constants),
            args=tuple(args),
            received=(*start, *loop, *end),
            results=tuple(self.results[stage]),
            sent=sent,
            loop=len(before),
            num_forward=num_forward,
            rounds=rounds,
            layers=tuple(k for k, s in enumerate(self.homes.stage_of_layer) if s == stage),
        )

    def _crossing(self, value: int, when: str) -> Crossing:
        if when == "loop":
            source = self.homes.body_stage[self.homes.body_maker[value]]
            readers = [s for s, n in enumerate(self.needs) if value in n.body_received]
        elif when == "start":
            argument = self.homes.position[value]
            source = self.homes.owner[argument]
            readers = [s for s, n in enumerate(self.needs) if argument in n.args and s != source]
        else:
            source = self.homes.home(value)
            readers = [s for s, n in enumerate(self.needs) if value in n.outer_received]
        argument = self.homes.position[value] if when == "start" else -1
        return Crossing(value=value, source=source, readers=tuple(readers), when=when, argument=argument)

    def _sent(self, stage: int) -> tuple[Crossing, ...]:
        """State is sent as the argument that it is; all else is made by the program."""
        return tuple(c for c in self.exchanged if c.source == stage)

    def _loop(
        self, need: _Needs, outer: Renumbered, received: list[Crossing], stacks: list[int], sent: list[Crossing]
    ) -> tuple[list[int], FlatOp, int]:
        """The loop over the stage's part of the body; also the stacks that it sends and how many ops are forward."""
        first, last = self.num_consts, self.num_consts + self.num_carry
        positions = self._body_inputs(need)
        consts, slices = [p for p in positions if p < last], [p for p in positions if p >= last]
        assert self.loop.params["length"] == 1 or all(p < first for p in consts), "a sum that another stage reads"
        carries = [first + j for j in need.carries]
        inner = Renumbered(self.body.avals)
        inputs = [inner.value(self.body.inputs[p]) for p in (*consts, *carries, *slices)]
        inputs += [inner.value(c.value) for c in received]
        order = sorted(need.body_ops, key=lambda i: (self.layered.backward[i], i))
        ops = [inner.op(self.body.ops[i]) for i in order]
        outputs = [inner.read(self.body.outputs[j]) for j in (*need.carries, *need.stacked)]
        outputs += [inner.value(c.value) for c in sent]
        constants = {inner.value(v): c for v, c in self.body.constants.items() if v in inner.number}
        body = FlatJaxpr(inner.avals, ops, inputs, outputs, constants)
        made = [outer.fresh(stacked_aval(self.body.avals[c.value], self.loop.params["length"])) for c in sent]
        given = [outer.read(self.loop.inputs[p]) for p in (*consts, *carries, *slices)]
        params = {
            "num_consts": len(consts),
            "num_carry": len(carries),
            "sent": tuple(range(len(need.carries) + len(need.stacked), len(outputs))),
            "received": tuple(range(len(given), len(given) + len(stacks))),
            **{k: self.loop.params[k] for k in ("length", "reverse", "unroll")},
        }
        everything = [outer.value(self.loop.all_outputs[j]) for j in (*need.carries, *need.stacked)] + made
        used = [self.loop.outputs[j] >= 0 for j in (*need.carries, *need.stacked)] + [True] * len(made)
        op = FlatOp(
            self.loop.primitive, params, [*given, *stacks], everything, self.loop.source, self.loop.scope, [body]
        )
        op.outputs = [o if u else -1 for o, u in zip(everything, used, strict=True)]
        op.traceback = self.loop.traceback
        return made, op, sum(not self.layered.backward[i] for i in order)
