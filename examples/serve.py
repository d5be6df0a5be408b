"""Trains a byte-level Llama for some steps, then serves it under one layout for all its graphs: buckets by advice, many requests
at once, tokens as they come.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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
NUM_TOKENS = 32  # of each answer
MAX_LENGTH = 256  # positions are rotary: a model answers beyond the length that it was trained on


def train(num_steps: int) -> tuple[Any, list[float]]:
    """The parameters in the layout of the training plan, and the losses."""
    example = llama_nnx.make("small")
    step = al.parallelize(example.train_step, donate_argnums=0)
    plan = step.plan(*example.abstract_args())
    state = step.init(example.init, jax.random.key(0))
    losses = []
    for index in range(num_steps):
        state, metrics = step(state, example.batch(index))
        losses.append(float(metrics["loss"]))
    print(f"Llama on the mesh {plan.mesh}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {num_steps} steps")
    return state["params"], losses


def serve(params: Any) -> list[bytes]:
    """Answers from one copy of the parameters, in one layout for prompts of all lengths and for single tokens."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.0, 0.8, 24).astype(int), 1, MAX_LENGTH // 2)
    advice = al.serve.propose_buckets(lengths.tolist(), k=3, multiple=8)
    print(advice, end="")
    starts = rng.integers(0, load_corpus().size - MAX_LENGTH, lengths.size)
    prompts = [load_corpus()[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    model, sizes = Llama.of("small"), {"slots": 8, "max_length": MAX_LENGTH}
    graphs = al.serve.graphs(model, params, buckets=advice.buckets, **sizes)
    calls = {f"prefill_{size}": count for size, count in zip(advice.buckets, advice.requests, strict=True)}
    calls["decode"] = NUM_TOKENS * len(prompts)
    layout = al.plan_shared(graphs, shared=("0", "1"), weights=calls, cluster=al.Cluster.local(), donate_argnums=1)
    print(str(layout).partition("Shared leaves")[0], end="")
    with al.serve.Engine(model, params, layout=layout, queue_limit=32, **sizes) as engine:
        requests = [
            engine.submit(prompt, max_tokens=NUM_TOKENS, sampling=al.serve.Sampling(0.8, top_p=0.95, seed=seed))
            for seed, prompt in enumerate(prompts)
        ]
        print(f"{bytes(prompts[0])!r} goes on: ", end="")
        for token in requests[0]:
            print(repr(bytes([token]))[2:-1], end="", flush=True)
        print()
        answers = [bytes(request.result()) for request in requests]
        seen = engine.statistics()
        print(f"{seen.generated_tokens} tokens; finished {seen.finished}; prompts per bucket {seen.prefills}")
        print(f"batch fill {seen.batch_fill:.0%}, padding {seen.padding_waste:.0%} of the prompts' tokens")
        print(
            f"time to first token: mean {seen.time_to_first_token.mean:.2f} s; per token: mean "
            f"{seen.time_per_token.mean * 1e3:.1f} ms"
        )
    return answers


def main() -> None:
    use_virtual_devices(4)
    params, _ = train(NUM_STEPS)
    serve(params)


if __name__ == "__main__":
    main()
