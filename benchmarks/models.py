"""The large models of the benchmarks, as plain JAX training steps on abstract arguments: nothing here allocates.

``MODELS`` names them: GPT-2 124M, GPT 350M and 1.3B (Alpa's shapes: 1024 tokens, vocabulary 51,200; GPT-2's 50,257 is
padded to 50,304, the usual multiple of 128, because only divisible dims are split) and Llama-3 8B (8192 tokens); for stages
also GPT 39B (as in Alpa's table) and Llama-3 405B.

All of them compute in bfloat16 (``published`` in float16) on float32 master parameters with AdamW. Two choices decide the memory:

- *Attention* is written out: two einsums around a softmax in bfloat16, so scores (batch, heads, seq, seq) exist.
  Without recomputation each layer keeps one bfloat16 copy of that shape, the probabilities: for Llama-3 8B, with
  2 sequences and 4 heads per device, 1.07 GB a layer and 34 GB in all.
- *The loss* picks the target's logit by comparing with a counter instead of gathering, so that the vocabulary dim can
  stay split; logits are float32.

Compiled by XLA:GPU for 8x8 H100 (FSDP on x, tensor parallel on y, ``constrain`` set; jaxlib 0.10.2), Llama-3 8B peaks
at 62.6 GB per device without recomputation and 27.6 GB with it.

Layers are unrolled on purpose: planners must cope with thousands of equations. ``remat=True`` puts each layer into
``jax.checkpoint``.

Dimension letters: b batch, s sequence (query), t sequence (key), k key-value head, g query head of one group, d width
of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import alpa_lite as al

PyTree = Any
Constrain = Callable[[jax.Array, str], jax.Array]
LEARNING_RATE = 1e-4
NORM_EPSILON = 1e-5
ROPE_BASE = 500_000.0
INIT_SCALE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes of a decoder-only transformer; ``family`` is "gpt" or "llama", ``compute`` the type that layers compute in.

    ``tied``: whether a GPT's head is its embedding.
    """

    family: str
    num_layers: int
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    seq_len: int
    batch_size: int
    compute: Any = jnp.bfloat16
    tied: bool = True

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step and its abstract arguments.

    Attributes:
        fn: ``fn(state, batch) -> (state, loss)``; ``state`` is ``{"params", "opt_state"}``.
        args: ``(state, batch)`` as pytrees of ``jax.ShapeDtypeStruct``.
        init: ``init(key) -> state`` for the models that fit a device.
    """

    name: str
    fn: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array]]
    args: tuple[PyTree, PyTree]
    init: Callable[[jax.Array], PyTree]

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.args[0]["params"]))


def gpt_config(num_layers: int, width: int, num_heads: int, *, vocab: int = 51_200) -> Config:
    """GPT with 1024 tokens and a batch of 32."""
    return Config(
        family="gpt",
        num_layers=num_layers,
        width=width,
        hidden=4 * width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        vocab=vocab,
        seq_len=1024,
        batch_size=32,
    )


MODELS: dict[str, Config] = {
    "gpt2-124m": gpt_config(12, 768, 12, vocab=50_304),
    "gpt-350m": gpt_config(24, 1024, 16),
    "gpt-1.3b": gpt_config(24, 2048, 32),
    "gpt-39b": replace(gpt_config(48, 8192, 64), batch_size=1024, compute=jnp.float16),  # V100s have no bfloat16
    "llama3-8b": Config(
        family="llama",
        num_layers=32,
        width=4096,
        hidden=14_336,
        num_heads=32,
        num_kv_heads=8,
        vocab=128_256,
        seq_len=8192,
        batch_size=16,
    ),
    "llama3-405b": Config(
        family="llama",
        num_layers=126,
        width=16_384,
        hidden=53_248,
        num_heads=128,
        num_kv_heads=8,
        vocab=128_256,
        seq_len=8192,
        batch_size=2048,
    ),
}


def unconstrained(x: jax.Array, kind: str) -> jax.Array:
    del kind
    return x


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's parameters."""
    width, hidden = config.width, config.hidden
    kv_width = config.num_kv_heads * config.head_width
    if config.family == "llama":
        return {
            "attention_norm": (width,),
            "query": (width, width),
            "key": (width, kv_width),
            "value": (width, kv_width),
            "out": (width, width),
            "mlp_norm": (width,),
            "gate": (width, hidden),
            "up": (width, hidden),
            "down": (hidden, width),
        }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, fan_in, fan_out in (
        ("query", width, width),
        ("key", width, width),
        ("value", width, width),
        ("out", width, width),
        ("up", width, hidden),
        ("down", hidden, width),
    ):
        shapes |= {name: (fan_in, fan_out), f"{name}_bias": (fan_out,)}
    for name in ("attention_norm", "mlp_norm"):
        shapes |= {name: (width,), f"{name}_bias": (width,)}
    return shapes


