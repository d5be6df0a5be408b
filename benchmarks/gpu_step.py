"""On one GPU: the parallelized step of a GPT against the plain jitted step, and the plan's figures against measured ones.

Needs a GPU. On another device it runs too (``--layers 1 --batch 1 --seq 128`` to keep it short), but then says little.
Options: ``--layers N``, ``--batch N``, ``--seq N``, and the model's name (gpt-350m).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import alpa_lite as al
from benchmarks.models import make
from benchmarks.report import Row, finish, interleaved_medians_s


def measure(name: str, layers: int | None, batch: int | None, seq: int | None) -> list[Row]:
    """Step time and peak memory, each beside what it is compared with."""
    model = make(name, layers=layers, batch_size=batch, seq_len=seq)
    cluster, options = al.Cluster.local(calibrate=True), al.PlanOptions(mesh_shape=(1,))
    plain = jax.jit(model.fn, donate_argnums=(0,))
    step = al.parallelize(model.fn, cluster=cluster, donate_argnums=(0,), options=options)
    plan = step.plan(*model.args)
    of_table = al.plan(model.fn, *model.args, cluster=al.Cluster.local(), donate_argnums=(0,), options=options)
    plans = {"calibrated": plan, "of the table": of_table}
    # Random ones: gradients of equal tokens would be added up in one row of the embedding, one after the other.
    key = jax.random.key(1)
    tokens = jax.tree.map(lambda x: jax.random.randint(key, x.shape, 0, 1000, x.dtype), model.args[1])
    holders = {"plain": [model.init(jax.random.key(0))], "planned": [step.init(model.init, jax.random.key(0))]}

    def run(key: str, fn: object) -> object:
        def once() -> None:
            holders[key][0], loss = fn(holders[key][0], tokens)  # type: ignore[operator]
            jax.block_until_ready(loss)

        return once

    times = interleaved_medians_s({"plain": run("plain", plain), "planned": run("planned", step)})  # type: ignore[dict-item]
    compiled = step.compile(*model.args)
    rows = [
        Row(
            benchmark="gpu_step",
            case=f"{name} on {jax.devices()[0].device_kind}",
            value=times["planned"] * 1e3,
            unit="ms",
            against="plain jit",
            ratio=times["planned"] / times["plain"],
            target="<= 1.02x",
        ),
        *(
            Row(
                benchmark="gpu_step",
                case=f"predicted step time, figures {case}",
                value=found.objective * 1e3,
                unit="ms",
                against="measured",
                ratio=found.objective / times["planned"],
                target="0.8 to 1.2",
            )
            for case, found in plans.items()
        ),
        Row(
            benchmark="gpu_step",
            case="predicted peak memory",
            value=plan.memory.peak / 1e9,
            unit="GB",
            against="XLA's figure",
            ratio=plan.memory.peak / compiled.peak_bytes(),
            target="0.9 to 1.1",
        ),
    ]
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        peak = stats["peak_bytes_in_use"]
        rows.append(
            Row(
                benchmark="gpu_step",
                case="both states resident, allocator peak",
                value=peak / 1e9,
                unit="GB",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="gpt-350m")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=4)  # what fits one GPU of 80 GB, two states included
    parser.add_argument("--seq", type=int)
    known, rest = parser.parse_known_args()
    finish(measure(known.model, known.layers, known.batch, known.seq), rest)


if __name__ == "__main__":
    main()
