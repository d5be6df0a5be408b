"""A serving engine on one device (``--devices N``: on so many): throughput of 16 requests at once against one at a time, and what
a change of bucket costs.

One at a time is measured twice: with the same engine, whose programs compute all 16 slots for the one, and with an engine of one
slot. Rounds of all three take turns. Arguments: a model of ``examples/serving_models.py`` ("llama").
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

import alpa_lite as al
from benchmarks.report import Row, finish, interleaved_medians_s
from examples.example import use_virtual_devices
from examples.serving_models import MODELS

SLOTS = 16
MAX_LENGTH = {"llama": 256, "gpt": 32}
NUM_REQUESTS = 32
NUM_ROUNDS = 5


def main() -> None:
    use_virtual_devices(int(sys.argv[sys.argv.index("--devices") + 1]) if "--devices" in sys.argv else 1)
    name = next((arg for arg in sys.argv[1:] if arg in MODELS), "llama")
    model = MODELS[name]("small")
    params = jax.jit(model.init_params)(jax.random.key(0))
    longest = MAX_LENGTH[name]
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(longest / 8), 0.8, NUM_REQUESTS).astype(int), 1, longest // 2)
    prompts = [rng.integers(0, model.vocab_size, length) for length in lengths]
    buckets = al.serve.propose_buckets(lengths.tolist(), 3, multiple=4).buckets
    new_tokens = longest // 4

    def engine_of(slots: int) -> al.serve.Engine:
        engine = al.serve.Engine(
            model, params, slots=slots, max_length=longest, buckets=buckets, queue_limit=NUM_REQUESTS
        )
        engine.warm_up()
        return engine

    many, one = engine_of(SLOTS), engine_of(1)
    runs: dict[str, Callable[[], object]] = {
        "at once": lambda: many.generate(prompts, max_tokens=new_tokens),
        "one at a time": lambda: [many.generate([prompt], max_tokens=new_tokens) for prompt in prompts],
        "one slot": lambda: one.generate(prompts, max_tokens=new_tokens),
    }
    times_s: dict[str, list[float]] = {case: [] for case in runs}
    runs["at once"]()
    filled = many.statistics()  # of the first round, while nothing else has run
    for _ in range(NUM_ROUNDS):
        for case, run in runs.items():
            start_s = time.perf_counter()
            run()
            times_s[case].append(time.perf_counter() - start_s)
    rate = {case: NUM_REQUESTS * new_tokens / statistics.median(values) for case, values in times_s.items()}
    rows = [
        Row(
            benchmark="serve_engine",
            case=f"{name}, {SLOTS} slots, {NUM_REQUESTS} requests at once",
            value=rate["at once"],
            unit="tokens/s",
            against=f"{case}: {rate[case]:.0f} tokens/s",
            ratio=rate["at once"] / rate[case],
            target=target,
        )
        for case, target in (("one at a time", ">= 4x"), ("one slot", ""))
    ]
    rows += [
        Row(benchmark="serve_engine", case=f"{name}, batch fill", value=100 * filled.batch_fill, unit="%"),
        Row(
            benchmark="serve_engine",
            case=f"{name}, padding waste of buckets {', '.join(map(str, buckets))}",
            value=100 * filled.padding_waste,
            unit="%",
        ),
        switch_row(name, many),
    ]
    many.close()
    one.close()
    finish(rows, sys.argv[1:])


def switch_row(name: str, engine: al.serve.Engine) -> Row:
    """Prompts of all buckets in turn, through the engine's own path and through the jitted functions alone."""
    programs = engine.programs
    prompts = {bucket: np.ones(bucket, np.int32) for bucket in engine.buckets}
    placed = {
        bucket: jax.device_put(
            [np.int32(0), prompt[None], np.array([bucket], np.int32)], list(programs.given[f"prefill_{bucket}"])
        )
        for bucket, prompt in prompts.items()
    }

    def through_engine() -> None:
        for bucket, prompt in prompts.items():
            jax.block_until_ready(programs.prefill_logits(bucket, 0, prompt))

    def jitted() -> None:
        for bucket, given in placed.items():
            logits, programs.caches[0] = programs.run(f"prefill_{bucket}")(programs.params, programs.caches[0], *given)
            jax.block_until_ready(logits)

    times_s = interleaved_medians_s({"engine": through_engine, "jitted": jitted}, num_rounds=200, num_warmup=20)
    extra_s = (times_s["engine"] - times_s["jitted"]) / len(prompts)
    return Row(
        benchmark="serve_engine",
        case=f"{name}, change of bucket, beyond the jitted call",
        value=extra_s * 1e6,
        unit="us",
        against=f"jitted: {times_s['jitted'] / len(prompts) * 1e6:.0f} us",
        target="<= 200 us",
    )


if __name__ == "__main__":
    main()
