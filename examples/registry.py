"""All examples by name: ``EXAMPLES["mlp"]("small")`` is an ``Example``."""

from __future__ import annotations

from collections.abc import Callable

from examples import gpt_linen, llama_nnx, lstm, mlp, moe, resnet18
from examples.example import Example

EXAMPLES: dict[str, Callable[..., Example]] = {
    "mlp": mlp.make,
    "gpt_linen": gpt_linen.make,
    "llama_nnx": llama_nnx.make,
    "resnet18": resnet18.make,
    "moe": moe.make,
    "lstm": lstm.make,
}
