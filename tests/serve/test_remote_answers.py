"""What a replica says while its engine is lost, with an actor that is played here; calls between the two are real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from alpa_lite.errors import DeadlineExceeded, EngineClosed, QueueFull, RequestError, ServeError
from alpa_lite.serve.answers import GenerateAnswer, GenerateBody, TokenEvent
from alpa_lite.serve.http import status_of

pytest.importorskip("ray", reason="Ray is not installed: pip install 'alpa-lite[serve]'")
grpc = pytest.importorskip("grpc", reason="gRPC is not installed: pip install 'alpa-lite[serve]'")
pytestmark = pytest.mark.medium  # seconds of waiting

from alpa_lite.serve.remote_answers import RemoteAnswers  # noqa: E402
from alpa_lite.serve.rpc import EngineChannel, EngineServer, Listening, error_of, is_lost  # noqa: E402

BODY = GenerateBody(tokens=[1, 10**30], top_p=0.5)  # what a client may send: the engine refuses it
ANSWER = GenerateAnswer(tokens=[7] * 3, text="\u00e9\n")
REFUSED_S = 1.5  # after which a call to an actor that starts is refused, as Ray does after 2 s


class PlayedAnswers:
    """Answers, or raises what it is told to; says who asks and who went away."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.blocks = False
        self.running = self.cancelled = 0

    async def generate(self, body: GenerateBody) -> GenerateAnswer:
        return [event async for event in self.stream(body)][-1]

    async def stream(self, body: GenerateBody) -> AsyncIterator[Any]:
        assert body == BODY
        if self.error is not None:
            raise self.error
        self.running += 1
        try:
            for token in ANSWER.tokens:
                yield TokenEvent(token)
            if self.blocks:
                await asyncio.sleep(60)
            yield ANSWER
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def check(self) -> None:
        if self.error is not None:
            raise self.error

    async def metrics(self) -> bytes:
        return b"x" * 2**23  # more than gRPC takes unless told to


class Played:
    """An actor that answers, starts again, or is gone. Calls count from when they are made: one that was made while it started
    fails, even if it is there by then."""

    def __init__(self) -> None:
        self.answers = PlayedAnswers()
        self.state: str | Exception = "there"
        self.asked: list[str] = []
        self._server: EngineServer | None = None
        self._where = Listening("", "", "")

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._call(method, self.state))

    async def dies(self, state: str | Exception = "starts") -> None:
        self.state = state
        assert self._server is not None
        await self._server.stop()

    async def comes_back(self) -> Listening:
        self._server = EngineServer(lambda: self.answers)  # pyrefly: ignore[bad-argument-type]
        self._where = Listening("", *await self._server.start("127.0.0.1"))
        self.state = "there"
        return self._where

    async def _call(self, method: str, state: Any) -> Any:
        from ray.exceptions import ActorUnavailableError

        self.asked.append(method)
        if state == "starts":
            await asyncio.sleep(REFUSED_S)
            raise ActorUnavailableError("it starts", None)
        if isinstance(state, Exception):
            raise state
        return self._where if method == "listen" else None


