"""``Answers`` of a process that may be lost: what a replica asks, and what it says while there is nobody to ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from grpc.aio import AioRpcError

from alpa_lite.errors import EngineClosed, ServeError
from alpa_lite.serve.rpc import EngineChannel, Listening, error_of, is_lost

if TYPE_CHECKING:
    from alpa_lite.serve.answers import GenerateBody

_LOOK_S = 0.25  # between two looks at whether a lost engine is back


class RemoteAnswers:
    """A ``Backend`` (see ``http``).

    Once a call has found the engine lost, others are refused at once, until Ray has started it again and says where it listens:
    one look is made after the other, whether others have come back or not, because Ray lets a call to an actor that is being
    started again wait for 2 s and refuses it then, also if the actor is there by that time.

    Args:
        engine: handle of the actor (``EngineActor``).
        node: on which this process is, as Ray names it.
        listening: what the actor said of itself.

    Attributes:
        running: requests that have not all of their answer yet.
        ending: whether new ones are refused.
    """

    def __init__(self, engine: Any, node: str, listening: Listening) -> None:
        self._engine, self._node, self._listening = engine, node, listening
        self._open: EngineChannel | None = None
        self._lost: Exception | None = None  # what was raised last
        self._looking: asyncio.Task[None] | None = None
        self.ending = False
        self.running = 0

    async def end(self) -> None:
        """New requests are refused from here on; returns when those that run have their answers."""
        from ray.exceptions import RayError

        self.ending = True
        if self._lost is None:
            with contextlib.suppress(RayError):
                await self._engine.close.remote()
        while self.running:
            await asyncio.sleep(0.02)

    async def generate(self, body: GenerateBody) -> msgspec.Raw:
        with self._counted(), self._lost_is_closed():
            return msgspec.Raw(await self._channel.call("generate", msgspec.json.encode(body)))

    async def check(self) -> None:
        self._check_takes()
        with self._lost_is_closed():
            await self._channel.call("check")

    async def metrics(self) -> bytes:
        with self._lost_is_closed():
            return await self._channel.call("metrics")

    async def stream(self, body: GenerateBody) -> AsyncGenerator[msgspec.Raw, None]:
        with self._counted(), self._lost_is_closed():
            async with contextlib.aclosing(self._channel.stream(msgspec.json.encode(body))) as events:
                async for event in events:
                    yield msgspec.Raw(event)

    @property
    def _channel(self) -> EngineChannel:
        """Made here, since a channel belongs to the event loop in which it is made."""
        if self._open is None:
            self._open = EngineChannel(self._listening)
        return self._open

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

    @contextlib.contextmanager
    def _lost_is_closed(self) -> Iterator[None]:
        """What calls raise as what clients are told; nothing is asked of an engine that is known to be lost."""
        if self._lost is not None:
            raise _closed() from self._lost
        channel = self._channel
        try:
            yield
        except AioRpcError as error:
            if told := error_of(error):
                raise told from None
            if not is_lost(error):  # a mistake of ours: what users' functions raise is told
                raise ServeError(
                    f"the engine's process failed at this request: {error.details()}. Its log says more. Ask whoever runs the "
                    "server."
                ) from error
            if (
                channel is self._open and self._lost is None
            ):  # not an answer that comes late, when there is another engine
                self._lost = error
                self._looking = asyncio.create_task(self._look())
            raise _closed() from error

    async def _look(self) -> None:
        """Until the engine answers, or Ray has given it up. Calls that wait in vain do not hold up the next one."""
        from ray.exceptions import ActorDiedError

        looks = set()
        while self._lost is not None and not isinstance(self._lost, ActorDiedError) and not self.ending:
            looks.add(look := asyncio.create_task(self._ask_where()))
            look.add_done_callback(looks.discard)
            await asyncio.sleep(_LOOK_S)
        await asyncio.gather(*looks)

    async def _ask_where(self) -> None:
        from ray.exceptions import ActorDiedError, RayError

        try:
            listening = await self._engine.listen.remote(self._node)
        except RayError as error:
            if not isinstance(self._lost, ActorDiedError):  # a look that was made before may end after it
                self._lost = self._lost and error
            return
        if self._lost is not None:
            left, self._open, self._listening, self._lost = self._open, None, listening, None
            if left is not None:
                await left.close()


def _closed() -> EngineClosed:
    return EngineClosed("the engine was lost or takes no requests. It is started again. Try again.")
