"""The objective against an event simulation of synchronous schedules, with stages of unequal times."""

from __future__ import annotations

import numpy as np
import pytest


def gpipe(stage: int, num_stages: int, microbatches: int) -> list[tuple[str, int]]:
    return [(action, m) for action in "FB" for m in range(microbatches)]


def one_f_one_b(stage: int, num_stages: int, microbatches: int) -> list[tuple[str, int]]:
    warm = min(microbatches, num_stages - stage - 1)
    actions = [("F", m) for m in range(warm)]
    for m in range(microbatches - warm):
        actions += [("F", warm + m), ("B", m)]
    return actions + [("B", m) for m in range(microbatches - warm, microbatches)]


def ends(schedule, forward: np.ndarray, backward: np.ndarray, microbatches: int) -> list[float]:
    """When each stage ends its last action: an action starts when its stage is free and its input is there."""
    last = len(forward) - 1
    orders = [schedule(stage, last + 1, microbatches) for stage in range(last + 1)]
    done: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * (last + 1)
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                action, m = order[0]
                first, source = (stage == 0, ("F", stage - 1, m))
                if action == "B":
                    first, source = False, (("B", stage + 1, m) if stage < last else ("F", stage, m))
                if not first and source not in done:
                    break
                order.pop(0)
                seconds = (forward if action == "F" else backward)[stage]
                clock[stage] = max(clock[stage], 0.0 if first else done[source]) + seconds
                done[action, stage, m] = clock[stage]
    return clock


def formula(times: np.ndarray, microbatches: int) -> float:
    return times.sum() + (microbatches - 1) * times.max()


@pytest.mark.parametrize("seed", range(40))
def test_makespan_and_once_per_step_costs(seed):
    rng = np.random.default_rng(seed)
    stages, microbatches = int(rng.integers(1, 7)), int(rng.integers(1, 17))
    forward, once = rng.uniform(0.2, 1, stages), rng.uniform(0, 3, stages)
    expected = formula(3 * forward, microbatches)
    exact = ends(gpipe, forward, 2 * forward, microbatches)
    below = ends(one_f_one_b, forward, 2 * forward, microbatches)
    assert max(exact) == pytest.approx(expected)
    assert max(below) <= expected * (1 + 1e-12)
    for finished in (exact, below):
        assert max(finished) == finished[0]  # the first stage ends last, so its own once-per-step cost is exposed
        assert max(finished + once) <= expected + once.max() + 1e-12
    once[0] = once.max()
    assert max(exact + once) == pytest.approx(expected + once.max())


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_equal_stages_reach_the_formula_with_1f1b(stages):
    for microbatches in (stages, 4 * stages):
        finished = ends(one_f_one_b, np.full(stages, 1.0), np.full(stages, 2.0), microbatches)
        assert max(finished) == pytest.approx(formula(np.full(stages, 3.0), microbatches))
