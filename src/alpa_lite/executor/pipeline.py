"""Runs a step whose stages lie on submeshes of this process's devices.

One driver hands out instructions in schedule order and waits for nothing: JAX runs what is ready on every submesh. A stage's
values are kept per (value, layout), those of the loop per microbatch, and dropped after their last reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite._jax_compat import Literal
from alpa_lite.core.collective import Collective
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.executor.local import SignatureChanged, local_mesh
from alpa_lite.executor.staged_array import StagedArray
from alpa_lite.lowering.audit import AuditReport, audit
from alpa_lite.lowering.segments import Pair, crossing_sharding
from alpa_lite.lowering.stage import LoweredStage, StagePart, first_equal, lowered_stages
from alpa_lite.lowering.transfer import Transfers
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule import Action, ActionKind, check_schedule, planned_schedule
from alpa_lite.schedule.actions import PER_STEP
from alpa_lite.trace.program import Traced
from alpa_lite.trace.staged import StagedStep
from alpa_lite.trace.stages import Crossing
from alpa_lite.trace.unstack import LayeredStep


class _StageRunner:
    """The compiled functions of one stage on its devices; ``parts`` may be those of an equal stage."""

    def __init__(self, stage: LoweredStage, parts: Sequence[StagePart], mesh: Any, transfers: Transfers) -> None:
        self.stage, self.program, self.mesh, self.transfers = stage, stage.program, mesh, transfers
        body, loop = stage.body, stage.loop
        consts, carries = loop.params["num_consts"], loop.params["num_carry"]
        self.num_carry = carries
        self.received = [c for c in self.program.received if c.when == "loop"]
        self.sent = {c.value: c for c in self.program.sent if c.when == "loop"}
        inputs = list(zip(body.flat.inputs, body.in_specs, strict=True))
        last = len(inputs) - len(self.received)
        self.const_of = dict(zip(inputs[:consts], self.operands(0, consts), strict=True))
        self.carry_of = {pair: j for j, pair in enumerate(inputs[consts : consts + carries])}
        self.slice_of = dict(zip(inputs[consts + carries : last], self.operands(consts + carries, last), strict=True))
        self.arrival_of = {pair: c.value for pair, c in zip(inputs[last:], self.received, strict=True)}
        self.starts = self.operands(consts, consts + carries)
        self.parts = tuple(parts)
        outer = len(self.parts) - len(body.segments)
        self.outer, self.passes = self.parts[:outer], self.parts[outer:]
        self.indices: dict[int, Any] = {}

    def index(self, number: int) -> Any:
        """The number on the stage's devices, which tells a function where to run."""
        if number not in self.indices:
            self.indices[number] = self.place(np.int32(number), ShardingSpec.replicated(0))
        return self.indices[number]

    def operands(self, start: int, stop: int) -> list[Any]:
        """Of the loop: (value, layout) of the outer region, or a literal's value."""
        specs = self.stage.lowering.decisions[f"{self.program.loop}"].operands
        given = zip(self.stage.loop.inputs[start:stop], specs[start:stop], strict=True)
        return [self.place(v.val, spec) if isinstance(v, Literal) else (v, spec) for v, spec in given]

    def place(self, value: Any, spec: ShardingSpec) -> Any:
        return self.transfers.place(value, crossing_sharding(spec, self.mesh))


