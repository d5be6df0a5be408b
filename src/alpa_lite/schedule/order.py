"""In which order can all columns be worked off? One order that respects columns and needs, or the cycle that forbids it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule.actions import Action, ActionKind, Column, Schedule

Needs = Callable[[Action], Iterable[Action]]
Place = tuple[int, int]
"""Mesh, and position in its column."""


def places(columns: Sequence[Column]) -> dict[Action, Place]:
    """Where every action stands."""
    return {action: (mesh, k) for mesh, column in enumerate(columns) for k, action in enumerate(column)}


def linear_order(schedule: Schedule, needs: Needs) -> list[Action]:
    """All actions, each after the ones it needs and after the earlier ones of its mesh.

    Args:
        needs: the actions whose results an action reads; all of them are in the schedule.

    Raises:
        ScheduleError: there is no such order ("order" where one mesh contradicts itself, else "deadlock").
    """
    actions = [action for column in schedule.columns for action in column]
    # Numbers instead of actions: tables of long steps have tens of thousands.
    number = {action: k for k, action in enumerate(actions)}
    readers: list[list[int]] = [[] for _ in actions]
    missing = [0] * len(actions)
    first = {0, *itertools.accumulate(len(column) for column in schedule.columns)}
    for k, action in enumerate(actions):
        before = [number[other] for other in needs(action)] + ([] if k in first else [k - 1])
        missing[k] = len(before)
        for other in before:
            readers[other].append(k)
    ready = deque(k for k, count in enumerate(missing) if count == 0)
    order = []
    while ready:
        k = ready.popleft()
        order.append(actions[k])
        for reader in readers[k]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    if len(order) < len(actions):
        left = {actions[k] for k, count in enumerate(missing) if count > 0}
        raise _stuck(schedule, needs, places(schedule.columns), left)
    return order


def _stuck(schedule: Schedule, needs: Needs, at: dict[Action, Place], left: set[Action]) -> ScheduleError:
    """The error that names a cycle among the actions that cannot run."""
    first = min(left, key=lambda action: at[action])
    seen: dict[Action, int] = {}
    path: list[tuple[Action, str]] = []
    action = first
    while action not in seen:
        seen[action] = len(path)
        following, why = _waits_for(schedule.columns, needs, at, left, action)
        path.append((action, why))
        action = following
    cycle = path[seen[action] :]
    meshes = {at[step][0] for step, _ in cycle}
    words = "; ".join(f"{step} (mesh {at[step][0]}, place {at[step][1] + 1}) {why}" for step, why in cycle)
    if len(meshes) == 1:
        return ScheduleError(
            f"the schedule {schedule.name!r} contradicts itself on mesh {meshes.pop()}: {words}. On a mesh, F is before "
            "RECOMPUTE, then B or I, then W, then GRADSYNC and UPDATE. Change the order of that column.",
            "order",
        )
    return ScheduleError(
        f"the schedule {schedule.name!r} is a deadlock; these actions wait for each other: {words}. A schedule is allowed "
        "if the meshes can work their columns off from the top, each action after the ones it reads from. Move one of "
        "these actions behind what it waits for.",
        "deadlock",
    )


def _waits_for(
    columns: Sequence[Column], needs: Needs, at: dict[Action, Place], left: set[Action], action: Action
) -> tuple[Action, str]:
    """One reason why an action cannot run; what it reads counts before the order of its column."""
    for other in needs(action):
        if other in left:
            return other, f"reads what {other} makes"
    mesh, k = at[action]
    # The first of the column that cannot run, not the neighbour: shorter cycles to read.
    for other in columns[mesh][:k]:
        if other in left:
            return other, f"comes after {other}"
    raise AssertionError(f"{action} waits for nothing")


def action_needs(schedule: Schedule) -> Needs:
    """Needs of a plain pipeline: activations go to the next stage, their cotangents back to the one before.

    The update of a stage needs its own gradients; what else a program reads is known on the second level only.
    """
    kinds = ActionKind
    present = {action for column in schedule.columns for action in column}
    backwards: dict[int, list[Action]] = {}
    for action in present:
        if action.kind in (kinds.B, kinds.W):
            backwards.setdefault(action.stage, []).append(action)

    def cotangent(stage: int, microbatch: int | None) -> Action:
        whole = Action(kinds.B, stage, microbatch)
        return whole if whole in present else Action(kinds.I, stage, microbatch)

    def needs(action: Action) -> list[Action]:
        kind, stage, k = action.kind, action.stage, action.microbatch
        if kind is kinds.F:
            return [Action(kinds.F, stage - 1, k)] if stage else []
        if kind is kinds.RECOMPUTE:
            return [Action(kinds.F, stage, k)]
        if kind is kinds.W:
            return [Action(kinds.I, stage, k)]
        if kind in (kinds.B, kinds.I):
            found = [Action(kinds.F, stage, k), Action(kinds.RECOMPUTE, stage, k)]
            found += [cotangent(stage + 1, k)] if stage + 1 < schedule.num_stages else []
            return [other for other in found if other in present]
        found = [Action(kinds.GRADSYNC, stage)] if kind is kinds.UPDATE else []
        return [*(other for other in found if other in present), *backwards.get(stage, ())]

    return needs
