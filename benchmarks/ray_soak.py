"""5,000 steps on 4 workers, a checkpoint every 100: what driver and workers hold of memory, open files and the object store.

Sampled every 100 steps; the slopes are least squares over what follows the warm-up. ``--steps N`` takes another number.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

import alpa_lite as al
from benchmarks.ray_session import held, local_ray, step_of, workers
from benchmarks.report import Row, finish
from examples import gpt_linen
from examples.example import use_virtual_devices

EVERY, WARM_UP = 100, 3000


def sample(pids: list[int]) -> list[float]:
    """Resident MiB of every process, their open files, and MiB used in the object store."""
    import ray

    name = "object_store_memory"
    used = (ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0)) / 2**20
    return [*held(pids), used]


def soak(num_steps: int) -> list[Row]:
    example = gpt_linen.make("small")
    seen: list[list[float]] = []

    def on_step(report: Any) -> None:
        done = report.position + 1
        if done % EVERY == 0:
            seen.append([done, *sample([os.getpid(), *workers(step)])])
            print(*(f"{x:.0f}" for x in seen[-1]), flush=True)

    step = step_of(example.train_step, 4, 4, "ray")
    with tempfile.TemporaryDirectory() as folder, step:
        al.fit(
            step,
            init=lambda: example.init(jax.random.key(0)),
            data=example.batch,
            num_steps=num_steps,
            checkpoint=al.Checkpoint(folder, every=EVERY, keep=2),
            on_step=on_step,
        )
    table = np.asarray(seen)
    table = table[table[:, 0] >= min(WARM_UP, num_steps // 2)]
    who = ["driver", *(f"worker {k}" for k in range(4))]
    cases = [f"{w}, {what}" for what in ("memory", "open files") for w in who] + ["object store"]
    units = ["MiB"] * 5 + ["files"] * 5 + ["MiB"]
    return [
        Row(
            benchmark="ray_soak",
            case=case,
            value=float(np.polyfit(table[:, 0] / 1000, column, 1)[0]),
            unit=f"{unit} per 1,000 steps",
            against=f"{column[0]:.0f} at step {table[0, 0]:.0f}, {column[-1]:.0f} at {table[-1, 0]:.0f}",
            target="no growth",
        )
        for case, unit, column in zip(cases, units, table[:, 1:].T, strict=True)
    ]


def main() -> None:
    use_virtual_devices(4)
    num_steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 5000
    with local_ray(4):
        finish(soak(num_steps), sys.argv[1:])


if __name__ == "__main__":
    main()
