"""What the server of the tests serves: the examples' Llama, shallow, with random parameters and bytes as its tokens."""

from __future__ import annotations

from dataclasses import replace

import jax

import alpa_lite as al
from examples.llama_nnx import CONFIGS
from examples.serving_models import Llama


def target() -> al.serve.ServeTarget:
    return _of_layers(1)


def target_of_two_layers() -> al.serve.ServeTarget:
    """For stages."""
    return _of_layers(2)


def _of_layers(count: int) -> al.serve.ServeTarget:
    model = Llama(replace(CONFIGS["small"], num_layers=count))
    return al.serve.ServeTarget(
        model=model,
        params=lambda: model.init_params(jax.random.key(0)),
        encode=lambda text: list(text.encode()),
        decode=lambda tokens: bytes(tokens).decode(errors="replace"),
    )


def not_a_target() -> int:
    return 3
