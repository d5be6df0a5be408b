"""A byte-level GPT in Flax linen, trained with Optax through Flax's own ``TrainState``.

Dimension letters: b batch, s sequence (query), t sequence (key), h head, d width of a head.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import alpa_lite as al
from examples.corpus import VOCAB, text_batch
from examples.example import Example, PyTree, make_optimizer, train, use_virtual_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    num_layers: int
    width: int
    num_heads: int
    seq_len: int
    batch_size: int
    learning_rate: float = 1e-3


CONFIGS = {
    "small": Config(num_layers=2, width=64, num_heads=8, seq_len=32, batch_size=16),
    "demo": Config(num_layers=4, width=128, num_heads=8, seq_len=64, batch_size=16),
    "base": Config(num_layers=8, width=512, num_heads=8, seq_len=256, batch_size=16, learning_rate=3e-4),
}


class Attention(nn.Module):
    """Causal self-attention."""

    num_heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch_size, seq_len, width = x.shape
        shape = (batch_size, seq_len, self.num_heads, width // self.num_heads)
        q, k, v = (nn.Dense(width, dtype=self.dtype, name=name)(x).reshape(shape) for name in ("query", "key", "value"))
        scores = jnp.einsum("bshd,bthd->bhst", q, k) / jnp.sqrt(jnp.asarray(shape[-1], x.dtype))
        causal = jnp.tril(jnp.ones((seq_len, seq_len), dtype=bool))
        scores = jnp.where(causal[None, None], scores, jnp.finfo(scores.dtype).min)
        attended = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)
        return nn.Dense(width, dtype=self.dtype, name="out")(attended.reshape(x.shape))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and beside a residual."""

    num_heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = x + Attention(self.num_heads, self.dtype, name="attention")(nn.LayerNorm(dtype=self.dtype)(x))
        hidden = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="up")(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + nn.Dense(width, dtype=self.dtype, name="down")(hidden)


class GPT(nn.Module):
    """Tokens (b, s) to logits (b, s, VOCAB)."""

    config: Config
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        x = nn.Embed(VOCAB, config.width, dtype=self.dtype, name="tokens")(tokens)
        positions = self.param("positions", nn.initializers.normal(0.02), (config.seq_len, config.width))
        x = x + positions.astype(self.dtype)[None]
        for index in range(config.num_layers):
            x = Block(config.num_heads, self.dtype, name=f"block{index}")(x)
        return nn.Dense(VOCAB, use_bias=False, dtype=self.dtype, name="head")(nn.LayerNorm(dtype=self.dtype)(x))


def make(size: str = "small", dtype: jnp.dtype = jnp.float32, optimizer: str = "adamw") -> Example:
    """The GPT of one size; parameters are float32, dtype is that of the computation."""
    config = CONFIGS[size]
    model = GPT(config, dtype)
    tx = make_optimizer(optimizer, config.learning_rate)

    def init(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, config.seq_len), jnp.int32))["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        return state.replace(step=jnp.zeros((), jnp.int32))  # Flax starts with a Python int: not an array

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        logits = model.apply({"params": params}, batch["inputs"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads = al.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def grads_step(state: TrainState, batch: PyTree) -> tuple[dict[str, jax.Array], PyTree, PyTree]:
        loss, grads = al.value_and_grad(loss_fn)(state.params, batch)
        return {"loss": loss}, grads, state.apply_gradients(grads=grads).params

    def batch(seed: int) -> PyTree:
        return text_batch(seed, batch_size=config.batch_size, seq_len=config.seq_len)

    return Example(name="gpt_linen", init=init, train_step=train_step, grads_step=grads_step, batch=batch)


def target() -> al.PlanTarget:
    """For ``alpa-lite plan examples/gpt_linen.py:target``."""
    return make().target()


def base() -> al.PlanTarget:
    """The same, large enough to be split."""
    return make("base").target()


def main() -> None:
    use_virtual_devices()
    example = make()
    train(al.parallelize(example.train_step, donate_argnums=(0,)), example)


if __name__ == "__main__":
    main()
