"""What a server is asked and answers, without HTTP: an engine and its tokenizer behind two coroutines.

In: ``GenerateBody``. Out: ``GenerateAnswer``, or ``TokenEvent``s as tokens come and the answer at their end. When a coroutine is
cancelled, so is its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from alpa_lite.errors import EngineClosed, RequestError, ServeError
from alpa_lite.serve.engine import Engine
from alpa_lite.serve.metrics import Metrics
from alpa_lite.serve.request import Request
from alpa_lite.serve.sampling import Sampling

_SHORT = 4096  # characters, which take a tokenizer a few milliseconds


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``POST /generate`` takes.

    Attributes:
        text: the prompt, where the server has a tokenizer.
        tokens: the prompt, where ``text`` is not given.
        max_tokens: how many to make.
        temperature, top_k, top_p, seed: as of ``Sampling``.
        stop: tokens after which it ends.
        timeout_s: seconds by when it must be finished; None = the server's own limit, which is also the most.
        stream: whether tokens are sent as they come.
    """

    text: str | None = None
    tokens: list[int] | None = None
    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: list[int] = []
    timeout_s: float | None = None
    stream: bool = False


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that was made.

    Attributes:
        tokens: that were made; text: the same, where the server has a tokenizer.
        finish_reason: "length" or "stop".
    """

    tokens: list[int]
    text: str | None = None
    finish_reason: str | None = None


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token, and what it adds to the text."""

    token: int
    text: str | None = None


class Answers:
    """Answers with an engine.

    Args:
        engine: that answers.
        encode, decode: text to tokens and back; None: requests and answers are tokens.
        timeout_s: of the longest request.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._engine, self._encode, self._decode, self._timeout_s = engine, encode, decode, timeout_s
        self._metrics = Metrics(engine.statistics)
        self._encoding = asyncio.Lock()

    async def generate(self, body: GenerateBody) -> GenerateAnswer:
        """The whole answer.

        Raises:
            ServeError: as ``Engine.submit`` and ``Request.result``.
        """
        with await self._submitted(body) as running:
            return self._whole(running, [token async for token in running])

    async def stream(self, body: GenerateBody) -> AsyncGenerator[TokenEvent | GenerateAnswer, None]:
        """Tokens as they come, then the whole answer; raises as ``generate``.

        A text is what a token adds to the few before it, so that a long answer is not decoded again for each of its tokens. A
        decoder that goes back on what it said is right only in the whole answer.
        """
        sent: list[int] = []
        start = shown = 0  # of the tokens that are decoded again, and of those that have not been shown
        with await self._submitted(body) as running:
            async for token in running:
                sent.append(token)
                text = None
                if self._decode is not None:
                    before, now = self._text(sent[start:shown]) if shown else "", self._text(sent[start:])
                    ends = len(sent) == running.max_tokens or token in running.stop
                    text = ""
                    if ends or not now.endswith("\ufffd"):  # else the token ends within a character
                        text, start, shown = now[len(before) :], shown, len(sent)
                yield TokenEvent(token, text)
            yield self._whole(running, sent)

    async def check(self) -> None:
        """Raises ``EngineClosed`` when no more requests are taken."""
        if self._engine.closed:
            raise EngineClosed(
                "the engine has ended, or is about to. It takes no more requests. Try again when another has started."
            )

    async def metrics(self) -> bytes:
        """For Prometheus."""
        return await asyncio.to_thread(self._metrics.text)

    async def _submitted(self, body: GenerateBody) -> Request:
        if (body.text is None) == (body.tokens is None):
            raise RequestError(
                "one of 'text' and 'tokens' must be given, and only one. Send the prompt as one of them."
            )
        tokens = body.tokens
        if body.text is not None:
            if self._encode is None:
                raise RequestError(
                    "'text' was given, and this server has no tokenizer. Send 'tokens', a list of whole numbers."
                )
            try:
                tokens = await self._encoded(self._encode, body.text)
            except Exception as error:  # of the user's function, whatever it raises
                raise RequestError(
                    f"the server's tokenizer cannot encode the text: {type(error).__name__}: {error!s:.200}. Send other text."
                ) from error
        limit = self._timeout_s
        if body.timeout_s is not None and not 0 < body.timeout_s <= limit:
            raise RequestError(
                f"timeout_s={body.timeout_s} was given; it must be above 0 and at most {limit:g}. Correct it."
            )
        return self._engine.submit(
            tokens or [],
            max_tokens=body.max_tokens,
            sampling=Sampling(temperature=body.temperature, top_k=body.top_k, top_p=body.top_p, seed=body.seed),
            stop=body.stop,
            timeout_s=body.timeout_s or limit,
        )

    async def _encoded(self, encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
        """Tokens of a text. Of a long one in a thread, as other requests have their tokens sent meanwhile; one at a time, as many
        tokenizers can do no more."""
        async with self._encoding:
            if len(text) <= _SHORT:
                return list(encode(text))
            running = asyncio.ensure_future(asyncio.to_thread(encode, text))
            try:
                return list(await asyncio.shield(running))
            finally:
                await asyncio.wait([running])  # also where the request is cancelled

    def _whole(self, running: Request, tokens: list[int]) -> GenerateAnswer:
        text = None if self._decode is None else self._text(tokens)
        return GenerateAnswer(tokens=tokens, text=text, finish_reason=running.finish_reason)

    def _text(self, tokens: list[int]) -> str:
        assert self._decode is not None
        try:
            text = self._decode(tokens)
            if not isinstance(text, str):
                raise TypeError(f"it returned {type(text).__name__} instead of str")
            text.encode()  # halves of a pair of surrogates cannot be sent
            return text
        except Exception as error:  # of the user's function, whatever it raises
            raise ServeError(
                f"the server's tokenizer cannot decode the answer: {type(error).__name__}: {error!s:.200}. Ask whoever runs the "
                "server."
            ) from error
