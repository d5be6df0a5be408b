"""How long the driver is busy with a transfer between submeshes, beside ``jax.device_put``.

Only the call counts, on the driver's own processor time: the array exists already and nothing is waited for. That is kind
to ``device_put``, which for unequal tilings waits for whatever makes the array.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.lowering.transfer import Transfers
from benchmarks.report import Row, finish
from examples.example import use_virtual_devices

NUM_ROUNDS = 200
CASES = (  # (spec, devices) from and to, "gather" where each byte is to be sent once
    ("[x,_]", 2, "[x,_]", 2, ""),
    ("[x,_]", 4, "[x,_]", 4, ""),
    ("[_,_]", 4, "[_,_]", 4, ""),
    ("[x,_]", 2, "[x,_]", 4, ""),
    ("[x,_]", 4, "[x,_]", 2, ""),
    ("[_,_]", 4, "[x,_]", 4, ""),
    ("[x,_]", 4, "[_,_]", 4, "gather"),
    ("[x,_]", 4, "[_,_]", 4, ""),
    ("[x,_]", 4, "[_,x]", 4, ""),
)


def sharding(spec, first, size):
    mesh = Mesh(np.array(jax.devices()[first : first + size]), ("x",))
    return NamedSharding(mesh, partition_spec(ShardingSpec.parse(spec)))


def driver_time_s(move, array, to):
    """Median over fresh arrays; each transfer ends before the next begins."""
    again = jax.jit(lambda x: x + 1, out_shardings=array.sharding)
    times = []
    for _ in range(NUM_ROUNDS + 10):
        given = jax.block_until_ready(again(array))
        start = time.thread_time()
        moved = move(given, to)
        times.append(time.thread_time() - start)
        jax.block_until_ready(moved)
    return statistics.median(times[10:])


def main() -> None:
    use_virtual_devices(8)
    rows = []
    for before, one, after, other, how in CASES:
        array = jax.device_put(np.ones((64, 64), np.float32), sharding(before, 0, one))
        to = sharding(after, 4, other)
        transfers = Transfers(gather_bytes=0 if how else 1 << 62)
        ours, theirs = (driver_time_s(move, array, to) * 1e6 for move in (transfers.move, jax.device_put))
        (made,) = transfers.made.values()
        equal = len(made.waves) == 1 and made.gather is None and all(cut.function is None for cut in made.cuts)
        row = Row(
            benchmark="transfer_time",
            case=f"{before} on {one} -> {after} on {other}{', gathered' * bool(how)}, driver",
            value=ours,
            unit="us",
            against=f"device_put: {theirs:.0f} us",
            ratio=ours / theirs,
            target="<= 150 us" if equal else "",
        )
        rows.append(row)
    finish(rows, sys.argv[1:])


if __name__ == "__main__":
    main()
