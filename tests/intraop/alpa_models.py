"""The models of Alpa's own tests as plain JAX functions: MLP and post-LN BERT layers, mean squared error, Adam.

Only gradients and the update are computed, as in Alpa's tests: a loss that nobody reads costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Shape = jax.ShapeDtypeStruct


def _f32(*shape: int) -> Shape:
    return Shape(shape, jnp.float32)


def adam_step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """``state, *batch -> state`` with Adam; the state is (params, (count, mu, nu))."""

    def step(state: Any, *batch: Any) -> Any:
        params, (count, mu, nu) = state
        grads = jax.grad(loss)(params, *batch)
        count = count + 1
        t = count.astype(jnp.float32)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
        nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, nu, grads)

        def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - 1e-3 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

        return jax.tree.map(update, params, mu, nu), (count, mu, nu)

    return step


def adam_state(params: Any) -> Any:
    return params, (Shape((), jnp.int32), params, params)


def mlp(hidden: int, batch: int, *, layers: int = 6, bias: bool = True) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``layers`` dense layers of width ``hidden``, relu between them, the last one linear."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for i in range(layers):
            layer = params[f"Dense_{i}"]
            x = x @ layer["kernel"]
            if bias:
                x = x + layer["bias"]
            if i + 1 < layers:
                x = jnp.maximum(x, 0.0)
        return jnp.mean((x - y) ** 2)

    dense = {"kernel": _f32(hidden, hidden)} | ({"bias": _f32(hidden)} if bias else {})
    params = {f"Dense_{i}": dense for i in range(layers)}
    return adam_step(loss), (adam_state(params), _f32(batch, hidden), _f32(batch, hidden))


def bert(
    hidden: int, batch: int, seq: int, *, layers: int = 2, heads: int = 8, dropout: float = 0.0, remat: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``layers`` post-LN transformer layers with a fused qkv projection."""

    def layer(p: Any, x: jax.Array, mask: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 3)
        x = _norm(p["norm_1"], x + _drop(dropout, keys[1], _attention(p, x, mask, heads, dropout, keys[0])))
        inner = jax.nn.gelu(_dense(p["mlp_in"], x))
        return _norm(p["norm_2"], x + _drop(dropout, keys[2], _dense(p["mlp_out"], inner)))

    apply = jax.checkpoint(layer) if remat else layer

    def loss(params: Any, x: jax.Array, mask: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        for i in range(layers):
            x = apply(params[f"layer_{i}"], x, mask, jax.random.fold_in(key, i))
        return jnp.mean((x - y) ** 2)

    one = {
        "qkv": {"kernel": _f32(hidden, 3 * hidden), "bias": _f32(3 * hidden)},
        "attn_out": {"kernel": _f32(hidden, hidden), "bias": _f32(hidden)},
        "norm_1": {"scale": _f32(hidden), "bias": _f32(hidden)},
        "mlp_in": {"kernel": _f32(hidden, 4 * hidden), "bias": _f32(4 * hidden)},
        "mlp_out": {"kernel": _f32(4 * hidden, hidden), "bias": _f32(hidden)},
        "norm_2": {"scale": _f32(hidden), "bias": _f32(hidden)},
    }
    params = {f"layer_{i}": one for i in range(layers)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (adam_state(params), _f32(batch, seq, hidden), _f32(batch, seq), _f32(batch, seq, hidden), key)
    return adam_step(loss), args


def _dense(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["kernel"] + p["bias"]


def _norm(p: Any, x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-12) * p["scale"] + p["bias"]


def _drop(rate: float, key: jax.Array, x: jax.Array) -> jax.Array:
    if not rate:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def _attention(p: Any, x: jax.Array, mask: jax.Array, heads: int, rate: float, key: jax.Array) -> jax.Array:
    batch, seq, hidden = x.shape
    # Head-major, so that columns of the fused kernel are whole heads of q, k and v.
    qkv = _dense(p["qkv"], x).reshape(batch, seq, heads, 3, hidden // heads)
    q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / (hidden // heads) ** 0.5
    scores = scores + (1 - mask[:, None, None, :]) * -1e9
    scores = scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores)
    weights = _drop(rate, key, weights / jnp.sum(weights, axis=-1, keepdims=True))
    return _dense(p["attn_out"], jnp.einsum("bhst,bthd->bshd", weights, v).reshape(batch, seq, hidden))
