"""What an engine counts, as plain numbers that a metrics exporter can read at any time."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

# Seconds, in steps of about two: from a fast decode step to a request that waited long.
TIME_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
REASONS = ("length", "stop", "cancelled", "deadline", "closed", "error", "refused")
"""Why requests end, as ``Request.finish_reason`` has it; those that are refused have none."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a value was at most each bound (one more count for those above all), and the sum of all.

    Attributes:
        bounds: rising.
        counts: one more than bounds; not cumulative.
        total: sum of the values.
    """

    bounds: tuple[float, ...] = TIME_BOUNDS_S
    counts: tuple[int, ...] = (0,) * (len(TIME_BOUNDS_S) + 1)
    total: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 where there was nothing."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The bound below which this share of the values lies; inf where that is above all bounds, 0 where there was nothing."""
        if not self.count:
            return 0.0
        seen, bounds = 0, (*self.bounds, float("inf"))
        for bound, count in zip(bounds, self.counts, strict=True):
            seen += count
            if seen >= share * self.count:
                return bound
        return bounds[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of an engine since it was made.

    Attributes:
        slots, queue_limit: settings of the engine.
        queued, active: requests that wait, and that are in a slot, now.
        finished: reason -> requests; "refused" are those that the full queue did not take.
        prompt_tokens, generated_tokens: of requests that were taken into a slot.
        prefills: bucket -> prompts.
        padded_tokens: bucket -> tokens that prompts were padded by.
        decode_steps: how often the next tokens were made.
        decoded_rows: slots that were in use in all these steps together.
        queue_time: seconds from submission until a request was taken into a slot.
        time_to_first_token: seconds from submission.
        time_per_token: seconds from one token of a request to its next.
    """

    slots: int
    queue_limit: int
    queued: int
    active: int
    finished: dict[str, int]
    prompt_tokens: int
    generated_tokens: int
    prefills: dict[int, int]
    padded_tokens: dict[int, int]
    decode_steps: int
    decoded_rows: int
    queue_time: Histogram
    time_to_first_token: Histogram
    time_per_token: Histogram

    @property
    def batch_fill(self) -> float:
        """The share of slots in use, on average over the decode steps."""
        return self.decoded_rows / (self.decode_steps * self.slots) if self.decode_steps else 0.0

    @property
    def padding_waste(self) -> float:
        """The share of padding among all tokens of prompts that were computed."""
        padded = sum(self.padded_tokens.values())
        return padded / (padded + self.prompt_tokens) if padded else 0.0


class _Times:
    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(TIME_BOUNDS_S) + 1), 0.0

    def add(self, value_s: float) -> None:
        self.counts[bisect_left(TIME_BOUNDS_S, value_s)] += 1
        self.total += value_s

    def read(self) -> Histogram:
        return Histogram(TIME_BOUNDS_S, tuple(self.counts), self.total)


class Counters:
    """Where an engine counts; ``read`` from any thread."""

    def __init__(self, slots: int, queue_limit: int, buckets: tuple[int, ...]) -> None:
        self._slots, self._queue_limit = slots, queue_limit
        self._lock = threading.Lock()
        # The collector may end a request (a reader's `with` block in a cycle) wherever something is allocated, also here: how
        # requests end is counted under a lock of its own, which the same thread may take again.
        self._ends = threading.RLock()
        self._finished = dict.fromkeys(REASONS, 0)
        self._prefills = dict.fromkeys(buckets, 0)
        self._padded = dict.fromkeys(buckets, 0)
        self._prompt_tokens = self._generated_tokens = self._decode_steps = self._decoded_rows = 0
        self._queue_time, self._first, self._next = _Times(), _Times(), _Times()

    def finished(self, reason: str) -> None:
        with self._ends:
            self._finished[reason] += 1

    def prefilled(self, bucket: int, length: int, *, queued_s: float, first_token_s: float | None) -> None:
        """A prompt was taken into a slot and its first token made, so many seconds after its submission; None = it has none."""
        with self._lock:
            self._prefills[bucket] += 1
            self._padded[bucket] += bucket - length
            self._prompt_tokens += length
            self._queue_time.add(queued_s)
            if first_token_s is not None:
                self._generated_tokens += 1
                self._first.add(first_token_s)

    def decoded(self, num_rows: int, waited_s: list[float]) -> None:
        """A step was for so many slots, and made tokens for all or some, so many seconds after the slot's last one."""
        with self._lock:
            self._decode_steps += 1
            self._decoded_rows += num_rows
            self._generated_tokens += len(waited_s)
            for value in waited_s:
                self._next.add(value)

    def read(self, *, queued: int, active: int) -> Statistics:
        with self._lock:
            return Statistics(
                slots=self._slots,
                queue_limit=self._queue_limit,
                queued=queued,
                active=active,
                finished={reason: count for reason, count in self._finished.items() if count},
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                prefills=dict(self._prefills),
                padded_tokens=dict(self._padded),
                decode_steps=self._decode_steps,
                decoded_rows=self._decoded_rows,
                queue_time=self._queue_time.read(),
                time_to_first_token=self._first.read(),
                time_per_token=self._next.read(),
            )
