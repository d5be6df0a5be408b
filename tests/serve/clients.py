"""Clients of the tests' servers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import alpa_lite as al
from alpa_lite.errors import EngineLost
from benchmarks.ray_session import pids_below

PROMPTS = [list(range(1, size)) for size in (2, 5, 9, 14)]
BACK_S = 180.0  # nothing hangs; how long it takes is what benchmarks/serve_recovery.py measures


def wait_until(done: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def ask(port: int, prompt: list[int], *, max_tokens: int = 12, **headers: str) -> tuple[int, Any]:
    with begin(port, {"tokens": prompt, "max_tokens": max_tokens}, **headers) as got:
        return got.status, got.read()


@contextlib.contextmanager
def begin(port: int, body: dict[str, Any], **headers: str) -> Iterator[http.client.HTTPResponse]:
    """An answer of which only the head has been read."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as link:
        link.request("POST", "/generate", json.dumps(body), headers)
        with link.getresponse() as got:  # which owns the socket where the server says that it closes it
            yield got


def streamed(port: int, prompt: list[int], max_tokens: int = 12) -> tuple[int, bytes]:
    """As ``ask``, by events; one that says that the answer was cut short counts as its status."""
    with begin(port, {"tokens": prompt, "max_tokens": max_tokens, "stream": True}) as got:
        raw = got.read()
    if got.status != 200:
        return got.status, raw
    end = raw.strip().rsplit(b"data: ", 1)[-1]
    return json.loads(end).get("status", 200), end


def kill_actor_under_load(
    engine: al.serve.Engine, number: int, prompts: Sequence[Any], expected: list[list[int]], *, max_tokens: int
) -> None:
    """Kills an actor of an engine: what runs ends with an error that is a 503, what waits is served by new actors, and no answer
    is wrong."""
    earlier = engine.programs.places
    requests = [engine.submit(prompt, max_tokens=max_tokens) for prompt in (*prompts, *prompts)]
    next(iter(requests[0]))
    os.kill(engine.programs.places[number][1], signal.SIGKILL)
    lost = 0
    for request, tokens in zip(requests, expected * 2, strict=True):
        try:
            assert list(request.result(BACK_S)) == tokens
        except EngineLost as error:
            lost += 1
            assert "Send the request again" in str(error)
    assert 1 <= lost <= engine.programs.slots
    assert set(earlier).isdisjoint(engine.programs.places)
    assert engine.generate(prompts, max_tokens=max_tokens) == expected
    assert not engine.closed


def kill_under_load(port: int, title: str, expected: list[list[int]]) -> None:
    """Kills a process of that title: requests, whole or streamed, get the right tokens or 503, and soon they get tokens again."""
    answers: list[tuple[float, int, bytes, int]] = []
    ended = threading.Event()

    def client(k: int) -> None:
        while not ended.is_set():
            asked_s = time.monotonic()
            try:
                status, raw = (streamed if k % 2 else ask)(port, PROMPTS[k])
            except (OSError, http.client.HTTPException) as error:
                # A connection that is refused or cut is no answer, and must not stay so.
                status, raw = 0, str(error).encode()
            answers.append((asked_s, status, raw, k))
            time.sleep(0.01 if status == 200 else 0.2)

    clients = [threading.Thread(target=client, args=(k,)) for k in range(len(PROMPTS))]
    for thread in clients:
        thread.start()
    time.sleep(1.0)
    killed_s = time.monotonic()
    os.kill(random.choice(pids_below(title)), signal.SIGKILL)
    while not any(asked_s > killed_s and status == 200 for asked_s, status, _, _ in answers):
        assert time.monotonic() < killed_s + BACK_S, [status for _, status, _, _ in answers]
        time.sleep(0.1)
    time.sleep(1.0)
    ended.set()
    for thread in clients:
        thread.join()
    assert {status for _, status, _, _ in answers} <= {200, 503}
    for _, status, raw, k in answers:
        assert status != 200 or json.loads(raw)["tokens"] == expected[k]
