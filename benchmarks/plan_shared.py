"""How long a joint plan of a served model's graphs takes beside the plan of one of them.

Llama-3 8B (abstract, bfloat16), 16 slots of 2048 tokens, buckets of 128, 512, 1024 and 2048 tokens and decode, on
1x8:h100-sxm. CPU seconds of this process, the smallest of two runs of each in turn; "one graph" is the slowest of the five to
plan, "each alone" the sum of all. Fewer graphs show how much of that is theirs: prompts of 128 to 1024 tokens are one
program of three sizes, which a prompt as long as the cache and decode are not. "As commands" counts whole processes, which
import, describe the model and plan once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

import alpa_lite as al
from benchmarks.fresh import answered, child
from benchmarks.report import Row, finish
from examples import llama_nnx
from examples.serving_models import Llama

CONFIG = llama_nnx.Config(
    num_layers=32,
    width=4096,
    hidden=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_width=128,
    seq_len=2048,
    batch_size=16,
)
VOCAB = 128_256
CLUSTER = "1x8:h100-sxm"
BUCKETS = (128, 512, 1024, 2048)
WEIGHTS = {"decode": 1000.0, "prefill_128": 8.0, "prefill_512": 4.0, "prefill_1024": 2.0, "prefill_2048": 1.0}
FEWER = (("prefill_128", "prefill_2048", "decode"), ("prefill_2048", "decode"))
REPEATS = 2
ALL = "all"


def abstract_params(config: llama_nnx.Config, vocab_size: int) -> dict[str, Any]:
    """Shapes of the parameters in bfloat16."""
    bf16, layers, width, hidden = jnp.bfloat16, config.num_layers, config.width, config.hidden
    asked, kept = (heads * config.head_width for heads in (config.num_heads, config.num_kv_heads))
    shape = jax.ShapeDtypeStruct

    kernels = {"query": (width, asked), "key": (width, kept), "value": (width, kept), "out": (asked, width)}
    mlp = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    blocks: dict[str, Any] = {name: {"kernel": shape((layers, *sizes), bf16)} for name, sizes in mlp.items()}
    blocks["attention"] = {name: {"kernel": shape((layers, *sizes), bf16)} for name, sizes in kernels.items()}
    blocks |= {name: {"scale": shape((layers, width), bf16)} for name in ("attention_norm", "mlp_norm")}
    return {
        "embed": {"embedding": shape((vocab_size, width), bf16)},
        "blocks": blocks,
        "norm": {"scale": shape((width,), bf16)},
        "head": {"kernel": shape((width, vocab_size), bf16)},
    }


def graphs(layers: int = CONFIG.num_layers) -> dict[str, Any]:
    """Of the engine, with abstract parameters."""
    config = replace(CONFIG, num_layers=layers)
    model = Llama(config, jnp.bfloat16, VOCAB)
    return al.serve.graphs(model, abstract_params(config, VOCAB), slots=16, max_length=2048, buckets=BUCKETS)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.process_time()
    found = run()
    return time.process_time() - start_s, found


def plan_one(cluster: al.Cluster, fn: Callable[..., Any], args: Sequence[Any]) -> al.Plan:
    return al.plan(fn, *args, cluster=cluster, donate_argnums=1)


def plan_jointly(cluster: al.Cluster, made: dict[str, Any]) -> al.SharedLayout:
    weights = {name: WEIGHTS[name] for name in made}
    return al.plan_shared(made, shared=("0", "1"), weights=weights, cluster=cluster, donate_argnums=1)


def command(name: str) -> dict[str, Any]:
    """Plans one graph, or all, and returns what this process took from its start; a child of ``main``."""
    made, cluster = graphs(), al.Cluster.parse(CLUSTER)
    if name == ALL:
        plan_jointly(cluster, made)
    else:
        plan_one(cluster, *made[name])
    return {"cpu_seconds": time.process_time()}


def measured() -> list[Row]:
    cluster = al.Cluster.parse(CLUSTER)
    made = graphs()
    one_s: dict[str, float] = {}
    joint_s: dict[tuple[str, ...], float] = {}
    layout = None
    for _ in range(REPEATS):
        for name, (fn, args) in made.items():
            spent_s, _ = timed(lambda fn=fn, args=args: plan_one(cluster, fn, args))
            one_s[name] = min(spent_s, one_s.get(name, float("inf")))
        for names in (*FEWER, tuple(made)):
            some = {name: made[name] for name in names}
            spent_s, layout = timed(lambda some=some: plan_jointly(cluster, some))
            joint_s[names] = min(spent_s, joint_s.get(names, float("inf")))
    assert layout is not None
    all_s = joint_s.pop(tuple(made))
    case = "llama3-8b, 4 buckets and decode"
    slowest = max(one_s, key=lambda name: one_s[name])
    whole_s = {
        name: min(child(__file__, "command", name)["cpu_seconds"] for _ in range(REPEATS)) for name in (slowest, ALL)
    }
    prices = ", ".join(f"{name} {price:+.2%}" for name, price in layout.price.items())
    sys.stderr.write(f"{case}: {layout.mesh}, gap {layout.gap:.2%}; price of sharing: {prices}; alone: {one_s}\n")
    return [
        Row(
            benchmark="plan_shared",
            case=case,
            value=all_s,
            unit="s",
            against=f"one graph ({slowest})",
            ratio=all_s / one_s[slowest],
            target="<= 20 s, <= 3x",
        ),
        Row(
            benchmark="plan_shared",
            case=case,
            value=all_s,
            unit="s",
            against="each alone",
            ratio=all_s / sum(one_s.values()),
        ),
        Row(
            benchmark="plan_shared",
            case=f"{case}, as commands",
            value=whole_s[ALL],
            unit="s",
            against=f"one graph ({slowest}): {whole_s[slowest]:.2f} s",
            ratio=whole_s[ALL] / whole_s[slowest],
        ),
        *(
            Row(
                benchmark="plan_shared",
                case=f"llama3-8b, {' and '.join(names)}",
                value=spent_s,
                unit="s",
                against=f"one graph ({slowest})",
                ratio=spent_s / one_s[slowest],
            )
            for names, spent_s in joint_s.items()
        ),
    ]


def main(argv: Sequence[str]) -> None:
    if not answered(argv, {"command": command}):
        finish(measured(), argv)


if __name__ == "__main__":
    main(sys.argv[1:])
