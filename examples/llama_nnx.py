"""A byte-level Llama-style model in Flax nnx: grouped queries, rotary positions, SwiGLU, RMSNorm, a scan over layers.

Dimension letters: b batch, s sequence (query), t sequence (key), k key-value head, g query head of
one group, d width of a head.
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
from flax import nnx

import alpa_lite as al
from examples.corpus import VOCAB, text_batch
from examples.example import Example, PyTree, make_optimizer, train, use_virtual_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    num_layers: int
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    seq_len: int
    batch_size: int
    learning_rate: float = 1e-3


CONFIGS = {
    "small": Config(
        num_layers=2, width=64, hidden=128, num_heads=16, num_kv_heads=8, head_width=8, seq_len=32, batch_size=16
    ),
    "base": Config(
        num_layers=8, width=512, hidden=1536, num_heads=16, num_kv_heads=8, head_width=32, seq_len=256, batch_size=16
    ),
}


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions for x of shape (b, s, heads, d): the two halves of a head are the parts of complex numbers."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None]
    cos, sin = jnp.cos(angles)[None, :, None].astype(x.dtype), jnp.sin(angles)[None, :, None].astype(x.dtype)
    real, imaginary = x[..., :half], x[..., half:]
    return jnp.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention where each key-value head serves a group of query heads."""

    def __init__(self, config: Config, dtype: jnp.dtype, *, rngs: nnx.Rngs) -> None:
        self.config = config
        query_width = config.num_heads * config.head_width
        kv_width = config.num_kv_heads * config.head_width
        self.query = nnx.Linear(config.width, query_width, use_bias=False, dtype=dtype, rngs=rngs)
        self.key = nnx.Linear(config.width, kv_width, use_bias=False, dtype=dtype, rngs=rngs)
        self.value = nnx.Linear(config.width, kv_width, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(query_width, config.width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        batch_size, seq_len, _ = x.shape
        heads = (batch_size, seq_len, -1, config.head_width)
        q, k = rotate(self.query(x).reshape(heads)), rotate(self.key(x).reshape(heads))
        v = self.value(x).reshape(heads)
        q = q.reshape(batch_size, seq_len, config.num_kv_heads, -1, config.head_width)
        scores = jnp.einsum("bskgd,btkd->bkgst", q, k) / jnp.sqrt(jnp.asarray(config.head_width, x.dtype))
        causal = jnp.tril(jnp.ones((seq_len, seq_len), dtype=bool))
        scores = jnp.where(causal[None, None, None], scores, jnp.finfo(scores.dtype).min)
        attended = jnp.einsum("bkgst,btkd->bskgd", jax.nn.softmax(scores), v)
        return self.out(attended.reshape(batch_size, seq_len, -1))


class Block(nnx.Module):
    """Attention and SwiGLU, each behind an RMS norm and beside a residual."""

    def __init__(self, config: Config, dtype: jnp.dtype, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, dtype, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.gate = nnx.Linear(config.width, config.hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(config.width, config.hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(normed)) * self.up(normed))


class Llama(nnx.Module):
    """Tokens (b, s) to logits (b, s, VOCAB). The blocks' parameters are stacked: their first dim is the layer."""

    def __init__(self, config: Config, dtype: jnp.dtype, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, config.width, dtype=dtype, rngs=rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.blocks = nnx.vmap(lambda key: Block(config, dtype, rngs=nnx.Rngs(params=key)))(keys)
        self.norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCAB, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        layers = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(self.norm(layers(self.embed(tokens), self.blocks)))


def make(size: str = "small", dtype: jnp.dtype = jnp.float32, optimizer: str = "adamw") -> Example:
    """The Llama of one size; parameters are float32, ``dtype`` is that of the computation."""
    config = CONFIGS[size]
    tx = make_optimizer(optimizer, config.learning_rate)
    # The module's structure without its arrays: with it, a plain dict of arrays becomes a module again.
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, dtype, rngs=nnx.Rngs(params=0))))

    def init(key: jax.Array) -> PyTree:
        params = nnx.to_pure_dict(nnx.state(Llama(config, dtype, rngs=nnx.Rngs(params=key)), nnx.Param))
        return {"params": params, "opt_state": tx.init(params)}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        logits = nnx.merge(graphdef, params)(batch["inputs"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def update(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array, PyTree]:
        loss, grads = al.value_and_grad(loss_fn)(state["params"], batch)
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

    return Example(name="llama_nnx", init=init, train_step=train_step, grads_step=grads_step, batch=batch)


def target() -> al.PlanTarget:
    """For ``alpa-lite plan examples/llama_nnx.py:target``."""
    return make().target()


def main() -> None:
    use_virtual_devices()
    example = make()
    train(al.parallelize(example.train_step, donate_argnums=(0,)), example)


if __name__ == "__main__":
    main()
