"""A request: what was asked for, and its tokens as they come, for any thread and any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np

from alpa_lite.errors import DeadlineExceeded, RequestError, user_line
from alpa_lite.numeric import real
from alpa_lite.serve.sampling import Sampling


def _nobody(request: Request) -> None:
    pass


def _uncounted(reason: str) -> None:
    pass


class Request:
    """Made by ``engine.submit``. Iterate over it, with ``for`` or ``async for``, to get tokens as they come.

    Iterations are independent: each begins with the first token. As a context manager it is cancelled at the end of the block
    unless it is finished.

    Attributes:
        prompt: int32 tokens.
        max_tokens, sampling, stop: as submitted.
        submitted_s: when, on ``time.monotonic``'s clock.
        deadline_s: by when it must be finished, on the same clock; inf = whenever.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        *,
        max_tokens: int,
        sampling: Sampling,
        stop: frozenset[int] = frozenset(),
        timeout_s: float | None = None,
    ) -> None:
        self.prompt, self.max_tokens, self.sampling, self.stop = prompt, max_tokens, sampling, stop
        self.submitted_s = time.monotonic()
        self.timeout_s = timeout_s
        self.deadline_s = float("inf") if timeout_s is None else self.submitted_s + timeout_s
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._reason: str | None = None
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []
        self._count: Callable[[str], None] = _uncounted
        self._on_finish: Callable[[Request], None] = _nobody

    # -- for users -----------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those that have come so far."""
        return tuple(self._tokens)

    @property
    def done(self) -> bool:
        return self._reason is not None

    @property
    def finish_reason(self) -> str | None:
        """None while it runs; then "length" (``max_tokens`` came), "stop" (a token of ``stop``, which is the last one),
        "cancelled", "deadline", "closed" or "error"."""
        return self._reason

    def cancel(self) -> None:
        """No more tokens come. Its slot is free with the next step. Nothing happens if it is finished."""
        self._finish("cancelled")

    def result(self, timeout_s: float | None = None) -> tuple[int, ...]:
        """All tokens, when it is finished.

        Raises:
            TimeoutError: it is not finished by then; it goes on.
            DeadlineExceeded: its own deadline passed.
            RequestError: ``timeout_s`` is no number of seconds.
            ServeError: the engine was closed, or failed.
        """
        if timeout_s is not None and not real(timeout_s) <= threading.TIMEOUT_MAX:
            raise RequestError(
                f"timeout_s={timeout_s!r:.40} was given; it must be a number of seconds up to {threading.TIMEOUT_MAX:g}, or None "
                f"for as long as it takes. At {user_line()}. Correct it, or leave it out."
            )
        if not self._wait(lambda: self.done, None if timeout_s is None else real(timeout_s)):
            raise TimeoutError(
                f"the request was not finished within {timeout_s} s, and goes on. A deadline of its own ends it (timeout_s= of "
                f"submit). At {user_line()}. Ask again, or cancel() it."
            )
        self._check()
        return self.tokens

    def __iter__(self) -> Iterator[int]:
        for index in range(self.max_tokens):
            self._wait(lambda index=index: self._has(index))
            if index >= len(self._tokens):
                break
            yield self._tokens[index]
        self._check()

    async def __aiter__(self) -> AsyncIterator[int]:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(woken.set)

        with self._changed:
            self._listeners.append(wake)
        try:
            for index in range(self.max_tokens):
                while not self._has(index):
                    try:
                        # Not `wait_for`: before Python 3.12 that loses a cancellation which comes with a token (gh-86296).
                        async with asyncio.timeout(self._left_s()):
                            await woken.wait()
                    except TimeoutError:
                        self._expire()
                    woken.clear()
                if index >= len(self._tokens):
                    break
                yield self._tokens[index]
        finally:
            with self._changed:
                self._listeners.remove(wake)
        self._check()

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        state = self._reason or "running"
        return f"<Request of {self.prompt.size} tokens: {len(self._tokens)} of {self.max_tokens} came, {state}>"

    def _has(self, index: int) -> bool:
        """Whether that token is there, or never comes."""
        with self._changed:
            return self.done or len(self._tokens) > index

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Until ``ready``. At its deadline the request ends here, whatever the engine is busy with."""
        left_s = self._left_s()
        limit_s = min((s for s in (left_s, timeout_s) if s is not None), default=None)
        with self._changed:
            if self._changed.wait_for(ready, limit_s):
                return True
        if limit_s == left_s:
            self._expire()
        return ready()

    def _left_s(self) -> float | None:
        """Until its deadline; None: there is none."""
        return None if math.isinf(self.deadline_s) else max(0.0, self.deadline_s - time.monotonic())

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # else it grows with each reader

    # -- for the engine ------------------------------------------------------------------------------------------------

    def _append(self, token: int) -> None:
        with self._changed:
            if self.done:
                return
            self._tokens.append(token)
            ended = "stop" if token in self.stop else "length" if len(self._tokens) == self.max_tokens else None
            if ended is None:
                self._tell()
                return
            tell = self._ended(ended)  # a reader that sees the last token must find it finished
        tell(self)

    def _finish(self, reason: str, error: BaseException | None = None) -> None:
        """Ends it, if nothing else has."""
        with self._changed:
            if self.done:
                return
            tell = self._ended(reason, error)
        tell(self)

    def _ended(self, reason: str, error: BaseException | None = None) -> Callable[[Request], None]:
        """Ends it; to be called with its lock. Returns whom to tell without it."""
        # A reader that sees `done` must see why, and find it counted.
        count, self._count = self._count, _uncounted  # once, also where the collector ends it again in here
        count(reason)
        self._error = error
        self._reason = reason
        self._tell()
        tell, self._on_finish = self._on_finish, _nobody  # who keeps an answer need not keep the engine
        return tell

    def _expire(self) -> None:
        self._finish(
            "deadline",
            DeadlineExceeded(
                f"the request was not finished within its {self.timeout_s} s: {len(self._tokens)} of {self.max_tokens} tokens "
                "had come. A request ends at its deadline, in the queue or in a slot. Give it more time, or fewer tokens."
            ),
        )

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
