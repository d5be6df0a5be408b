"""A byte-level LSTM, plain JAX: ``jax.lax.scan`` over time, two layers.

Dimension letters: b batch, s sequence.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax

import alpa_lite as al
from examples.corpus import VOCAB, text_batch
from examples.example import Example, PyTree, make_optimizer, train, use_virtual_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    num_layers: int
    width: int
    seq_len: int
    batch_size: int
    learning_rate: float = 3e-3


CONFIGS = {
    "small": Config(num_layers=2, width=64, seq_len=32, batch_size=16),
    "base": Config(num_layers=2, width=512, seq_len=128, batch_size=64),
}


def lstm_layer(params: PyTree, xs: jax.Array) -> jax.Array:
    """One layer over a sequence xs of shape (s, b, width); returns the hidden states, same shape."""
    projected = jnp.einsum("sbd,dgh->sbgh", xs, params["input"]) + params["bias"]

    def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, memory = carry
        gates = x + jnp.einsum("bd,dgh->bgh", hidden, params["recurrent"])
        write, forget, read = (jax.nn.sigmoid(gates[:, index]) for index in range(3))
        memory = forget * memory + write * jnp.tanh(gates[:, 3])
        hidden = read * jnp.tanh(memory)
        return (hidden, memory), hidden

    start = jnp.zeros(xs.shape[1:], xs.dtype)
    return jax.lax.scan(cell, (start, start), projected)[1]


def make(size: str = "small", dtype: jnp.dtype = jnp.float32, optimizer: str = "adamw") -> Example:
    """The LSTM of one size; ``dtype`` is that of the computation, parameters are float32."""
    config = CONFIGS[size]
    tx = make_optimizer(optimizer, config.learning_rate)

    def init(key: jax.Array) -> PyTree:
        width = config.width
        keys = iter(jax.random.split(key, 2 * config.num_layers + 2))

        def weight(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape) * width**-0.5

        layers = [
            {"input": weight(width, 4, width), "recurrent": weight(width, 4, width), "bias": jnp.zeros((4, width))}
            for _ in range(config.num_layers)
        ]
        params = {"embed": weight(VOCAB, width), "layers": layers, "head": weight(width, VOCAB)}
        return {"params": params, "opt_state": tx.init(params)}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        xs = params["embed"][batch["inputs"].T]
        for layer in params["layers"]:
            xs = lstm_layer(layer, xs)
        logits = jnp.einsum("sbd,dv->bsv", xs, params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def update(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array, PyTree]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss, grads

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        state, loss, _ = update(state, batch)
        return state, {"loss": loss}

    def grads_step(state: PyTree, batch: PyTree) -> tuple[dict[str, jax.Array], PyTree, PyTree]:
        state, loss, grads = update(state, batch)
        return {"loss": loss}, grads, state["params"]

    def batch(seed: int) -> PyTree:
        return text_batch(seed, batch_size=config.batch_size, seq_len=config.seq_len)

    return Example(name="lstm", init=init, train_step=train_step, grads_step=grads_step, batch=batch)


def target() -> al.PlanTarget:
    """For ``alpa-lite plan examples/lstm.py:target``."""
    return make().target()


def main() -> None:
    use_virtual_devices()
    example = make()
    train(al.parallelize(example.train_step, donate_argnums=(0,)), example)


if __name__ == "__main__":
    main()
