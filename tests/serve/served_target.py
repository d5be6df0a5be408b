"""What the server of the tests serves: the examples' Llama, small, with random parameters and bytes as its tokens."""

from __future__ import annotations

import jax

import alpa_lite as al
from examples.serving_models import Llama


def target() -> al.serve.ServeTarget:
    model = Llama.of("small")
    return al.serve.ServeTarget(
        model=model,
        params=lambda: model.init_params(jax.random.key(0)),
        encode=lambda text: list(text.encode()),
        decode=lambda tokens: bytes(tokens).decode(errors="replace"),
    )


def not_a_target() -> int:
    return 3
