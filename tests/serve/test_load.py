"""A server under load: right answers and statuses, nothing hangs, nothing is left, and nothing is kept of requests that ended."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import itertools
import json
import sys
from typing import Any

import pytest

import alpa_lite as al

pytestmark = pytest.mark.ray
SECONDS = 60.0  # three crowds
# What an answered request may leave in memory: peaks of crowds come to 2 to 8 KiB, one Starlette request that is kept to 26.
KEPT_KIB = 16.0
MISTAKES = {
    "not JSON": 400,
    "unknown field": 400,
    "out of range": 400,
    "too long a prompt": 400,
    "too large a body": 413,
    "wrong token": 401,
    "no token": 401,
}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="Locust is not installed: pip install 'alpa-lite[load]'"
)
def test_right_answers_and_statuses_under_load(ray_session: None) -> None:
    """The load of ``benchmarks/serve_load.py``."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'")
    from benchmarks.serve_load import load

    rows = {row.case: row for row in load(SECONDS)}
    assert "gevent" not in sys.modules, "it would change the sockets of this process"
    assert rows["all"].value == 0, rows
    done = {case.split("'")[1] for case in rows if case.startswith("requests ")}
    mistakes = {f"{name}, {status}" for name, status in MISTAKES.items()}
    assert {case for case in done if not case.endswith(", refused")} == mistakes | {
        "whole",
        "streamed",
        "read slowly",
        "left",
        "at once",
    }
    assert "at once, refused" in done
    assert rows["queued_requests at the end"].value == rows["active_requests at the end"].value == 0
    per_minute = float(rows["all"].against.split()[0]) / SECONDS * 60
    for who in ("engine", "HTTP", "proxy"):
        assert rows[f"{who}, memory"].value * 1024 / per_minute < KEPT_KIB, rows
        assert rows[f"{who}, open files"].value < 1.0, rows  # they may fall, as what the start left closes
        assert abs(rows[f"{who}, open files left"].value) < 10, rows  # of some 2000 requests


# -- in this process, where objects can be counted ---------------------------------------------------------------------

TOKEN = "secret"


async def asked(service: Any, body: bytes, token: str = TOKEN, leave: bool = False) -> int:
    """The status that a request gets; with ``leave`` the client goes away at the first token."""
    from starlette.requests import Request

    given = [{"type": "http.request", "body": body, "more_body": False}]
    gone, sent = asyncio.Event(), []

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if leave and message.get("body"):
            gone.set()

    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b""}
    scope |= {"headers": [(b"authorization", f"Bearer {token}".encode())], "asgi": {"spec_version": "2.3"}}
    await (await service(Request(scope, receive)))(scope, receive, send)
    return sent[0]["status"]


async def crowd(service: Any, times: int) -> list[int]:
    """So many of every kind of request, all at once and more than slots and queue hold; statuses in order."""
    bodies = [
        {"tokens": [1, 2, 3], "max_tokens": 3},
        {"tokens": [4, 5, 6, 7], "max_tokens": 4, "stream": True},
        {"prompt": "def"},
        {"tokens": [10**9]},
        {"tokens": [1] * 33},
        {"tokens": [1] * 4096},
    ]
    kinds = [(service, json.dumps(body).encode()) for body in bodies]
    kinds += [(service, b"{not JSON"), (service, kinds[0][1], "guess"), (service, kinds[1][1], TOKEN, True)]
    return await asyncio.gather(*(asked(*kind) for _ in range(times) for kind in kinds))


@pytest.mark.medium
def test_nothing_is_kept_of_requests_that_ended() -> None:
    """Not one object per request: blocks of Python's memory are counted, which leaves no room for noise as bytes do."""
    pytest.importorskip("starlette", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'")
    from alpa_lite.serve.answers import Answers
    from alpa_lite.serve.http import HttpService
    from tests.serve.served_target import target

    served = target()
    sizes = {"slots": 4, "max_length": 64, "buckets": (8, 32), "queue_limit": 16}
    with al.serve.Engine(served.model, served.params(), **sizes) as engine:
        service = HttpService(Answers(engine), token=TOKEN, body_bytes=4096)

        async def grown(times: int) -> tuple[set[int], int, int]:
            """Statuses, and by how many blocks as many requests more grow, where nothing else in this process does meanwhile."""
            held = []
            for _ in range(5):
                statuses = await crowd(service, times)
                while engine.statistics().active:  # those that left
                    await asyncio.sleep(0.01)
                gc.collect()
                held.append(sys.getallocatedblocks())
            return set(statuses), len(statuses), min(b - a for a, b in itertools.pairwise(held[1:]))

        statuses, count, blocks = asyncio.run(grown(20))
    assert statuses == {200, 400, 401, 413, 429}
    assert blocks < count, f"{blocks} blocks more after {count} requests"
