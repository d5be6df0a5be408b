"""``Answers`` of an actor that may be lost: what a replica asks, and what it says while there is nobody to ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from alpa_lite.errors import EngineClosed, ServeError

if TYPE_CHECKING:
    from alpa_lite.serve.answers import GenerateBody

_LOOK_S = 0.25  # between two looks at whether a lost engine is back


class RemoteAnswers:
    """A ``Backend`` (see ``http``).

    Ray lets a call to an actor that is being started again wait for 2 s and refuses it then, also if the actor is there by that
    time. So once a call has found the engine lost, others are refused at once, until one of those that look for it has an answer.

    Requests and answers cross as bytes, since Ray takes longer for objects, which it pickles.

    Args:
        engine: handle of the actor.

    Attributes:
        running: requests that have not all of their answer yet.
        ending: whether new ones are refused.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._lost: Exception | None = None  # what Ray said last
        self._looking: asyncio.Task[None] | None = None
        self.ending = False
        self.running = 0

    async def end(self) -> None:
        """New requests are refused from here on; returns when those that run have their answers."""
        self.ending = True
        with contextlib.suppress(EngineClosed):
            await self._asked("close")
        while self.running:
            await asyncio.sleep(0.02)

    async def generate(self, body: GenerateBody) -> msgspec.Raw:
        with self._counted():
            return msgspec.Raw(await self._asked("generate", msgspec.json.encode(body)))

    async def check(self) -> None:
        self._check_takes()
        await self._asked("check")

    async def metrics(self) -> bytes:
        return await self._asked("metrics")

    async def stream(self, body: GenerateBody) -> AsyncIterator[msgspec.Raw]:
        import ray

        with self._counted(), self._lost_is_closed():
            events = self._engine.stream.remote(msgspec.json.encode(body))
            try:
                async for event in events:
                    yield msgspec.Raw(_raised(await event))
            except (asyncio.CancelledError, GeneratorExit):  # the client went away
                ray.cancel(events)
                raise

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._check_takes()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _check_takes(self) -> None:
        if self.ending:
            raise EngineClosed(
                "the server is ending. It takes no more requests. Try another, or this one when it is back."
            )

    async def _asked(self, method: str, *args: Any) -> Any:
        import ray

        with self._lost_is_closed():
            answer = getattr(self._engine, method).remote(*args)
            try:
                return _raised(await answer)
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise

    @contextlib.contextmanager
    def _lost_is_closed(self) -> Iterator[None]:
        """What Ray raises as what clients are told; nothing is asked of an engine that is known to be lost."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        if self._lost is not None:
            raise _closed(self._lost) from self._lost
        try:
            yield
        except RayTaskError as error:  # a mistake of ours: what users' functions raise comes as a value
            raise ServeError(
                f"the engine's process failed at this request: {type(error.cause).__name__}. Its log says more. Ask whoever runs "
                "the server."
            ) from error
        except RayError as error:
            if isinstance(error, RayActorError) and self._lost is None:
                self._lost = error
                self._looking = asyncio.create_task(self._look())
            raise _closed(error) from error

    async def _look(self) -> None:
        """Until the engine answers, or Ray has given it up. Calls that wait in vain do not hold up the next one."""
        from ray.exceptions import ActorDiedError

        looks = set()
        while self._lost is not None and not isinstance(self._lost, ActorDiedError) and not self.ending:
            looks.add(look := asyncio.create_task(self._ask_whether_there()))
            look.add_done_callback(looks.discard)
            await asyncio.sleep(_LOOK_S)
        await asyncio.gather(*looks)

    async def _ask_whether_there(self) -> None:
        from ray.exceptions import RayError

        try:
            await self._engine.failure.remote()
        except RayError as error:
            self._lost = self._lost and error
        else:
            self._lost = None


def _closed(error: Exception) -> EngineClosed:
    return EngineClosed(
        f"the engine was lost or takes no requests: {type(error).__name__}. It is started again. Try again."
    )


def _raised(value: Any) -> Any:
    if isinstance(value, ServeError):
        raise value
    return value
