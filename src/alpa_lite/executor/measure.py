"""When things happened on submeshes while a driver went on: recorded by threads that wait in its place.

A program's end is when its mark is there; its start is the latest of: the end of the program before it on its submesh, the
arrival of what it reads, and its dispatch. So the driver runs as it does when nobody measures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import jax

from alpa_lite.schedule import Event, Timeline


class _Entry:
    """A program or a transfer: when it was issued, what it waits for, and when it was over."""

    __slots__ = ("after", "end_s", "issued_s", "label", "lane", "mesh")

    def __init__(self, mesh: int, lane: str, label: str, after: Sequence[_Entry]) -> None:
        self.mesh, self.lane, self.label, self.after = mesh, lane, label, tuple(after)
        self.issued_s, self.end_s = time.perf_counter(), 0.0


class Recorder:
    """Records one step. ``ran`` and ``sent`` are called by the driver, in its order; ``timeline`` waits for all of them."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.lanes: dict[tuple[int, str], SimpleQueue[Any]] = {}
        self.threads: list[Thread] = []
        self.transfers: dict[int, _Entry] = {}
        self.makers: dict[tuple[int, str], _Entry] = {}

    def ran(self, mesh: int, label: str, mark: Any, transfers: Sequence[int] = ()) -> None:
        """A program was issued; ``mark`` is there when it is over; it reads what ``transfers`` bring."""
        after = [self.transfers[t] for t in transfers if t in self.transfers]
        self.makers[mesh, label] = self._add(_Entry(mesh, "", label, after), mark)

    def sent(self, transfer: int, mesh: int, destination: int, label: str, maker: str, pieces: Any) -> None:
        """A transfer was issued of what the program ``maker`` makes; it is over when ``pieces`` are there."""
        after = [self.makers[mesh, maker]] if (mesh, maker) in self.makers else []
        self.transfers[transfer] = self._add(_Entry(mesh, f"to mesh {destination}", label, after), pieces)

    def _add(self, entry: _Entry, awaited: Any) -> _Entry:
        lane = entry.mesh, entry.lane
        if lane not in self.lanes:
            self.lanes[lane] = SimpleQueue()
            self.threads.append(Thread(target=_watch, args=(self.lanes[lane],), daemon=True))
            self.threads[-1].start()
        self.entries.append(entry)
        self.lanes[lane].put((entry, awaited))
        return entry

    def timeline(self, name: str, num_meshes: int) -> Timeline:
        """What was recorded; times count from the first start."""
        for queue in self.lanes.values():
            queue.put(None)
        for thread in self.threads:
            thread.join()
        last: dict[tuple[int, str], float] = {}
        spans = []
        for entry in self.entries:
            lane = entry.mesh, entry.lane
            start = max(entry.issued_s, last.get(lane, 0.0), *(other.end_s for other in entry.after), 0.0)
            last[lane] = end = max(entry.end_s, start)
            spans.append((entry, start, end))
        zero = min((start for _, start, _ in spans), default=0.0)
        events = [Event(entry.mesh, start - zero, end - zero, entry.label, entry.lane) for entry, start, end in spans]
        busy = [0.0] * num_meshes
        for event in events:
            busy[event.mesh] += 0.0 if event.lane else event.end_s - event.start_s
        return Timeline(
            name=name,
            makespan_s=max((event.end_s for event in events), default=0.0),
            busy_s=tuple(busy),
            peak_bytes=(0,) * num_meshes,
            events=tuple(sorted(events, key=lambda e: (e.mesh, e.lane, e.start_s, e.end_s))),
        )


def _watch(queue: SimpleQueue[Any]) -> None:
    while (item := queue.get()) is not None:
        entry, awaited = item
        jax.block_until_ready(awaited)
        entry.end_s = time.perf_counter()
