"""Calls from the server's replica to the engine's process: gRPC, with bodies in JSON, as clients send and get them.

Ray starts, watches and ends that process; calls through Ray took longer than all else that HTTP adds. Both sides are here:
``EngineServer`` and ``EngineChannel``.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio
import msgspec

from alpa_lite import errors
from alpa_lite.errors import ServeError

if TYPE_CHECKING:
    from alpa_lite.serve.answers import Answers, GenerateBody

_PATH = "/alpa_lite.Engine/"
_SECRET, _KIND = "alpa-lite-secret", "alpa-lite-error"  # keys of what comes beside bodies
_TEXT = 2000  # bytes of an error: it is a header, in which a byte may take three, and headers have 8 KiB
_SIZES = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))  # HTTP has the limit
_PING_MS, _PONG_MS = 10_000, 20_000  # a host that is gone closes no connections
_GRACE_S = 60.0


class Listening(NamedTuple):
    """What an engine's process says of itself.

    Attributes:
        failure: why there is no engine; "" if there is one. For whoever runs the server: clients are not told.
        address: "HOST:PORT".
        secret: without which calls are refused, as others on this machine can reach the port.
    """

    failure: str
    address: str
    secret: str


class EngineServer:
    """Takes calls for ``answers``, which may raise ``ServeError``; as long as it is held, and in one event loop."""

    def __init__(self, answers: Callable[[], Answers]) -> None:
        self._secret = secrets.token_hex(32)
        self._server = grpc.aio.server(
            options=(*_SIZES, ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2))
        )
        self._server.add_generic_rpc_handlers((_Service(answers, self._secret),))

    async def start(self, host: str) -> tuple[str, str]:
        """Listens on this address of the machine; returns it with a port of its own, and the secret."""
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        return f"{host}:{port}", self._secret

    async def stop(self) -> None:
        """Calls that run are cancelled."""
        await self._server.stop(None)


class _Service(grpc.GenericRpcHandler):
    def __init__(self, answers: Callable[[], Answers], secret: str) -> None:
        self._answers, self._secret = answers, secret
        self._methods = {
            "generate": grpc.unary_unary_rpc_method_handler(_told(self._generate)),
            "stream": grpc.unary_stream_rpc_method_handler(self._stream),
            "check": grpc.unary_unary_rpc_method_handler(_told(self._check)),
            "metrics": grpc.unary_unary_rpc_method_handler(_told(self._metrics)),
        }

    def service(self, handler_call_details: Any) -> Any:
        given = dict(handler_call_details.invocation_metadata).get(_SECRET, "")
        if not hmac.compare_digest(str(given).encode(), self._secret.encode()):
            return grpc.unary_unary_rpc_method_handler(_refuse)
        return self._methods.get(handler_call_details.method.removeprefix(_PATH))

    async def _generate(self, body: bytes) -> bytes:
        return msgspec.json.encode(await self._answers().generate(_body(body)))

    async def _stream(self, body: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            async for event in self._answers().stream(_body(body)):
                yield msgspec.json.encode(event)
        except ServeError as error:
            await _abort(context, error)

    async def _check(self, _: bytes) -> bytes:
        await self._answers().check()
        return b""

    async def _metrics(self, _: bytes) -> bytes:
        return await self._answers().metrics()


def _told(ask: Callable[[bytes], Awaitable[bytes]]) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def answered(body: bytes, context: Any) -> bytes:
        try:
            return await ask(body)
        except ServeError as error:
            await _abort(context, error)
            raise  # never reached: what aborts raises

    return answered


async def _abort(context: Any, error: ServeError) -> None:
    text = str(error).encode()[:_TEXT].decode(errors="ignore")
    await context.abort(grpc.StatusCode.ABORTED, text, ((_KIND, type(error).__name__),))


async def _refuse(_: bytes, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the secret is missing or wrong")


def _body(data: bytes) -> GenerateBody:
    from alpa_lite.serve.answers import GenerateBody

    return msgspec.json.decode(data, type=GenerateBody)


class EngineChannel:
    """Calls to an engine's process, from the event loop in which this is made. A call that is cancelled is cancelled there.

    Calls raise ``grpc.aio.AioRpcError``; ``error_of`` and ``is_lost`` say what it means.
    """

    def __init__(self, listening: Listening) -> None:
        self._channel = grpc.aio.insecure_channel(
            listening.address,
            options=(
                *_SIZES,
                ("grpc.keepalive_time_ms", _PING_MS),
                ("grpc.keepalive_timeout_ms", _PONG_MS),
                ("grpc.enable_http_proxy", 0),
            ),
        )
        self._metadata = ((_SECRET, listening.secret),)

    async def call(self, method: str, body: bytes = b"") -> bytes:
        """The answer of "generate", "check" or "metrics"."""
        return await self._channel.unary_unary(_PATH + method)(body, metadata=self._metadata)

    async def stream(self, body: bytes) -> AsyncGenerator[bytes, None]:
        """The events of "stream"."""
        events = self._channel.unary_stream(_PATH + "stream")(body, metadata=self._metadata)
        try:
            async for event in events:
                yield event
        finally:
            events.cancel()  # for a client that went away; else it has ended

    async def close(self) -> None:
        """Calls that run have some time left."""
        await self._channel.close(_GRACE_S)


def error_of(error: grpc.aio.AioRpcError) -> ServeError | None:
    """What the engine raised; None if it raised nothing of its own."""
    name = dict(error.trailing_metadata() or ()).get(_KIND, "")
    kind = getattr(errors, str(name), None)
    return kind(error.details()) if isinstance(kind, type) and issubclass(kind, ServeError) else None


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether nobody answers there any more."""
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
