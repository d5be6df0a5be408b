"""Ray nodes as processes of this machine: started with a token and folders of their own, ended with all their children."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ray_session import free_port

ROOT = Path(__file__).parents[2]
LOOPBACK = frozenset({"0100007F", "0000000000000000FFFF00000100007F"})  # as listening_hosts has it
_STARTED = "Ray runtime started"
_START_S, _STOP_S, _GRACE_S = 90.0, 20.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """A cluster: where it is, and what a process needs in its environment to join it."""

    address: str
    env: Mapping[str, str]
    sessions: Sequence[int]


@contextlib.contextmanager
def ray_nodes(count: int, num_cpus: int) -> Iterator[Nodes]:
    """A head and ``count - 1`` more nodes; afterwards nothing of them runs.

    Ray stops with the session of the command that started it: ``ray stop`` would end other clusters of this machine too.
    """
    env = own_environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(
        prefix="ray-"
    ) as name:  # short: it holds sockets, whose paths may have 107 characters
        folder = Path(name)
        head = (
            "--head",
            f"--port={port}",
            "--include-dashboard=false",
            f"--ray-client-server-port={free_port()}",
            f"--temp-dir={folder}",
        )
        try:
            for k in range(count):
                place = (f"--address=127.0.0.1:{port}",) if k else head
                log = folder / f"{k}.log"
                started.append(_start([*place, f"--num-cpus={num_cpus}"], env, log))
                _wait(started[-1], log)
            yield Nodes(address=f"127.0.0.1:{port}", env=env, sessions=[p.pid for p in started])
        finally:
            for process in reversed(started):
                _stop(process)


def own_environment() -> dict[str, str]:
    """This process's environment, in which Ray's processes find the same sources and no cluster of somebody else."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return env | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def session_processes(session: int) -> list[int]:
    """Processes of a session that run, from /proc: Ray's children leave their process group, but not their session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, *ids = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(ids[2]) == session and state != "Z":
                found.append(int(folder.name))
    return found


def listening_hosts(pids: Iterable[int]) -> set[str]:
    """Where processes accept connections, as /proc/net writes addresses (hexadecimal)."""
    own = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                own.add(os.readlink(link))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def _start(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    fixed = ["--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1", f"--object-store-memory={80 * 2**20}"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *fixed]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=dict(env), stdout=out, stderr=out, start_new_session=True)


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while _STARTED not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"a Ray node did not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the node to end its processes; what is left of them after a while is ended by force."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    end = time.monotonic() + _STOP_S
    while left := session_processes(process.pid):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < end, f"processes {left} do not end"
        time.sleep(0.1)
    process.wait()
