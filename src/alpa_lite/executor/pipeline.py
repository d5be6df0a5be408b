"""Runs a step whose stages lie on submeshes of this process's devices.

Every submesh has a list of instructions (``schedule/emit.py``); one driver issues them in the order in which the simulator plays
them, and waits for nothing: JAX runs what is ready on every submesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite.core.collective import Collective
from alpa_lite.errors import AlpaLiteError
from alpa_lite.executor.driver import Driver, StepState
from alpa_lite.executor.local import SignatureChanged, leaf_type, positional_tree, stage_meshes
from alpa_lite.executor.loop_io import StageLoop, loop_step
from alpa_lite.executor.measure import Recorder
from alpa_lite.executor.stage_memory import StageMemory, program_bytes, stage_memory
from alpa_lite.executor.stage_run import StageRun, StageRunner
from alpa_lite.executor.staged_array import StagedArray
from alpa_lite.lowering.audit import AuditReport, audit
from alpa_lite.lowering.stage import LoweredStage, first_equal, lowered_stages
from alpa_lite.lowering.transfer import Transfers
from alpa_lite.plan.files import as_path
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule import (
    ActionKind,
    Instructions,
    Schedule,
    Timeline,
    emit_instructions,
    planned_schedule,
    simulate,
    write_trace,
)
from alpa_lite.schedule.simulate import Durations, TransferTime
from alpa_lite.trace.program import Traced
from alpa_lite.trace.staged import StagedStep
from alpa_lite.trace.unstack import LayeredStep


class PipelinedStep:
    """Runs one step; made once per plan, called with the leaves of the arguments.

    Args:
        stages: lowered, in order.
        meshes: the devices of each.
        schedule: which stage does what when, on which submesh.
        num_results: leaves of the step's result.
        durations_s, transfer_s: predicted, as for ``simulate``; transfers are named after what they carry.
        make_runner, transfers: what does the work; others than the usual ones write down what is to be done.

    Attributes:
        instructions: what every submesh executes.
        predicted: how the simulator plays them.
    """

    def __init__(
        self,
        stages: Sequence[LoweredStage],
        meshes: Sequence[Any],
        schedule: Schedule,
        num_results: int,
        durations_s: Durations,
        transfer_s: TransferTime,
        make_runner: Callable[..., StageRunner] = StageRunner,
        transfers: Any = None,
    ) -> None:
        self.transfers, self.num_results = transfers or Transfers(), num_results
        at = schedule.mesh_of_stage()
        parts = [stages[k].parts for k in first_equal(stages)]
        each = zip(range(len(stages)), at, stages, parts, meshes, strict=True)
        self.runners = [make_runner(*one, self.transfers) for one in each]
        self.rounds = range(1, 1 + len(stages[0].program.rounds))
        self.updates_alone = len(self.rounds) == 1 and not any(
            crossing.when == "end" for stage in stages for crossing in stage.program.received
        )
        loops = [StageLoop.of(number, runner) for number, runner in enumerate(self.runners)]
        # Gradients are reduced over a stage's devices by the functions of its update.
        columns = (tuple(a for a in column if a.kind is not ActionKind.GRADSYNC) for column in schedule.columns)
        self.schedule = replace(schedule, columns=tuple(columns))
        self.instructions = emit_instructions(
            self.schedule, loop_step(self.runners, loops, self.schedule), checked=True
        )
        self.predicted = simulate(self.instructions, durations_s, transfer_s, checked=True)
        self.driver = Driver(
            self.runners, loops, at, self.instructions, self.predicted.order, self.transfers, self._update
        )

    def __call__(self, leaves: Sequence[Any], record: Recorder | None = None) -> list[Any]:
        runs = [StageRun(runner, leaves) for runner in self.runners]
        self._exchange(runs, "start")
        for run in runs:
            run.segment(0)
        self.driver(runs, record)
        results: list[Any] = [None] * self.num_results
        for run in runs:
            for position, array in run.results().items():
                results[position] = array
        return results

    def _update(self, state: StepState, stage: int, sums: dict[int, Any], rows: dict[int, list[Any]]) -> None:
        """A stage's loop is over. What stages exchange for the update, such as a norm, waits for the last of them."""
        runs = state.runs
        runs[stage].end_loop(sums, rows)
        state.updating.append(stage)
        if self.updates_alone:
            runs[stage].segment(1, state.record)
        elif len(state.updating) == len(runs):
            self._exchange(runs, "end")  # what loops made
            for number in self.rounds:
                for run in runs:
                    run.segment(number, state.record)
                self._exchange(runs, "end")

    def _exchange(self, runs: Sequence[StageRun], when: str) -> None:
        """Before or after the loop: what stages read of others, as far as it exists and has not been sent."""
        for run in runs:
            for crossing in run.program.received:
                if crossing.when == when and crossing not in run.arrived:
                    array = runs[crossing.source].outgoing(crossing)
                    if array is not None:
                        run.arrive(crossing, array)


