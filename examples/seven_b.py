"""A transformer of 7 billion parameters, all in bfloat16, with abstract arguments: for plans, not for running here.

The shapes are Llama-2 7B's (32 layers, width 4096, hidden 11008, vocabulary 32000). Layers are one ``lax.scan`` over stacked
weights, each recomputed in the backward pass, so that tracing takes a moment. One step of SGD.

``step(params, tokens) -> (params, loss)``; ``ARGS`` are its arguments as ``jax.ShapeDtypeStruct``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LAYERS, WIDTH, HIDDEN, VOCAB, HEADS = 32, 4096, 11008, 32000, 32
BATCH, TOKENS = 8, 512
LEARNING_RATE = 1e-3
Params = dict[str, Any]


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


PARAMS: Params = {
    "embed": _shape(VOCAB, WIDTH),
    "layers": {
        "query": _shape(LAYERS, WIDTH, WIDTH),
        "key": _shape(LAYERS, WIDTH, WIDTH),
        "value": _shape(LAYERS, WIDTH, WIDTH),
        "out": _shape(LAYERS, WIDTH, WIDTH),
        "gate": _shape(LAYERS, WIDTH, HIDDEN),
        "up": _shape(LAYERS, WIDTH, HIDDEN),
        "down": _shape(LAYERS, HIDDEN, WIDTH),
    },
    "head": _shape(WIDTH, VOCAB),
}
ARGS = (PARAMS, jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32))


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _layer(x: jax.Array, w: Params) -> jax.Array:
    def heads(y: jax.Array) -> jax.Array:
        return y.reshape(*y.shape[:2], HEADS, WIDTH // HEADS)

    y = _norm(x)
    q, k, v = heads(y @ w["query"]), heads(y @ w["key"]), heads(y @ w["value"])
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * (WIDTH // HEADS) ** -0.5
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    x = x + jnp.einsum("bhst,bthd->bshd", weights, v).reshape(x.shape) @ w["out"]
    y = _norm(x)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (_layer(x, w), None)), x, params["layers"])
    logits = (_norm(x) @ params["head"]).astype(jnp.float32)
    here = jax.nn.one_hot(tokens, VOCAB, dtype=logits.dtype)
    return -(jax.nn.log_softmax(logits) * here).sum(-1).mean()


def step(params: Params, tokens: jax.Array) -> tuple[Params, jax.Array]:
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, params, grads), value
