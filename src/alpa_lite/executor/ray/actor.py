"""The actor that holds one worker. Importing this imports no JAX: ``setup`` sets the platform first.

Calls run one after the other; ``ping`` has a thread of its own, so that a worker that is busy can be told from one that hangs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from alpa_lite.executor.ports import kept_port

_OPTIONS: dict[str, Any] = {"concurrency_groups": {"watch": 1}, "max_restarts": 0, "max_task_retries": 0}


@dataclass(frozen=True, slots=True)
class Later:
    """Another actor's answer as an argument. By itself it would hold up all that this one is asked after it, pings as well: Ray
    sends an actor's calls in their order, each when its arguments are there."""

    answer: Any


@ray.remote(**_OPTIONS)
class WorkerActor:
    """One process: see ``executor.worker.Worker`` for what the calls mean."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.writers: dict[int, Any] = {}
        self.ports: list[socket.socket] = []
        self.doing = "starting"

    def where(self) -> tuple[str, int]:
        """(address of this host, process id)."""
        return ray.util.get_node_ip_address(), os.getpid()

    def free_port(self, host: str) -> int:
        """A port that nobody else gets while this process lives, for servers of JAX in it."""
        kept = kept_port(host)
        self.ports.append(kept)
        return int(kept.getsockname()[1])

    def setup(self, platform: str, num_devices: int, wide: bool, cache: str, world: Mapping[str, Any] | None) -> None:
        """Configure JAX before its backends start; ``world``: arguments of ``jax.distributed.initialize``."""
        self.doing = "importing JAX"
        import jax

        jax.config.update("jax_platforms", platform)
        if platform == "cpu":
            jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_enable_x64", wide)
        jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM (JAX 0.10.2)
        if cache:
            from alpa_lite.executor.compiled import keep_compiled

            keep_compiled(os.path.expanduser(cache))
        if world is not None:
            self.doing = "joining other processes"
            world = dict(world)
            if socket_address := world.pop("socket_address", None):  # CPUs have no links of their own between processes
                jax.config.update("jax_cross_host_transfer_socket_address", socket_address)
            jax.distributed.initialize(**world)
        self.doing = "set up"

    def load(self, parcel: bytes, site: int, host: str, one_world: bool) -> str:
        """Read the parcel and compile its programs; returns the address of the transport."""
        from alpa_lite.executor.parcel import read_parcel
        from alpa_lite.executor.transport import PullTransport
        from alpa_lite.executor.worker import Worker

        self.doing = "compiling"
        transport = PullTransport(host)
        self.worker = Worker(read_parcel(parcel), site, transport, one_world=one_world)
        return transport.address

    def begin(self, make: Callable[..., Any], *args: Any) -> None:
        """Make a worker of another kind: what ``make(*args)`` returns has methods to call and ``progress()``."""
        self.doing = "loading"
        self.worker = make(*args)

    def connect(self, addresses: Sequence[str]) -> None:
        self.worker.transport.connect(addresses)

    def call(self, method: str, *args: Any) -> Any:
        """A method of the worker."""
        return getattr(self.worker, method)(*(ray.get(x.answer) if isinstance(x, Later) else x for x in args))

    @ray.method(concurrency_group="watch")
    def ping(self) -> Any:
        """How far the worker has come."""
        if self.worker is None:
            return (0, 0, self.doing)
        progress = self.worker.progress()
        return (progress.steps, progress.calls, progress.doing)
