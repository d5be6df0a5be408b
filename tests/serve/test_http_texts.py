"""Tokenizers behind the HTTP service: texts of streams, tokenizers that fail or take long."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from alpa_lite.serve.request import Request
from tests.serve.fake_runner import answer

starlette = pytest.importorskip(
    "starlette.requests", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'"
)

from alpa_lite.serve.answers import Answers, GenerateBody  # noqa: E402
from tests.serve.http_server import PROMPT, FakeEngine, Server, wait_for_room  # noqa: E402 - needs Starlette


def characters(tokens: list[int]) -> str:
    """Bytes of UTF-8; more than a byte is a mistake."""
    return bytes(tokens).decode(errors="replace")


def cleaned(tokens: list[int]) -> str:
    """Goes back on a space before a comma, as tokenizers may."""
    return "".join(("Hello", " ", ",", " world")[token % 4] for token in tokens).replace(" ,", ",")


class Says(FakeEngine):
    """Its runner's tokens are replaced by those given."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.said = tokens

    def submit(self, prompt: list[int], **asked: Any) -> Request:
        request = super().submit(prompt, **asked)
        request._append, append = lambda token: append(self.said[len(request.tokens)]), request._append
        return request


@pytest.mark.parametrize(
    ("decode", "tokens", "texts", "whole"),
    [
        (characters, list("aé€b".encode()), ["a", "", "é", "", "", "€", "b"], "aé€b"),
        (characters, list("a€".encode())[:3], ["a", "", "\ufffd"], "a\ufffd"),
        (characters, [0xFF, 0x61], ["", "\ufffda"], "\ufffda"),
        (cleaned, [0, 1, 2, 3, 0], ["Hello", " ", "", " world", "Hello"], "Hello, worldHello"),
    ],
    ids=["characters of several bytes", "one that does not end", "no character", "one that goes back"],
)
def test_texts_of_a_stream(decode: Any, tokens: list[int], texts: list[str], whole: str) -> None:
    server = Server(Says(tokens), decode=decode)
    try:
        _, raw, _ = server.ask("POST", "/generate", {"tokens": PROMPT, "max_tokens": len(tokens), "stream": True})
        *events, last = [json.loads(line.removeprefix("data: ")) for line in raw.strip().split("\n\n")]
        assert [event["text"] for event in events] == texts
        assert last["text"] == whole
    finally:
        server.end()


def test_a_tokenizer_that_fails() -> None:
    def encode(text: str) -> list[int]:
        return [{"a": 1}[c] for c in text]

    server = Server(Says([1, 300]), encode=encode, decode=characters)
    try:
        status, got = server.generate(text="b")
        assert status == 400 and "cannot encode the text: KeyError: 'b'" in got["error"]
        status, got = server.generate(text="a", max_tokens=2)
        assert status == 500 and "cannot decode the answer: ValueError" in got["error"]
        _, raw, _ = server.ask("POST", "/generate", {"text": "a", "max_tokens": 2, "stream": True})
        assert json.loads(raw.strip().rsplit("data: ", 1)[1])["status"] == 500
        assert wait_for_room(server) == 200
    finally:
        server.end()


def test_a_text_that_takes_long_to_encode_holds_up_nobody_else() -> None:
    begun, may_end, running = threading.Event(), threading.Event(), []

    def encode(text: str) -> list[int]:
        running.append(text)
        assert len(running) == 1, "two at once"
        if len(text) == 4000:
            running.pop()
            return [1]
        begun.set()
        may_end.wait(30)
        running.pop()
        return [1, 2]

    async def asked() -> None:
        answers = Answers(engine, timeout_s=20.0, encode=encode)  # pyrefly: ignore[bad-argument-type]
        long, gone = (asyncio.create_task(answers.generate(GenerateBody(text="x" * 5000))) for _ in range(2))
        await asyncio.to_thread(begun.wait, 30)
        assert (await answers.generate(GenerateBody(tokens=PROMPT, max_tokens=2))).tokens == answer(PROMPT, 2)
        short = asyncio.create_task(answers.generate(GenerateBody(text="x" * 4000)))
        gone.cancel()
        await asyncio.sleep(0.05)
        long.cancel()  # what it began goes on, and the others wait for it
        await asyncio.sleep(0.05)
        assert not short.done() and not long.done()
        may_end.set()
        assert (await short).tokens == answer([1], 16)
        for task in (long, gone):
            with pytest.raises(asyncio.CancelledError):
                await task

    engine = FakeEngine()
    try:
        asyncio.run(asked())
    finally:
        may_end.set()
        engine.close()
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (lambda tokens: bytes(tokens).decode(errors="surrogateescape"), "UnicodeEncodeError"),
        (lambda tokens: None, "it returned NoneType instead of str"),
        (lambda tokens: bytes(tokens), "it returned bytes instead of str"),
    ],
    ids=["half of a pair", "nothing", "bytes"],
)
def test_a_tokenizer_that_makes_no_text(decode: Any, words: str) -> None:
    def encode(text: str) -> list[int]:
        raise ValueError("no \ud800")

    server = Server(Says([0xFF, 0xFE]), encode=encode, decode=decode)
    try:
        status, got = server.generate(tokens=PROMPT, max_tokens=2)
        assert status == 500 and "cannot decode the answer: " in got["error"] and words in got["error"]
        status, got, _ = server.ask("POST", "/generate", {"tokens": PROMPT, "max_tokens": 2, "stream": True})
        assert status == 500 and words in got["error"]
        status, got = server.generate(text="a")
        assert status == 400 and got["error"].startswith(
            "the server's tokenizer cannot encode the text: ValueError: no ?"
        )
    finally:
        server.end()
