"""Steps with dims that divide over nothing, for the tests of padding: (function, arguments) by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _rng().normal(size=shape).astype(np.float32)


def language_model(
    vocabulary: int = 10, width: int = 8, batch: int = 8, length: int = 6
) -> tuple[Any, tuple[Any, ...]]:
    """Tied embedding, softmax over the vocabulary, a momentum step: GPT-2's uneven dim in small."""

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = jnp.tanh(params["wte"][tokens] @ params["w"])
        logits = hidden @ params["wte"].T + params["bias"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return -jnp.mean(picked)

    def step(state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        params, momentum = state
        value, grads = jax.value_and_grad(loss)(params, tokens, labels)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        return (params, momentum), value, grads

    params = {
        "wte": _normal(vocabulary, width),
        "w": _normal(width, width) * 0.3,
        "bias": _normal(vocabulary) * 0.1,
    }
    tokens = _rng().integers(0, vocabulary, (2, batch, length)).astype(np.int32)
    return step, ((params, jax.tree.map(np.zeros_like, params)), tokens[0], tokens[1])


def losses() -> tuple[Any, tuple[Any, ...]]:
    """Other ways to a loss: logsumexp, one-hot, argmax, label smoothing, a soft cap."""

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        one_hot = jax.nn.one_hot(labels, logits.shape[-1])
        capped = 30.0 * jnp.tanh(logits / 30.0)
        smooth = -jnp.mean(jax.nn.log_softmax(capped) * (0.9 * one_hot + 0.1 / logits.shape[-1]))
        entropy = -jnp.mean(jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1))
        right = jnp.mean(jnp.argmax(logits, -1) == labels)
        z = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
        return smooth + 0.1 * entropy + right + z + jnp.mean(jnp.exp(logits)) + jnp.mean(logits > 0.5)

    return jax.value_and_grad(loss), (_normal(6, 10), np.arange(6, dtype=np.int32))


def reductions() -> tuple[Any, tuple[Any, ...]]:
    """Reductions of tensors whose padding is not neutral."""

    def step(x: jax.Array, n: jax.Array) -> Any:
        y = jnp.exp(x) + 3.0
        centred = y - y.mean(0)
        return (
            (-y).max(0),
            y.min(0),
            y.sum(),
            centred.var(1),
            jnp.cumsum(y, 1).sum(0),
            (n + 5).max(),
            (n - 5).min(0),
            (n + 1).sum(),
            jnp.sqrt(y.sum(0)) / y.sum(0).min(),
            jnp.linalg.norm(1.0 / y),
            jnp.sort(y, 0),
            y[::-1],
        )

    return step, (_normal(10, 6), _rng().integers(-9, 9, (10, 3)).astype(np.int32))


def hazards() -> tuple[Any, tuple[Any, ...]]:
    """Paddings that would be NaN or meet in corners: guarded quotients, reductions over two padded dims, overflow."""

    def step(x: jax.Array, y: jax.Array) -> Any:
        guarded = jnp.where(x > 5.0, 1.0, x) / jnp.where(y > 5.0, 1.0, y)
        two = jnp.exp(x[:, :, None] + y[:, None, :])
        scaled = x * (1e30 * (jnp.arange(10.0) + 1.0)[:, None]) * 1e8
        return (
            guarded.sum(),
            (x / y).sum(0),
            two.max((1, 2)),
            jax.nn.logsumexp(-two, axis=(1, 2)),
            jax.nn.softmax(jnp.log(two), axis=1).sum((0, 2)),
            (two.max(1) * x).sum(1),
            jnp.log(x.sum(1, keepdims=True) ** 2 + x * x).sum(),
            jnp.where(jnp.isfinite(scaled), 0.0, x).sum(),
            (two.min(0) + two.sum(0)).astype(jnp.int32).sum(),
            jnp.prod(jnp.stack([x.sum(1), y.sum(1)]), axis=0),
        )

    return step, (_normal(10, 6) + 3.0, _normal(10, 6)[::-1] + 4.0)


def contractions() -> tuple[Any, tuple[Any, ...]]:
    """Products over a padded dim, with neither side zero there, and both dims of a square padded."""

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        c = jnp.exp(a) @ (b + 1.0)
        gram = jnp.einsum("ij,kj->ik", c, c)
        return jnp.log(gram * gram + 1.0).sum() + jnp.einsum("ii->", gram) + (c.T @ jnp.cos(c)).max()

    return jax.value_and_grad(loss, argnums=(0, 1)), (_normal(6, 10), _normal(10, 6))


def attention() -> tuple[Any, tuple[Any, ...]]:
    """Uneven batch, length and heads; a causal mask."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, w[i]) for i in range(3))
        scores = jnp.einsum("bthe,bshe->bhts", q, k)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        out = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), v)
        return jnp.mean((out.reshape(*x.shape[:2], -1) @ w[3] - x) ** 2)

    return jax.value_and_grad(loss), ((*(_normal(8, 3, 4) for _ in range(3)), _normal(12, 8)), _normal(6, 10, 8))


def indexing() -> tuple[Any, tuple[Any, ...]]:
    """Indices out of bounds are filled, clamped or dropped at the true size."""

    def step(table: jax.Array, ids: jax.Array, rows: jax.Array) -> Any:
        filled = jnp.take(table, ids, axis=0)
        clamped = jnp.take(table, ids, axis=0, mode="clip")
        dropped = jnp.zeros_like(table).at[ids].add(rows, mode="drop")
        held = jnp.zeros_like(table).at[ids].add(rows, mode="clip")
        replaced = (table + 1.0).at[jnp.arange(4) * 3].set(rows[:4], mode="drop")
        return filled, clamped, dropped, dropped.sum(), held, replaced, replaced.sum(0), table[-1], table[2:5]

    ids = np.array([0, 9, 10, 11, 12, 3, 40], np.int32)
    return step, (_normal(10, 4), ids, _normal(7, 4))


def bodies() -> tuple[Any, tuple[Any, ...]]:
    """A scan, a loop and a branch over uneven dims; a checkpoint."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, wi: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jax.checkpoint(lambda h, wi: jax.nn.softmax(h @ wi + 1.0))(h, wi)
            return h, h.sum(-1)

        h, sums = jax.lax.scan(layer, x, w)
        h = jax.lax.cond(sums.sum() > 0, lambda h: jnp.exp(h) @ w[0], lambda h: h, h)
        return jnp.sum(h**2) + sums.mean()

    return jax.value_and_grad(loss), (_normal(3, 10, 10), _normal(6, 10))


def convolution() -> tuple[Any, tuple[Any, ...]]:
    """Uneven batch and channels."""

    def loss(k: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(jnp.exp(x), k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = (y - y.mean((0, 1, 2))) / jnp.sqrt(y.var((0, 1, 2)) + 1e-3)
        return jnp.mean(jax.nn.relu(y) ** 2)

    return jax.value_and_grad(loss), (_normal(3, 3, 6, 10), _normal(6, 4, 4, 6))


def adam() -> tuple[Any, tuple[Any, ...]]:
    """AdamW behind clipping by the global norm, dropout on an uneven batch."""
    optimiser = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))

    def loss(w: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        h = jax.nn.gelu(x @ w["a"])
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h * 2.0, 0.0)
        return jnp.mean(jax.nn.logsumexp(h @ w["b"], -1))

    def step(state: Any, x: jax.Array, key: jax.Array) -> Any:
        params, moments = state
        grads = jax.grad(loss)(params, x, key)
        updates, moments = optimiser.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    params = {"a": jnp.asarray(_normal(8, 10)), "b": jnp.asarray(_normal(10, 6))}
    return step, ((params, optimiser.init(params)), _normal(6, 8), jax.random.key(0))


STEPS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    made.__name__: made
    for made in (
        language_model,
        losses,
        reductions,
        hazards,
        contractions,
        attention,
        indexing,
        bodies,
        convolution,
        adam,
    )
}
