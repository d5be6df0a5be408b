"""What calling a parallelized step with 500 leaves costs beyond calling the jitted function itself, on one device."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

import alpa_lite as al
from benchmarks.report import Row, finish, interleaved_medians_s
from examples.example import use_virtual_devices

NUM_LEAVES = 500
NUM_ROUNDS = 300


def decay(state: dict[str, jax.Array], factor: jax.Array) -> dict[str, jax.Array]:
    """Touches every leaf once: next to nothing to compute, so the call itself is what takes time."""
    return jax.tree.map(lambda leaf: leaf * factor, state)


def main() -> None:
    use_virtual_devices(1)
    state = {f"leaf{index:03d}": jnp.full((8,), float(index)) for index in range(NUM_LEAVES)}
    factor = jnp.asarray(0.5)
    step = al.parallelize(decay, cluster=al.Cluster.parse("1x1:cpu"))
    plain = jax.jit(decay)
    runs = {"plain": lambda: plain(state, factor), "parallelized": lambda: step(state, factor)}
    times_s = interleaved_medians_s(runs, num_rounds=NUM_ROUNDS, num_warmup=20)
    row = Row(
        benchmark="call_overhead",
        case=f"{NUM_LEAVES} leaves, extra per call",
        value=(times_s["parallelized"] - times_s["plain"]) * 1e6,
        unit="us",
        against=f"jax.jit: {times_s['plain'] * 1e6:.0f} us",
        ratio=times_s["parallelized"] / times_s["plain"],
        target="<= 100 us",
    )
    finish([row], sys.argv[1:])


if __name__ == "__main__":
    main()
