"""The driver runs the lists: they are sound, nothing outlives its FREE, and measuring changes no result."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest

from alpa_lite.schedule import ActionKind, check_instructions
from alpa_lite.schedule.instructions import Free, Recv, Run, Send
from tests.executor.test_pipeline_schedules import CASES, MICROBATCHES, arguments, parallel, run

pytestmark = pytest.mark.medium


def step_of(num_stages, schedule, num_chunks):
    return parallel(num_stages, schedule, num_chunks)._step(arguments(), {}).step


@pytest.mark.parametrize("case", CASES)
def test_the_lists_are_sound(case):
    step = step_of(*case)
    check_instructions(step.instructions, step.schedule)
    kinds = {i.action.kind for each in step.instructions.meshes for i in each.instructions if isinstance(i, Run)}
    assert ActionKind.UPDATE in kinds and ActionKind.GRADSYNC not in kinds
    sent, received = (
        sum(isinstance(i, kind) for each in step.instructions.meshes for i in each.instructions)
        for kind in (Send, Recv)
    )
    planned = parallel(*case).plan(*arguments()).pipeline.transfers
    assert sent == received == MICROBATCHES * sum(transfer.when == "loop" for transfer in planned)


def test_residuals_are_freed_as_the_schedule_says():
    """Under 1f1b the first of two stages holds two microbatches, under gpipe all four."""
    for schedule, most in (("1f1b", 2), ("gpipe", MICROBATCHES)):
        held = peak = 0
        for instruction in step_of(2, schedule, 1).instructions.meshes[0].instructions:
            if isinstance(instruction, Run) and instruction.action.kind is ActionKind.F:
                held += 1
            elif isinstance(instruction, Free) and instruction.buffer.name == "r0":
                held -= 1
            peak = max(peak, held)
        assert peak == most


def test_nothing_outlives_its_free(monkeypatch):
    """What the submeshes hold after every instruction of a step."""
    step, held = step_of(2, "1f1b", 1), []
    names = {number: str(buffer) for (_, buffer), number in step.driver.numbers.items()}

    def watched(call):
        def inner(state):
            call(state)
            held.append([names[n] for n, value in enumerate(state.buffers) if value is not None])

        return inner

    monkeypatch.setattr(step.driver, "calls", [watched(call) for call in step.driver.calls])
    step(jax.tree.leaves(arguments()))
    residuals = [sum(name.startswith("r0@") for name in there) for there in held]
    assert max(residuals) == 2 and residuals[-1] == 0
    assert {name[0] for name in held[-1]} <= {"w", "l", "y"}, "weights and results alone are left"


def test_a_step_leaves_no_arrays_behind():
    step, args = parallel(2, "1f1b"), arguments()
    step(*args)
    gc.collect()
    before = len(jax.live_arrays())
    results = jax.block_until_ready(step(*args))
    gc.collect()
    assert len(jax.live_arrays()) - before <= len(jax.tree.leaves(results))


def test_measuring_runs_the_same_step():
    parallelized, args = parallel(2, "1f1b"), arguments()
    compiled = parallelized.compile(*args)
    line = compiled.measure(*args)
    labels = sorted(e.label for e in line.events if not e.lane)
    assert labels == sorted(e.label for e in compiled.predicted.events if not e.lane)
    assert {e.lane for e in line.events if e.lane} <= {"to mesh 0", "to mesh 1"}
    assert all(e.end_s >= e.start_s >= 0 for e in line.events)
    for got, want in zip(jax.tree.leaves(parallelized(*args)), run(2, "1f1b"), strict=True):
        assert np.array_equal(np.asarray(got), want)
