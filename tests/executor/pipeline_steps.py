"""A small attention model for tests of pipelines, its layers one by one or scanned, and the step that trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import alpa_lite as al
from tests.trace.cases import floats, ints

NUM_LAYERS, MICROBATCHES = 4, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def block(w: Any, x: Any, mask: Any) -> Any:
    h = jnp.tanh(x @ w["a"])
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", h, h) + mask)
    return x + jnp.einsum("bst,btd->bsd", scores, h) @ w["b"]


def loss_fn(params: Any, batch: Any, ends: Sequence[int] = range(NUM_LAYERS - 1)) -> Any:
    """Tied embedding, a shared mask, every second layer recomputed; boundaries after the layers ``ends``, -1 the embedding."""
    tokens, labels = batch
    x = params["emb"][tokens]
    x = al.layer_boundary(x) if -1 in ends else x
    mask = causal_mask()
    for i, w in enumerate(params["layers"]):
        x = jax.checkpoint(block)(w, x, mask) if i % 2 else block(w, x, mask)
        x = al.layer_boundary(x) if i in ends else x
    return jnp.mean((x @ params["emb"].T - labels) ** 2)


def scanned_loss_fn(params: Any, batch: Any) -> Any:
    """Tied embedding, a mask that every layer reads, every layer recomputed."""
    tokens, labels = batch
    mask = causal_mask()
    body = jax.checkpoint(lambda w, x: block(w, x, mask))
    x, _ = lax.scan(lambda x, w: (body(w, x), None), params["emb"][tokens], params["layers"])
    return jnp.mean((x @ params["emb"].T - labels) ** 2)


def causal_mask() -> Any:
    return jnp.where(jnp.tril(jnp.ones((16, 16))), 0, -1e9)


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Clipping by the global norm, so that the update needs values of all stages."""

    def train_step(state: Any, batch: Any) -> Any:
        params, optimizer = state
        value, grads = al.value_and_grad(loss)(params, batch)
        updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), value

    return train_step


def arguments(*, stacked: bool = False) -> tuple[Any, Any]:
    """State and batch; ``stacked`` for the scanned model."""

    def weights(i: int) -> Any:
        return jnp.asarray(floats(16, 16, seed=i) * 0.3)

    layers: Any = [{"a": weights(i), "b": weights(i + 9)} for i in range(NUM_LAYERS)]
    if stacked:
        layers = jax.tree.map(lambda *rows: jnp.stack(rows), *layers)
    params = {"emb": jnp.asarray(floats(48, 16) * 0.1), "layers": layers}
    batch = jnp.asarray(ints(48, 16, 16)), jnp.asarray(floats(16, 16, 48))
    return (params, OPTIMIZER.init(params)), batch
