"""Whole transformer models as published, forward only, in plain JAX on abstract arguments: BERT-large and GPT-Neo 1.3B.

Both return logits over the vocabulary from the tied embedding. Layers are unrolled. They differ in where the norms stand,
in BERT's token types and pooled head, and in GPT-Neo's causal mask (every second layer looks 256 tokens back) and in its
projections without bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
NORM_EPSILON = 1e-5
LOCAL_WINDOW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes; ``causal`` makes it GPT-Neo, else it is BERT. Vocabularies are padded to a multiple of 128."""

    num_layers: int
    width: int
    num_heads: int
    vocab: int
    seq_len: int
    causal: bool
    batch_size: int = 8


MODELS = {
    "bert-large": Config(num_layers=24, width=1024, num_heads=16, vocab=30_592, seq_len=512, causal=False),
    "gpt-neo-1.3b": Config(num_layers=24, width=2048, num_heads=16, vocab=50_304, seq_len=1024, causal=True),
}


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _dense_shape(fan_in: int, fan_out: int, *, bias: bool = True) -> PyTree:
    return {"kernel": _shape(fan_in, fan_out)} | ({"bias": _shape(fan_out)} if bias else {})


def _norm_shape(width: int) -> PyTree:
    return {"scale": _shape(width), "bias": _shape(width)}


def param_shapes(config: Config) -> PyTree:
    """The parameters as ``jax.ShapeDtypeStruct``."""
    width = config.width
    layer = {name: _dense_shape(width, width, bias=not config.causal) for name in ("query", "key", "value")}
    layer |= {"out": _dense_shape(width, width)}
    layer |= {"up": _dense_shape(width, 4 * width), "down": _dense_shape(4 * width, width)}
    layer |= {"norm1": _norm_shape(width), "norm2": _norm_shape(width)}
    shapes = {
        "tokens": _shape(config.vocab, width),
        "positions": _shape(config.seq_len, width),
        "norm": _norm_shape(width),
        "layers": [layer for _ in range(config.num_layers)],
    }
    if not config.causal:
        shapes |= {"types": _shape(2, width), "head": _dense_shape(width, width), "head_norm": _norm_shape(width)}
    return shapes


def _dense(params: PyTree, x: jax.Array) -> jax.Array:
    y = x @ params["kernel"]
    return y + params["bias"] if "bias" in params else y


def _norm(params: PyTree, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + NORM_EPSILON) * params["scale"] + params["bias"]


def _attention(config: Config, params: PyTree, x: jax.Array, index: int) -> jax.Array:
    batch_size, seq_len, width = x.shape

    def heads(name: str) -> jax.Array:
        y = _dense(params[name], x).reshape(batch_size, seq_len, config.num_heads, width // config.num_heads)
        return y.transpose(0, 2, 1, 3)

    scores = heads("query") @ heads("key").transpose(0, 1, 3, 2)
    if config.causal:
        back = jnp.arange(seq_len)[:, None] - jnp.arange(seq_len)[None, :]
        seen = (back >= 0) & (back < (LOCAL_WINDOW if index % 2 else seq_len))
        scores = jnp.where(seen, scores, -1e9)
    else:
        scores = scores / (width // config.num_heads) ** 0.5
    mixed = jax.nn.softmax(scores, axis=-1) @ heads("value")
    return _dense(params["out"], mixed.transpose(0, 2, 1, 3).reshape(x.shape))


def _layer(config: Config, params: PyTree, x: jax.Array, index: int) -> jax.Array:
    def mlp(y: jax.Array) -> jax.Array:
        return _dense(params["down"], jax.nn.gelu(_dense(params["up"], y), approximate=config.causal))

    if config.causal:
        x = x + _attention(config, params, _norm(params["norm1"], x), index)
        return x + mlp(_norm(params["norm2"], x))
    x = _norm(params["norm1"], x + _attention(config, params, x, index))
    return _norm(params["norm2"], x + mlp(x))


def make(name: str, *, layers: int | None = None) -> tuple[Callable[..., jax.Array], tuple[PyTree, PyTree]]:
    """``fn(params, batch) -> logits`` of ``MODELS[name]`` and its abstract arguments, with another depth where given."""
    config = MODELS[name]
    config = replace(config, num_layers=layers or config.num_layers)

    def forward(params: PyTree, batch: PyTree) -> jax.Array:
        x = params["tokens"][batch["tokens"]] + params["positions"][None]
        if not config.causal:
            x = _norm(params["norm"], x + params["types"][batch["types"]])
        for index, layer_params in enumerate(params["layers"]):
            x = _layer(config, layer_params, x, index)
        if config.causal:
            x = _norm(params["norm"], x)
        else:
            x = _norm(params["head_norm"], jax.nn.gelu(_dense(params["head"], x), approximate=False))
        return x @ params["tokens"].T

    ids = jax.ShapeDtypeStruct((config.batch_size, config.seq_len), jnp.int32)
    batch = {"tokens": ids} | ({} if config.causal else {"types": ids})
    return forward, (param_shapes(config), batch)
