"""Executed steps on 8 CPU devices: the plan that alpa_lite chose against four layouts written by hand.

The hand-written ones run twice removed from us: as plain ``jax.jit(in_shardings=...)``. ``al.plan`` also scores each of
them (its pins, everything else free), so the table shows whether the predicted order is the measured one.
Options: ``--size small|base`` and names of examples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import alpa_lite as al
from benchmarks.hand_layouts import NUM_DEVICES, hand_layouts
from benchmarks.report import Row, finish, interleaved_medians_s
from examples.example import Example, use_virtual_devices
from examples.registry import EXAMPLES

CASES = ("gpt_linen", "moe", "resnet18")
NUM_ROUNDS = 150  # steps of some 10 ms differ by a fifth from one to the next where devices share cores


def repeated(step: Callable[..., Any], state: Any, batch: Any) -> Callable[[], Any]:
    """A function that runs one more step on its own state and returns the loss."""
    holder = [state]

    def run() -> jax.Array:
        holder[0], metrics = step(holder[0], batch)
        jax.block_until_ready(holder[0])
        return metrics["loss"]

    return run


def measure(name: str, example: Example) -> list[Row]:
    """Rows of one example: the chosen plan, then each hand-written layout."""
    args = example.abstract_args()
    devices = jax.devices()[:NUM_DEVICES]
    cluster = al.Cluster.local(calibrate=True)
    key, batch = jax.random.key(0), example.batch(0)

    step = al.parallelize(example.train_step, cluster=cluster, donate_argnums=(0,))
    plan = step.plan(*args)
    runs = {"alpa_lite": repeated(step, step.init(example.init, key), batch)}
    predicted_s = {"alpa_lite": plan.objective}
    for layout in hand_layouts(name, args):
        shardings = layout.shardings(args, devices)
        # Created in place: `device_put` of one state for all would share buffers, and the steps donate them.
        own_state = jax.jit(example.init, out_shardings=shardings[0])(key)
        own_batch = jax.device_put(batch, shardings[1])
        runs[layout.name] = repeated(layout.jit(example.train_step, args, devices), own_state, own_batch)
        options = al.PlanOptions(mesh_shape=layout.mesh_shape, axis_names=layout.axis_names)
        scored = al.plan(example.train_step, *args, cluster=cluster, pins=dict(layout.pins), options=options)
        predicted_s[layout.name] = scored.objective

    measured_s = interleaved_medians_s(runs, num_rounds=NUM_ROUNDS)
    best = min((key for key in measured_s if key != "alpa_lite"), key=measured_s.__getitem__)
    rows = []
    for key, value_s in measured_s.items():
        rows.append(
            Row(
                benchmark="step_time",
                case=f"{name} {key} (predicted {predicted_s[key] * 1e3:.3g} ms)",
                value=value_s * 1e3,
                unit="ms",
                against=f"best by hand: {best}",
                ratio=value_s / measured_s[best],
                target="<= 1.05x" if key == "alpa_lite" else "",
            )
        )
    return rows


def main() -> None:
    use_virtual_devices()
    argv = sys.argv[1:]
    size = argv[argv.index("--size") + 1] if "--size" in argv else "small"
    names = [name for name in argv if name in CASES] or CASES
    rows = [row for name in names for row in measure(name, EXAMPLES[name](size))]
    finish(rows, argv)


if __name__ == "__main__":
    main()
