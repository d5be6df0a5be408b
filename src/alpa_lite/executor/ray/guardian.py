"""Ends what a local Ray cluster has left when its driver is gone: ``python guardian.py MARK``, started by ``cluster.connect``.

A driver that is killed takes Ray's head processes with it, but not their agents (Ray 2.60). This process waits for the end of its
stdin, a pipe that only the driver holds open, and then kills every process that has MARK in its environment. It imports nothing
of this package, so that it is small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_GRACE_S = 2.0  # in which Ray ends by itself
_ROUNDS = 5


def marked(mark: bytes) -> list[int]:
    """Ids of processes that have ``mark`` in their environment, this one not."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read():
                    found.append(int(name))
    return found


def main(mark: str) -> None:
    while os.read(0, 1):
        pass
    for _ in range(_ROUNDS):
        time.sleep(_GRACE_S)
        left = marked(mark.encode())
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
