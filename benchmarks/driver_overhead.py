"""What the driver of a pipeline costs per instruction, and how near the measured bubble is to the simulated one.

The first is the processor time of the driver's own thread, for stages with next to nothing to compute; an instruction is a RUN,
SEND, RECV, ZEROS or FREE of the lists. The second runs stages whose time is a fixed delay that needs no core.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import alpa_lite as al
from benchmarks.delays import delayed_step, simulated
from benchmarks.report import Row, finish
from examples.example import use_virtual_devices

DELAY_S = 0.03
NUM_ROUNDS = 20


def overhead(num_stages: int, devices_per_stage: int) -> Row:
    step, args = delayed_step(num_stages, 0.0, 0.0, 0.0)
    options = al.PlanOptions(num_stages=num_stages, num_microbatches=8, mesh_shape=(devices_per_stage,))
    cluster = al.Cluster.parse(f"1x{num_stages * devices_per_stage}:cpu")
    parallel = al.parallelize(step, cluster=cluster, options=options)
    lists = parallel.compile(*args).instructions.meshes
    count = sum(len(each.instructions) for each in lists)
    state = jax.block_until_ready(parallel(*args))[0]
    used = []
    for _ in range(NUM_ROUNDS):
        start = time.thread_time()
        made = parallel(state, args[1])
        used.append(time.thread_time() - start)
        jax.block_until_ready(made)
    return Row(
        benchmark="driver_overhead",
        case=f"{num_stages} stages x {devices_per_stage} devices, {count} instructions",
        value=statistics.median(used) / count * 1e6,
        unit="us per instruction",
        target="<= 150 us",
    )


def bubble(schedule: str) -> Row:
    step, args = delayed_step(4, DELAY_S, DELAY_S, DELAY_S)
    options = al.PlanOptions(num_stages=4, num_microbatches=8, mesh_shape=(1,), schedule=schedule)
    compiled = al.parallelize(step, cluster=al.Cluster.parse("1x4:cpu"), options=options).compile(*args)
    expected = simulated(compiled, DELAY_S, DELAY_S, DELAY_S).bubble_share
    measured = compiled.measure(*args).bubble_share
    return Row(
        benchmark="driver_overhead",
        case=f"bubble of {schedule}, 4 stages x 1 device",
        value=100 * measured,
        unit="%",
        against=f"simulated: {100 * expected:.1f} %",
        ratio=measured / expected,
        target="0.9 to 1.1",
    )


def main() -> None:
    use_virtual_devices(8)
    finish([overhead(2, 1), overhead(4, 1), overhead(4, 2), bubble("1f1b"), bubble("zb-h1")], sys.argv[1:])


if __name__ == "__main__":
    main()
