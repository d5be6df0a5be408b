"""Generators: the published formulas of idle time and of activations, and what every table must be."""

from __future__ import annotations

import random

import pytest

import alpa_lite as al
from alpa_lite.errors import ScheduleError
from alpa_lite.schedule import (
    GENERATORS,
    Action,
    ActionKind,
    bubble_s,
    check_schedule,
    in_flight,
    make_schedule,
    mesh_residuals,
    peak_residuals,
    simulate_schedule,
)
from tests.schedule.tables import COUNTS, TRAINING, table

K = ActionKind


def times(rng, num_chunks=1):
    """Random F and I, and W not above either, per mesh; a chunk takes its share."""
    forward, inputs = rng.uniform(0.5, 3), rng.uniform(0.5, 3)
    weights = rng.uniform(0, 1) * min(forward, inputs)
    share = {K.F: forward, K.I: inputs, K.W: weights, K.B: inputs + weights}
    return forward, inputs, weights, lambda action: share.get(action.kind, 0.0) / num_chunks


@pytest.mark.parametrize(("p", "m"), COUNTS)
@pytest.mark.parametrize("name", [*TRAINING, "inference"])
def test_bubble_formulas(name, p, m):
    chunks = 2 if name == "interleaved-1f1b" else 1
    forward, inputs, weights, duration = times(random.Random(f"{name} {p} {m}"), chunks)
    timeline = simulate_schedule(table(name, p, m), duration)
    # Written out here, beside the formulas of the package.
    whole = forward + inputs + weights
    expected = (p - 1) * {
        "zb-h1": forward + inputs - weights,
        "interleaved-1f1b": whole / 2,
        "inference": forward,
    }.get(name, whole)
    assert timeline.bubble_s == pytest.approx([expected] * p)
    assert bubble_s(name, p, forward, inputs, weights, chunks) == pytest.approx(expected)
    work = m * (forward if name == "inference" else whole)
    assert timeline.makespan_s == pytest.approx(work + expected)
    assert timeline.bubble_share == pytest.approx(expected / (work + expected))


@pytest.mark.parametrize(("p", "m"), COUNTS)
@pytest.mark.parametrize("name", [*TRAINING, "inference"])
def test_peak_activations(name, p, m):
    schedule = table(name, p, m)
    expected = [
        {
            "gpipe": m,
            "1f1b": min(m, p - i),
            "eager-1f1b": min(m, 2 * (p - i) - 1),
            "interleaved-1f1b": min(2 * m, p + 2 * (p - 1 - i) + 1),
            "zb-h1": p,
            "inference": 0,
        }[name]
        for i in range(p)
    ]
    assert mesh_residuals(schedule) == tuple(expected)
    chunks = 2 if name == "interleaved-1f1b" else 1
    assert [peak_residuals(name, p, m, i, chunks) for i in range(p)] == expected
    if chunks == 1:
        assert [count.residuals for count in in_flight(schedule)] == expected
        assert [count.inputs for count in in_flight(schedule)] == expected


