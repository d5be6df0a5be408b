"""A Ray cluster on this machine for the time of a benchmark, and steps that run on it."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import alpa_lite as al
from examples import gpt_linen

# A step is longer than 100 ms on two cores.
gpt_linen.CONFIGS["wide"] = gpt_linen.Config(num_layers=4, width=256, num_heads=8, seq_len=64, batch_size=16)


@contextlib.contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """Starts one with room for so many virtual devices, and ends it. Its token is its own, in no file."""
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)  # read when Ray is imported
    os.environ.pop("RAY_ADDRESS", None)
    import ray

    from alpa_lite.executor.ray.cluster import connect

    connect(None, num_cpus)
    try:
        yield
    finally:
        ray.shutdown()


def free_port(ports: range = range(20_000, 32_000)) -> int:
    """One where nobody listens, by default below those that systems choose from, as Ray makes many use of these."""
    for port in random.sample(ports, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port was found in {ports}")


def step_of(fn: Any, num_stages: int, num_microbatches: int, executor: Any) -> Any:
    """A pipelined step with a CPU device per stage, and for Ray a worker as well."""
    options = al.PlanOptions(num_stages=num_stages, num_microbatches=num_microbatches)
    cluster = al.Cluster.parse(f"1x{num_stages}:cpu")
    return al.parallelize(fn, cluster=cluster, options=options, executor=executor, donate_argnums=0)


def workers(step: Any) -> list[int]:
    """Process ids of a step's workers."""
    (remote,) = step._remotes
    return [pid for _, pid in remote.group.places]


def pids_below(title: str) -> list[int]:
    """Processes that this one started, or those started, whose title begins so."""
    parents, named = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(title.encode()):
                named.append(int(folder.name))

    def above(pid: int) -> Iterator[int]:
        while pid := parents.get(pid, 0):
            yield pid

    return sorted(pid for pid in named if os.getpid() in above(pid))


def held(pids: Sequence[int]) -> list[float]:
    """Resident MiB of every process, then open files of every process."""
    page = os.sysconf("SC_PAGE_SIZE")
    rss = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page / 2**20 for pid in pids]
    return [*rss, *(float(len(os.listdir(f"/proc/{pid}/fd"))) for pid in pids)]
