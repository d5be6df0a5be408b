"""Continuous batching: requests enter free slots between the steps that make the next token of all slots.

One thread calls ``step`` again and again; any thread submits, cancels and reads. The scheduler knows no arrays on devices: a
``Runner`` has them.

A step, in this order: what is cancelled or past its deadline leaves its slot; up to ``prefills_per_step`` waiting requests, first
come first served, are taken into free slots, which makes their first tokens; one token is made for every slot in use.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from alpa_lite.errors import EngineClosed, QueueFull, ServeError
from alpa_lite.serve.buckets import smallest_bucket
from alpa_lite.serve.request import Request
from alpa_lite.serve.sampling import NO_TOKEN, Rows
from alpa_lite.serve.slots import Slots
from alpa_lite.serve.statistics import Counters, Statistics


class Runner(Protocol):
    """What runs the model."""

    slots: int
    buckets: tuple[int, ...]

    @property
    def check_s(self) -> float | None:
        """Seconds without a request after which ``check`` is called; None = never."""
        ...

    def check(self) -> None:
        """Sees that the model can run, and mends what it can; nobody is in a slot."""
        ...

    def prefill(self, bucket: int, slot: int, prompt: np.ndarray, rows: Rows) -> int:
        """Puts a prompt, padded to a bucket, into a slot; ``rows`` has its one row. Returns the token after it."""
        ...

    def decode(self, tokens: np.ndarray, rows: Rows) -> Sequence[int]:
        """The token after ``tokens``, for all slots."""
        ...

    def reset(self) -> None:
        """Forgets what is in the slots, after a failure."""
        ...


class Scheduler:
    """Requests in, tokens out.

    Args:
        runner: runs the model.
        queue_limit: so many requests may wait for a slot.
        prefills_per_step: so many prompts at most are taken in between two steps of those that run.
    """

    def __init__(self, runner: Runner, *, queue_limit: int, prefills_per_step: int) -> None:
        self._runner, self._queue_limit, self._per_step = runner, queue_limit, prefills_per_step
        self._slots = Slots(runner.slots)
        self._rows, self._tokens = Rows.greedy(runner.slots), np.zeros(runner.slots, np.int32)
        self._running: dict[int, Request] = {}
        self._last_token_s: dict[int, float] = {}
        self._queue: deque[Request] = deque()
        self._changed = threading.Condition()  # guards the queue and `closed`
        self._closed: str | None = None  # why
        self._draining = False
        self._calls: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self.counters = Counters(runner.slots, queue_limit, runner.buckets)

    # -- any thread ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, *, wait: bool = False) -> None:
        """Queues a request.

        Args:
            wait: for room in the queue.

        Raises:
            QueueFull: there is no room.
            EngineClosed: it takes no more requests.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._has_room() or self.shut)
            if self.shut:
                raise _closed(self._closed or "it is about to end")
            if not self._has_room():
                self.counters.finished("refused")
                raise QueueFull(
                    f"{len(self._queue)} requests wait already for one of {self._runner.slots} slots. At most "
                    f"queue_limit={self._queue_limit} may. Try again later, or give the engine more slots or a longer queue."
                )
            request._count, request._on_finish = self.counters.finished, self._finished
            self._queue.append(request)
            self._changed.notify_all()

    def statistics(self) -> Statistics:
        with self._changed:
            queued, active = len(self._queue), self._slots.num_taken
        return self.counters.read(queued=queued, active=active)

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Calls it in the thread that runs the model, when no request is in a slot."""
        future: Future[None] = Future()
        with self._changed:
            if self.shut:
                raise _closed(self._closed or "it is about to end")
            self._calls.append((future, function))
            self._changed.notify_all()
        return future

    def drain(self) -> None:
        """Takes no more requests; those that it has go on."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def close(self, why: str) -> None:
        """Takes no more requests, and ends those that it has with the step that runs."""
        with self._changed:
            self._closed = self._closed or why
            self._changed.notify_all()

    @property
    def ending(self) -> bool:
        """Whether those that it has end, too."""
        return self._closed is not None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        with self._changed:
            return not self._queue and not self._running

    def _has_work(self) -> bool:
        return bool(self._queue or self._running or self._calls or self.shut)

    def _has_room(self) -> bool:
        return len(self._queue) < self._queue_limit

    @property
    def shut(self) -> bool:
        """Whether it takes no more requests."""
        return self._draining or self._closed is not None

    def _finished(self, request: Request) -> None:
        """Called once per request, by the thread that ended it."""
        with self._changed:
            if request in self._queue:  # its place there is free at once
                self._queue.remove(request)
            self._changed.notify_all()

    # -- the thread that runs it ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Steps until it is closed, or drained and done; whatever is left then ends with an error."""
        try:
            while self.wait():
                self.step()
        except BaseException as error:  # a mistake of ours: no reader may wait for ever
            self.close(f"it failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.close("it has ended")
            self._end_all()

    def wait(self) -> bool:
        """Until there is something to do. False: it has ended."""
        with self._changed:
            while not self._changed.wait_for(self._has_work, self._runner.check_s):
                self._calls.append((Future(), self._runner.check))
            return self._closed is None and not (self._draining and not self._queue and not self._running)

    def step(self) -> None:
        """See the module's docstring."""
        self._expire()
        self._leave()
        self._answer_calls()
        try:
            for _ in range(self._per_step):
                if self._calls or not self._enter():  # calls wait until nobody is in a slot
                    break
            self._decode()
        except Exception as error:  # of the model or its devices: whatever they raise
            self._fail(error)
        self._leave()

    def _answer_calls(self) -> None:
        while not self._running:
            with self._changed:
                if not self._calls:
                    return
                future, function = self._calls.popleft()
            try:
                function()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)  # first: what fails here too ends the engine, and nobody may wait for ever
                if not isinstance(error, Exception):
                    raise
                if not self.ending:
                    self._runner.reset()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._changed:
            late = [request for request in (*self._queue, *self._running.values()) if request.deadline_s <= now]
        for request in late:
            request._expire()

    def _leave(self) -> None:
        """Slots whose requests are finished become free."""
        for slot, request in list(self._running.items()):
            if request.done:
                del self._running[slot]
                self._rows.reset(slot)
                self._slots.give_back(slot)

    def _enter(self) -> bool:
        """Takes the next waiting request into a free slot; False if there is none of either."""
        with self._changed:
            if not self._queue or not self._slots.num_free:
                return False
            request, slot = self._queue.popleft(), self._slots.take()
            assert slot is not None
            self._running[slot] = request  # with the lock: it is in the queue or in a slot, whoever looks
            self._changed.notify_all()  # there is room in the queue
        if request.done:  # ended between queue and slot
            return True
        queued_s = time.monotonic() - request.submitted_s
        self._rows.set(slot, request.sampling)
        bucket = smallest_bucket(self._runner.buckets, request.prompt.size)
        assert bucket is not None
        token = self._runner.prefill(bucket, slot, request.prompt, self._rows.row(slot))
        now = time.monotonic()
        first_s = None if token == NO_TOKEN else now - request.submitted_s
        self.counters.prefilled(bucket, request.prompt.size, queued_s=queued_s, first_token_s=first_s)
        self._given(slot, request, token, now)
        return True

    def _decode(self) -> None:
        # A request that ended in the meantime is decoded in vain, once.
        rows = {slot: request for slot, request in self._running.items() if not request.done}
        if not rows:
            return
        tokens = self._runner.decode(self._tokens, self._rows)
        now = time.monotonic()
        made = [slot for slot in rows if tokens[slot] != NO_TOKEN]
        self.counters.decoded(len(rows), [now - self._last_token_s[slot] for slot in made])
        for slot, request in rows.items():
            self._given(slot, request, int(tokens[slot]), now)

    def _given(self, slot: int, request: Request, token: int, now: float) -> None:
        if token == NO_TOKEN:
            request._finish(
                "error",
                ServeError(
                    f"the model returned logits that are no numbers (nan, inf) after {request.prompt.size} tokens of prompt and "
                    f"{self._rows.drawn[slot]} of answer. The largest logit of a request must be a finite number. Other requests "
                    "go on. Whoever runs the model should check its parameters and its functions on this prompt."
                ),
            )
            return
        self._tokens[slot], self._last_token_s[slot] = token, now
        self._rows.drawn[slot] += 1
        request._append(token)

    def _fail(self, error: Exception) -> None:
        """What ran has failed: its requests end, and the slots begin anew; what waits goes on."""
        failure: ServeError
        if isinstance(error, ServeError):
            failure = error
        else:
            failure = ServeError(
                f"the step that made a token of this request failed: {type(error).__name__}: {error!s:.500}. All requests in a "
                "slot end with it, those in the queue go on. Try again; if it stays, see the cause."
            )
            failure.__cause__ = error
        for request in list(self._running.values()):
            request._finish("error", failure)
        if not self.ending and (self._queue or not self._draining):  # else nobody would use what is started again
            self._runner.reset()

    def _end_all(self) -> None:
        with self._changed:
            left = [*self._queue, *self._running.values()]
        why = self._closed or "it has ended"
        for request in left:
            request._finish("closed", _closed(why))
        for future, _ in self._calls:
            future.set_exception(_closed(why))
        self._leave()


def _closed(why: str) -> EngineClosed:
    return EngineClosed(f"the engine is closed: {why}. A closed engine takes and finishes no requests. Make a new one.")