def played(run: Callable[[Played, RemoteAnswers], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        engine = Played()
        answers = RemoteAnswers(engine, "node", await engine.comes_back())
        try:
            await run(engine, answers)
        finally:
            if answers._open is not None:
                await answers._open.close()
            await engine.dies()

    asyncio.run(whole())


async def refused(answers: RemoteAnswers) -> tuple[EngineClosed, float]:
    start_s = time.monotonic()
    with pytest.raises(EngineClosed, match="Try again") as raised:
        await answers.generate(BODY)
    return raised.value, time.monotonic() - start_s


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def test_answers_cross_as_they_are() -> None:
    async def run(engine: Played, answers: RemoteAnswers) -> None:
        wholes = await asyncio.gather(*(answers.generate(BODY) for _ in range(50)))
        assert {msgspec.json.decode(whole, type=GenerateAnswer) == ANSWER for whole in wholes} == {True}
        events = [msgspec.json.decode(event) async for event in answers.stream(BODY)]
        assert [event.get("token") for event in events] == [7, 7, 7, None] and events[-1]["text"] == ANSWER.text
        await answers.check()
        assert len(await answers.metrics()) == 2**23
        assert (engine.answers.running, answers.running, engine.asked) == (0, 0, [])

    played(run)


@pytest.mark.parametrize("kind", [RequestError, QueueFull, DeadlineExceeded, EngineClosed, ServeError])
def test_errors_keep_their_kind_and_text(kind: type[ServeError]) -> None:
    """Without a cause: ``HttpReplica.check_health`` tells by it an engine that ended from one that is lost."""

    async def run(engine: Played, answers: RemoteAnswers) -> None:
        engine.answers.error = kind("what you gave: '\u00e9\n'. " + "\u6c34" * 10_000)
        for ask in (lambda: answers.generate(BODY), lambda: anext(answers.stream(BODY)), answers.check):
            with pytest.raises(kind) as raised:
                await ask()
            assert type(raised.value) is kind and raised.value.__cause__ is None
            assert str(raised.value).startswith("what you gave: '\u00e9\n'. \u6c34\u6c34")
        assert answers._lost is None and answers.running == 0

    played(run)


def test_a_mistake_of_ours_is_no_lost_engine() -> None:
    async def run(engine: Played, answers: RemoteAnswers) -> None:
        engine.answers.error = KeyError("x")
        for ask in (lambda: answers.generate(BODY), lambda: anext(answers.stream(BODY))):
            with pytest.raises(ServeError, match=r"failed at this request.*KeyError.*Its log says more") as raised:
                await ask()
            assert (status_of(raised.value), answers._lost) == (500, None)

    played(run)


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_cancels_the_request(stream: bool) -> None:
    async def run(engine: Played, answers: RemoteAnswers) -> None:
        engine.answers.blocks = True
        if stream:
            events = answers.stream(BODY)
            assert msgspec.json.decode(await anext(events))["token"] == 7
            await until(lambda: engine.answers.running == 1)
            await events.aclose()
        else:
            asked = asyncio.create_task(answers.generate(BODY))
            await until(lambda: engine.answers.running == 1)
            asked.cancel()
        await until(lambda: engine.answers.running == 0)
        assert (engine.answers.cancelled, answers.running) == (1, 0)

    played(run)


def test_who_does_not_know_the_secret_is_refused() -> None:
    async def run(engine: Played, _: RemoteAnswers) -> None:
        where = engine._where
        for secret in ("", "0" * len(where.secret)):
            stranger = EngineChannel(where._replace(secret=secret))
            for ask in (stranger.call("generate", b""), stranger.call("metrics"), anext(stranger.stream(b""))):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await ask
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert error_of(raised.value) is None and not is_lost(raised.value)
        friend = EngineChannel(where)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await friend.call("no such method")
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED

    played(run)


def test_requests_are_refused_at_once_until_the_engine_is_back() -> None:
    async def run(engine: Played, answers: RemoteAnswers) -> None:
        await answers.generate(BODY)
        engine.answers.blocks = True
        running = asyncio.create_task(refused(answers))
        await until(lambda: engine.answers.running == 1)
        await engine.dies()
        await asyncio.wait_for(running, 1)
        for _ in range(3):
            _, later_s = await refused(answers)
            assert later_s < 0.5
            await asyncio.sleep(0.1)
        for ask in (answers.check, answers.metrics, lambda: anext(answers.stream(BODY))):
            with pytest.raises(EngineClosed):
                await ask()
        assert (engine.answers.running, set(engine.asked)) == (0, {"listen"})
        engine.answers.blocks = False
        await engine.comes_back()
        back_s = time.monotonic()
        while answers._lost is not None:
            await asyncio.sleep(0.01)
        assert time.monotonic() - back_s < REFUSED_S / 2, "a look that was made before must not be waited for"
        assert msgspec.json.decode(await answers.generate(BODY), type=GenerateAnswer) == ANSWER
        looks = engine.asked.count("listen")
        await asyncio.sleep(REFUSED_S)  # those that were made before fail only now
        assert await answers.metrics() and engine.asked.count("listen") == looks

    played(run)


def test_an_engine_that_is_given_up_is_not_looked_for() -> None:
    """Its cause is what has the replica replaced (``HttpReplica.check_health``)."""
    from ray.exceptions import ActorDiedError

    async def run(engine: Played, answers: RemoteAnswers) -> None:
        await engine.dies()
        await refused(answers)
        engine.state = ActorDiedError()
        await until(lambda: answers._looking is not None and answers._looking.done())
        looks = engine.asked.count("listen")
        with pytest.raises(EngineClosed) as raised:
            await answers.check()
        assert isinstance(raised.value.__cause__, ActorDiedError) and status_of(raised.value) == 503
        assert engine.asked.count("listen") == looks

    played(run)


def test_nothing_is_looked_for_at_the_end() -> None:
    async def run(engine: Played, answers: RemoteAnswers) -> None:
        await engine.dies()
        await refused(answers)
        await answers.end()
        assert answers._looking is not None
        await asyncio.wait_for(answers._looking, 5 * REFUSED_S)
        with pytest.raises(EngineClosed, match="the server is ending"):
            await answers.generate(BODY)
        assert "close" not in engine.asked

    played(run)


def test_a_look_that_ends_late_does_not_hide_that_the_engine_is_given_up() -> None:
    from ray.exceptions import ActorDiedError

    async def run(engine: Played, answers: RemoteAnswers) -> None:
        await engine.dies()
        await refused(answers)
        await until(lambda: "listen" in engine.asked)  # which is refused only in a while
        engine.state = ActorDiedError()
        await until(lambda: answers._looking is not None and answers._looking.done())
        assert isinstance(answers._lost, ActorDiedError)

    played(run)


def test_an_engine_that_drains_is_not_taken_for_one_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at its health may be on its way when the end begins."""
    import ray

    from alpa_lite.serve.deployment import HttpReplica

    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", lambda actor, **_: killed.append(actor))
    ending = False

    async def check() -> None:
        replica._answers.ending = ending
        raise EngineClosed("the engine has ended, or is about to")

    replica: Any = SimpleNamespace(_engine="engine", _answers=SimpleNamespace(ending=False, check=check))
    asyncio.run(HttpReplica.check_health(replica))
    assert killed == ["engine"], "one that ended by itself is started again"
    ending = True
    asyncio.run(HttpReplica.check_health(replica))
    assert killed == ["engine"]
