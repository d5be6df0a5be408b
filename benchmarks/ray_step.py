"""A step on the Ray executor beside the same plan on the local executor, and what the driver adds to a step of 8 workers.

The driver's time is its call less the longest worker's part: sorting and sending arguments, two calls of Ray's, and the answers.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from benchmarks.ray_session import local_ray, step_of
from benchmarks.report import Row, finish, interleaved_medians_s
from examples import gpt_linen
from examples.example import use_virtual_devices

NUM_ROUNDS = 20
NUM_WORKERS = 8


def beside_local() -> Row:
    """Both train, each its own state; a round ends when the loss of both is known."""
    example = gpt_linen.make("wide")
    state = jax.tree.map(np.asarray, example.init(jax.random.key(0)))
    batch = example.batch(0)
    steps = {name: step_of(example.train_step, 2, 4, name) for name in ("local", "ray")}
    states = dict.fromkeys(steps, state)

    def run(name: str) -> None:
        states[name], metrics = steps[name](states[name], batch)
        float(metrics["loss"])
        if name == "local":
            jax.block_until_ready(states[name])

    with steps["ray"]:
        times = interleaved_medians_s({name: lambda name=name: run(name) for name in steps}, num_rounds=NUM_ROUNDS)
    return Row(
        benchmark="ray_step",
        case="GPT of 4 layers x 256, 2 stages",
        value=times["ray"] * 1e3,
        unit="ms",
        against=f"local: {times['local'] * 1e3:.0f} ms",
        ratio=times["ray"] / times["local"],
        target="<= 1.10x",
    )


def tiny(weights: Any, x: Any) -> Any:
    """A matmul per stage."""

    def loss_fn(weights: Any, x: Any) -> Any:
        for number, w in enumerate(weights, 1):
            x = jnp.tanh(x @ w)
            x = al.layer_boundary(x) if number < len(weights) else x
        return jnp.mean(x**2)

    loss, grads = al.value_and_grad(loss_fn)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def driver() -> Row:
    """Stages with next to nothing to compute; the batch comes from the host."""
    state, batch, used = [np.eye(64, dtype=np.float32)] * NUM_WORKERS, np.ones((64, 64), np.float32), []
    with step_of(tiny, NUM_WORKERS, 8, "ray") as step:
        for _ in range(5 * NUM_ROUNDS):
            state, _ = step(state, batch)
            times = step._remotes[0].times
            used.append(times.call_s - max(times.step_s))
    return Row(
        benchmark="ray_step",
        case=f"driver, {NUM_WORKERS} workers",
        value=statistics.median(used[NUM_ROUNDS:]) * 1e3,
        unit="ms per step",
        against=f"longest worker: {max(times.step_s) * 1e3:.0f} ms",
        target="<= 3 ms",
    )


def main() -> None:
    use_virtual_devices(NUM_WORKERS)
    with local_ray(NUM_WORKERS):
        finish([beside_local(), driver()], sys.argv[1:])


if __name__ == "__main__":
    main()
