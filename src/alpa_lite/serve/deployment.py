"""An engine behind Ray Serve.

In: a function that makes a ``ServeTarget``, called in the engine's process, and ``ServerSettings``. Out: an HTTP server on this
machine, or on a cluster that others started: one replica for HTTP and one with the engine. If that dies, Ray Serve starts
another; requests that it had get 503, later ones wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite.errors import EngineClosed, ServeError

APPLICATION = "alpa_lite"
_MARGIN = 64  # requests for /health and /metrics, and those that are being refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTarget:
    """What a server serves.

    Attributes:
        model: see ``al.serve.Model``.
        params: its parameters, as ``Engine`` takes them, or a function of no arguments that makes them where they are used.
        encode, decode: text to tokens and back; None: requests and answers are tokens.
    """

    model: Any
    params: Any
    encode: Callable[[str], Sequence[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How it is served.

    Attributes:
        host, port: where it listens; loopback unless told otherwise.
        buckets, slots, max_length, queue_limit, compile_cache: of the engine.
        token: that requests must bring; None = none.
        body_bytes, timeout_s: limits of a request.
        drain_s: how long requests may go on for when the server ends.
        cluster: "HOSTSxDEVICES:DEVICE"; "" = all devices of the replica's process.
        num_cpus, num_gpus: that the replica takes of the Ray cluster.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    buckets: tuple[int, ...] | None = None
    slots: int = 16
    max_length: int = 2048
    queue_limit: int | None = None
    compile_cache: str | None = None
    token: str | None = None
    body_bytes: int = 2**20
    timeout_s: float = 300.0
    drain_s: float = 30.0
    cluster: str = ""
    num_cpus: float = 1.0
    num_gpus: float = 0.0


class EngineReplica:
    """An engine in a process of its own, as Ray Serve runs it. Errors for clients are values, so that they keep their kind."""

    def __init__(self, make: Callable[[], ServeTarget], settings: ServerSettings) -> None:
        set_devices(settings.cluster)  # before JAX is used
        from alpa_lite.serve.answers import Answers
        from alpa_lite.serve.engine import Engine

        self._drain_s = settings.drain_s
        target = make()
        params = target.params() if callable(target.params) else target.params
        self._engine = Engine(
            target.model,
            params,
            slots=settings.slots,
            max_length=settings.max_length,
            buckets=settings.buckets,
            queue_limit=settings.queue_limit,
            compile_cache=settings.compile_cache,
        )
        self._engine.warm_up()  # no request waits for a compiler
        self._answers = Answers(self._engine, encode=target.encode, decode=target.decode, timeout_s=settings.timeout_s)

    async def generate(self, body: Any) -> Any:
        return await _told(self._answers.generate(body))

    async def stream(self, body: Any) -> AsyncIterator[Any]:
        try:
            async for event in self._answers.stream(body):
                yield event
        except ServeError as error:
            yield error

    async def check(self) -> Any:
        return await _told(self._answers.check())

    async def metrics(self) -> Any:
        return await _told(self._answers.metrics())

    def check_health(self) -> None:
        """Ray Serve asks now and then; a replica whose engine has ended is replaced."""
        if self._engine.closed:
            raise EngineClosed("the engine has ended. A server needs one that runs. Another one is started.")

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close(drain_s=self._drain_s)


async def _told(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except ServeError as error:
        return error


class _RemoteAnswers:
    """``Answers`` of a replica that may be lost."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._streams = engine, engine.options(stream=True)

    async def generate(self, body: Any) -> Any:
        return await self._asked(self._engine.generate.remote(body))

    async def check(self) -> None:
        await self._asked(self._engine.check.remote())

    async def metrics(self) -> bytes:
        return await self._asked(self._engine.metrics.remote())

    async def stream(self, body: Any) -> AsyncIterator[Any]:
        with _lost_is_closed():
            events = self._streams.stream.remote(body)
            try:
                async for event in events:
                    yield _raised(event)
            finally:
                events.cancel()

    async def _asked(self, response: Any) -> Any:
        with _lost_is_closed():
            try:
                return _raised(await response)
            finally:
                response.cancel()  # where the client went away; else nothing is left to cancel


@contextlib.contextmanager
def _lost_is_closed() -> Iterator[None]:
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except (RayError, RayServeException) as error:
        raise EngineClosed(
            f"the engine was lost or takes no requests: {type(error).__name__}. Another one is started. Try again."
        ) from error


def _raised(value: Any) -> Any:
    if isinstance(value, ServeError):
        raise value
    return value


class HttpReplica:
    """HTTP in front of an engine's replica: it outlives the engine, and says so when that is lost."""

    def __init__(self, engine: Any, settings: ServerSettings) -> None:
        from alpa_lite.serve.http import HttpService

        self._service = HttpService(_RemoteAnswers(engine), token=settings.token, body_bytes=settings.body_bytes)

    async def __call__(self, request: Any) -> Any:
        return await self._service(request)


def set_devices(cluster: str) -> None:
    """Settings of JAX for "1x4:cpu", which must stand before it is used."""
    import jax

    from alpa_lite.cluster.cluster import Cluster

    if cluster and (asked := Cluster.parse(cluster)).device.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", asked.num_devices)


def start(make: Callable[[], ServeTarget], settings: ServerSettings) -> None:
    """Start a server on the Ray cluster that this process is connected to; returns when it takes requests.

    Args:
        make: makes the target, in the replica's process.

    Raises:
        ServeError: the port is taken, or the replica could not be made.
    """
    from ray import serve

    _check_free(settings.host, settings.port)
    serve.start(proxy_location="HeadOnly", http_options={"host": settings.host, "port": settings.port})
    limit = 4 * settings.slots if settings.queue_limit is None else settings.queue_limit
    most = settings.slots + limit + _MARGIN  # the engine itself says when it has too many
    deployed: Callable[[Any], Any] = serve.deployment
    engine = deployed(EngineReplica).options(
        name="engine",
        num_replicas=1,
        max_ongoing_requests=most,
        max_queued_requests=_MARGIN,  # while another engine is started
        graceful_shutdown_timeout_s=settings.drain_s + 5,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
    )
    front = deployed(HttpReplica).options(
        name="http", num_replicas=1, max_ongoing_requests=2 * most, ray_actor_options={"num_cpus": 0}
    )
    try:
        serve.run(front.bind(engine.bind(make, settings), settings), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        details = serve.status().applications[APPLICATION]
        said = "; ".join(d.message for d in details.deployments.values() if d.message) or details.message
        serve.shutdown()
        raise ServeError(
            f"the server could not be started: {said or error}. Correct the target or the settings."
        ) from error


def stop() -> None:
    """End the server: no more requests are taken, and those that it has may finish."""
    from ray import serve

    serve.shutdown()


def _check_free(host: str, port: int) -> None:
    import socket

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise ServeError(
                f"the server cannot listen on {host}:{port}: {error.strerror}. It must be an address of this machine and a port "
                "that is free. Give another --port."
            ) from error
