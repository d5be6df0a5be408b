"""What a pipeline takes by its stages' times, against the simulator."""

from __future__ import annotations

import random

import pytest

from alpa_lite.planner.stage_estimate import estimate_s
from alpa_lite.planner.stage_search import in_flight_of
from alpa_lite.schedule import ActionKind, make_schedule, simulate_schedule

COUNT = 64


def simulated(schedule: str, times: list[float], trips: list[float], once: list[float] | None = None) -> float:
    durations = {(s, ActionKind.F): t / 3 for s, t in enumerate(times)}
    durations |= {(s, ActionKind.B): 2 * t / 3 for s, t in enumerate(times)}
    durations |= {(s, ActionKind.GRADSYNC): 0.0 for s in range(len(times))}
    durations |= {(s, ActionKind.UPDATE): 0.0 if once is None else once[s] for s in range(len(times))}
    table = make_schedule(schedule, len(times), COUNT)
    return simulate_schedule(table, durations, lambda t: trips[min(t.source, t.destination)] / 2).makespan_s


@pytest.mark.medium
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "gpipe"])
def test_as_the_simulator_says(schedule: str):
    rng = random.Random(0)
    for _ in range(10):
        stages = rng.randint(2, 6)
        times = [rng.uniform(0.8, 1.2) for _ in range(stages)]
        trips = [rng.choice((0.0, 0.1, 0.4)) for _ in range(stages - 1)]
        flying = in_flight_of(schedule, stages, COUNT)[::-1]
        found = estimate_s(times, trips, [0.0] * stages, flying, COUNT)
        assert found == pytest.approx(simulated(schedule, times, trips), rel=0.05)


@pytest.mark.medium
def test_transfers_set_the_pace_under_1f1b():
    # Eight equal stages: microbatches are nearly a stage and a round trip apart, not a stage.
    found = estimate_s([1.0] * 8, [0.2] * 7, [0.0] * 8, in_flight_of("1f1b", 8, COUNT)[::-1], COUNT)
    assert found / COUNT > 1.15
    assert found == pytest.approx(simulated("1f1b", [1.0] * 8, [0.2] * 7), rel=0.02)


def test_what_is_done_once_is_added():
    assert estimate_s([1.0], [], [0.5], [1], 4) == pytest.approx(4.5)


@pytest.mark.medium
def test_later_stages_hide_what_they_do_once():
    times, trips, flying = [1.0] * 4, [0.1] * 3, in_flight_of("1f1b", 4, COUNT)[::-1]
    for stage in range(4):
        once = [4.0 if s == stage else 0.0 for s in range(4)]
        found, exact = estimate_s(times, trips, once, flying, COUNT), simulated("1f1b", times, trips, once)
        assert found == pytest.approx(exact, rel=0.02)
        assert found == pytest.approx(estimate_s(times, trips, [0.0] * 4, flying, COUNT) + 4.0 - stage * (2 / 3 + 0.05))
