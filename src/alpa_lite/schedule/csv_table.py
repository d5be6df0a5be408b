"""Action tables as CSV: one row per mesh, one action per cell, e.g. ``0F0,0F1,0B0,0B1``. PyTorch's tables have this form.

Empty cells are idle time and carry no meaning, because a table holds an order and no times.
"""

from __future__ import annotations

import csv
import io
from os import PathLike

from alpa_lite.errors import AlpaLiteError, ScheduleError
from alpa_lite.plan.files import as_path, saved_file
from alpa_lite.schedule.actions import Action, ActionKind, Column, Schedule
from alpa_lite.schedule.check import check_schedule


def schedule_csv(schedule: Schedule) -> str:
    """The table as CSV text; ``parse_schedule`` reads it back."""
    return "".join(",".join(map(str, column)) + "\n" for column in schedule.columns)


def write_schedule(path: str | PathLike[str], schedule: Schedule) -> None:
    """Writes the table as a CSV file, whole or not at all.

    Raises:
        AlpaLiteError: the file cannot be written.
    """
    target = as_path(path, 'write_schedule("schedule.csv", schedule)', AlpaLiteError)
    with saved_file("the schedule", target, AlpaLiteError) as file:
        file.write(schedule_csv(schedule).encode())


def read_schedule(
    path: str | PathLike[str], *, num_stages: int | None = None, num_microbatches: int | None = None
) -> Schedule:
    """Reads and checks a CSV file; the schedule is named after the file. Arguments and errors as ``parse_schedule``."""
    source = as_path(path, 'read_schedule("schedule.csv")', AlpaLiteError)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"the schedule file {str(source)!r} cannot be read: {error}. A CSV file of actions in UTF-8 is allowed. Check the "
            "path, or write one with write_schedule.",
            "file",
        ) from None
    return parse_schedule(text, name=source.stem, num_stages=num_stages, num_microbatches=num_microbatches)


def parse_schedule(
    text: str, *, name: str = "csv", num_stages: int | None = None, num_microbatches: int | None = None
) -> Schedule:
    """Reads and checks CSV text.

    Args:
        text: one row per mesh.
        name: of the schedule.
        num_stages, num_microbatches: what the table is for; by default the largest numbers in it, plus one.

    Raises:
        ScheduleError: a cell that is no action (with its row and column), or a table that ``check_schedule`` refuses.
    """
    rows = list(csv.reader(io.StringIO(text)))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    columns = tuple(_column(name, number, row) for number, row in enumerate(rows, start=1))
    actions = [action for column in columns for action in column]
    if not actions:
        raise ScheduleError(
            f"the schedule {name!r} is empty. A row per mesh with cells like '0F3' is allowed. Its text is {text[:40]!r}: "
            "write one with write_schedule to see the form.",
            "file",
        )
    schedule = Schedule(
        name=name,
        num_stages=num_stages or 1 + max(action.stage for action in actions),
        num_microbatches=num_microbatches or 1 + max(action.microbatch or 0 for action in actions),
        columns=columns,
    )
    check_schedule(schedule)
    return schedule


def _column(name: str, row: int, cells: list[str]) -> Column:
    actions = []
    for column, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        try:
            actions.append(Action.parse(cell.strip()))
        except ValueError as error:
            raise ScheduleError(
                f"the schedule {name!r} holds the cell {cell!r}, but {error}. A cell is a stage, a kind "
                f"({', '.join(ActionKind)}) and, unless it is GRADSYNC or UPDATE, a microbatch, e.g. '0F3'. It is in row "
                f"{row} (mesh {row - 1}), column {column}: correct it.",
                "action",
            ) from None
    return tuple(actions)
