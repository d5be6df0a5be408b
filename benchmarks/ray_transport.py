"""A tensor from one worker to another, beside what two bare processes get from JAX's transfer server.

Two processes have a worker's transport and a bare transfer server each. The taker asks the giver to post, pulls, and waits until
the array is on its device; all ways in turn.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from alpa_lite._jax_compat import start_transfer_server
from alpa_lite.executor.calls import Call
from alpa_lite.executor.local import local_mesh
from alpa_lite.executor.parcel import StageMesh
from alpa_lite.executor.transport import PullTransport
from alpa_lite.executor.worker import _RemoteCrossing
from alpa_lite.lowering.transfer import Functions
from benchmarks.report import Row, finish
from examples.example import use_virtual_devices

SIZES_MIB = (1, 16, 64)
NUM_ROUNDS, NUM_WARMUP = 30, 5
WAYS = ("bare", "worker", "worker, copied")  # copied: as where a later program takes over the buffer


class Bare:
    """A transfer server and no more."""

    def __init__(self) -> None:
        self.server = start_transfer_server("127.0.0.1:0", ["127.0.0.1:0"])
        self.address = self.server.address()

    def connect(self, address: str) -> None:
        self.link = self.server.connect(address)


def crossing(site: int, shape: tuple[int, ...], transport: PullTransport, *, copied: bool) -> tuple[Any, Any]:
    """What a worker has for a send from stage 0, a device of process 0, to stage 1, one of process 1."""
    stages = [StageMesh(shape=(1,), axis_names=("x",), first_device=k) for k in (0, 1)]
    call = Call(
        kind="send",
        stage=1,
        reads=("v0",),
        writes=("v1",),
        spec="[_,_]",
        value=json.dumps(["float32", shape, "[_,_]", 0]),
    )
    worker: Any = SimpleNamespace(
        parcel=SimpleNamespace(stages=stages, sites=[None, None]),
        process_of={0: 0, 1: 1},
        site=SimpleNamespace(number=site),
        functions=Functions(),
        meshes={site: local_mesh(stages[site].logical)},
        given_away={"v0"} if copied else set(),
        transport=transport,
        all_calls=[call],
        steps=0,
    )
    return worker, _RemoteCrossing(worker, 0, call)


def giver(pipe: Any) -> None:
    """Posts what it is asked for."""
    use_virtual_devices(1)
    transport, bare = PullTransport("127.0.0.1"), Bare()
    pipe.send((transport.address, bare.address))
    transport.connect([transport.address, pipe.recv()])
    made: dict[int, Any] = {}
    while (order := pipe.recv()) is not None:
        rows, way, key = order
        if rows not in made:
            array = jax.block_until_ready(jnp.ones((rows, 1024)))
            made[rows] = array, {c: crossing(0, array.shape, transport, copied=c) for c in (False, True)}
        array, workers = made[rows]
        if way == "bare":
            bare.server.await_pull(key, [array])
            continue
        worker, half = workers[way != "worker"]
        worker.steps = key
        half.send(array)


def take(pipe: Any, transport: PullTransport, bare: Bare, keys: Iterator[int], mib: int) -> dict[str, float]:
    """Seconds of every way."""
    rows = mib * 256
    types = [jax.ShapeDtypeStruct((rows, 1024), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))]
    worker, half = crossing(1, (rows, 1024), transport, copied=False)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(NUM_ROUNDS + NUM_WARMUP):
        for way in WAYS:
            key = next(keys)
            start = time.perf_counter()
            pipe.send((rows, way, key))
            if way == "bare":
                (made,) = bare.link.pull(key, types)
            else:
                worker.steps = key
                made = half.expect().array()
            jax.block_until_ready(made)
            if index >= NUM_WARMUP:
                times[way].append(time.perf_counter() - start)
            assert made.shape == (rows, 1024)
            del made
    return {way: statistics.median(found) for way, found in times.items()}


def main() -> None:
    use_virtual_devices(1)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=giver, args=(other,), daemon=True)
    process.start()
    transport, bare = PullTransport("127.0.0.1"), Bare()
    theirs = pipe.recv()
    pipe.send(transport.address)
    transport.connect([theirs[0], transport.address])
    bare.connect(theirs[1])
    rows: list[Row] = []
    keys = itertools.count(1)
    for mib in SIZES_MIB:
        times = take(pipe, transport, bare, keys, mib)
        for way in WAYS[1:]:
            row = Row(
                benchmark="ray_transport",
                case=f"{mib} MiB, {way}",
                value=mib / times[way],
                unit="MiB/s",
                against=f"bare: {mib / times['bare']:.0f} MiB/s",
                ratio=times["bare"] / times[way],
                target=">= 0.80x" if way == "worker" else "",
            )
            rows.append(row)
    pipe.send(None)
    process.join()
    finish(rows, sys.argv[1:])


if __name__ == "__main__":
    main()
