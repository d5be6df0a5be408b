"""From ``kill -9`` of a worker to the end of the next step that is completed, in ``al.fit`` with checkpoints.

The first start fills the compile cache; every later one finds it warm.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import alpa_lite as al
from alpa_lite.executor.ray.settings import RayExecutor
from benchmarks.ray_session import local_ray, step_of, workers
from benchmarks.report import Row, finish
from examples import gpt_linen
from examples.example import use_virtual_devices

NUM_STEPS, KILLED_AFTER = 32, (7, 13, 19, 25)


def recovery(size: str, num_stages: int) -> Row:
    example = gpt_linen.make(size)
    killed_at = 0.0
    gone_s: list[float] = []

    def on_step(report: Any) -> None:
        nonlocal killed_at
        if killed_at:
            gone_s.append(time.perf_counter() - killed_at)
            killed_at = 0.0
        if report.position in KILLED_AFTER and report.restarts == KILLED_AFTER.index(report.position):
            killed_at = time.perf_counter()
            os.kill(workers(step)[-1], signal.SIGKILL)

    with tempfile.TemporaryDirectory() as folder:
        step = step_of(example.train_step, num_stages, 4, RayExecutor(compile_cache=f"{folder}/compiled"))
        with step:
            al.fit(
                step,
                init=lambda: example.init(jax.random.key(0)),
                data=example.batch,
                num_steps=NUM_STEPS,
                checkpoint=al.Checkpoint(f"{folder}/kept", every=5),
                on_step=on_step,
            )
    return Row(
        benchmark="ray_recovery",
        case=f"GPT {size}, {num_stages} workers, {len(gone_s)} losses",
        value=statistics.median(gone_s),
        unit="s",
        against=f"longest: {max(gone_s):.1f} s",
        target="<= 15 s",
    )


def main() -> None:
    use_virtual_devices(4)
    with local_ray(4):
        finish([recovery("small", 2), recovery("small", 4)], sys.argv[1:])


if __name__ == "__main__":
    main()
