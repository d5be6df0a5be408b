"""Training steps of many kinds, small: each written once, for ``al.value_and_grad`` and for a plain loop over microbatches.

Sizes have 24 as a factor where that is possible, so that they divide over 1, 2, 4, 6 and 8 devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import alpa_lite as al
from tests.executor import pipeline_steps

NUM_LAYERS, BATCH, SEQ, WIDTH, VOCAB = 4, 24, 4, 24, 48
KEY = jax.random.key(7)

GradFn = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class Variant:
    """``step(value_and_grad)`` is a step of (state, batch, ...): new state, (gradients, whatever else it returns)."""

    step: Callable[[GradFn], Callable[..., Any]]
    arguments: Callable[[], tuple[Any, ...]]


def loop_value_and_grad(count: int) -> GradFn:
    """``al.value_and_grad`` as a plain loop over every ``count``-th example of the batch, the second argument."""

    def value_and_grad(loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        function = jax.value_and_grad(loss, has_aux=has_aux)

        def looped(params: Any, batch: Any, *rest: Any) -> Any:
            made = []
            for i in range(count):
                others = jax.tree.map(lambda x, i=i: _folded(x, i, count), rest)
                made.append(function(params, jax.tree.map(lambda x, i=i: x[i::count], batch), *others))
            if not has_aux:
                return jax.tree.map(lambda *xs: sum(xs) / count, *made)
            values = [((value, grads), aux) for (value, aux), grads in made]
            (value, grads) = jax.tree.map(lambda *xs: sum(xs) / count, *[v for v, _ in values])
            return (value, jax.tree.map(_joined, *[aux for _, aux in values])), grads

        return looped

    return value_and_grad


def _folded(x: Any, index: int, count: int) -> Any:
    return jax.random.fold_in(x, index) if count > 1 and jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _joined(*parts: Any) -> Any:
    """What users of JAX expect: examples in order, means of floats, sums of counts."""
    if parts[0].ndim:
        return jnp.stack(parts, 1).reshape(-1, *parts[0].shape[1:])
    return sum(parts) / len(parts) if jnp.issubdtype(parts[0].dtype, jnp.floating) else sum(parts)


def normal(i: int, *shape: int, scale: float = 0.2) -> Any:
    return jax.random.normal(jax.random.fold_in(KEY, i), shape) * scale


def descent(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def plain(loss: Callable[..., Any]) -> Callable[[GradFn], Callable[..., Any]]:
    """Gradient descent."""

    def make(value_and_grad: GradFn) -> Callable[..., Any]:
        def step(params: Any, batch: Any) -> Any:
            value, grads = value_and_grad(loss)(params, batch)
            return descent(params, grads), (grads, value)

        return step

    return make


def layered(x: Any, params: Sequence[Any], block: Callable[[Any, Any], Any]) -> Any:
    for i, w in enumerate(params):
        x = block(w, x)
        x = al.layer_boundary(x) if i < len(params) - 1 else x
    return x


def tokens() -> tuple[Any, Any]:
    keys = jax.random.split(KEY)
    return tuple(jax.random.randint(key, (BATCH, SEQ), 0, VOCAB) for key in keys)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def rms(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def attention(w: Any, x: Any) -> Any:
    q, k, v = (x @ w[name] for name in "qkv")
    scores = jnp.einsum("bsd,btd->bst", q, k) + jnp.where(jnp.tril(jnp.ones((SEQ, SEQ))), 0, -1e9)
    return jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), v) @ w["o"]


# -- transformers ---------------------------------------------------------------------------------------------------


def gpt_layer(i: int) -> Any:
    shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    return {name: normal(100 * i + k, *shape) for k, (name, shape) in enumerate(shapes.items())}


def gpt_block(w: Any, x: Any) -> Any:
    x = x + attention(w, rms(x))
    return x + jax.nn.gelu(rms(x) @ w["up"]) @ w["down"]


def gpt_loss(params: Any, batch: Any) -> Any:
    x = params["tokens"][batch[0]] + params["positions"]
    return cross_entropy(layered(x, params["layers"], gpt_block) @ params["head"], batch[1])


def gpt_arguments() -> tuple[Any, ...]:
    params = {"tokens": normal(1, VOCAB, WIDTH), "positions": normal(2, SEQ, WIDTH), "head": normal(3, WIDTH, VOCAB)}
    return {**params, "layers": [gpt_layer(i + 1) for i in range(NUM_LAYERS)]}, tokens()


def llama_loss(params: Any, batch: Any) -> Any:
    def block(x: Any, w: Any) -> Any:
        x = x + attention(w, rms(x))
        h = rms(x)
        return x + (jax.nn.silu(h @ w["up"]) * (h @ w["gate"])) @ w["down"], None

    x, _ = lax.scan(jax.checkpoint(block), params["tokens"][batch[0]], params["layers"])
    return cross_entropy(x @ params["head"], batch[1])


def llama_arguments() -> tuple[Any, ...]:
    layers = [gpt_layer(i + 1) | {"gate": normal(100 * i + 90, WIDTH, 2 * WIDTH)} for i in range(NUM_LAYERS)]
    params = {"tokens": normal(1, VOCAB, WIDTH), "head": normal(3, WIDTH, VOCAB)}
    return {**params, "layers": jax.tree.map(lambda *rows: jnp.stack(rows), *layers)}, tokens()


def moe_loss(params: Any, batch: Any) -> Any:
    """Every token to its best expert, by one-hot products; the loss of balance is per example."""
    balance = []

    def block(w: Any, x: Any) -> Any:
        gates = jax.nn.softmax(rms(x) @ w["router"])
        mask = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1])
        balance.append(jnp.mean(jnp.sum(mask.mean(1) * gates.mean(1), -1)))
        sent = jnp.einsum("bse,bsd->ebsd", mask * gates, rms(x))
        hidden = jax.nn.gelu(jnp.einsum("ebsd,edf->ebsf", sent, w["up"]))
        return x + jnp.einsum("ebsf,efd->bsd", hidden, w["down"])

    x = layered(params["tokens"][batch[0]], params["layers"], block)
    return cross_entropy(x @ params["head"], batch[1]) + 0.01 * sum(balance)


def moe_arguments() -> tuple[Any, ...]:
    experts = 4
    layers = [
        {
            "router": normal(10 * i, WIDTH, experts, scale=1.0),
            "up": normal(10 * i + 1, experts, WIDTH, WIDTH),
            "down": normal(10 * i + 2, experts, WIDTH, WIDTH),
        }
        for i in range(NUM_LAYERS)
    ]
    return {"tokens": normal(91, VOCAB, WIDTH, scale=1.0), "head": normal(92, WIDTH, VOCAB), "layers": layers}, tokens()


# -- a network with batch statistics -------------------------------------------------------------------------------


def resnet_loss(params: Any, batch: Any) -> Any:
    """Residual blocks with batch norm over the microbatch; its statistics come back beside the loss."""
    statistics = []

    def block(w: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, w["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean, variance = jnp.mean(y, (0, 1, 2)), jnp.var(y, (0, 1, 2))
        statistics.append((jnp.mean(mean), jnp.mean(variance)))
        return x + jax.nn.relu((y - mean) * lax.rsqrt(variance + 1e-5) * w["scale"])

    x = layered(batch[0] @ params["stem"], params["layers"], block)
    return cross_entropy(jnp.mean(x, (1, 2)) @ params["head"], batch[1]), statistics


def resnet_step(value_and_grad: GradFn) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        (value, found), grads = value_and_grad(resnet_loss, has_aux=True)(state["params"], batch)
        moved = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["statistics"], found)
        return {"params": descent(state["params"], grads), "statistics": moved}, (grads, value)

    return step


def resnet_arguments() -> tuple[Any, ...]:
    layers = [{"kernel": normal(10 * i, 3, 3, WIDTH, WIDTH), "scale": jnp.ones(WIDTH)} for i in range(NUM_LAYERS)]
    params = {"stem": normal(91, 3, WIDTH, scale=1.0), "head": normal(92, WIDTH, 24), "layers": layers}
    statistics = [(jnp.zeros(()), jnp.ones(()))] * NUM_LAYERS
    batch = normal(93, BATCH, 6, 6, 3, scale=1.0), jax.random.randint(KEY, (BATCH,), 0, 24)
    return {"params": params, "statistics": statistics}, batch


# -- updates, keys and results of other kinds ----------------------------------------------------------------------


def mlp_block(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["a"] + w["bias"]) @ w["b"]


def mlp_loss(params: Any, batch: Any, scale: Any = 1.0) -> Any:
    return jnp.mean((layered(batch[0], params, mlp_block) - batch[1]) ** 2) * scale


def mlp_params() -> Any:
    return [
        {
            "a": normal(10 * i, WIDTH, 2 * WIDTH),
            "bias": normal(10 * i + 1, 2 * WIDTH),
            "b": normal(10 * i + 2, 2 * WIDTH, WIDTH),
        }
        for i in range(NUM_LAYERS)
    ]


def mlp_batch() -> Any:
    return normal(91, BATCH, WIDTH, scale=1.0), normal(92, BATCH, WIDTH, scale=1.0)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9))


def clipped_step(value_and_grad: GradFn) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        params, optimizer = state
        value, grads = value_and_grad(mlp_loss)(params, batch)
        updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), (grads, value)

    return step


def scaled_step(value_and_grad: GradFn) -> Callable[..., Any]:
    """Dynamic loss scaling: where a gradient is not finite nothing is updated and the scale falls."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(mlp_loss)(state["params"], batch, state["scale"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        moved = descent(state["params"], grads)
        params = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state["params"])
        return {"params": params, "scale": state["scale"] * jnp.where(finite, 2.0, 0.5)}, (grads, value)

    return step


