"""``make demo``: a byte-level GPT learns Python's standard library on 8 virtual devices, beside a single-device run.

Plans the step as two stages of 2x2 devices each, with two parameters pinned, prints the plan, trains both runs on the
same batches from the same start, and leaves the plan, the losses and their plot in ``out/demo/``. Then the parameters are
loaded from the checkpoint into the layout of a serving engine, which continues some Python. At last a byte-level Llama learns the
same and is served under one layout that is planned for all its graphs (``examples/serve.py``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from matplotlib.figure import Figure

import alpa_lite as al
from examples import gpt_linen, serve
from examples.corpus import load_corpus
from examples.example import NUM_DEVICES, Example, use_virtual_devices
from examples.serving_models import GPT

P = jax.sharding.PartitionSpec

OUT = Path("out/demo")
NUM_STEPS, NUM_LLAMA_STEPS = 200, 60
PRINT_EVERY = 10
PINS = {
    "0/params/block0/up/kernel": P(None, "model"),
    "0/params/block0/down/kernel": P("model", None),
}
PROMPTS = ("    def __init__(self, ", "import ", "        if not isin", "class ")
OPTIONS = al.PlanOptions(mesh_shape=(2, 2), axis_names=("data", "model"), num_stages=2, num_microbatches=4)


@dataclass(slots=True, kw_only=True)
class Losses:
    """The two runs' losses, step by step."""

    planned: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)

    def largest_difference(self) -> float:
        return max(abs(a - b) for a, b in zip(self.planned, self.single, strict=True))


def train_both(step: Callable, example: Example, num_steps: int) -> tuple[Losses, Any]:
    """Trains the planned ``step`` and the plain jitted one on the same batches, printing both losses.

    Returns:
        The losses, and the state of the planned run.
    """
    key = jax.random.key(0)
    single_step = jax.jit(example.train_step, donate_argnums=(0,))
    planned_state, single_state = step.init(example.init, key), jax.jit(example.init)(key)
    losses = Losses()
    print(f"{'step':>5} {'planned, 8 devices':>19} {'one device':>11} {'difference':>11} {'seconds':>8}")
    start_s = time.perf_counter()
    for index in range(num_steps):
        batch = example.batch(index)
        planned_state, planned = step(planned_state, batch)
        losses.planned.append(float(planned["loss"]))
        single_state, single = single_step(single_state, batch)
        losses.single.append(float(single["loss"]))
        if index % PRINT_EVERY == 0 or index == num_steps - 1:
            a, b = losses.planned[-1], losses.single[-1]
            print(f"{index:5d} {a:19.5f} {b:11.5f} {abs(a - b):11.2e} {time.perf_counter() - start_s:8.1f}", flush=True)
    return losses, planned_state


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls ``write`` on a neighbour of ``path`` and moves the result into place: readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    write(partial)
    os.replace(partial, path)


def plot(losses: Losses, path: Path) -> None:
    """Both loss curves as a PNG; the single-device one dashed on top, because they should coincide."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(losses.planned, label=f"planned, {NUM_DEVICES} devices", linewidth=3, alpha=0.6)
    axes.plot(losses.single, label="one device", linestyle="--", color="black", linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT on the standard library's source")
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def continue_python(checkpoints: Path) -> list[str]:
    """Serves the trained parameters from their checkpoint under another layout, and continues ``PROMPTS``."""
    start_s = time.perf_counter()
    model = GPT.of("demo")
    params = al.serve.StoredParams(checkpoints, jax.eval_shape(model.init_params, jax.random.key(0)))
    max_length = model.config.seq_len
    with al.serve.Engine(model, params, slots=4, max_length=max_length, buckets=(16, 32)) as engine:
        print(f"served on the mesh {engine.plans['decode'].mesh}; plans {', '.join(engine.plans)}")
        prompts = [list(prompt.encode()) for prompt in PROMPTS]
        drawn = al.serve.Sampling(temperature=0.7, top_k=20, seed=0)
        answers = engine.generate(prompts, max_tokens=max_length - max(map(len, prompts)), sampling=drawn)
        answers = [bytes(answer).decode(errors="replace") for answer in answers]
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"  {prompt!r} -> {answer!r}")
        found = engine.statistics()
        print(
            f"{found.generated_tokens} tokens in {found.decode_steps} steps; batch fill {found.batch_fill:.0%}, padding "
            f"{found.padding_waste:.0%}; {time.perf_counter() - start_s:.0f} s with loading and compiling"
        )
    return answers


def run(
    out: Path = OUT, num_steps: int = NUM_STEPS, num_llama_steps: int = NUM_LLAMA_STEPS
) -> tuple[Losses, list[float]]:
    """The whole demo; returns the losses of the GPT's two runs, and those of the Llama."""
    start_s = time.perf_counter()
    example = gpt_linen.make("demo")
    print(
        f"{load_corpus().size / 1e6:.1f} MB of Python source; {len(jax.devices())} {jax.devices()[0].platform} devices"
    )
    step = al.parallelize(example.train_step, pins=PINS, options=OPTIONS, donate_argnums=(0,))
    plan = step.plan(*example.abstract_args())
    print(plan)
    print(f"planned in {time.perf_counter() - start_s:.1f} s")
    losses, state = train_both(step, example, num_steps)

    write_atomically(out / "plan.json", plan.save)
    write_atomically(
        out / "losses.json", lambda path: path.write_text(json.dumps(dataclasses.asdict(losses)), encoding="utf-8")
    )
    write_atomically(out / "loss.png", lambda path: plot(losses, path))
    print(f"loss {losses.planned[0]:.3f} -> {losses.planned[-1]:.3f} in {num_steps} steps")
    print(f"largest difference from the single-device run: {losses.largest_difference():.1e}")
    print(f"wrote {', '.join(str(out / name) for name in ('plan.json', 'losses.json', 'loss.png'))}")
    step.save(out / "checkpoints", state, step=num_steps)
    continue_python(out / "checkpoints")
    params, llama_losses = serve.train(num_llama_steps)
    serve.serve(params)
    print(f"{time.perf_counter() - start_s:.0f} s in all")
    return losses, llama_losses


def main() -> None:
    use_virtual_devices()
    losses, llama_losses = run()
    if any(found[-1] > 0.8 * found[0] for found in (losses.planned, llama_losses)):
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
