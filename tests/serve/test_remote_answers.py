"""What a replica says while its engine is lost, with an actor that is played here."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from alpa_lite.errors import EngineClosed, ServeError
from alpa_lite.serve.answers import GenerateBody
from alpa_lite.serve.http import status_of
from alpa_lite.serve.remote_answers import RemoteAnswers

pytest.importorskip("ray", reason="Ray is not installed: pip install 'alpa-lite[serve]'")
pytestmark = pytest.mark.medium  # seconds of waiting

BODY = GenerateBody(tokens=[1, 10**30], top_p=0.5)  # what a client may send: the engine refuses it
REFUSED_S = 1.5  # after which a call to an actor that starts is refused, as Ray does after 2 s


class Played:
    """An actor that answers, starts again, or is gone. Calls count from when they are made: one that was made while it started
    fails, even if it is there by then."""

    def __init__(self) -> None:
        self.state: str | Exception = "there"
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._call(method, self.state, args))

    async def _call(self, method: str, state: Any, args: tuple[Any, ...]) -> Any:
        from ray.exceptions import ActorUnavailableError

        self.asked.append(method)
        if state == "starts":
            await asyncio.sleep(REFUSED_S)
            raise ActorUnavailableError("it starts", None)
        if isinstance(state, Exception):
            raise state
        if method == "generate":
            assert msgspec.json.decode(*args, type=GenerateBody) == BODY
        return "" if method == "failure" else method.encode()


async def refused(answers: RemoteAnswers) -> tuple[EngineClosed, float]:
    start_s = time.monotonic()
    with pytest.raises(EngineClosed, match="Try again") as raised:
        await answers.generate(BODY)
    return raised.value, time.monotonic() - start_s


def test_requests_are_refused_at_once_until_the_engine_is_back() -> None:
    async def run() -> None:
        engine = Played()
        answers = RemoteAnswers(engine)
        assert bytes(await answers.generate(BODY)) == b"generate"
        engine.state = "starts"
        _, first_s = await refused(answers)
        assert first_s >= REFUSED_S
        asked = engine.asked.count("generate")
        for _ in range(3):
            _, later_s = await refused(answers)
            assert later_s < REFUSED_S / 2
            await asyncio.sleep(0.1)
        for ask in (answers.check, answers.metrics, lambda: anext(answers.stream(BODY))):
            with pytest.raises(EngineClosed):
                await ask()
        assert (engine.asked.count("generate"), set(engine.asked)) == (asked, {"generate", "failure"})
        engine.state, back_s = "there", time.monotonic()
        while answers._lost is not None:
            await asyncio.sleep(0.01)
        assert time.monotonic() - back_s < REFUSED_S / 2, "a look that was made before must not be waited for"
        assert [bytes(await answers.generate(BODY)), answers.running] == [b"generate", 0]
        looks = engine.asked.count("failure")
        await asyncio.sleep(REFUSED_S)  # those that were made before fail only now
        assert await answers.metrics() == b"metrics" and engine.asked.count("failure") == looks

    asyncio.run(run())


def test_an_engine_that_is_given_up_is_not_looked_for() -> None:
    """Its cause is what has the replica replaced (``HttpReplica.check_health``)."""
    from ray.exceptions import ActorDiedError

    async def run() -> None:
        engine = Played()
        answers = RemoteAnswers(engine)
        engine.state = "starts"
        await refused(answers)
        engine.state = ActorDiedError()
        while answers._looking is not None and not answers._looking.done():
            await asyncio.sleep(0.01)
        looks = engine.asked.count("failure")
        with pytest.raises(EngineClosed) as raised:
            await answers.check()
        assert isinstance(raised.value.__cause__, ActorDiedError)
        assert engine.asked.count("failure") == looks and "check" not in engine.asked

    asyncio.run(run())


def test_nothing_is_looked_for_at_the_end() -> None:
    async def run() -> None:
        engine = Played()
        answers = RemoteAnswers(engine)
        engine.state = "starts"
        await refused(answers)
        await answers.end()
        assert answers._looking is not None
        await asyncio.wait_for(answers._looking, 5 * REFUSED_S)
        with pytest.raises(EngineClosed, match="the server is ending"):
            await answers.generate(BODY)

    asyncio.run(run())


def test_what_fails_in_the_engines_process_is_no_loss() -> None:
    """Trying again would not help: 500, where a lost process is 503."""
    from ray.exceptions import ActorDiedError, RayTaskError

    async def asked(error: Exception) -> tuple[int, bool]:
        engine = Played()
        answers = RemoteAnswers(engine)
        engine.state = error
        with pytest.raises(ServeError) as raised:
            await answers.generate(BODY)
        return status_of(raised.value), answers._lost is not None

    assert asyncio.run(asked(RayTaskError("stream", "trace", ValueError("x")))) == (500, False)
    assert asyncio.run(asked(ActorDiedError())) == (503, True)