@dataclass(frozen=True, slots=True, eq=False)
class RunnablePipeline:
    """A planned pipeline over positional dynamic arguments (keyword arguments follow, sorted by name).

    Attributes:
        plan: what runs.
        step: on parts of leaves.
        tree, types: of the arguments, and of their leaves.
        parts: what they are of the arguments and results.
        out_tree: of the results.
    """

    plan: Plan
    step: PipelinedStep
    tree: Any
    types: Sequence[tuple[tuple[int, ...], str]]
    parts: LayeredStep
    out_tree: Any

    def run(self, *args: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(args)
        if tree != self.tree or list(map(leaf_type, leaves)) != self.types:
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
        return CompiledPipeline(self.plan, tuple(found), self)

    def place(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments as they are: every stage takes its parts to its devices."""
        return tuple(args)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPipeline:
    """All programs of a pipeline, compiled: per program (name, stage, the planned collectives that it holds, JAX's object)."""

    plan: Plan
    programs: tuple[tuple[str, int, tuple[Collective, ...], Any], ...]
    runnable: RunnablePipeline

    @property
    def instructions(self) -> Instructions:
        """What every submesh executes."""
        return self.runnable.step.instructions

    @property
    def predicted(self) -> Timeline:
        """The timeline of one step, as the simulator plays it with the plan's times."""
        return self.runnable.step.predicted

    def measure(self, *args: Any) -> Timeline:
        """Runs two steps on copies of the arguments, the first to warm up, and returns the timeline of the second.

        Args:
            args: positional dynamic arguments of the step (keyword arguments follow, sorted by name).
        """
        leaves = self.runnable.parts.split(jax.tree_util.tree_leaves(args))
        step, record = self.runnable.step, Recorder()
        jax.block_until_ready(step([jnp.copy(leaf) for leaf in leaves], Recorder()))
        fresh = jax.block_until_ready([jnp.copy(leaf) for leaf in leaves])
        step(fresh, record)
        return record.timeline("measured", len(step.instructions.meshes))

    def trace(self, path: str | PathLike[str], *args: Any) -> tuple[Timeline, Timeline]:
        """Writes the predicted and the measured timeline of one step as one Chrome trace file, and returns them.

        Args:
            path: of the file, for ui.perfetto.dev or chrome://tracing.
            args: as for ``measure``.

        Raises:
            AlpaLiteError: the file cannot be written.

        Example:
            >>> predicted, measured = step.compile(state, batch).trace("trace.json", state, batch)
            >>> print(predicted.bubble_share, measured.bubble_share)
        """
        target = as_path(path, 'step.compile(state, batch).trace("trace.json", state, batch)', AlpaLiteError)
        measured = self.measure(*args)
        write_trace(target, {"predicted": self.predicted.events, "measured": measured.events})
        return self.predicted, measured

    def audit(self) -> tuple[AuditReport, ...]:
        """One report per program: every planned collective against every compiled one, both ways."""
        meshes = [stage.mesh for stage in self.plan.stages]
        return tuple(audit(planned, done.as_text(), meshes[stage]) for _, stage, planned, done in self.programs)

    def memory(self) -> tuple[StageMemory, ...]:
        """Per stage: XLA's figures of its programs with what lies beside them, and the plan's prediction."""
        figures = {(stage, name): program_bytes(done) for name, stage, _, done in self.programs}
        predicted = [stage.memory.peak for stage in self.plan.stages]
        stages = [runner.stage for runner in self.runnable.step.runners]
        return stage_memory(stages, self.runnable.step.schedule, figures, predicted)


def runnable_pipeline(traced: Traced, staged: StagedStep, plan: Plan, devices: Sequence[Any]) -> RunnablePipeline:
    """Lower every stage of ``plan`` for its part of ``devices``.

    Raises:
        ClusterError: there are fewer devices than the plan has.
    """
    assert plan.pipeline is not None
    step = pipelined_step(staged, plan, lowered_stages(staged, plan), stage_meshes(plan, devices))
    assert traced.parts is not None
    types = list(map(leaf_type, traced.parts.argument_types()))
    return RunnablePipeline(plan, step, positional_tree(traced.in_tree), types, traced.parts, traced.out_tree)


def pipelined_step(
    staged: StagedStep, plan: Plan, stages: Sequence[LoweredStage], meshes: Sequence[Any], **doing: Any
) -> PipelinedStep:
    """A planned pipeline's step over the leaves of its plan; ``doing`` as ``make_runner`` and ``transfers`` there."""
    assert plan.pipeline is not None
    schedule = planned_schedule(plan.pipeline)
    times = _planned_s(plan), _transfer_s(plan, staged, schedule)
    return PipelinedStep(stages, meshes, schedule, len(plan.outputs), *times, **doing)


def _planned_s(plan: Plan) -> Durations:
    """The planned seconds of every stage's actions."""
    kinds = ActionKind
    found: dict[tuple[int, ActionKind], float] = {}
    for number, stage in enumerate(plan.stages):
        found[number, kinds.F], found[number, kinds.B] = stage.forward_s, stage.backward_s
        found[number, kinds.I], found[number, kinds.W] = stage.backward_s - stage.weight_s, stage.weight_s
        found[number, kinds.UPDATE] = stage.once_s
    return found


def _transfer_s(plan: Plan, staged: StagedStep, schedule: Schedule) -> TransferTime:
    """The planned seconds of what is sent in the loop; the plan lists transfers as stages receive them."""
    assert plan.pipeline is not None
    at = schedule.mesh_of_stage()
    received = [
        (crossing, target)
        for target, stage in enumerate(staged.stages)
        for crossing in stage.received
        if at[crossing.source] != at[target]
    ]
    times: dict[tuple[str, int], float] = {}
    for (crossing, target), planned in zip(received, plan.pipeline.transfers, strict=True):
        if crossing.when == "loop":
            times.setdefault((f"x{crossing.value}", at[target]), planned.time_s)
    return lambda transfer: times[transfer.buffer.name, transfer.destination]
