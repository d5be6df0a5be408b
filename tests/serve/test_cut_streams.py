"""Streams whose sending is cancelled, as a server does that waits for a client which takes nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

starlette = pytest.importorskip(
    "starlette.requests", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'"
)

from alpa_lite.serve.answers import Answers  # noqa: E402
from alpa_lite.serve.http import HttpService  # noqa: E402 - needs Starlette
from tests.serve.http_server import PROMPT, FakeEngine  # noqa: E402


@pytest.mark.parametrize("sent", ["http.response.start", "http.response.body"])
def test_a_stream_that_is_cancelled_while_it_sends_is_closed(sent: str) -> None:
    """At once, not when the collector comes: the server may wait in ``send`` for a client that takes nothing."""
    engine = FakeEngine(delay_s=0.001)

    async def run() -> None:
        answers = Answers(engine, timeout_s=20.0)  # pyrefly: ignore[bad-argument-type]
        body = json.dumps({"tokens": PROMPT, "max_tokens": 10**6, "stream": True}).encode()
        given = [{"type": "http.request", "body": body}]
        waits, never = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not given:
                await never.wait()
            return given.pop()

        async def send(message: Any) -> None:
            if message["type"] == sent:
                waits.set()
                await never.wait()

        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
        response = await HttpService(answers)(starlette.Request(scope, receive))
        sending = asyncio.create_task(response(scope, receive, send))
        async with asyncio.timeout(20):
            await waits.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert engine.requests[0].finish_reason == "cancelled"

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()
        engine.close()
