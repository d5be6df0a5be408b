"""A name, a function or a CSV file to a checked action table; passes that add what a step needs besides F and B."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike, fspath

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule.actions import Action, ActionKind, Column, Schedule
from alpa_lite.schedule.check import check_schedule
from alpa_lite.schedule.csv_table import read_schedule
from alpa_lite.schedule.generators import GENERATORS, UserSchedule


def make_schedule(
    schedule: str | PathLike[str] | UserSchedule,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    recompute: Iterable[int] = (),
    gradsync: bool = True,
    update: bool = True,
) -> Schedule:
    """A checked action table.

    Args:
        schedule: a name of ``GENERATORS``, the path of a file that ends in ".csv", or a function of ``num_stages`` and
            ``num_microbatches`` that returns one list of actions (or their texts, e.g. "0F3") per mesh.
        num_stages: stages of all meshes together, chunks included.
        num_microbatches: microbatches of one step.
        num_chunks: stages per mesh; only "interleaved-1f1b" takes more than one.
        recompute: stages whose forward is made again before each backward.
        gradsync: adds GRADSYNC at the end of every training stage that has none.
        update: adds UPDATE at the end of every training stage that has none.

    Raises:
        ScheduleError: an unknown name, counts that do not fit, or a table that ``check_schedule`` refuses.

    Example:
        >>> print(make_schedule("1f1b", 2, 2, gradsync=False, update=False))
        1f1b: 2 stages on 2 meshes, 2 microbatches
        mesh 0 | 0F0 0F1   .   . 0B0 --- 0B1 ---
        mesh 1 |   . 1F0 1B0 --- 1F1 1B1 ---   .
    """
    _check_counts(num_stages, num_microbatches, num_chunks)
    schedule = fspath(schedule) if isinstance(schedule, PathLike) else schedule
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        table = read_schedule(schedule, num_stages=num_stages, num_microbatches=num_microbatches)
    elif isinstance(schedule, str):
        table = _generate(schedule, num_stages, num_microbatches, num_chunks)
    else:
        name = getattr(schedule, "__name__", type(schedule).__name__)
        columns = _user_columns(name, schedule(num_stages, num_microbatches))
        table = Schedule(name=name, num_stages=num_stages, num_microbatches=num_microbatches, columns=columns)
        # Before the passes, which count on a whole table. Files are checked when they are read.
        check_schedule(table)
    if table.is_training:
        table = with_step_actions(with_recompute(table, recompute), gradsync=gradsync, update=update)
    check_schedule(table)
    return table


def forward_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Of a function without a gradient: forward passes, then what is done once (results are taken out of their stacks)."""
    table = make_schedule("inference", num_stages, num_microbatches)
    table = with_step_actions(table, gradsync=False)
    check_schedule(table)
    return table


def _generate(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    where = f"It was asked for with num_stages={num_stages}, num_microbatches={num_microbatches}"
    if name not in GENERATORS:
        raise ScheduleError(
            f"{name!r} is no schedule. Allowed are {', '.join(map(repr, GENERATORS))}, a path that ends in '.csv', or a "
            f"function. {where}: take one of these names.",
            "unknown",
        )
    if num_chunks > 1 and name != "interleaved-1f1b":
        raise ScheduleError(
            f"the schedule {name!r} was given num_chunks={num_chunks}. Only 'interleaved-1f1b' puts several chunks on a "
            f"mesh. {where}: leave num_chunks out or take that schedule.",
            "chunks",
        )
    if num_stages % num_chunks:
        raise ScheduleError(
            f"num_chunks={num_chunks} does not divide {num_stages} stages. Every mesh has as many chunks, and every chunk is "
            f"a stage. {where}: take a multiple of {num_chunks} stages.",
            "chunks",
        )
    columns = GENERATORS[name](num_stages // num_chunks, num_microbatches, num_chunks)
    return Schedule(name=name, num_stages=num_stages, num_microbatches=num_microbatches, columns=columns)


def _check_counts(num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(
                f"{name}={count!r} is no count. A whole number of at least 1 is allowed. It was given to make_schedule: "
                f"give e.g. {name}=2.",
                "range",
            )


def _user_columns(name: str, given: Sequence[Sequence[Action | str]]) -> tuple[Column, ...]:
    columns = []
    for mesh, column in enumerate(given):
        actions = []
        for k, action in enumerate(column):
            try:
                actions.append(action if isinstance(action, Action) else Action.parse(action))
            except (TypeError, ValueError) as error:
                raise ScheduleError(
                    f"the function {name!r} returned {action!r}, but {error}. Allowed are Action records and texts like "
                    f"'0F3': stage, kind ({', '.join(ActionKind)}), microbatch unless it is GRADSYNC or UPDATE. It is on "
                    f"mesh {mesh}, place {k + 1}: correct it.",
                    "action",
                ) from None
        columns.append(tuple(actions))
    return tuple(columns)


def with_recompute(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """Puts a RECOMPUTE before the backward of every microbatch of the given stages that has none.

    It stands directly before: it does not wait for the cotangent, so that it fills the time in which the mesh would.
    """
    wanted = frozenset(stages)
    present = {action for column in schedule.columns for action in column}

    def expand(action: Action) -> Column:
        again = Action(ActionKind.RECOMPUTE, action.stage, action.microbatch) if action.microbatch is not None else None
        backward = action.kind in (ActionKind.B, ActionKind.I)
        return (again, action) if again and backward and action.stage in wanted and again not in present else (action,)

    columns = tuple(tuple(one for action in column for one in expand(action)) for column in schedule.columns)
    return replace(schedule, columns=columns)


def with_step_actions(schedule: Schedule, *, gradsync: bool = True, update: bool = True) -> Schedule:
    """Adds GRADSYNC and UPDATE where they are not there.

    A mesh with several stages syncs all before it updates any: an update may read a norm over all gradients.
    """
    wanted = [ActionKind.GRADSYNC] * gradsync + [ActionKind.UPDATE] * update
    columns = []
    for column in schedule.columns:
        stages = sorted({action.stage for action in column})
        added = [Action(kind, stage) for kind in wanted for stage in stages]
        columns.append((*column, *(action for action in added if action not in column)))
    return replace(schedule, columns=tuple(columns))
