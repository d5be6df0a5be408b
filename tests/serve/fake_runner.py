"""A runner without a model, which remembers what is in its slots and notices when it is misused; what is scheduled on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from alpa_lite.serve.request import Request
from alpa_lite.serve.sampling import Rows, Sampling
from alpa_lite.serve.scheduler import Scheduler


def next_token(tokens: Sequence[int]) -> int:
    """Of a "model" whose answer depends on every token before."""
    value = 7
    for token in tokens:
        value = (value * 31 + int(token)) % 101
    return value


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What a request must get, however it was batched."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    """``fail_at``: the number of a call or check that raises; ``delay_s``: of each call."""

    check_s: float | None = None

    def __init__(self, slots: int = 3, buckets: tuple[int, ...] = (4, 16), *, fail_at: int = -1, delay_s: float = 0.0):
        self.slots, self.buckets, self.fail_at, self.delay_s = slots, buckets, fail_at, delay_s
        self.tokens: list[list[int] | None] = [None] * slots
        self.calls = 0
        self.used: list[int] = []
        self.temperatures: list[float] = []

    def _called(self) -> None:
        self.calls += 1
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.calls == self.fail_at:
            raise RuntimeError("out of memory")

    def prefill(self, bucket: int, slot: int, prompt: np.ndarray, rows: Rows) -> int:
        self._called()
        assert prompt.size <= bucket and bucket in self.buckets
        assert all(size < prompt.size for size in self.buckets if size < bucket), "a smaller bucket holds it"
        assert all(x.shape[0] == 1 for x in rows) and rows.drawn[0] == 0
        self.used.append(bucket)
        self.temperatures.append(float(rows.temperature[0]))
        self.tokens[slot] = [*prompt.tolist(), next_token(prompt.tolist())]
        return self.tokens[slot][-1]

    def decode(self, tokens: np.ndarray, rows: Rows) -> list[int]:
        self._called()
        found = []
        for slot in range(self.slots):
            held = self.tokens[slot]
            if held is None:
                found.append(-1)
                continue
            # A slot whose request has gone gets nonsense, as a cache does; in one that runs, the last token must come back.
            held.append(next_token([*held[:-1], int(tokens[slot])]))
            found.append(held[-1])
        return found

    def check(self) -> None:
        self._called()

    def reset(self) -> None:
        self.tokens = [None] * self.slots


def request_of(*prompt: int, count: int = 3, **rest) -> Request:
    return Request(np.array(prompt, np.int32), max_tokens=count, sampling=Sampling(), **rest)


def scheduler_of(runner: FakeRunner | None = None, *, queue_limit: int = 8, prefills_per_step: int = 2) -> Scheduler:
    return Scheduler(runner or FakeRunner(), queue_limit=queue_limit, prefills_per_step=prefills_per_step)


def finish(scheduler: Scheduler) -> None:
    for _ in range(1000):
        if scheduler.idle:
            return
        scheduler.step()
    raise AssertionError("it does not end")


@contextmanager
def running(scheduler: Scheduler) -> Iterator[Scheduler]:
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    try:
        yield scheduler
    finally:
        scheduler.close("the test has ended")
        thread.join(10)
        assert not thread.is_alive()