def dropout_loss(params: Any, batch: Any, key: Any) -> Any:
    keys = iter(jax.random.split(key, NUM_LAYERS))

    def block(w: Any, x: Any) -> Any:
        y = mlp_block(w, x)
        return jnp.where(jax.random.bernoulli(next(keys), 0.8, y.shape), y / 0.8, 0)

    return jnp.mean((layered(batch[0], params, block) - batch[1]) ** 2)


def dropout_step(value_and_grad: GradFn) -> Callable[..., Any]:
    def step(params: Any, batch: Any, key: Any) -> Any:
        value, grads = value_and_grad(dropout_loss)(params, batch, key)
        return descent(params, grads), (grads, value)

    return step


def aux_loss(params: Any, batch: Any) -> Any:
    """Beside the loss what it predicts for every example, a mean and a count."""
    found = layered(batch[0], params, mlp_block)
    aux = {"found": found, "mean": jnp.mean(jnp.abs(found)), "above": jnp.sum(found > batch[1])}
    return jnp.mean((found - batch[1]) ** 2), aux


def aux_step(value_and_grad: GradFn) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        (value, aux), grads = value_and_grad(aux_loss, has_aux=True)(params, batch)
        return descent(params, grads), (grads, value, aux)

    return step


def tied_arguments() -> tuple[Any, ...]:
    (params, _), (numbers, labels) = pipeline_steps.arguments()
    more = -(-BATCH // len(numbers))
    return params, (jnp.tile(numbers, (more, 1))[:BATCH], jnp.tile(labels, (more, 1, 1))[:BATCH])


VARIANTS = {
    "gpt": Variant(plain(gpt_loss), gpt_arguments),
    "scanned llama": Variant(plain(llama_loss), llama_arguments),
    "moe": Variant(plain(moe_loss), moe_arguments),
    "resnet": Variant(resnet_step, resnet_arguments),
    "tied embedding": Variant(plain(pipeline_steps.loss_fn), tied_arguments),
    "global norm": Variant(clipped_step, lambda: ((mlp_params(), OPTIMIZER.init(mlp_params())), mlp_batch())),
    "loss scaling": Variant(scaled_step, lambda: ({"params": mlp_params(), "scale": jnp.float32(8)}, mlp_batch())),
    "dropout": Variant(dropout_step, lambda: (mlp_params(), mlp_batch(), jax.random.key(1))),
    "aux outputs": Variant(aux_step, lambda: (mlp_params(), mlp_batch())),
}


def numbers(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]
