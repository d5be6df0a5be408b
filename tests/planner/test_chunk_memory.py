"""Memory of stages that share a submesh, by hand."""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.plan.records import MemoryProfile
from alpa_lite.planner.chunk_memory import submesh_peaks
from alpa_lite.planner.stage_costs import StageCosts
from alpa_lite.schedule import in_flight, make_schedule

STATE, RESIDUAL, WORK = 1000, 10, 7


def costs(flying, work=WORK, halves=0):
    """Of a stage with its own microbatches in flight."""
    held = flying.residuals * RESIDUAL + flying.halves * halves
    memory = MemoryProfile(parameters=STATE, activations=held, temporaries=work, peak=STATE + held + work)
    return StageCosts(
        forward_s=1.0,
        backward_s=2.0,
        weight_s=0.0,
        once_s=0.0,
        residual_bytes=RESIDUAL,
        halves_bytes=halves,
        memory=memory,
    )


def test_one_stage_per_submesh_is_as_it_is():
    schedule = make_schedule("1f1b", 3, 6)
    flying = in_flight(schedule)
    every = [costs(one) for one in flying]
    assert submesh_peaks(schedule, every, flying) == [one.memory.peak for one in every]


def test_chunks_keep_their_state_and_take_turns_to_work():
    schedule = make_schedule("interleaved-1f1b", 4, 4, 2)
    flying = in_flight(schedule)
    every = [costs(one, work=WORK * (1 + s)) for s, one in enumerate(flying)]
    # Mesh r holds (v - 1) p + 2 (p - 1 - r) + 1 residuals at its peak; the stage with most work is 2 + r.
    assert submesh_peaks(schedule, every, flying) == [
        2 * STATE + 5 * RESIDUAL + 3 * WORK,
        2 * STATE + 3 * RESIDUAL + 4 * WORK,
    ]


def test_what_lies_between_halves_counts_per_stage():
    def both_here(num_stages, num_microbatches):
        order = [
            f"{s}{kind}{k}"
            for k in range(num_microbatches)
            for kind in "FI"
            for s in ((0, 1) if kind == "F" else (1, 0))
        ]
        return [[*order, *(f"{s}W{k}" for s in (0, 1) for k in range(num_microbatches))]]

    schedule = make_schedule(both_here, 2, 3)
    flying = in_flight(schedule)
    assert [(one.residuals, one.halves) for one in flying] == [(3, 3)] * 2
    every = [costs(one, halves=2) for one in flying]
    without = [replace(costs(one), halves_bytes=0) for one in flying]
    assert submesh_peaks(schedule, without, flying) == [2 * STATE + 6 * RESIDUAL + WORK]
    assert submesh_peaks(schedule, every, flying) == [2 * STATE + 6 * RESIDUAL + 2 * 3 * 2 + WORK]
