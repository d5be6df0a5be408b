"""What happened when, predicted or measured: events, figures, text, and a trace file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from alpa_lite.errors import AlpaLiteError
from alpa_lite.plan.files import as_path, saved_file
from alpa_lite.units import format_bytes, format_time


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time on a mesh.

    Attributes:
        mesh: index of the mesh.
        start_s, end_s: seconds since the step began.
        label: e.g. "1B3" for an action, or the buffer of a transfer.
        lane: "" for what occupies the mesh; what goes on beside it has a lane of its own, e.g. "to mesh 2".
    """

    mesh: int
    start_s: float
    end_s: float
    label: str
    lane: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step that was played through.

    Attributes:
        name: of the schedule.
        makespan_s: end of the last event.
        busy_s: per mesh the seconds in which it computes.
        peak_bytes: per mesh the most bytes per device that are alive at once.
        events: sorted by mesh, lane and time.
        order: (mesh, place in its list) of all instructions, in an order in which one driver can issue them: by time, and
            each after all that it depends on.
    """

    name: str
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    events: tuple[Event, ...]
    order: tuple[tuple[int, int], ...] = ()

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Per mesh the seconds in which it does not compute."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble_share(self) -> float:
        """Idle part of all meshes' time, from 0 to 1."""
        whole = self.makespan_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    def __str__(self) -> str:
        peak = f", peak {format_bytes(max(self.peak_bytes))}" if any(self.peak_bytes) else ""
        head = f"{self.name}: {format_time(self.makespan_s)}, bubble {self.bubble_share:.1%}{peak}\n"
        return head + timeline_text(self.events)


def timeline_text(events: Iterable[Event], *, width: int = 96) -> str:
    """One row per mesh; each character is what the mesh does in that part of the time: a kind's letter, or "." for idle.

    A part in which several things happen shows the one that takes most of it, so short actions of long steps are dropped.
    """
    computing = [event for event in events if not event.lane and event.end_s > event.start_s]
    end = max((event.end_s for event in computing), default=0.0)
    meshes = sorted({event.mesh for event in computing})
    margin = len(str(meshes[-1])) if meshes else 1
    rows = []
    for mesh in meshes:
        share: list[dict[str, float]] = [{} for _ in range(width)]
        for event in computing:
            if event.mesh == mesh:
                for slot, part in _slots(event, end / width, width):
                    share[slot][_letter(event.label)] = share[slot].get(_letter(event.label), 0.0) + part
        cells = ("." if sum(s.values()) < 0.5 else max(s, key=lambda letter: s[letter]) for s in share)
        rows.append(f"mesh {mesh:>{margin}} |{''.join(cells)}|\n")
    return "".join(rows)


def _slots(event: Event, slot_s: float, count: int) -> Iterator[tuple[int, float]]:
    """The slots that an event touches, and which part of each it fills."""
    first, last = int(event.start_s / slot_s), int(event.end_s / slot_s)
    for slot in range(first, min(last, count - 1) + 1):
        part = min(event.end_s / slot_s, slot + 1) - max(event.start_s / slot_s, slot)
        if part > 0:
            yield slot, part


def _letter(label: str) -> str:
    return next((character for character in label if character.isalpha()), "#")


def chrome_trace(groups: Mapping[str, Sequence[Event]]) -> str:
    """JSON of the Trace Event Format, for ui.perfetto.dev or chrome://tracing.

    Args:
        groups: events by name, e.g. {"predicted": ..., "measured": ...}; every name is a process of the trace, every mesh
            and lane a thread, and times count from the start of the group.
    """
    entries: list[dict[str, Any]] = []
    for pid, (name, events) in enumerate(groups.items(), start=1):
        entries.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        lanes = sorted({(event.mesh, event.lane) for event in events})
        for tid, (mesh, lane) in enumerate(lanes, start=1):
            label = f"mesh {mesh} {lane}".strip()
            entries.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}})
        threads = {lane: tid for tid, lane in enumerate(lanes, start=1)}
        for event in events:
            entries.append(
                {
                    "ph": "X",
                    "name": event.label,
                    "cat": "transfer" if event.lane else _letter(event.label),
                    "pid": pid,
                    "tid": threads[event.mesh, event.lane],
                    "ts": event.start_s * 1e6,
                    "dur": (event.end_s - event.start_s) * 1e6,
                }
            )
    lines = ",\n".join(json.dumps(entry, allow_nan=False) for entry in entries)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def write_trace(path: str | PathLike[str], groups: Mapping[str, Sequence[Event]]) -> None:
    """Writes ``chrome_trace(groups)`` as a file, whole or not at all.

    Raises:
        AlpaLiteError: the file cannot be written.
    """
    target = as_path(path, 'write_trace("trace.json", {"predicted": timeline.events})', AlpaLiteError)
    with saved_file("the trace", target, AlpaLiteError) as file:
        file.write(chrome_trace(groups).encode())