class _StageRun:
    """One step of one stage: what exists now."""

    def __init__(self, runner: _StageRunner, leaves: Sequence[Any]) -> None:
        self.runner, self.program = runner, runner.program
        self.region, self.body = runner.stage.outer, runner.stage.body
        self.inputs: list[Pair] = list(zip(self.region.flat.inputs, self.region.in_specs, strict=True))
        self.outer: dict[Pair, Any] = {}
        for pair, position in zip(self.inputs, self.program.args, strict=False):
            self.outer[pair] = runner.place(leaves[position], pair[1])
        self.carry: list[Any] = []
        self.rows: dict[int, list[Any]] = {}
        self.kept: dict[int, dict[Pair, Any]] = {}

    # -- before and after the loop ----------------------------------------------------------------------------------

    def segment(self, number: int) -> None:
        segment = self.region.segments[number]
        part = self.runner.outer[number]
        made = part.function(self.runner.index(0), *(self.outer[pair] for pair in segment.reads))
        self.outer.update(zip(segment.writes, made, strict=True))

    def before_loop(self) -> None:
        self.segment(0)
        self.carry = [jnp.copy(self.value(start)) for start in self.runner.starts]  # donated in the loop

    def value(self, operand: Any) -> Any:
        return self.outer[operand] if isinstance(operand, tuple) else operand

    def end_loop(self) -> None:
        loop, specs = self.runner.stage.loop, self.runner.stage.lowering.decisions[f"{self.program.loop}"].results
        for j, (value, spec) in enumerate(zip(loop.outputs, specs, strict=True)):
            if value >= 0 and j < self.runner.num_carry:
                self.outer[value, spec] = self.carry[j]
            elif value >= 0 and j in self.rows:
                axis = 1 if spec.unreduced else 0  # behind the dim of the partial sums
                stack = jax.jit(partial(jnp.stack, axis=axis), out_shardings=crossing_sharding(spec, self.runner.mesh))
                self.outer[value, spec] = stack(self.rows[j])
        self.carry, self.rows = [], {}

    def update(self, number: int) -> None:
        self.segment(1 + number)

    def results(self) -> dict[int, Any]:
        outputs = zip(self.program.results, self.region.flat.outputs, self.region.results, strict=False)
        return {p: jnp.asarray(v.val) if pair is None else self.outer[pair] for p, v, pair in outputs}

    # -- what other stages send and want ----------------------------------------------------------------------------

    def place_of(self, crossing: Crossing) -> Pair:
        """Where a received value of before or after the loop goes."""
        return self.inputs[len(self.program.args) + self.program.received.index(crossing)]

    def outgoing(self, crossing: Crossing) -> Any:
        """The array of a value that this stage sends before or after the loop; None if it does not exist yet."""
        if crossing.when == "start":
            return self.outer[self.inputs[self.program.args.index(crossing.argument)]]
        sent = next(k for k, c in enumerate(self.program.sent) if c.value == crossing.value and c.when == "end")
        pair = self.region.results[len(self.program.results) + sent]
        assert pair is not None
        return self.outer.get(pair)

    def arrive(self, crossing: Crossing, array: Any) -> None:
        pair = self.place_of(crossing)
        self.outer[pair] = self.runner.transfers.move(array, crossing_sharding(pair[1], self.runner.mesh))

    def sharding_of_arrival(self, value: int) -> NamedSharding:
        spec = next(spec for (_, spec), v in self.runner.arrival_of.items() if v == value)
        return crossing_sharding(spec, self.runner.mesh)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self, action: Action, arrived: dict[int, Any]) -> dict[int, Any]:
        """One pass of one microbatch; returns what others read of it, by value.

        ``arrived`` keeps what was sent to the microbatch, for both passes; the first that reads a value receives it.
        """
        last = len(self.body.segments) - 1
        numbers = {ActionKind.F: (0,), ActionKind.I: (1,), ActionKind.W: (2,)}.get(action.kind, range(1, 1 + last))
        sent: dict[int, Any] = {}
        for number in numbers:
            sent |= self.run_segment(number, action, arrived)
        return sent

    def run_segment(self, number: int, action: Action, arrived: dict[int, Any]) -> dict[int, Any]:
        segment = self.body.segments[number]
        microbatch = action.microbatch
        assert microbatch is not None
        kept = self.kept.setdefault(microbatch, {})
        given = [self.given(pair, kept, arrived) for pair in segment.reads]
        part = self.runner.passes[number]
        made = dict(zip(segment.writes, part.function(self.runner.index(microbatch), *given), strict=True))
        kept.update(made)
        sent = {}
        first = len(self.body.results) - len(self.runner.sent)
        for j, pair in enumerate(self.body.results):
            if pair not in made:
                continue
            if j < self.runner.num_carry:
                self.carry[j] = made[pair]
            elif j < first:
                self.rows.setdefault(j, []).append(made[pair])
            else:
                sent[list(self.runner.sent)[j - first]] = made[pair]
        if number == len(self.body.segments) - 1:
            del self.kept[microbatch]
        return sent

    def given(self, pair: Pair, kept: dict[Pair, Any], arrived: dict[int, Any]) -> Any:
        runner = self.runner
        if pair in runner.const_of:
            return self.value(runner.const_of[pair])
        if pair in runner.slice_of:
            return self.value(runner.slice_of[pair])
        if pair in runner.carry_of:
            return self.carry[runner.carry_of[pair]]
        if pair not in runner.arrival_of:
            return kept[pair]
        value = runner.arrival_of[pair]
        arrived[value] = runner.transfers.receive(arrived[value])
        return arrived[value]


