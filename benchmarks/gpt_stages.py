"""A GPT as a training step in stages: Alpa's 2.6B model, for ``alpa-lite verify`` and ``python -m benchmarks.pipeline_memory``.

Layers end with ``al.layer_boundary`` and are recomputed in the backward pass; float16 in float32 master weights with Adam, as
in Alpa's table of GPT models (32 layers, width 2560, 32 heads, 1024 tokens, vocabulary 51,200). V100s have no bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import alpa_lite as al

COMPUTE = jnp.float16
SEQ_LEN, WIDTH, NUM_HEADS, VOCAB = 1024, 2560, 32, 51_200
TX = optax.adam(1e-4)


def norm(w: Any, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * w["scale"] + w["bias"]).astype(COMPUTE)


def dense(w: Any, x: jax.Array) -> jax.Array:
    return x @ w["kernel"].astype(COMPUTE) + w["bias"].astype(COMPUTE)


@jax.checkpoint
def layer(w: Any, x: jax.Array) -> jax.Array:
    """Causal attention and MLP, both on what the norm made of x (b, s, width)."""
    batch, length, width = x.shape
    y = norm(w["attention_norm"], x)
    q, k, v = (dense(w[name], y).reshape(batch, length, NUM_HEADS, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * (width // NUM_HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.finfo(COMPUTE).min)
    x = x + dense(w["out"], jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v).reshape(x.shape))
    return x + dense(w["down"], jax.nn.gelu(dense(w["up"], norm(w["mlp_norm"], x))))


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = params["embed"].astype(COMPUTE)[batch["inputs"]] + params["positions"].astype(COMPUTE)
    for number, w in enumerate(params["layers"], 1):
        x = layer(w, x)
        x = al.layer_boundary(x) if number < len(params["layers"]) else x
    logits = (norm(params["norm"], x) @ params["embed"].astype(COMPUTE).T).astype(jnp.float32)
    target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == batch["targets"][..., None]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(target, logits, 0.0), axis=-1))


def train_step(state: Any, batch: Any) -> Any:
    params, optimizer = state
    loss, grads = al.value_and_grad(loss_fn)(params, batch)
    updates, optimizer = TX.update(grads, optimizer, params)
    return (optax.apply_updates(params, updates), optimizer), loss


def arguments(
    num_layers: int = 32, *, batch_size: int = 64, width: int = WIDTH, seq_len: int = SEQ_LEN, vocab: int = VOCAB
) -> Any:
    """State and batch as ``jax.ShapeDtypeStruct``."""

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def norm_shapes() -> Any:
        return {"scale": of(width), "bias": of(width)}

    sizes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    sizes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    one = {name: {"kernel": of(*shape), "bias": of(shape[1])} for name, shape in sizes.items()}
    one |= {"attention_norm": norm_shapes(), "mlp_norm": norm_shapes()}
    params = {
        "embed": of(vocab, width),
        "positions": of(seq_len, width),
        "norm": norm_shapes(),
        "layers": [one] * num_layers,
    }
    tokens = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32)
    return (params, jax.eval_shape(TX.init, params)), {"inputs": tokens, "targets": tokens}


def gpt_2_6b() -> al.PlanTarget:
    """Four stages on 8 V100s: ``alpa-lite verify benchmarks/gpt_stages.py:gpt_2_6b --cluster 1x8:v100-sxm2-16gb``."""
    options = al.PlanOptions(num_stages=4, num_microbatches=8)
    return al.PlanTarget(al.parallelize(train_step, options=options), arguments(), donate_argnums=(0,))
