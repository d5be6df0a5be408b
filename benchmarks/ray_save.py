"""What checkpoints that are written while steps go on add to a step: ``al.fit`` with a save every 20 steps, and without.

Runs with and without take turns, on the same workers; a run's time is from the end of step 20 to that of step 60.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import alpa_lite as al
from benchmarks.ray_session import local_ray, step_of
from benchmarks.report import Row, finish
from examples import gpt_linen
from examples.example import use_virtual_devices

EVERY, NUM_STEPS, NUM_ROUNDS = 20, 60, 11


def saving(size: str, executor: str, num_rounds: int) -> Row:
    example = gpt_linen.make(size)
    batch = example.batch(0)
    step = step_of(example.train_step, 2, 4, executor)

    def run(checkpoint: al.Checkpoint | None) -> float:
        """Seconds per step."""
        ends: list[float] = []
        al.fit(
            step,
            init=lambda: example.init(jax.random.key(0)),
            data=lambda _: batch,
            num_steps=NUM_STEPS + 1,  # what follows the last step of a run is not timed
            checkpoint=checkpoint,
            on_step=lambda _: ends.append(time.perf_counter()),
        )
        return (ends[NUM_STEPS] - ends[EVERY]) / (NUM_STEPS - EVERY)

    with_s, without_s = [], []
    with step:
        run(None)
        for _ in range(num_rounds):
            without_s.append(run(None))
            with tempfile.TemporaryDirectory() as folder:
                with_s.append(run(al.Checkpoint(folder, every=EVERY, keep=2)))
    ratio = statistics.median(a / b for a, b in zip(with_s, without_s, strict=True))
    return Row(
        benchmark="ray_save",
        case=f"GPT {size}, {executor}, a save every {EVERY} steps",
        value=statistics.median(with_s) * 1e3,
        unit="ms per step",
        against=f"without: {statistics.median(without_s) * 1e3:.1f} ms",
        ratio=ratio,
        target="<= 1.05x",
    )


def main() -> None:
    use_virtual_devices(2)
    with local_ray(2):
        cases = [(size, name) for size in ("small", "wide") for name in ("local", "ray")]
        finish([saving(size, name, NUM_ROUNDS if size == "small" else 5) for size, name in cases], sys.argv[1:])


if __name__ == "__main__":
    main()
