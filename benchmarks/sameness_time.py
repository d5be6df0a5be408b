"""How long the sameness analysis takes on programs of 1,000 to 10,000 producer-consumer pairs.

The program is a chain of matmuls, biases, residuals, reductions and transposes of many different shapes, so that little can be
remembered from one op to the next. Tracing is not counted: the analysis starts from a Program.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from benchmarks.report import Row, finish

PAIRS = (1_000, 3_000, 10_000)
MESH = al.analysis.DeviceMesh(shape=(2, 4), axis_names=("x", "y"))
PAIRS_PER_BLOCK = 12  # of `block` below


def block(x: jax.Array, width: int) -> jax.Array:
    """Pairs: two matmuls 4, tanh, two scalings 3, transpose, sum, broadcast 3, add 2; the weights are literals and have none."""
    hidden = jnp.tanh(x @ jnp.full((x.shape[1], width), 0.1))
    back = (x.T @ (hidden * 2.0)).sum(1)
    return x + back * jnp.float32(0.5)


def chain(num_pairs: int) -> al.analysis.Program:
    """A program of about ``num_pairs`` pairs."""

    def fn(x: jax.Array) -> jax.Array:
        for index in range(num_pairs // PAIRS_PER_BLOCK):
            x = block(x, 8 * (1 + index % 97))
        return x

    return al.analysis.trace(fn, jax.ShapeDtypeStruct((64, 64), jnp.float32))


def random_specs(program: al.analysis.Program, seed: int = 0) -> dict[int, al.analysis.ShardingSpec]:
    """Every tensor split somehow: x on one dim, y on one dim, wherever they divide."""
    rng = np.random.default_rng(seed)
    specs = {}
    for value, tensor in enumerate(program.values):
        dims: list[tuple[str, ...]] = [()] * len(tensor.shape)
        for axis in MESH.axis_names:
            fit = [
                d for d, size in enumerate(tensor.shape) if size % (MESH.axes_size(dims[d]) * MESH.axis_size(axis)) == 0
            ]
            if fit and rng.random() < 0.7:
                dim = int(rng.choice(fit))
                dims[dim] = (*dims[dim], axis)
        specs[value] = al.analysis.ShardingSpec(tuple(dims))
    return specs


def seconds(num_pairs: int, num_rounds: int = 5) -> tuple[int, float, int]:
    """(pairs, CPU seconds of one analysis, the least disturbed of several, pairs that need resharding) on one core."""
    program = chain(num_pairs)
    specs = random_specs(program)
    times: list[float] = []
    found = al.analysis.needs_resharding(program, specs, MESH)
    for _ in range(num_rounds):
        gc.collect()
        start_s = time.process_time()
        found = al.analysis.needs_resharding(program, specs, MESH)
        times.append(time.process_time() - start_s)
    return len(found), min(times), len(found.resharding)


def rows() -> list[Row]:
    """One row per size; the ratio is time per pair over that of the smallest."""
    made: list[Row] = []
    first_s = 0.0
    for wanted in PAIRS:
        pairs, time_s, resharding = seconds(wanted)
        first_s = first_s or time_s / pairs
        made.append(
            Row(
                benchmark="sameness_time",
                case=f"{pairs} pairs, {resharding} need resharding",
                value=time_s,
                unit="s",
                against=f"time per pair of {PAIRS[0]} pairs",
                ratio=time_s / pairs / first_s,
                target="<= 1 s, flat" if wanted == max(PAIRS) else "flat",
            )
        )
    return made


if __name__ == "__main__":
    finish(rows(), sys.argv)
