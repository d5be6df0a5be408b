"""One stage on its devices: what runs before and after the loop over microbatches, and what the loop starts with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite._jax_compat import Literal
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.executor.measure import Recorder
from alpa_lite.lowering.segments import Pair, crossing_sharding
from alpa_lite.lowering.stage import LoweredStage, StagePart
from alpa_lite.lowering.transfer import Transfers
from alpa_lite.trace.stages import Crossing


class StageRunner:
    """The compiled functions of stage ``number`` on its devices, submesh ``place``; ``parts`` may be those of an equal stage."""

    def __init__(
        self,
        number: int,
        place: int,
        stage: LoweredStage,
        parts: Sequence[StagePart],
        mesh: Any,
        transfers: Transfers,
    ) -> None:
        self.number, self.place_number = number, place
        self.stage, self.program, self.mesh, self.transfers = stage, stage.program, mesh, transfers
        inputs = stage.cut.loop_inputs
        first, last = len(inputs.consts), len(inputs.consts) + len(inputs.carries)
        self.num_carry, self.num_microbatches = len(inputs.carries), stage.loop.params["length"]
        received = [c for c in self.program.received if c.when == "loop"]
        self.sent = {c.value: c for c in self.program.sent if c.when == "loop"}
        self.given_of = dict(zip(inputs.consts, self.operands(0, first), strict=True))
        self.given_of |= zip(inputs.slices, self.operands(last, last + len(inputs.slices)), strict=True)
        self.carry_of = {pair: j for j, pair in enumerate(inputs.carries)}
        self.arrival_of = {pair: c.value for pair, c in zip(inputs.received, received, strict=True)}
        self.starts = self.operands(first, last)
        self.inputs: list[Pair] = list(zip(stage.outer.flat.inputs, stage.outer.in_specs, strict=True))
        each = zip(self.inputs, self.program.args, strict=False)
        self.arguments = [(pair, position, self.layout(pair[1])) for pair, position in each]
        self.parts = tuple(parts)
        outer = len(self.parts) - len(stage.passes)
        self.outer, self.passes = self.parts[:outer], self.parts[outer:]
        self.indices: dict[int, Any] = {}

    def index(self, number: int) -> Any:
        """The number on the stage's devices, which tells a function where to run."""
        if number not in self.indices:
            self.indices[number] = self.place(np.int32(number), ShardingSpec.replicated(0))
        return self.indices[number]

    def operands(self, start: int, stop: int) -> list[Any]:
        """Of the loop: (value, layout) of the outer region, or the value of a literal or a constant."""
        specs = self.stage.lowering.decisions[f"{self.program.loop}"].operands[start:stop]
        constants, found = self.stage.outer.flat.constants, []
        for operand, spec in zip(self.stage.operands(start, stop), specs, strict=True):
            if isinstance(operand, Literal):
                found.append(self.place(operand.val, spec))
            elif operand[0] in constants:
                found.append(self.place(constants[operand[0]], spec))
            else:
                found.append(operand)
        return found

    def layout(self, spec: ShardingSpec) -> Any:
        """A layout on the stage's devices, as transfers take it."""
        return crossing_sharding(spec, self.mesh)

    def place(self, value: Any, spec: ShardingSpec) -> Any:
        return self.transfers.place(value, self.layout(spec))

    def copy(self, array: Any) -> Any:
        return jnp.copy(array)

    def literal(self, value: Any) -> Any:
        """A result of the step that nothing computes."""
        return jnp.asarray(value)

    def sharding_of_arrival(self, value: int) -> Any:
        """How the stage wants a value of the loop that another stage makes."""
        spec = next(spec for (_, spec), v in self.arrival_of.items() if v == value)
        return self.layout(spec)

    @cached_property
    def stacks(self) -> dict[int, Any]:
        """Result of the loop -> the function that stacks its rows."""
        specs = self.stage.lowering.decisions[f"{self.program.loop}"].results
        found = {}
        for j, spec in enumerate(specs):
            axis = 1 if spec.unreduced else 0  # behind the dim of the partial sums
            found[j] = jax.jit(partial(jnp.stack, axis=axis), out_shardings=crossing_sharding(spec, self.mesh))
        return found


