"""The verifier of action tables: everything once, and an order in which all of it can run."""

from __future__ import annotations

from collections import Counter

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule.actions import Action, ActionKind, Schedule, mesh_words
from alpa_lite.schedule.order import action_needs, linear_order, places

K = ActionKind


def check_schedule(schedule: Schedule) -> list[Action]:
    """Checks an action table and returns its actions in one order in which they can run.

    1. Stages and microbatches are in range, no mesh is idle, and all actions of a stage are on one mesh.
    2. Every stage has each microbatch's F once, and, where anything is differentiated, B once or I and W once each.
       RECOMPUTE is there for all microbatches of a stage or none, UPDATE for all stages or none; nothing is there twice.
    3. Nothing waits for itself: not within a mesh (F before B) and not across meshes.

    Raises:
        ScheduleError: with ``problem`` "range", "placement", "double", "missing", "order" or "deadlock".
    """
    _check_range(schedule)
    _check_double(schedule)
    schedule.mesh_of_stage()
    _check_missing(schedule)
    return linear_order(schedule, action_needs(schedule))


def _check_range(schedule: Schedule) -> None:
    for mesh, column in enumerate(schedule.columns):
        if not column:
            raise ScheduleError(
                f"the schedule {schedule.name!r} has an empty column. Every mesh has at least one action. Mesh {mesh} of "
                f"{schedule.num_meshes} has none: give it a stage or leave it out.",
                "range",
            )
        for k, action in enumerate(column):
            if action.stage >= schedule.num_stages or (action.microbatch or 0) >= schedule.num_microbatches:
                raise ScheduleError(
                    f"the schedule {schedule.name!r} holds the action {action}. It is a schedule for {mesh_words(schedule)}, "
                    f"both counted from 0. It stands on mesh {mesh}, place {k + 1}: correct its numbers or the counts.",
                    "range",
                )


def _check_double(schedule: Schedule) -> None:
    at = places(schedule.columns)
    counts = Counter(action for column in schedule.columns for action in column)
    for action, count in counts.items():
        if count > 1:
            _raise_double(schedule, f"{action} {count} times", action)
        for half in (K.I, K.W) if action.kind is K.B else ():
            if (other := Action(half, action.stage, action.microbatch)) in at:
                _raise_double(schedule, f"{action} and its {'input' if half is K.I else 'weight'} half {other}", other)


def _raise_double(schedule: Schedule, what: str, action: Action) -> None:
    mesh, k = places(schedule.columns)[action]
    raise ScheduleError(
        f"the schedule {schedule.name!r} holds {what}. Every action is there once, and a backward is either B or I and W. "
        f"The last one is on mesh {mesh}, place {k + 1}: remove all but one.",
        "double",
    )


def _check_missing(schedule: Schedule) -> None:
    present = {action for column in schedule.columns for action in column}
    at, training = schedule.mesh_of_stage(), schedule.is_training
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_microbatches):
            for kind in _wanted(present, training, stage, k):
                if Action(kind, stage, k) not in present:
                    _raise_missing(schedule, Action(kind, stage, k), at[stage])
        again = [Action(K.RECOMPUTE, stage, k) in present for k in range(schedule.num_microbatches)]
        if any(again) and not all(again):
            _raise_missing(schedule, Action(K.RECOMPUTE, stage, again.index(False)), at[stage])
    updates = [Action(K.UPDATE, stage) in present for stage in range(schedule.num_stages)]
    if any(updates) and not all(updates):
        stage = updates.index(False)
        _raise_missing(schedule, Action(K.UPDATE, stage), at[stage])
    if not training:
        for action in sorted(present, key=str):
            if action.kind in (K.RECOMPUTE, K.GRADSYNC):
                _raise_missing(schedule, Action(K.B, action.stage, action.microbatch or 0), at[action.stage])


def _wanted(present: set[Action], training: bool, stage: int, microbatch: int) -> tuple[ActionKind, ...]:
    if not training:
        return (K.F,)
    split = any(Action(half, stage, microbatch) in present for half in (K.I, K.W))
    return (K.F, K.I, K.W) if split else (K.F, K.B)


def _raise_missing(schedule: Schedule, action: Action, mesh: int) -> None:
    raise ScheduleError(
        f"the schedule {schedule.name!r} has no {action}. In a schedule for {mesh_words(schedule)} every stage has the F of "
        "each microbatch and, if it trains, its B or its I and W; RECOMPUTE is there for all microbatches of a stage or none, "
        "UPDATE for all stages or none. It belongs on "
        f"mesh {mesh}: add it there.",
        "missing",
    )