@pytest.mark.parametrize("name", [*TRAINING, "inference"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (3, 1), (3, 2), (4, 6), (5, 5), (3, 12)])
def test_every_action_once_at_any_counts(name, p, m):
    if name == "interleaved-1f1b" and m % max(1, m // p):
        pytest.skip("no whole number of rounds")
    schedule = table(name, p, m)
    order = check_schedule(schedule)
    actions = [action for column in schedule.columns for action in column]
    assert sorted(map(str, order)) == sorted(map(str, actions))
    stages = schedule.num_stages
    backward = {"inference": (), "zb-h1": (K.I, K.W)}.get(name, (K.B,))
    expected = {Action(kind, s, k) for kind in (K.F, *backward) for s in range(stages) for k in range(m)}
    if name != "inference":
        expected |= {Action(kind, s) for kind in (K.GRADSYNC, K.UPDATE) for s in range(stages)}
    assert set(actions) == expected and len(actions) == len(expected)
    place = {action: k for column in schedule.columns for k, action in enumerate(column)}
    for action in actions:
        if action.kind in (K.B, K.I):
            assert place[Action(K.F, action.stage, action.microbatch)] < place[action]
    assert [peak_residuals(name, p, m, i, stages // p) for i in range(p)] == list(mesh_residuals(schedule))


def test_gradients_are_summed_in_one_order():
    """Every unsplit schedule adds microbatch 0 first, then 1, ...: their sums agree bit for bit."""
    for name in TRAINING:
        for column in table(name, 4, 8).columns:
            for stage in {action.stage for action in column}:
                for kind in (K.B, K.W):
                    added = [a.microbatch for a in column if a.kind is kind and a.stage == stage]
                    assert added == sorted(added)


def test_more_chunks_and_splitting_never_make_a_step_longer():
    duration = {K.F: 1.0, K.B: 2.0, K.I: 1.0, K.W: 1.0}
    spans = []
    for name, chunks in (("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4)):
        schedule = make_schedule(name, 4 * chunks, 16, chunks)
        spans.append(simulate_schedule(schedule, lambda a, v=chunks: duration.get(a.kind, 0.0) / v).makespan_s)
    assert spans == sorted(spans, reverse=True) and len(set(spans)) == 3
    assert simulate_schedule(table("zb-h1", 4, 16), lambda a: duration.get(a.kind, 0.0)).makespan_s < spans[0]


def test_recompute_stands_before_each_backward_and_moves_the_residuals():
    for name in TRAINING:
        schedule = table(name, 3, 6, recompute=[0, 2])
        for column in schedule.columns:
            for k, action in enumerate(column):
                if action.kind in (K.B, K.I):
                    before = column[k - 1]
                    again = before == Action(K.RECOMPUTE, action.stage, action.microbatch)
                    assert again == (action.stage in (0, 2))
    plain, again = (in_flight(table("1f1b", 3, 6, recompute=r)) for r in ((), [0]))
    assert (plain[0].residuals, again[0].residuals) == (3, 1) and plain[0].inputs == again[0].inputs == 3
    assert plain[1:] == again[1:]


def test_residuals_of_a_mesh_are_weighed():
    schedule = make_schedule("interleaved-1f1b", 4, 4, 2)
    assert mesh_residuals(schedule, {0: 10.0, 2: 0.0}) == (10.0 * in_flight(schedule)[0].residuals, 0.0)


def test_a_mesh_syncs_all_its_stages_before_it_updates_any():
    for column in make_schedule("interleaved-1f1b", 4, 4, 2).columns:
        kinds = [action.kind for action in column[-4:]]
        assert kinds == [K.GRADSYNC, K.GRADSYNC, K.UPDATE, K.UPDATE]


def test_a_users_function_is_a_schedule():
    def backwards_first(num_stages, num_microbatches):
        return [
            [one for k in range(num_microbatches) for one in (f"{s}F{k}", Action(K.B, s, k))] for s in range(num_stages)
        ]

    schedule = al.schedule.make_schedule(backwards_first, 2, 3, gradsync=False)
    assert schedule.name == "backwards_first"
    assert [str(a) for a in schedule.columns[1]] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1UPDATE"]
    assert in_flight(schedule)[0].residuals == 1


UNKNOWN = "'1f2b' is no schedule. Allowed are 'gpipe', '1f1b', 'eager-1f1b', 'interleaved-1f1b', 'zb-h1', 'inference'"


@pytest.mark.parametrize(
    ("arguments", "words", "problem"),
    [
        (("1f2b", 2, 4), UNKNOWN, "unknown"),
        (("1f1b", 0, 4), "num_stages=0 is no count", "range"),
        (("1f1b", 2, 2.5), "num_microbatches=2.5 is no count", "range"),
        (("1f1b", 4, 4, 2), "Only 'interleaved-1f1b' puts several chunks on a mesh", "chunks"),
        (("interleaved-1f1b", 5, 4, 2), "num_chunks=2 does not divide 5 stages", "chunks"),
        (("interleaved-1f1b", 8, 9, 2), "9 microbatches on 4 meshes", "microbatches"),
        ((lambda s, m: [["0X0"]], 1, 1), "'0X0' is no action", "action"),
        ((lambda s, m: [["0F"]], 1, 1), "F is done once per microbatch", "action"),
        ((lambda s, m: [["0F0", 7]], 1, 1), "mesh 0, place 2", "action"),
    ],
)
def test_what_is_refused(arguments, words, problem):
    with pytest.raises(ScheduleError) as caught:
        make_schedule(*arguments)
    assert words in str(caught.value) and caught.value.problem == problem


def test_formulas_know_the_generators_only():
    for ask in (lambda: bubble_s("mine", 2, 1, 1, 1), lambda: peak_residuals("mine", 2, 2, 0)):
        with pytest.raises(ScheduleError, match="no closed form for 'mine'"):
            ask()
    assert all(bubble_s(name, 1, 1.0, 1.0, 1.0) == 0 for name in GENERATORS)


@pytest.mark.parametrize("name", [*TRAINING, "inference"])
def test_tables_as_text(name, golden):
    golden(f"schedule_{name}", str(table(name, 2 if name == "interleaved-1f1b" else 4, 4)))


def test_long_tables_are_cut():
    text = str(table("1f1b", 4, 200))
    assert all(len(line) <= 120 for line in text.splitlines())
    slots = 200 * 3 + 3 * 3 + 2
    cells = text.splitlines()[1].partition("| ")[2].split(" ... ")
    assert cells[1] == f"{slots - len(cells[0].split())} more"
