"""Moves pieces of arrays between processes that know nothing of each other's devices.

A piece is posted under a key by the process that has it, and pulled by the one that wants it, in any order and before or after it
exists; nothing waits. ``PullTransport`` is JAX's transfer server: it needs no common ``jax.distributed`` job, so that a process
that dies takes nobody with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from alpa_lite._jax_compat import start_transfer_server


class Transport(Protocol):
    """Between processes, by their numbers. ``post`` and ``pull`` return at once."""

    address: str

    def connect(self, addresses: Sequence[str]) -> None:
        """Learn the addresses of all processes, by number."""

    def post(self, key: int, arrays: Sequence[Any]) -> None:
        """Offer arrays of single devices, once."""

    def pull(self, process: int, key: int, types: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        """What a process offers under a key, on the devices that the types name."""


class PullTransport:
    """JAX's transfer server, with one connection per process that something was pulled from.

    Args:
        host: the address of this host that others reach it at; "127.0.0.1" where all are on one.
    """

    def __init__(self, host: str) -> None:
        self.server = start_transfer_server(f"{host}:0", [f"{host}:0"])
        self.address = self.server.address()
        self.addresses: Sequence[str] = ()
        self.connections: dict[int, Any] = {}

    def connect(self, addresses: Sequence[str]) -> None:
        self.addresses = addresses

    def post(self, key: int, arrays: Sequence[Any]) -> None:
        self.server.await_pull(key, list(arrays))

    def pull(self, process: int, key: int, types: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        connection = self.connections.get(process)
        if connection is None:
            connection = self.connections[process] = self.server.connect(self.addresses[process])
        return connection.pull(key, list(types))
