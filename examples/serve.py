"""Trains a byte-level Llama for some steps, then serves it: buckets by advice, many requests at once, tokens as they come."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

import alpa_lite as al
from examples import llama_nnx
from examples.corpus import load_corpus
from examples.example import use_virtual_devices
from examples.serving_models import Llama

NUM_STEPS = 60
MAX_LENGTH = 256  # positions are rotary: a model answers beyond the length that it was trained on


def main() -> None:
    use_virtual_devices(4)
    example = llama_nnx.make("small")
    step = al.parallelize(example.train_step, donate_argnums=0)
    step.plan(*example.abstract_args())
    state = step.init(example.init, jax.random.key(0))
    for index in range(NUM_STEPS):
        state, metrics = step(state, example.batch(index))
    print(f"loss {float(metrics['loss']):.3f} after {NUM_STEPS} steps")

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.0, 0.8, 24).astype(int), 1, MAX_LENGTH // 2)
    advice = al.serve.propose_buckets(lengths.tolist(), k=3, multiple=8)
    print(advice, end="")
    starts = rng.integers(0, load_corpus().size - MAX_LENGTH, lengths.size)
    prompts = [load_corpus()[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    engine = al.serve.Engine(
        Llama.of("small"), state["params"], slots=8, max_length=MAX_LENGTH, buckets=advice.buckets, queue_limit=32
    )
    with engine:
        requests = [
            engine.submit(prompt, max_tokens=32, sampling=al.serve.Sampling(0.8, top_p=0.95, seed=seed))
            for seed, prompt in enumerate(prompts)
        ]
        print(f"{bytes(prompts[0])!r} goes on: ", end="")
        for token in requests[0]:
            print(repr(bytes([token]))[2:-1], end="", flush=True)
        print()
        for request in requests:
            request.result()
        seen = engine.statistics()
        print(f"{seen.generated_tokens} tokens; finished {seen.finished}; prompts per bucket {seen.prefills}")
        print(f"batch fill {seen.batch_fill:.0%}, padding {seen.padding_waste:.0%} of the prompts' tokens")
        print(
            f"time to first token: mean {seen.time_to_first_token.mean:.2f} s; per token: mean "
            f"{seen.time_per_token.mean * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
