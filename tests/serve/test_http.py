"""The HTTP service over real sockets, with an engine whose model is a sum: status codes, limits, clients that go away."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest

from alpa_lite.errors import EngineClosed, EngineLost, ServeError
from examples import client
from tests.serve.clients import wait_until
from tests.serve.fake_runner import answer

starlette = pytest.importorskip(
    "starlette.requests", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'"
)

from alpa_lite.serve.http import _shown, status_of  # noqa: E402
from tests.serve.http_server import PROMPT, FakeEngine, Server, wait_for_room  # noqa: E402 - needs Starlette


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(FakeEngine(), decode=lambda tokens: " ".join(map(str, tokens)), encode=lambda text: [len(text)])
    yield made
    made.end()


@pytest.fixture
def slow() -> Iterator[Server]:
    """One slot, and 50 ms per token."""
    made = Server(FakeEngine(slots=1, delay_s=0.05))
    yield made
    made.end()


def test_an_answer(server: Server) -> None:
    status, got = server.generate(tokens=PROMPT, max_tokens=5)
    tokens = answer(PROMPT, 5)
    assert (status, got) == (200, {"tokens": tokens, "text": " ".join(map(str, tokens)), "finish_reason": "length"})
    assert server.generate(text="abc", max_tokens=2)[1]["tokens"] == answer([3], 2)
    stop = answer(PROMPT, 5)[2]
    assert server.generate(tokens=PROMPT, max_tokens=5, stop=[stop])[1]["finish_reason"] == "stop"


def test_a_stream(server: Server) -> None:
    _, text, got = server.ask("POST", "/generate", {"tokens": PROMPT, "max_tokens": 4, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    tokens = answer(PROMPT, 4)
    assert got.getheader("content-type").startswith("text/event-stream")
    assert [event["token"] for event in events[:-1]] == tokens == events[-1]["tokens"]
    assert "".join(event["text"] for event in events[:-1]) == events[-1]["text"] == " ".join(map(str, tokens))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{nope", "JSON is malformed"),
        (b"\xff\xfe", "cannot be taken"),
        (b"[]", "cannot be taken"),
        ({"tokens": PROMPT, "max_token": 3}, "max_token"),
        ({"tokens": "abc"}, "tokens"),
        ({}, "one of 'text' and 'tokens'"),
        ({"tokens": PROMPT, "text": "a"}, "only one"),
        ({"tokens": [1] * 17}, "the largest bucket holds 16"),
        ({"tokens": PROMPT, "top_p": 2.0}, "top_p=2.0"),
        ({"tokens": PROMPT, "timeout_s": 21.0}, "at most 20"),
    ],
)
def test_what_cannot_be_taken_is_400(server: Server, body: Any, words: str) -> None:
    status, got, _ = server.ask("POST", "/generate", body)
    assert status == 400 and words in got["error"]
    assert ".py:" not in got["error"], "a client learns nothing from the server's code"
    assert server.generate(tokens=PROMPT)[0] == 200


def test_a_body_that_is_too_large(server: Server) -> None:
    assert server.ask("POST", "/generate", b"x" * 5000)[0] == 413
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    link.request(
        "POST", "/generate", iter([b"x" * 3000] * 3), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
    )
    assert link.getresponse().status == 413
    link.close()


@pytest.mark.medium
@pytest.mark.parametrize("sent", [b"", b'{"tokens": '], ids=["nothing", "some"])
def test_a_body_that_does_not_come(sent: bytes) -> None:
    server = Server(FakeEngine(), body_timeout_s=3.0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as link:
            link.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + sent)
            assert server.generate(tokens=PROMPT, max_tokens=2)[1]["tokens"] == answer(PROMPT, 2)
            got = http.client.HTTPResponse(link)
            got.begin()
            assert got.status == 408 and "within 3 s" in json.loads(got.read())["error"]
            assert link.recv(1) == b"", "the connection is closed"
    finally:
        server.end()


def test_paths_and_methods(server: Server) -> None:
    for path in ("/nothing", "/", "/hea%0alth"):
        status, found, _ = server.ask("GET", path)
        assert status == 404 and f"there is nothing at {unquote(path)!r}. There are POST /generate" in found["error"]
    status, _, got = server.ask("GET", "/generate")
    assert (status, got.getheader("allow")) == (405, "POST")
    assert server.ask("GET", "/health")[:2] == (200, {"status": "ok"})
    assert server.ask("HEAD", "/health")[0] == 200 and server.ask("HEAD", "/metrics")[0] == 200
    assert server.ask("DELETE", "/health")[0] == 405
    assert server.ask("GET", "/any/where/health")[0] == server.ask("POST", "/v1/generate", {})[0] == 404


@pytest.mark.parametrize(
    "place",
    ["At file.py:3 (f).", "At /my files/b.py:10 (<lambda>).", "At <stdin>:1 (<module>).", "At the command line."],
)
def test_clients_are_not_told_of_the_servers_code(place: str) -> None:
    assert _shown(f"what. At most 3 may. {place} Change it.") == "what. At most 3 may. Change it."


def test_the_token() -> None:
    server = Server(FakeEngine(), token="right")
    try:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic right"},
            {"Authorization": "Bearer r\xfc"},
        ):
            status, _, got = server.ask("POST", "/generate", {"tokens": PROMPT}, **headers)
            assert (status, got.getheader("www-authenticate")) == (401, "Bearer")
        assert server.ask("GET", "/metrics")[0] == 401
        assert server.ask("GET", "/health")[0] == 200
        assert server.ask("POST", "/generate", {"tokens": PROMPT}, Authorization="Bearer right")[0] == 200
        assert len(server.engine.requests) == 1
    finally:
        server.end()


def test_what_was_lost_is_503() -> None:
    assert [status_of(kind("lost")) for kind in (EngineLost, EngineClosed, ServeError)] == [503, 503, 500]


def test_a_full_queue_is_429_and_a_deadline_504(slow: Server) -> None:
    running = [slow.begin(tokens=PROMPT, max_tokens=100)]
    wait_until(lambda: slow.engine.statistics().active == 1)
    running += [slow.begin(tokens=PROMPT, max_tokens=100) for _ in range(2)]
    wait_until(lambda: slow.engine.statistics().queued == 2)
    _, text, _ = slow.ask("GET", "/metrics")
    assert "alpa_lite_queued_requests 2.0\n" in text and "alpa_lite_active_requests 1.0\n" in text
    status, got, head = slow.ask("POST", "/generate", {"tokens": PROMPT})
    assert status == 429 and "queue_limit=2" in got["error"] and int(head.getheader("retry-after")) >= 1
    for link in running:
        link.close()
    assert wait_for_room(slow) == 200
    assert slow.generate(tokens=PROMPT, max_tokens=50, timeout_s=0.2)[0] == 504


def test_the_client_of_the_examples_reads_what_is_no_error_of_the_server() -> None:
    assert client.told(b'{"error": "no"}') == "no"
    assert [client.told(x) for x in (b"Service Unavailable", b"[1]", b"{}")] == ["Service Unavailable", "[1]", "{}"]


def test_the_client_of_the_examples_knows_a_cut_from_an_end() -> None:
    events = b'data: {"token": 1, "text": "a"}\n\n', b'data: {"tokens": [1], "finish_reason": "length"}\n\n'

    def answer(said: bytes) -> None:
        link, _ = listening.accept()
        with link:
            asked = b""
            while b"}" not in asked:  # head and body may come apart; a link that is closed with some unread is reset
                asked += link.recv(2**16)
            link.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + said)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        for count in (1, 2):
            thread = threading.Thread(target=answer, args=(b"".join(events[:count]),))
            thread.start()
            got = client.stream({"text": "x"}, port=listening.getsockname()[1])
            assert next(got)["token"] == 1
            if count == 1:
                with pytest.raises(ConnectionError, match="cut before the end"):
                    next(got)
            else:
                assert [event["tokens"] for event in got] == [[1]]
            thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(slow: Server, stream: bool) -> None:
    link = slow.begin(tokens=PROMPT, max_tokens=400, stream=stream)
    wait_until(lambda: slow.engine.statistics().active == 1)
    link.close()
    wait_until(lambda: slow.engine.requests[0].done)
    assert slow.engine.requests[0].finish_reason == "cancelled" and len(slow.engine.requests[0].tokens) < 100
    assert wait_for_room(slow) == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_the_queue(slow: Server, stream: bool) -> None:
    running, waiting = slow.begin(tokens=PROMPT, max_tokens=400), None
    wait_until(lambda: slow.engine.statistics().active == 1)
    waiting = slow.begin(tokens=PROMPT, max_tokens=400, stream=stream)
    wait_until(lambda: slow.engine.statistics().queued == 1)
    waiting.close()
    wait_until(lambda: slow.engine.statistics().queued == 0)
    first, second = slow.engine.requests
    assert (second.finish_reason, second.tokens, first.done) == ("cancelled", (), False)
    running.close()


def test_health_while_it_ends(slow: Server) -> None:
    """As long as requests run, new ones are refused, and /health says so."""
    running = slow.begin(tokens=PROMPT, max_tokens=400)
    wait_until(lambda: slow.engine.statistics().active == 1)
    assert slow.ask("GET", "/health")[0] == 200
    slow.engine.scheduler.drain()
    assert [slow.ask("GET", "/health")[0], slow.generate(tokens=PROMPT)[0]] == [503, 503]
    assert slow.engine.statistics().active == 1
    running.close()


def test_a_slow_reader_holds_nobody_up() -> None:
    """It is sent 8 MB, far more than both ends of a connection and the server hold for it, and reads nothing for a while."""
    server = Server(FakeEngine(), decode=lambda tokens: "".join(f"{token:080000d}" for token in tokens))
    try:
        link = server.begin(receive_bytes=4096, tokens=PROMPT, max_tokens=100, stream=True)
        wait_until(lambda: server.engine.requests and server.engine.requests[0].done)
        for _ in range(5):
            assert server.generate(tokens=PROMPT, max_tokens=3)[1]["tokens"] == answer(PROMPT, 3)
        got = http.client.HTTPResponse(link)
        got.begin()
        events = [json.loads(line.removeprefix(b"data: ")) for line in got.read().split(b"\n\n") if line]
        link.close()
        assert [event["token"] for event in events[:-1]] == answer(PROMPT, 100) == events[-1]["tokens"]
        assert "".join(event["text"] for event in events[:-1]) == events[-1]["text"]
    finally:
        server.end()


def test_an_engine_that_ended_is_503(server: Server) -> None:
    server.engine.close()
    status, got, head = server.ask("POST", "/generate", {"tokens": PROMPT})
    assert status == 503 and "closed" in got["error"] and head.getheader("retry-after")
    assert server.ask("GET", "/health")[0] == 503


def test_metrics(server: Server) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    server.generate(tokens=PROMPT, max_tokens=5)
    _, text, head = server.ask("GET", "/metrics")
    assert head.getheader("content-type").startswith("text/plain")
    found = {s.name: s.value for f in parser.text_string_to_metric_families(text) for s in f.samples if not s.labels}
    labelled = {
        (s.name, *s.labels.values()): s.value for f in parser.text_string_to_metric_families(text) for s in f.samples
    }
    assert found["alpa_lite_generated_tokens_total"] == 5 and found["alpa_lite_prompt_tokens_total"] == 3
    assert labelled["alpa_lite_finished_requests_total", "length"] == 1
    assert labelled["alpa_lite_padded_tokens_total", "4"] == 1 and labelled["alpa_lite_prefills_total", "4"] == 1
    assert found["alpa_lite_time_to_first_token_seconds_count"] == 1
    assert found["alpa_lite_time_per_token_seconds_count"] == 4
    assert found["alpa_lite_queue_seconds_count"] == 1 and found["alpa_lite_queue_seconds_sum"] >= 0
    assert 0 < found["alpa_lite_batch_fill"] <= 1 and found["alpa_lite_padding_waste"] == 0.25
    assert found["alpa_lite_decoded_rows_total"] == found["alpa_lite_decode_steps_total"] == 4
    # What never was is 0: Prometheus sees no first one where a series begins with it.
    assert labelled["alpa_lite_finished_requests_total", "error"] == 0
