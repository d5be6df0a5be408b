"""A Ray cluster on this machine for the time of a benchmark, and steps that run on it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
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


def step_of(fn: Any, num_stages: int, num_microbatches: int, executor: Any) -> Any:
    """A pipelined step with a CPU device per stage, and for Ray a worker as well."""
    options = al.PlanOptions(num_stages=num_stages, num_microbatches=num_microbatches)
    cluster = al.Cluster.parse(f"1x{num_stages}:cpu")
    return al.parallelize(fn, cluster=cluster, options=options, executor=executor, donate_argnums=0)


def workers(step: Any) -> list[int]:
    """Process ids of a step's workers."""
    (remote,) = step._remotes
    return [pid for _, pid in remote.group.places]
