"""Requests and answers over HTTP, whatever server carries them.

In: what answers (``Answers``, or the same in another process). Out: ``HttpService``, which answers Starlette's requests;
``deployment.py`` puts it behind Ray Serve.

====================  ============================================================================================
``POST /generate``    a JSON object, ``GenerateBody``; its answer as one JSON object, or as server-sent events
``GET /health``       200 while requests are taken
``GET /metrics``      for Prometheus
====================  ============================================================================================

An error is a JSON object, {"error": text}:

===  =======================================================================================================
400  not JSON, a field that is unknown, missing or out of range, a prompt longer than the largest bucket
401  the bearer token is missing or wrong
404  no such path; 405 the path has another method
408  the body did not come within its time; the connection is closed
413  the body is larger than allowed
429  the queue is full; try again after the seconds of ``Retry-After``
500  a step of the model failed, its logits are no numbers, the answer cannot be decoded, or a mistake of ours
503  the engine has ended or was lost; as 429
504  not finished by the request's deadline
===  =======================================================================================================
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from alpa_lite.errors import DeadlineExceeded, EngineClosed, EngineLost, QueueFull, RequestError, ServeError
from alpa_lite.serve.answers import GenerateAnswer, GenerateBody, TokenEvent
from alpa_lite.serve.metrics import CONTENT_TYPE

_JSON = "application/json"
_NOT_SENT = 499  # the client went away; nobody sees it
_RETRY_AFTER_S = 1
# As `errors.user_line` writes it: the path of a file may have blanks in it.
_PLACE = re.compile(r" At (the command line|(?:(?! At )[^\n:])+(?:\.py|>):\d+(?: \([^)\n]*\))?)\.")
_T = TypeVar("_T")


class Backend(Protocol):
    """What answers, as ``Answers`` or with the same as JSON already. All raise ``ServeError``s."""

    async def generate(self, body: GenerateBody) -> GenerateAnswer | msgspec.Raw: ...
    def stream(self, body: GenerateBody) -> AsyncGenerator[TokenEvent | GenerateAnswer | msgspec.Raw, None]: ...
    async def check(self) -> None: ...
    async def metrics(self) -> bytes: ...


class _Refused(Exception):
    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


class HttpService:
    """Answers HTTP requests.

    Args:
        backend: what answers.
        token: that requests must bring in "Authorization: Bearer ..."; None = none. /health needs none.
        body_bytes: of the largest body.
        body_timeout_s: within which all of a body must come.
    """

    def __init__(
        self, backend: Backend, *, token: str | None = None, body_bytes: int = 2**20, body_timeout_s: float = 30.0
    ) -> None:
        self._backend, self._token = backend, token
        self._body_bytes, self._body_timeout_s = body_bytes, body_timeout_s

    async def __call__(self, request: Request) -> Response:
        """The answer to any request."""
        try:
            return await self._answer(request)
        except _Refused as refused:
            return _error(refused.status, str(refused), refused.headers)
        except ServeError as error:
            status = status_of(error)
            return _error(status, str(error), {"Retry-After": str(_RETRY_AFTER_S)} if status in (429, 503) else {})
        except ClientDisconnect:
            return Response(status_code=_NOT_SENT)

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")).rstrip("/")
        if path == "/generate":
            _check_method(request, "POST")
            self._check_token(request)
            return await self._generate(request)
        if path == "/metrics":
            _check_method(request, "GET", "HEAD")
            self._check_token(request)
            return Response(await self._backend.metrics(), media_type=CONTENT_TYPE)
        if path == "/health":
            _check_method(request, "GET", "HEAD")
            await self._backend.check()
            return _json(200, {"status": "ok"})
        raise _Refused(
            404, f"there is nothing at {path or '/'!r}. There are POST /generate, GET /health and GET /metrics."
        )

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token.encode()):
            text = "the bearer token is missing or wrong. Send the header 'Authorization: Bearer TOKEN' with the server's token."
            raise _Refused(401, text, **{"WWW-Authenticate": "Bearer"})

    # -- /generate -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        body = _decoded(await self._body(request))
        if body.stream:
            events = self._backend.stream(body)
            try:
                first = await _unless_gone(request, anext(events))  # what is refused has a status of its own
            except BaseException:
                await events.aclose()
                raise
            return _Events(first, events)
        return _json(200, await _unless_gone(request, self._backend.generate(body)))

    async def _body(self, request: Request) -> bytes:
        try:
            async with asyncio.timeout(self._body_timeout_s):  # of the whole: a byte now and then is no progress
                return await self._whole_body(request)
        except TimeoutError:
            raise _Refused(
                408,
                f"the body did not come within {self._body_timeout_s:g} s, which is the most that it may take. Send all of it at "
                "once, on a new connection.",
                Connection="close",  # else what still comes of it would keep the connection
            ) from None

    async def _whole_body(self, request: Request) -> bytes:
        limit, found = self._body_bytes, bytearray()
        too_large = f"the body is larger than {limit} bytes, which is the most that is taken. Send a shorter prompt."
        with suppress(ValueError):
            if int(request.headers.get("content-length", "0")) > limit:
                raise _Refused(413, too_large)
        async for chunk in request.stream():
            found += chunk
            if len(found) > limit:
                raise _Refused(413, too_large)
        return bytes(found)


def _check_method(request: Request, *allowed: str) -> None:
    if request.method not in allowed:
        raise _Refused(405, f"{request.method} was sent. This path takes {allowed[0]}.", Allow=", ".join(allowed))


class _Events(StreamingResponse):
    """Server-sent events. When the client goes away this is cancelled, and with it the request, which Starlette leaves to the
    collector where that comes while something is sent."""

    def __init__(self, first: Any, events: AsyncGenerator[Any, None]) -> None:
        self._events, self._sent = events, _sent(first, events)
        super().__init__(self._sent, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events), aclosing(self._sent):
            await super().__call__(scope, receive, send)


async def _sent(first: Any, events: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield _event(first)
        async for event in events:
            yield _event(event)
    except ServeError as error:  # the status is sent already
        yield _event({"error": _shown(error), "status": status_of(error)})


async def _unless_gone(request: Request, answer: Awaitable[_T]) -> _T:
    """The answer; when the client goes away first it is cancelled, and that is raised."""
    answered = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((answered, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise ClientDisconnect
        return answered.result()
    finally:
        answered.cancel()
        gone.cancel()
        await asyncio.gather(answered, gone, return_exceptions=True)  # a generator cannot be closed while it runs


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def status_of(error: ServeError) -> int:
    """The HTTP status that says so."""
    for kinds, status in (
        (RequestError, 400),
        (QueueFull, 429),
        (DeadlineExceeded, 504),
        ((EngineClosed, EngineLost), 503),
    ):
        if isinstance(error, kinds):
            return status
    return 500


def _decoded(data: bytes) -> GenerateBody:
    try:
        return msgspec.json.decode(data, type=GenerateBody)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        fields = ", ".join(GenerateBody.__struct_fields__)
        raise RequestError(
            f"the body cannot be taken: {error}. It must be a JSON object with some of: {fields}. Correct it."
        ) from error


def _json(status: int, value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, _JSON)


def _error(status: int, text: str, headers: dict[str, str]) -> Response:
    return _json(status, {"error": _shown(text)}, headers)


def _shown(error: Any) -> str:
    """Without the line of the server's own code that an error names: a client learns nothing from it."""
    return _PLACE.sub("", str(error)).encode(errors="replace").decode()


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
