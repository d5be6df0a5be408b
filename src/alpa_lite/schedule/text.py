"""Action tables as text: a picture in slots of equal time."""

from __future__ import annotations

from alpa_lite.schedule.actions import Action, ActionKind, Schedule, mesh_words

SLOTS = {kind: 2 if kind is ActionKind.B else 1 for kind in ActionKind}
"""Every action takes one slot, a whole backward the two of its halves."""

LINE_LENGTH = 120


def schedule_text(schedule: Schedule, *, width: int = LINE_LENGTH) -> str:
    """A row per mesh and a cell per slot: the action, "---" where one goes on, "." where the mesh is idle.

    Rows that are longer than ``width`` are cut, and say how many slots are left out.
    """
    from alpa_lite.schedule.simulate import simulate_schedule

    timeline = simulate_schedule(schedule, lambda action: float(SLOTS[action.kind]))
    slots = round(timeline.makespan_s)
    cells = [["."] * slots for _ in schedule.columns]
    for event in timeline.events:
        first, last = round(event.start_s), round(event.end_s)
        cells[event.mesh][first] = _short(event.label)
        cells[event.mesh][first + 1 : last] = ["---"] * (last - first - 1)
    cell = max(len(text) for row in cells for text in row)
    margin = len(str(schedule.num_meshes - 1))
    shown = max(1, (width - margin - 7) // (cell + 1))
    if shown < slots:
        shown = max(1, (width - margin - 7 - len(f" ... {slots} more")) // (cell + 1))
    more = f" ... {slots - shown} more" if shown < slots else ""
    rows = (
        f"mesh {mesh:>{margin}} | {' '.join(f'{text:>{cell}}' for text in row[:shown])}{more}\n"
        for mesh, row in enumerate(cells)
    )
    return f"{schedule.name}: {mesh_words(schedule)}\n{''.join(rows)}"


def _short(label: str) -> str:
    action = Action.parse(label)
    return f"{action.stage}{action.kind.letter}{'' if action.microbatch is None else action.microbatch}"
