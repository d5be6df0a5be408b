"""On one GPU: a serving engine's programs against plain jitted ones, and its plans' figures against measured ones.

Llama of 0.9 billion parameters (random, bfloat16), 16 slots of 2048 tokens, buckets of 128, 512 and 2048 tokens. Needs a GPU. On
another device it runs too (``--layers 1 --width 256 --max-length 64`` to keep it short), but then says little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from benchmarks.plan_shared import abstract_params
from benchmarks.report import Row, finish, interleaved_medians_s
from benchmarks.serve_engine import switch_row
from examples import llama_nnx
from examples.serving_models import Llama

SLOTS = 16
VOCAB = 32_000


def model_of(layers: int, width: int) -> Llama:
    config = llama_nnx.Config(
        num_layers=layers,
        width=width,
        hidden=11 * width // 4,
        num_heads=width // 64,
        num_kv_heads=width // 256,
        head_width=64,
        seq_len=2048,
        batch_size=SLOTS,
    )
    return Llama(config, jnp.bfloat16, VOCAB)


def random_params(model: Llama) -> Any:
    """Small numbers, so that bfloat16 holds what layers make of them."""
    leaves, tree = jax.tree.flatten(abstract_params(model.config, VOCAB))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten(
        [jax.random.normal(key, x.shape, x.dtype) * x.shape[-1] ** -0.5 for key, x in zip(keys, leaves, strict=True)]
    )


def measured(layers: int, width: int, max_length: int) -> list[Row]:
    model = model_of(layers, width)
    params = random_params(model)
    buckets = tuple(max_length // part for part in (16, 4, 1))
    sizes: dict[str, Any] = {"slots": SLOTS, "max_length": max_length, "buckets": buckets}
    clusters = {"calibrated": al.Cluster.local(calibrate=True), "of the table": al.Cluster.local()}
    sys.stderr.write(f"{clusters['calibrated'].calibration}\n")
    graphs = al.serve.graphs(model, params, **sizes)
    layouts = {
        name: al.plan_shared(graphs, shared=("0", "1"), cluster=cluster, donate_argnums=1)
        for name, cluster in clusters.items()
    }
    rows = []
    with al.serve.Engine(model, params, layouts["calibrated"], **sizes) as engine:
        engine.warm_up()
        for name, (fn, args) in graphs.items():
            rows += graph_rows(name, engine, fn, args, {case: of.plans[name] for case, of in layouts.items()})
        rows += [*throughput_rows(engine, max_length), switch_row("llama", engine)]
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        rows.append(
            Row(
                benchmark="gpu_serve",
                case="allocator's peak, two caches",
                value=stats["peak_bytes_in_use"] / 1e9,
                unit="GB",
            )
        )
    return rows


def graph_rows(name: str, engine: al.serve.Engine, fn: Any, args: Any, plans: dict[str, al.Plan]) -> list[Row]:
    """Of one program: its time beside plain jit's, its predicted time and peak beside what was found."""
    programs = engine.programs
    given = [jax.device_put(np.ones(x.shape, x.dtype)) for x in args[2:]]
    lowered = jax.jit(fn, donate_argnums=1).lower(programs.params, programs.caches[0], *given)
    plain = lowered.compile()
    caches = {"planned": programs.caches[0], "plain": jax.tree.map(jnp.copy, programs.caches[0])}

    def run(case: str, call: Any) -> Callable[[], Any]:
        def once() -> Any:
            logits, caches[case] = call(programs.params, caches[case], *given)
            return logits

        return once

    runs = {"planned": run("planned", programs.run(name)), "plain": run("plain", plain)}
    time_s = interleaved_medians_s(runs, num_rounds=30, num_warmup=5)
    programs.caches[0] = caches["planned"]
    # Calls follow one another on the device: what dispatch takes lies beside the call before, if it takes less than the call.
    start_s = time.perf_counter()
    for _ in range(30):
        logits = runs["planned"]()
    jax.block_until_ready(logits)
    call_s = min((time.perf_counter() - start_s) / 30, time_s["planned"])
    programs.caches[0] = caches["planned"]
    found = plain.memory_analysis()
    peak = found.argument_size_in_bytes + found.temp_size_in_bytes
    peak += found.output_size_in_bytes - found.alias_size_in_bytes
    plan = plans["calibrated"]
    return [
        Row(
            benchmark="gpu_serve",
            case=f"{name} on {jax.devices()[0].device_kind}",
            value=time_s["planned"] * 1e3,
            unit="ms",
            against="plain jit",
            ratio=time_s["planned"] / time_s["plain"],
            target="<= 1.02x",
        ),
        *(
            Row(
                benchmark="gpu_serve",
                case=f"{name}, predicted time, figures {case}",
                value=of.objective * 1e3,
                unit="ms",
                against=f"a call: {call_s * 1e3:.3f} ms",
                ratio=of.objective / call_s,
                target="0.8 to 1.2",
            )
            for case, of in plans.items()
        ),
        Row(
            benchmark="gpu_serve",
            case=f"{name}, predicted peak memory",
            value=plan.memory.peak / 1e9,
            unit="GB",
            against=f"XLA: {peak / 1e9:.3f} GB",
            ratio=plan.memory.peak / peak,
            target="0.95 to 1.1",
        ),
    ]


def throughput_rows(engine: al.serve.Engine, max_length: int) -> list[Row]:
    """Requests at once against one at a time, in turn."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(max_length / 16), 0.8, SLOTS).astype(int), 1, max_length // 2)
    prompts = [rng.integers(0, VOCAB, length) for length in lengths]
    times_s: dict[str, list[float]] = {"at once": [], "one at a time": []}
    tokens = max_length // 16
    for _ in range(3):
        for case, groups in (("at once", [prompts]), ("one at a time", [[prompt] for prompt in prompts])):
            start_s = time.perf_counter()
            for group in groups:
                engine.generate(group, max_tokens=tokens)
            times_s[case].append(time.perf_counter() - start_s)
    rate = {case: SLOTS * tokens / statistics.median(values) for case, values in times_s.items()}
    return [
        Row(
            benchmark="gpu_serve",
            case=f"{SLOTS} requests at once",
            value=rate["at once"],
            unit="tokens/s",
            against=f"one at a time: {rate['one at a time']:.0f} tokens/s",
            ratio=rate["at once"] / rate["one at a time"],
            target=">= 4x",
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--max-length", type=int, default=2048)
    known, rest = parser.parse_known_args()
    finish(measured(known.layers, known.width, known.max_length), rest)


if __name__ == "__main__":
    main()