class PipelinedStep:
    """Runs one step; made once per plan, called with the leaves of the arguments.

    Args:
        stages: lowered, in order.
        meshes: the devices of each.
        order: every forward and backward pass once, each after those that it waits for.
        num_results: leaves of the step's result.
    """

    def __init__(
        self, stages: Sequence[LoweredStage], meshes: Sequence[Any], order: Sequence[Action], num_results: int
    ) -> None:
        self.transfers = Transfers()
        parts = [stages[k].parts for k in first_equal(stages)]
        self.runners = [_StageRunner(*each, self.transfers) for each in zip(stages, parts, meshes, strict=True)]
        self.order, self.num_results = tuple(order), num_results

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        runs = [_StageRun(runner, leaves) for runner in self.runners]
        self.exchange(runs, "start")
        for run in runs:
            run.before_loop()
        self.loop(runs)
        for run in runs:
            run.end_loop()
        for number in range(len(self.runners[0].program.rounds)):
            for run in runs:
                run.update(number)
            self.exchange(runs, "end")
        results: list[Any] = [None] * self.num_results
        for run in runs:
            for position, array in run.results().items():
                results[position] = array
        return results

    def loop(self, runs: list[_StageRun]) -> None:
        boxes: dict[tuple[int, int | None], dict[int, Any]] = {}  # (stage, microbatch) -> what has arrived
        for action in self.order:
            run = runs[action.stage]
            box = boxes.setdefault((action.stage, action.microbatch), {})
            for value, array in run.run(action, box).items():
                for reader in run.runner.sent[value].readers:
                    sent = self.transfers.send(array, runs[reader].sharding_of_arrival(value))
                    boxes.setdefault((reader, action.microbatch), {})[value] = sent
            if action.kind in (ActionKind.B, ActionKind.W):
                del boxes[action.stage, action.microbatch]

    def exchange(self, runs: list[_StageRun], when: str) -> None:
        """Before or after the loop: what stages read of others, as far as it exists and has not been sent."""
        for run in runs:
            for crossing in run.program.received:
                if crossing.when == when and run.place_of(crossing) not in run.outer:
                    array = runs[crossing.source].outgoing(crossing)
                    if array is not None:
                        run.arrive(crossing, array)


@dataclass(frozen=True, slots=True, eq=False)
class RunnablePipeline:
    """A planned pipeline over positional dynamic arguments (keyword arguments follow, sorted by name).

    Attributes:
        plan: what runs.
        step: on parts of leaves.
        parts: what they are of the arguments and results.
        out_tree: of the results.
    """

    plan: Plan
    step: PipelinedStep
    parts: LayeredStep
    out_tree: Any

    def run(self, *args: Any) -> Any:
        leaves = jax.tree_util.tree_leaves(args)
        if [_type(x) for x in leaves] != [_type(x) for x in self.parts.argument_types()]:
            raise SignatureChanged
        made = self.step(self.parts.split(leaves))
        return jax.tree_util.tree_unflatten(self.out_tree, self.parts.join(made, StagedArray))

    def compile(self) -> CompiledPipeline:
        """Compile every stage's programs without running them."""
        found = []
        for number, runner in enumerate(self.step.runners):
            index = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(runner.mesh, PartitionSpec()))
            for part in runner.parts:
                planned = part.collectives(self.plan.stages[number].collectives)
                compiled = part.function.lower(index, *part.structs(runner.mesh)).compile()
                found.append((part.name, number, planned, compiled))
        return CompiledPipeline(self.plan, tuple(found))

    def place(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments as they are: every stage takes its parts to its devices."""
        return tuple(args)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPipeline:
    """All programs of a pipeline, compiled: per program (name, stage, the planned collectives that it holds, JAX's object)."""

    plan: Plan
    programs: tuple[tuple[str, int, tuple[Collective, ...], Any], ...]

    def audit(self) -> tuple[AuditReport, ...]:
        """One report per program: every planned collective against every compiled one, both ways."""
        meshes = [stage.mesh for stage in self.plan.stages]
        return tuple(audit(planned, done.as_text(), meshes[stage]) for _, stage, planned, done in self.programs)


def runnable_pipeline(traced: Traced, staged: StagedStep, plan: Plan, devices: Sequence[Any]) -> RunnablePipeline:
    """Lower every stage of ``plan`` for its part of ``devices``.

    Raises:
        ClusterError: there are fewer devices than the plan has.
    """
    assert plan.pipeline is not None
    meshes = [local_mesh(stage.mesh, devices[stage.first_device :]) for stage in plan.stages]
    stages = lowered_stages(staged, plan)
    schedule = planned_schedule(plan.pipeline)
    order = [action for action in check_schedule(schedule) if action.kind not in PER_STEP]
    assert traced.parts is not None
    step = PipelinedStep(stages, meshes, order, len(plan.outputs))
    return RunnablePipeline(plan, step, traced.parts, traced.out_tree)


def _type(x: Any) -> tuple[tuple[int, ...], str]:
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jnp.result_type(x if dtype is None else dtype)
    return tuple(np.shape(x)), str(dtype)