def param_shapes(config: Config) -> PyTree:
    """The parameters as float32 ``jax.ShapeDtypeStruct``; a GPT ties its head to the embedding if asked, a Llama does not."""
    shapes: PyTree = {
        "embed": (config.vocab, config.width),
        "layers": [layer_shapes(config) for _ in range(config.num_layers)],
        "norm": (config.width,),
    }
    if config.family == "llama" or not config.tied:
        shapes["head"] = (config.width, config.vocab)
    if config.family == "gpt":
        shapes |= {"positions": (config.seq_len, config.width), "norm_bias": (config.width,)}
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )


def dense(params: PyTree, name: str, x: jax.Array) -> jax.Array:
    y = x @ params[name].astype(x.dtype)
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(x.dtype)


def norm(params: PyTree, name: str, x: jax.Array) -> jax.Array:
    """Layer norm where there is a bias, RMS norm otherwise; computed in float32."""
    bias, compute = params.get(f"{name}_bias"), x.dtype
    y = x.astype(jnp.float32)
    if bias is not None:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + NORM_EPSILON) * params[name]
    return (y if bias is None else y + bias).astype(compute)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions for x of shape (b, s, heads, d): the two halves of a head are the parts of complex numbers."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None]
    cos, sin = jnp.cos(angles)[None, :, None].astype(x.dtype), jnp.sin(angles)[None, :, None].astype(x.dtype)
    real, imaginary = x[..., :half], x[..., half:]
    return jnp.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)


def attention(config: Config, params: PyTree, x: jax.Array) -> jax.Array:
    """Causal self-attention; each key-value head serves a group of query heads (of one, for a GPT)."""
    batch_size, seq_len, _ = x.shape
    heads = (batch_size, seq_len, -1, config.head_width)
    q, k, v = (dense(params, name, x).reshape(heads) for name in ("query", "key", "value"))
    if config.family == "llama":
        q, k = rotate(q), rotate(k)
    q = q.reshape(batch_size, seq_len, config.num_kv_heads, -1, config.head_width)
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k) * jnp.asarray(config.head_width**-0.5, x.dtype)
    causal = jnp.tril(jnp.ones((seq_len, seq_len), dtype=bool))
    scores = jnp.where(causal[None, None, None], scores, jnp.finfo(x.dtype).min)
    attended = jnp.einsum("bkgst,btkd->bskgd", jax.nn.softmax(scores), v)
    return dense(params, "out", attended.reshape(x.shape))


def mlp(config: Config, params: PyTree, x: jax.Array) -> jax.Array:
    if config.family == "llama":
        return dense(params, "down", jax.nn.silu(dense(params, "gate", x)) * dense(params, "up", x))
    return dense(params, "down", jax.nn.gelu(dense(params, "up", x)))


