"""An engine behind Ray Serve.

In: a function that makes a ``ServeTarget``, called in the engine's process, and ``ServerSettings``. Out: an HTTP server on this
machine, or on a cluster that others started: a replica of Ray Serve for HTTP, and an actor with the engine, which the replica
starts and calls. If the actor dies, Ray starts it again; until then requests get 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpa_lite.api.shared_layout import SharedLayout
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, EngineClosed, ServeError
from alpa_lite.executor.ray.settings import RayExecutor
from alpa_lite.serve.remote_answers import RemoteAnswers
from alpa_lite.serve.rpc import EngineServer, Listening
from alpa_lite.serve.settings import ServerSettings, ServeTarget, bracketed
from alpa_lite.serve.stored import StoredParams, shapes_of

if TYPE_CHECKING:
    from alpa_lite.serve.answers import Answers
    from alpa_lite.serve.engine import Engine

APPLICATION = "alpa_lite"
_MARGIN_S = 5.0  # for answers to come from the engine's process when it has ended
_SENT_S = 0.5  # for answers to come through Ray Serve's proxy
_LOOK_S = 1.0  # between two looks at whether Ray is still there
_PROXY_S = 120.0  # for that proxy to start
_PROXY_STARTS = 2
_SOON_S = 0.05  # between two looks at it


class EngineActor:
    """An engine in a process of its own, which the replica asks by gRPC (``rpc``), where ``listen`` says."""

    def __init__(self, make: Callable[[], ServeTarget], settings: ServerSettings) -> None:
        self._drain_s = settings.drain_s
        self._engine: Engine | None = None
        self._failure = ""
        self._listening: asyncio.Task[Listening] | None = None  # several may ask while it starts
        try:
            self._load(make, settings)
        except AlpaLiteError as error:
            self._failure = str(error)
        except Exception as error:  # of the user's functions, JAX or the devices: whatever they raise
            trace = "".join(traceback.format_exception(error))
            self._failure = f"the engine could not be made. Correct its cause:\n{trace}"
        if self._failure:
            sys.stderr.write(f"{self._failure}\n")  # Ray keeps it in the actor's log

    def _load(self, make: Callable[[], ServeTarget], settings: ServerSettings) -> None:
        layout = None if settings.layout is None else SharedLayout.load(settings.layout)
        cluster = settings.planned_for(layout)
        hosted = cluster is not None and cluster.num_hosts > 1
        set_devices(None if hosted else cluster)  # before JAX is used
        from alpa_lite.serve.answers import Answers
        from alpa_lite.serve.engine import Engine

        target = make()
        params = target.params
        if settings.checkpoint is not None:
            params = StoredParams(settings.checkpoint, shapes_of(params), path=settings.checkpoint_path)
        self._engine = Engine(
            target.model,
            params,
            layout,
            # By name it gets the room of an engine that died.
            executor=RayExecutor(name=APPLICATION) if hosted else "local",
            cluster=cluster if hosted else None,
            num_stages=settings.num_stages,
            slots=settings.slots,
            max_length=settings.max_length,
            buckets=settings.buckets,
            queue_limit=settings.queue_limit,
            compile_cache=settings.compile_cache,
        )
        self._engine.warm_up()  # no request waits for a compiler
        self._answers = Answers(self._engine, encode=target.encode, decode=target.decode, timeout_s=settings.timeout_s)

    async def listen(self, node: str) -> Listening:
        """Where it is asked, by a process on this node as Ray names it; on loopback where that is the engine's own."""
        if self._listening is None or (self._listening.done() and self._listening.exception()):
            self._listening = asyncio.create_task(self._listen(node))
        return await asyncio.shield(self._listening)

    async def _listen(self, node: str) -> Listening:
        import ray

        own = node == ray.get_runtime_context().get_node_id()
        host = "127.0.0.1" if own else ray.util.get_node_ip_address()
        self._server = EngineServer(self._made)
        return Listening(self._failure, *await self._server.start(bracketed(host)))

    async def close(self) -> None:
        """Lets requests that run finish."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close, drain_s=self._drain_s)

    def _made(self) -> Answers:
        if self._failure:
            raise EngineClosed("the engine could not be started again. Its log says why. Ask whoever runs the server.")
        return self._answers


class HttpReplica:
    """HTTP in front of an engine, as Ray Serve runs it. It starts the engine, outlives it, and says so when that is lost."""

    def __init__(self, make: Callable[[], ServeTarget], settings: ServerSettings) -> None:
        import ray

        from alpa_lite.serve.http import HttpService

        remote: Callable[[Any], Any] = ray.remote
        engine = remote(EngineActor).options(
            max_restarts=-1,
            num_cpus=settings.num_cpus,
            num_gpus=settings.num_gpus,
        )
        self._engine = engine.remote(make, settings)
        self._drain_s = settings.drain_s
        node = ray.get_runtime_context().get_node_id()
        listening = ray.get(self._engine.listen.remote(node))  # when it is there
        self._failure = listening.failure
        self._answers = RemoteAnswers(self._engine, node, listening)
        self._service = HttpService(
            self._answers,
            token=settings.token,
            body_bytes=settings.body_bytes,
            body_timeout_s=settings.body_timeout_s,
        )

    async def __call__(self, request: Any) -> Any:
        return await self._service(request)

    def failure(self) -> str:
        """Of the engine's first start; "" if it has an engine."""
        return self._failure

    async def end(self) -> None:
        """Returns when the requests that run have their answers, or can have none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s + _MARGIN_S):
                await self._answers.end()

    async def check_health(self) -> None:
        """Ray Serve asks now and then. An engine that ended by itself is started again here; this replica is replaced, and the
        engine with it, where Ray cannot do that."""
        import ray

        if self._answers.ending:
            return
        try:
            await self._answers.check()
        except EngineClosed as error:
            if self._answers.ending:  # it drains
                return
            if error.__cause__ is None:
                ray.kill(self._engine, no_restart=False)
            elif isinstance(error.__cause__, ray.exceptions.ActorDiedError):
                raise

    def __del__(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._engine.close.remote())
        ray.kill(self._engine)


def set_devices(cluster: Cluster | None) -> None:
    """Settings of JAX for virtual devices, which must stand before it is used."""
    import jax

    if cluster is not None and cluster.device.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cluster.num_devices)


def start(
    make: Callable[[], ServeTarget], settings: ServerSettings, *, started: Callable[[], object] = lambda: None
) -> None:
    """Start a server on the Ray cluster that this process is connected to; returns when it takes requests.

    Args:
        make: makes the target, in the engine's process.
        started: called at the very end. Whoever interrupts before that leaves no server; after it there is one to ``stop``.

    Raises:
        ServeError: the port is taken, the cluster serves already or has too little, or the engine could not be made.
    """
    from ray import serve

    check_free(settings)
    _check_cluster(settings)
    _start_proxy(settings)
    deployed: Callable[[Any], Any] = serve.deployment
    front = deployed(HttpReplica).options(
        num_replicas=1,
        max_ongoing_requests=settings.most_requests,
        graceful_shutdown_timeout_s=settings.drain_s + _MARGIN_S,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": 0},
    )
    try:
        handle: Any = serve.run(front.bind(make, settings), name=APPLICATION, route_prefix="/")
        failure = handle.failure.remote().result()
        if not failure:
            started()
    except RuntimeError as error:
        details = serve.status().applications[APPLICATION]
        said = "; ".join(d.message for d in details.deployments.values() if d.message) or details.message
        serve.shutdown()
        raise ServeError(
            f"the server could not be started: {said or error}. Correct the target or the settings."
        ) from error
    except BaseException:  # whoever waits for it was interrupted
        serve.shutdown()
        raise
    if failure:
        serve.shutdown()
        raise ServeError(f"the server could not be started: {failure}")


def stop(drain_s: float = 30.0) -> None:
    """End the server: no more requests are taken, and those that it has may finish.

    Args:
        drain_s: of its settings.

    Raises:
        ServeError: Ray has ended before, as where a signal went to its processes too, and requests with it. Ray's client in this
            process waits for a minute then, so that this process should end without it.
    """
    from alpa_lite.executor.ray.cluster import is_gone

    failed: list[BaseException] = []

    def end() -> None:
        try:
            _end(drain_s)
        except BaseException as error:
            failed.append(error)

    ending = threading.Thread(target=end, daemon=True)  # it may wait for good for what is gone
    ending.start()
    while ending.is_alive():
        ending.join(_LOOK_S)
        if ending.is_alive() and is_gone():
            raise ServeError(
                "Ray has ended before the server, and requests that ran are lost. Only the server's own process may get a signal "
                "that ends it. Send it to that process alone (with systemd, KillMode=mixed)."
            )
    if failed:
        raise failed[0]


def _end(drain_s: float) -> None:
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    # Ray Serve's own end kills its proxy first, and with it the answers that pass through it.
    with contextlib.suppress(ray.exceptions.RayError, RayServeException, TimeoutError):  # there may be no replica left
        serve.get_app_handle(APPLICATION).end.remote().result(timeout_s=drain_s + 2 * _MARGIN_S)
        time.sleep(_SENT_S)
    serve.shutdown()


def _start_proxy(settings: ServerSettings) -> None:
    """Starts Ray Serve, and once more where its proxy does not come: a process of Ray may hang while it starts."""
    import ray
    from ray import serve

    warnings = ""
    for _ in range(_PROXY_STARTS):
        try:
            if _proxy_comes(settings):
                return
            warnings = _last_warnings()
        except BaseException:  # whoever waits for it was interrupted
            serve.shutdown()
            raise
        serve.shutdown()
        check_free(settings)
    context = ray.get_runtime_context()
    raise ServeError(
        f"Ray Serve's HTTP proxy did not start on {settings.address} within {_PROXY_S:.0f} s, {_PROXY_STARTS} times"
        f"{warnings}. It needs a machine that is not too busy. See Ray's logs, of session {context.get_session_name()} in "
        f"{context.get_temp_dir()}, and try again."
    )


def _proxy_comes(settings: ServerSettings) -> bool:
    """Starts Ray Serve. It gives up a proxy that is not there after 15 s, and starts another with more time, as often as it
    takes; ``serve.start`` waits for the first one alone, and returns too where that answers as it is given up."""
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.schema import ProxyStatus

    end_s = time.monotonic() + _PROXY_S
    with contextlib.suppress(RayActorError, TimeoutError):
        serve.start(proxy_location="HeadOnly", http_options={"host": settings.host, "port": settings.port})
    while ProxyStatus.HEALTHY not in serve.status().proxies.values():
        if time.monotonic() > end_s:
            return False
        time.sleep(_SOON_S)
    return True


def _last_warnings() -> str:
    """Those of Ray Serve's controller, where it runs on this machine."""
    import ray

    context = ray.get_runtime_context()
    folder = Path(context.get_temp_dir(), context.get_session_name(), "logs", "serve")
    logs = sorted(folder.glob("controller_*.log"), key=os.path.getmtime)
    lines = logs[-1].read_text().splitlines() if logs else []
    told = [line.partition(" -- ")[2] for line in lines if line.startswith(("WARNING", "ERROR"))]
    return "".join(f"; {line.rstrip('.')}" for line in dict.fromkeys(told[-3:]))


def _check_cluster(settings: ServerSettings) -> None:
    """Ray Serve is one per cluster: a second server would take the first one's place. It waits for good for what is not there."""
    import ray
    from ray import serve

    if running := serve.status().applications:
        raise ServeError(
            f"Ray Serve runs on this Ray cluster already, with {', '.join(map(repr, running))}. A cluster has one server. End "
            "that one, or start this one on another Ray cluster (--address)."
        )
    has = ray.cluster_resources()
    for name, wanted, option in (
        ("CPU", settings.num_cpus, "num_cpus"),
        ("GPU", settings.num_gpus, "num_gpus; --gpus at the command line"),
    ):
        if wanted > has.get(name, 0.0):
            raise ServeError(
                f"the engine was to take {wanted:g} {name}s, and this Ray cluster has {has.get(name, 0.0):g}. Ask for fewer "
                f"({option}), or give it a node that has them."
            )


def check_free(settings: ServerSettings) -> None:
    """Raises ``ServeError`` if nobody can listen there."""
    import socket

    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((settings.host, settings.port))
        except OSError as error:
            raise ServeError(
                f"the server cannot listen on {settings.address}: {error.strerror}. It must be an address of this machine and a "
                "port that is free. Give another --port, or another --host."
            ) from error
