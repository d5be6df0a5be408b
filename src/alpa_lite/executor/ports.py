"""Ports for servers of JAX that start later, in this process or in one that it starts."""

from __future__ import annotations

import socket


def kept_port(host: str) -> socket.socket:
    """A socket that keeps a port, ``getsockname()[1]``, from everybody else while it is open.

    JAX's coordinator and its transfer server share ports with sockets of the same user that have SO_REUSEPORT, as this one: they
    can listen there. It does not listen itself, so that all connections are theirs.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind((host, 0))
    return kept
