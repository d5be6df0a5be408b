"""Where the parts of a step belong, given a stage for every layer.

The step is ops before the microbatch loop, the loop, and ops after it. Every op belongs to a stage:

- ops of the loop to the stage of their layer; cheap ones that read no state but lengths (masks, positions) to every stage that
  wants them;
- ops before the loop to every stage that wants them;
- ops after the loop (the update) to the stage of the largest gradient or state that they read.

Without a gradient there is no update that says which arguments are parameters: all floats with dims count as state, and lie with
the first stage that reads them, or where the caller says. All else may be of the batch, and is copied to the stages that read it,
unless the caller says where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from alpa_lite._jax_compat import Literal, scan_layout
from alpa_lite.trace.flatten import FlatJaxpr
from alpa_lite.trace.layers import Layered
from alpa_lite.trace.renumbered import readers_of, values_of

_HEAVY = frozenset({"dot_general", "conv_general_dilated", "scan", "while", "cond", "shard_map", "user_op"})


def is_kept(aval: Any) -> bool:
    """Whether an argument of a function without a gradient lies on one stage, also where nobody says so."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact) and aval.ndim > 0)


class StageHomes:
    """Which stage every op of the step, result and state belongs to; the module tells the rules.

    Attributes:
        flat, loop_index, layered, aliases, stage_of_layer: as in ``stages.split_step``.
        loop, body: the microbatch loop and its body.
        maker, body_maker: value -> the number of the op that makes it, of the step and of the body.
        position, body_position: value -> its place among the arguments.
        body_stage: per op of the body. ``shareable``: per op of the body, whether any stage may repeat it.
        result_stage: per result of the body.
        outer_stage: number of an op after the loop -> its stage; ``round_of``: its round of the update.
        owner: position of a state argument -> the stage that makes its next value, or on which it lies.

    ``owners`` are those that the caller says, of a function without a gradient.
    """

    def __init__(
        self,
        flat: FlatJaxpr,
        loop: int,
        layered: Layered,
        stage_of_layer: tuple[int, ...],
        aliases: dict[int, int],
        owners: Mapping[int, int] | None = None,
    ) -> None:
        self.flat, self.loop_index, self.layered = flat, loop, layered
        self.loop, self.body = flat.ops[loop], layered.flat
        self.num_stages = stage_of_layer[-1] + 1
        self.stage_of_layer = stage_of_layer
        self.body_stage = [stage_of_layer[k] for k in layered.layer]
        self.num_consts, self.num_carry = scan_layout(self.loop.params)
        self.maker = {o: i for i, op in enumerate(flat.ops) for o in op.outputs if o >= 0}
        self.body_maker = {o: i for i, op in enumerate(self.body.ops) for o in op.outputs if o >= 0}
        self.position = {v: i for i, v in enumerate(flat.inputs)}
        self.body_position = {v: i for i, v in enumerate(self.body.inputs)}
        self.aliases = aliases
        self.owners = {} if any(layered.backward) else dict(owners or {})
        self.parameters = {} if any(layered.backward) else self._parameters()
        self.shareable = self._shareable()
        self.result_stage = [self._stage_in_body(o) for o in self.body.outputs]
        self.outer_stage: dict[int, int] = self._outer_stages()
        self.owner = self._owners()
        self.round_of = self._rounds()
        self.num_rounds = 1 + max(self.round_of.values(), default=0)

    def home(self, value: Any) -> int:
        """The stage of what makes a value of the step; 0 for arguments and what lies before the loop."""
        made = None if isinstance(value, Literal) else self.maker.get(value)
        if made == self.loop_index:
            return self.result_stage[self.loop.outputs.index(value)]
        return 0 if made is None else self.outer_stage.get(made, 0)

    def _shareable(self) -> list[bool]:
        """Per body op: cheap, and made of nothing but literals and arguments that are no state; or, without a gradient, of
        whole numbers per slot (lengths, positions), which every stage is sent rather than what is made of them."""
        state = self._made_of_state()
        carried = set(self.body.inputs[self.num_consts : self.num_consts + self.num_carry])
        if not any(self.layered.backward):
            avals = self.body.avals
            carried = {v for v in carried if avals[v].ndim > 1 or not jnp.issubdtype(avals[v].dtype, jnp.integer)}
        consts = self.body.inputs[: self.num_consts]
        dear = carried | {v for v, outer in zip(consts, self.loop.inputs, strict=False) if outer in state}
        found: list[bool] = []
        for op, back in zip(self.body.ops, self.layered.backward, strict=True):
            made = [v for v in values_of(op) if v in self.body_maker]
            cheap = op.name not in _HEAVY and not back and not op.has_effects
            cheap = cheap and not any(v in dear for v in values_of(op))
            found.append(cheap and all(found[self.body_maker[v]] for v in made))
        return found

    def _parameters(self) -> dict[int, int]:
        """Of a function without a gradient, position of an argument that is no batch, nor state -> its stage."""
        inner = dict(zip(self.loop.inputs, self.body.inputs, strict=True))
        readers = readers_of(enumerate(self.body.ops))
        found = {}
        for position, value in enumerate(self.flat.inputs):
            aval = self.flat.avals[value]
            if (is_kept(aval) or position in self.owners) and position not in self.aliases:
                stages = [self.body_stage[i] for i in readers[inner[value]]] if value in inner else []
                found[position] = self.owners.get(position, min(stages, default=0))
        return found

    def _made_of_state(self) -> set[Any]:
        """Outer values that state goes into, before the loop. Scalars, and vectors of whole numbers, are not counted: they
        are sent as cheaply as what is made of them."""
        avals = {i: self.flat.avals[self.flat.inputs[i]] for i in self.parameters}
        dear = [i for i, aval in avals.items() if is_kept(aval) or aval.ndim > 1]
        found: set[Any] = {self.flat.inputs[i] for i in (*self.aliases, *dear)}
        for op in self.flat.ops[: self.loop_index]:
            if any(v in found for v in values_of(op)):
                found.update(op.outputs)
        return found

    def _stage_in_body(self, value: Any) -> int:
        """Of the op that makes it; what needs no op is left to the last stage, where losses are."""
        made = None if isinstance(value, Literal) else self.body_maker.get(value)
        return self.num_stages - 1 if made is None else self.body_stage[made]

    def _outer_stages(self) -> dict[int, int]:
        """Stages of the ops after the loop."""
        size = [math.prod(getattr(a, "shape", ())) for a in self.flat.avals]
        home: dict[int, int] = {}
        for value, stage in zip(self.loop.outputs, self.result_stage, strict=True):
            if value >= 0:
                home[value] = stage
        body_readers = readers_of(enumerate(self.body.ops))
        for outer, inner in zip(self.loop.inputs[: self.num_consts], self.body.inputs, strict=False):
            readers = [self.body_stage[i] for i in body_readers[inner]]
            if not isinstance(outer, Literal) and readers and outer in self.position:
                home.setdefault(outer, min(readers))
        after = range(self.loop_index + 1, len(self.flat.ops))
        stages: dict[int, int] = {}
        for i in after:
            known = [v for v in values_of(self.flat.ops[i]) if v in home]
            if known:
                stages[i] = home[max(known, key=lambda v: size[v])]
                home.update((o, stages[i]) for o in self.flat.ops[i].outputs if o >= 0)
        readers_after = readers_of((i, self.flat.ops[i]) for i in after)
        for i in reversed(after):
            if i not in stages:
                readers = [stages[r] for o in self.flat.ops[i].outputs for r in readers_after[o] if r in stages]
                stages[i] = min(readers, default=0)
        return stages

    def _rounds(self) -> dict[int, int]:
        """Of the ops after the loop: one more than that of what they read from another stage, and not before it is read.

        So the old value of a moment is read in the round that makes the new one, which may then take its buffer.
        """
        found = dict.fromkeys(self.outer_stage, 0)
        for i in sorted(self.outer_stage):
            for value in values_of(self.flat.ops[i]):
                made = self.maker.get(value)
                if made is not None and made >= self.loop_index:
                    found[i] = max(found[i], found.get(made, 0) + (self.home(value) != self.outer_stage[i]))
        readers = readers_of((i, self.flat.ops[i]) for i in sorted(self.outer_stage))
        for i in sorted(self.outer_stage, reverse=True):
            stage = self.outer_stage[i]
            wanted = [found[r] - (self.outer_stage[r] != stage) for o in self.flat.ops[i].outputs for r in readers[o]]
            found[i] = max(found[i], min(wanted, default=0))
        return found

    def _owners(self) -> dict[int, int]:
        """Position of a state argument -> the stage that makes its next value."""
        found = dict(self.parameters)
        for argument, result in self.aliases.items():
            value = self.flat.outputs[result]
            made = None if isinstance(value, Literal) else self.maker.get(value)
            if argument in self.owners:
                found[argument] = self.owners[argument]
            elif made == self.loop_index:
                found[argument] = self.result_stage[self.loop.outputs.index(value)]
            elif made is not None and made in self.outer_stage:
                found[argument] = self.outer_stage[made]
            else:
                found[argument] = 0
        return found
