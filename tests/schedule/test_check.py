"""Corrupted tables are reported as what they are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import AlpaLiteError, ScheduleError
from alpa_lite.schedule import Action, ActionKind, Schedule, check_schedule
from tests.schedule.tables import TRAINING, random_table, table

K = ActionKind


def refused(schedule, problem, *words):
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    assert caught.value.problem == problem, caught.value
    assert isinstance(caught.value, AlpaLiteError)
    for word in words:
        assert word in str(caught.value)


def changed(schedule, mesh, column):
    return replace(schedule, columns=(*schedule.columns[:mesh], tuple(column), *schedule.columns[mesh + 1 :]))


def without(schedule, action):
    return replace(schedule, columns=tuple(tuple(a for a in c if a != action) for c in schedule.columns))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_an_action_less_is_missing(seed):
    rng = random.Random(seed)
    schedule = random_table(rng)
    check_schedule(schedule)
    actions = [a for c in schedule.columns for a in c if a.kind is not K.GRADSYNC and len(c) > 1]
    action = rng.choice([a for a in actions if a.kind is not K.RECOMPUTE] or actions)
    left = without(schedule, action)
    if action.kind is K.UPDATE and schedule.num_stages == 1:
        check_schedule(left)  # an update is optional where no other stage has one
        return
    refused(left, "missing", "has no", str(schedule.num_microbatches))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_an_action_more_is_double(seed):
    rng = random.Random(seed)
    schedule = random_table(rng)
    mesh = rng.randrange(schedule.num_meshes)
    column = list(schedule.columns[mesh])
    action = rng.choice(column)
    column.insert(rng.randint(0, len(column)), action)
    refused(changed(schedule, mesh, column), "double", f"{action} 2 times", f"mesh {mesh}")


def test_a_whole_backward_beside_its_halves_is_double():
    schedule = table("1f1b", 2, 2)
    for half, word in ((K.I, "input half 1I0"), (K.W, "weight half 1W0")):
        refused(changed(schedule, 1, (*schedule.columns[1], Action(half, 1, 0))), "double", f"1B0 and its {word}")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_a_shuffled_column_runs_or_is_reported_as_a_circle(seed):
    """The verdict is that of a run by hand: all columns worked off from the top until nothing moves."""
    rng = random.Random(seed)
    schedule = random_table(rng)
    mesh = rng.randrange(schedule.num_meshes)
    column = list(schedule.columns[mesh])
    for _ in range(rng.randint(1, 3)):
        i, k = rng.randrange(len(column)), rng.randrange(len(column))
        column[i], column[k] = column[k], column[i]
    schedule = changed(schedule, mesh, column)
    if runs_by_hand(schedule):
        check_schedule(schedule)
        return
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    assert caught.value.problem in ("deadlock", "order")
    named = [word for word in str(caught.value).split() if word[0].isdigit() and word[-1].isalnum()]
    assert len(named) >= 2


def runs_by_hand(schedule):
    done: set[Action] = set()
    at = [0] * schedule.num_meshes
    everything = {a for c in schedule.columns for a in c}

    def there(kind, s, k):
        return Action(kind, s, k) in done

    def ready(a):
        s, k = a.stage, a.microbatch
        if a.kind is K.F:
            return s == 0 or there(K.F, s - 1, k)
        if a.kind is K.RECOMPUTE:
            return there(K.F, s, k)
        if a.kind is K.W:
            return there(K.I, s, k)
        if a.kind in (K.B, K.I):
            recomputed = Action(K.RECOMPUTE, s, k) not in everything or there(K.RECOMPUTE, s, k)
            later = s + 1 == schedule.num_stages or there(K.B, s + 1, k) or there(K.I, s + 1, k)
            return there(K.F, s, k) and recomputed and later
        own = {b for b in everything if b.stage == s and b.kind in (K.B, K.W)}
        synced = a.kind is K.GRADSYNC or Action(K.GRADSYNC, s) not in everything or Action(K.GRADSYNC, s) in done
        return own <= done and synced

    moved = True
    while moved:
        moved = False
        for mesh, column in enumerate(schedule.columns):
            while at[mesh] < len(column) and ready(column[at[mesh]]):
                done.add(column[at[mesh]])
                at[mesh] += 1
                moved = True
    return len(done) == len(everything)


def test_a_deadlock_names_its_circle():
    schedule = Schedule(
        name="mine",
        num_stages=2,
        num_microbatches=2,
        columns=(
            tuple(map(Action.parse, ["0F0", "0B0", "0F1", "0B1"])),
            tuple(map(Action.parse, ["1F0", "1F1", "1B0", "1B1"])),
        ),
    )
    circle = (
        "1B0 (mesh 1, place 3) comes after 1F1; 1F1 (mesh 1, place 2) reads what 0F1 makes; "
        "0F1 (mesh 0, place 3) comes after 0B0; 0B0 (mesh 0, place 2) reads what 1B0 makes"
    )
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    # The circle may be told from any of its members.
    steps = circle.split("; ")
    turns = ["; ".join(steps[k:] + steps[:k]) for k in range(len(steps))]
    assert caught.value.problem == "deadlock" and any(turn in str(caught.value) for turn in turns)
    assert "Move one of these actions behind what it waits for" in str(caught.value)


@pytest.mark.parametrize("name", TRAINING)
def test_backward_before_forward_is_an_order(name):
    schedule = table(name, 2, 4)
    column = list(schedule.columns[1])
    forward = next(k for k, a in enumerate(column) if a.kind is K.F)
    stage, microbatch = column[forward].stage, column[forward].microbatch
    back = next(
        k for k, a in enumerate(column) if a.kind in (K.B, K.I) and (a.stage, a.microbatch) == (stage, microbatch)
    )
    column[forward], column[back] = column[back], column[forward]
    with pytest.raises(ScheduleError) as caught:
        check_schedule(changed(schedule, 1, column))
    assert caught.value.problem in ("order", "deadlock")
    assert f"reads what {stage}F{microbatch} makes" in str(caught.value) or caught.value.problem == "deadlock"


def test_one_mesh_that_contradicts_itself_is_an_order():
    columns = (tuple(map(Action.parse, ["0B0", "0F0"])),)
    schedule = Schedule(name="mine", num_stages=1, num_microbatches=1, columns=columns)
    refused(schedule, "order", "contradicts itself on mesh 0", "0B0 (mesh 0, place 1) reads what 0F0 makes")


def test_ranges_and_places():
    schedule = table("1f1b", 2, 2)
    refused(changed(schedule, 0, ()), "range", "empty column", "Mesh 0 of 2")
    refused(changed(schedule, 1, (*schedule.columns[1], Action(K.F, 7, 0))), "range", "7F0", "mesh 1, place 7")
    refused(changed(schedule, 1, (*schedule.columns[1], Action(K.F, 1, 2))), "range", "1F2")
    moved = changed(schedule, 0, schedule.columns[0][:-1])
    moved = changed(moved, 1, (*moved.columns[1], schedule.columns[0][-1]))
    refused(moved, "placement", "actions of stage 0 on mesh 0 and on mesh 1 (0UPDATE)")
    refused(replace(schedule, num_stages=3), "missing", "has no action of stage 2")


def test_partial_recompute_and_update():
    again = table("1f1b", 2, 2, recompute=[0])
    refused(without(again, Action(K.RECOMPUTE, 0, 1)), "missing", "has no 0RECOMPUTE1")
    refused(without(again, Action(K.UPDATE, 1)), "missing", "has no 1UPDATE")
    forward = table("inference", 2, 2)
    refused(changed(forward, 0, (*forward.columns[0], Action(K.UPDATE, 0))), "missing")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Action(K.F, 0), "once per microbatch"),
        (lambda: Action(K.UPDATE, 0, 1), "once per step"),
        (lambda: Action(K.F, -1, 0), "counted from 0"),
    ],
)
def test_actions_check_themselves(make, words):
    with pytest.raises(ValueError, match=words):
        make()
