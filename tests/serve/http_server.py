"""The HTTP service over real sockets, with an engine whose model is a sum, for the tests of both."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from typing import Any

import numpy as np
import pytest

from alpa_lite.errors import RequestError
from alpa_lite.serve.request import Request
from alpa_lite.serve.scheduler import Scheduler
from tests.serve.clients import wait_until
from tests.serve.fake_runner import FakeRunner

starlette = pytest.importorskip(
    "starlette.requests", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'"
)
uvicorn = pytest.importorskip("uvicorn", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'")

from alpa_lite.serve.answers import Answers  # noqa: E402
from alpa_lite.serve.http import HttpService  # noqa: E402 - needs Starlette

PROMPT = [3, 1, 4]


class FakeEngine:
    """What the service needs of an engine, over a runner without a model."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = Scheduler(FakeRunner(**settings), queue_limit=2, prefills_per_step=4)
        self.thread = threading.Thread(target=self.scheduler.run, daemon=True)
        self.thread.start()
        self.requests: list[Request] = []

    def submit(self, prompt: list[int], **asked: Any) -> Request:
        if not 0 < len(prompt) <= 16:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens was given; the largest bucket holds 16. At file.py:3 (f). Change it."
            )
        request = Request(np.asarray(prompt, np.int32), **asked | {"stop": frozenset(asked["stop"])})
        self.scheduler.submit(request)
        self.requests.append(request)
        return request

    def statistics(self) -> Any:
        return self.scheduler.statistics()

    @property
    def closed(self) -> bool:
        return self.scheduler.shut

    def close(self) -> None:
        self.scheduler.close("it was asked to")
        self.thread.join()


class Server:
    """An engine behind uvicorn on a free port of loopback."""

    def __init__(
        self, engine: FakeEngine, token: str | None = None, body_timeout_s: float = 20.0, **settings: Any
    ) -> None:
        self.engine = engine
        answers = Answers(engine, timeout_s=20.0, **settings)  # pyrefly: ignore[bad-argument-type]
        service = HttpService(answers, token=token, body_bytes=4096, body_timeout_s=body_timeout_s)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            response = await service(starlette.Request(scope, receive))
            await response(scope, receive, send)

        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Status, decoded body and headers."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = json.dumps(body) if isinstance(body, dict) else body
        link.request(method, path, data, headers)
        got = link.getresponse()
        raw = got.read()
        link.close()
        is_json = raw and got.getheader("content-type") == "application/json"
        return got.status, json.loads(raw) if is_json else raw.decode(), got

    def generate(self, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", "/generate", body)[:2]

    def begin(self, receive_bytes: int = 0, **body: Any) -> socket.socket:
        """Sends a request and reads nothing; ``receive_bytes``: that this end may hold unread."""
        data = json.dumps(body).encode()
        link = socket.socket()
        if receive_bytes:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        link.settimeout(30)
        link.connect(("127.0.0.1", self.port))
        link.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        return link

    def end(self) -> None:
        self.engine.close()
        self.server.should_exit = True
        self.thread.join()


def wait_for_room(server: Server) -> int:
    wait_until(lambda: server.engine.scheduler.idle)
    return server.generate(tokens=PROMPT, max_tokens=1)[0]