class StageRun:
    """One step of one stage: what exists now outside of the loop."""

    def __init__(self, runner: StageRunner, leaves: Sequence[Any]) -> None:
        self.runner, self.program, self.region = runner, runner.program, runner.stage.outer
        place = runner.transfers.place
        self.outer: dict[Pair, Any] = {p: place(leaves[position], layout) for p, position, layout in runner.arguments}
        self.arrived: set[Crossing] = set()

    def segment(self, number: int, record: Recorder | None = None) -> None:
        """Run a segment of the outer region: 0 before the loop, then the rounds of the update."""
        segment, part = self.region.segments[number], self.runner.outer[number]
        given = [self.outer[pair] for pair in segment.reads]
        if record is None:
            made = part.function(self.runner.index(0), *given)
        else:
            *made, mark = part.marked(self.runner.index(0), *given)
            record.ran(self.runner.place_number, f"{self.runner.number}UPDATE" if number else "before", mark)
        self.outer.update(zip(part.results, made, strict=True))
        self.keep(self.runner.stage.cut.wanted_after(number))

    def keep(self, wanted: frozenset[Pair]) -> None:
        """Everything else has had its last reader."""
        self.outer = {pair: array for pair, array in self.outer.items() if pair in wanted}

    def value(self, operand: Any) -> Any:
        return self.outer[operand] if isinstance(operand, tuple) else operand

    def start(self, carry: int) -> Any:
        """What a sum starts with; the loop donates it."""
        operand = self.runner.starts[carry]
        moved = isinstance(operand, tuple) and operand in self.runner.stage.cut.moved_starts
        return self.outer.pop(operand) if moved else self.runner.copy(self.value(operand))

    def end_loop(self, sums: dict[int, Any], rows: dict[int, list[Any]]) -> None:
        """Take the results of the loop: sums by number, and per microbatch what is stacked."""
        specs = self.runner.stage.lowering.decisions[f"{self.program.loop}"].results
        for j, (value, spec) in enumerate(zip(self.runner.stage.loop.outputs, specs, strict=True)):
            if value >= 0 and j < self.runner.num_carry:
                self.outer[value, spec] = sums[j] if j in sums else self.start(j)
            elif value >= 0 and j in rows:
                self.outer[value, spec] = self.runner.stacks[j](rows[j])
        self.keep(self.runner.stage.cut.wanted_after_loop)

    def results(self) -> dict[int, Any]:
        outputs = zip(self.program.results, self.region.flat.outputs, self.region.results, strict=False)
        return {p: self.runner.literal(v.val) if pair is None else self.outer[pair] for p, v, pair in outputs}

    # -- what other stages send and want ----------------------------------------------------------------------------

    def place_of(self, crossing: Crossing) -> Pair:
        """Where a received value of before or after the loop goes."""
        return self.runner.inputs[len(self.program.args) + self.program.received.index(crossing)]

    def outgoing(self, crossing: Crossing) -> Any:
        """The array of a value that this stage sends before or after the loop; None if it does not exist yet."""
        if crossing.when == "start":
            return self.outer[self.runner.inputs[self.program.args.index(crossing.argument)]]
        sent = next(k for k, c in enumerate(self.program.sent) if c.value == crossing.value and c.when == "end")
        pair = self.region.results[len(self.program.results) + sent]
        assert pair is not None
        return self.outer.get(pair)

    def arrive(self, crossing: Crossing, array: Any) -> None:
        pair = self.place_of(crossing)
        self.arrived.add(crossing)
        self.outer[pair] = self.runner.transfers.move(array, self.runner.layout(pair[1]))