def loss_fn(
    config: Config,
    params: PyTree,
    batch: PyTree,
    *,
    remat: bool,
    constrain: Constrain = unconstrained,
    boundary: Callable[[jax.Array], jax.Array] = al.layer_boundary,
) -> jax.Array:
    """Mean cross entropy of the next token; ``boundary`` is called between transformer layers."""
    compute = config.compute

    def layer(params: PyTree, x: jax.Array) -> jax.Array:
        x = constrain(x + attention(config, params, norm(params, "attention_norm", x)), "residual")
        return constrain(x + mlp(config, params, norm(params, "mlp_norm", x)), "residual")

    layer = jax.checkpoint(layer) if remat else layer
    x = constrain(params["embed"].astype(compute)[batch["inputs"]], "residual")
    if config.family == "gpt":
        x = x + params["positions"].astype(compute)[None]
    for index, layer_params in enumerate(params["layers"]):
        x = layer(layer_params, x if index == 0 else boundary(x))
    head = params["head"] if "head" in params else params["embed"].T
    logits = constrain((norm(params, "norm", x) @ head.astype(compute)).astype(jnp.float32), "logits")
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == batch["targets"][..., None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target_logits)


def pipelined(
    config: Config,
    *,
    remat: bool = True,
    constrain: Constrain = unconstrained,
    boundary: Callable[[jax.Array], jax.Array] = al.layer_boundary,
) -> tuple[Callable[..., Any], tuple[PyTree, PyTree]]:
    """(training step, abstract arguments) of a model that is cut in microbatches, and in stages between its layers."""
    tx = optax.adamw(LEARNING_RATE)

    def loss_of(params: PyTree, batch: PyTree) -> jax.Array:
        return loss_fn(config, params, batch, remat=remat, constrain=constrain, boundary=boundary)

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        loss, grads = al.value_and_grad(loss_of)(state["params"], batch)
        return updated(tx, state, grads), loss

    return train_step, abstract_args(config, tx)


def updated(tx: optax.GradientTransformation, state: PyTree, grads: PyTree) -> PyTree:
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def abstract_args(config: Config, tx: optax.GradientTransformation) -> tuple[PyTree, PyTree]:
    """``(state, batch)`` of a training step."""
    shapes = param_shapes(config)
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.seq_len), jnp.int32)
    state = {"params": shapes, "opt_state": jax.eval_shape(tx.init, shapes)}
    return state, {"inputs": tokens, "targets": tokens}


def make(
    name: str,
    *,
    layers: int | None = None,
    remat: bool = False,
    batch_size: int | None = None,
    seq_len: int | None = None,
    constrain: Constrain = unconstrained,
) -> Step:
    """The training step of ``MODELS[name]``, with another depth, batch or length where given.

    ``constrain(x, kind)`` is called on the activations that hand-written layouts annotate: "residual" (b, s, width) and
    "logits" (b, s, vocab). Planners get the step without.
    """
    config = MODELS[name]
    config = replace(
        config,
        num_layers=layers or config.num_layers,
        batch_size=batch_size or config.batch_size,
        seq_len=seq_len or config.seq_len,
    )
    tx = optax.adamw(LEARNING_RATE)
    shapes = param_shapes(config)

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        def loss_of(params: PyTree) -> jax.Array:
            return loss_fn(config, params, batch, remat=remat, constrain=constrain, boundary=lambda x: x)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        return updated(tx, state, grads), loss

    def init(key: jax.Array) -> PyTree:
        leaves, structure = jax.tree.flatten(shapes)
        keys = jax.random.split(key, len(leaves))
        # Vectors are norms' scales and biases: near one, so that nothing is degenerate.
        params = [
            (1.0 if leaf.ndim == 1 else 0.0) + INIT_SCALE * jax.random.normal(subkey, leaf.shape)
            for leaf, subkey in zip(leaves, keys, strict=True)
        ]
        params = jax.tree.unflatten(structure, params)
        return {"params": params, "opt_state": tx.init(params)}

    return Step(name=name, fn=train_step, args=abstract_args(config, tx), init=init)
