"""The examples' GPT and Llama as models that a serving engine runs: with a cache of keys and values, on the very parameters that
their training steps make.

A model has ``init_cache(slots, max_length)``, ``prefill(params, cache, tokens, lengths)`` and ``decode(params, cache, tokens)``;
see ``al.serve.Model``. A cache holds for every slot the keys and values of ``max_length`` tokens, and how many there are. What
lies behind a slot's length is masked.

Dimension letters: b slot, s token that asks, t token in the cache, h head, k key-value head, g query head of one group, d width
of a head.

Matmuls read a tensor whose batch dims come first. So heads lie before tokens in the cache, and scores keep the order of their
query's dims: with tokens before heads, XLA copies all of the cache twice with every token.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

if __package__ in (None, ""):  # run as a script: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flax.linen as nn
import jax
import jax.numpy as jnp

from examples import gpt_linen, llama_nnx
from examples.corpus import VOCAB

PyTree = Any
Cache = dict[str, Any]


def empty_cache(layers: range, shape: tuple[int, ...], dtype: Any) -> Cache:
    """Keys and values of that shape, (b, heads, t, d), for every layer."""
    blocks = {f"block{index}": {name: jnp.zeros(shape, dtype) for name in ("key", "value")} for index in layers}
    return {"length": jnp.zeros((shape[0],), jnp.int32), **blocks}


def write_tokens(cache: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """``cache`` (b, heads, t, d) with one token (b, heads, d) of every slot written behind its last one."""

    def write(row: jax.Array, token: jax.Array, length: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(row, token, length, axis=1)

    return jax.vmap(write)(cache, new.astype(cache.dtype), lengths)


def write_prompt(cache: jax.Array, new: jax.Array) -> jax.Array:
    """``cache`` (b, heads, t, d) with the prompts (b, heads, s, d) of all slots at its beginning."""
    return jax.lax.dynamic_update_slice(cache, new.astype(cache.dtype), (0,) * cache.ndim)


def last_tokens(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Of (b, s, ...) what belongs to the last token of every prompt: (b, ...)."""
    return jax.vmap(lambda row, length: jax.lax.dynamic_index_in_dim(row, length - 1, axis=0, keepdims=False))(
        x, lengths
    )


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last dim of what the mask admits."""
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))


@dataclass(frozen=True)
class Cut(ABC):
    """A model of blocks ``first`` to ``last`` - 1 of all; a whole one has them all."""

    config: Any
    dtype: Any = jnp.float32
    vocab_size: int = VOCAB
    first: int = 0
    last: int | None = None

    def split(self, num_stages: int) -> list[tuple[Self, Callable[[PyTree], PyTree]]]:
        """Parts of as many blocks each, and for each what picks its parameters."""
        cuts = [index * self.config.num_layers // num_stages for index in range(num_stages + 1)]
        parts = [replace(self, first=first, last=last) for first, last in pairwise(cuts)]
        return [(part, part._picked) for part in parts]

    @abstractmethod
    def _picked(self, params: PyTree) -> PyTree:
        """Of the whole model's parameters those of these blocks."""

    @property
    def _is_first(self) -> bool:
        return self.first == 0

    @property
    def _is_last(self) -> bool:
        return self.last in (None, self.config.num_layers)

    def _indices(self) -> range:
        return range(self.first, self.config.num_layers if self.last is None else self.last)


@dataclass(frozen=True)
class GPT(Cut):
    """``examples/gpt_linen.py`` with a cache; ``params`` are those of its training state (``state.params``).

    Positions are learned: a slot holds at most ``config.seq_len`` tokens. A part of it (``split``) has blocks ``first`` to
    ``last`` - 1 alone, and takes hidden values in place of tokens where it is not the first part.
    """

    config: gpt_linen.Config

    @classmethod
    def of(cls, size: str = "small") -> GPT:
        return cls(gpt_linen.CONFIGS[size])

    def _picked(self, params: PyTree) -> PyTree:
        names = [name for name, _ in self._blocks(params)]
        names += ["tokens", "positions"] if self._is_first else []
        names += ["LayerNorm_0", "head"] if self._is_last else []
        return {name: params[name] for name in names}

    def init_params(self, key: jax.Array) -> PyTree:
        """Parameters as training begins with them."""
        module = gpt_linen.GPT(self.config, self.dtype)
        return module.init(key, jnp.zeros((1, self.config.seq_len), jnp.int32))["params"]

    def logits(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        """The training model's own logits (b, s, vocabulary), without a cache: what serving is compared with."""
        padded = jnp.pad(tokens, ((0, 0), (0, self.config.seq_len - tokens.shape[1])))
        return gpt_linen.GPT(self.config, self.dtype).apply({"params": params}, padded)[:, : tokens.shape[1]]

    def init_cache(self, slots: int, max_length: int) -> Cache:
        """No tokens in any slot."""
        assert max_length <= self.config.seq_len, f"positions are learned up to {self.config.seq_len}"
        heads = self.config.num_heads
        return empty_cache(self._indices(), (slots, heads, max_length, self.config.width // heads), self.dtype)

    def prefill(self, params: PyTree, cache: Cache, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Cache]:
        """Prompts (b, s), of which ``lengths`` tokens count, into an empty cache -> logits (b, vocabulary) of what follows."""
        size = tokens.shape[1]
        causal = jnp.tril(jnp.ones((size, size), dtype=bool))[None, None]
        x = tokens
        if self._is_first:
            x = self._embedded(params, tokens) + params["positions"][:size].astype(self.dtype)[None]
        new = {"length": lengths.astype(jnp.int32)}
        for name, block in self._blocks(params):
            q, k, v = self._projected(block, x)
            new[name] = {"key": write_prompt(cache[name]["key"], k), "value": write_prompt(cache[name]["value"], v)}
            x = self._mixed(block, x, self._attended(q, k, v, causal))
        return self._head(params, last_tokens(x, lengths)) if self._is_last else x, new

    def decode(self, params: PyTree, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        """One more token (b,) for every slot -> logits (b, vocabulary) of what follows."""
        lengths = cache["length"]
        max_length = cache[f"block{self.first}"]["key"].shape[2]
        x = tokens
        if self._is_first:
            positions = jnp.take(params["positions"].astype(self.dtype), lengths, axis=0, mode="clip")
            x = (self._embedded(params, tokens) + positions)[:, None]
        seen = (jnp.arange(max_length)[None] <= lengths[:, None])[:, None, None]
        new = {"length": jnp.minimum(lengths + 1, max_length)}
        for name, block in self._blocks(params):
            q, k, v = self._projected(block, x)
            keys = write_tokens(cache[name]["key"], k[:, :, 0], lengths)
            values = write_tokens(cache[name]["value"], v[:, :, 0], lengths)
            new[name] = {"key": keys, "value": values}
            x = self._mixed(block, x, self._attended(q, keys, values, seen))
        return self._head(params, x[:, 0]) if self._is_last else x, new

    def _embedded(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        return params["tokens"]["embedding"].astype(self.dtype)[tokens]

    def _blocks(self, params: PyTree) -> list[tuple[str, PyTree]]:
        return [(f"block{index}", params[f"block{index}"]) for index in self._indices()]

    def _dense(self, params: PyTree, x: jax.Array) -> jax.Array:
        y = x @ params["kernel"].astype(self.dtype)
        return y + params["bias"].astype(self.dtype) if "bias" in params else y

    def _norm(self, params: PyTree, x: jax.Array) -> jax.Array:
        return nn.LayerNorm(dtype=self.dtype).apply({"params": params}, x)

    def _projected(self, block: PyTree, x: jax.Array) -> tuple[jax.Array, ...]:
        normed = self._norm(block["LayerNorm_0"], x)
        shape = (*x.shape[:2], self.config.num_heads, -1)
        q, k, v = (self._dense(block["attention"][name], normed).reshape(shape) for name in ("query", "key", "value"))
        return q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        """Queries (b, s, h, d) on keys and values (b, h, t, d); the mask is (b or 1, 1, s or 1, t)."""
        scores = jnp.einsum("bshd,bhtd->bhst", q, k) / jnp.sqrt(jnp.asarray(q.shape[-1], q.dtype))
        return jnp.einsum("bhst,bhtd->bshd", masked_softmax(scores, mask), v)

    def _mixed(self, block: PyTree, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = x + self._dense(block["attention"]["out"], attended.reshape(x.shape))
        hidden = nn.gelu(self._dense(block["up"], self._norm(block["LayerNorm_1"], x)))
        return x + self._dense(block["down"], hidden)

    def _head(self, params: PyTree, x: jax.Array) -> jax.Array:
        return self._dense(params["head"], self._norm(params["LayerNorm_0"], x)).astype(jnp.float32)


def rotate_at(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions for x of shape (b, s, heads, d), as ``llama_nnx.rotate``, with ``positions`` (b or 1, s)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    real, imaginary = x[..., :half], x[..., half:]
    return jnp.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)


@dataclass(frozen=True)
class Llama(Cut):
    """``examples/llama_nnx.py`` with a cache; ``params`` are those of its training state (``state["params"]``)."""

    config: llama_nnx.Config

    @classmethod
    def of(cls, size: str = "small") -> Llama:
        return cls(llama_nnx.CONFIGS[size])

    @cached_property
    def _graphdef(self) -> Any:
        from flax import nnx

        module = nnx.eval_shape(lambda: llama_nnx.Llama(self.config, self.dtype, rngs=nnx.Rngs(params=0)))
        return nnx.graphdef(module)

    def init_params(self, key: jax.Array) -> PyTree:
        """Parameters as training begins with them."""
        from flax import nnx

        module = llama_nnx.Llama(self.config, self.dtype, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def logits(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        """The training model's own logits (b, s, vocabulary), without a cache: what serving is compared with."""
        from flax import nnx

        return nnx.merge(self._graphdef, params)(tokens)

    def init_cache(self, slots: int, max_length: int) -> Cache:
        """No tokens in any slot."""
        shape = slots, self.config.num_kv_heads, max_length, self.config.head_width
        return empty_cache(self._indices(), shape, self.dtype)

    def prefill(self, params: PyTree, cache: Cache, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Cache]:
        """Prompts (b, s), of which ``lengths`` tokens count, into an empty cache -> logits (b, vocabulary) of what follows."""
        size = tokens.shape[1]
        causal = jnp.tril(jnp.ones((size, size), dtype=bool))[None, None, :, None]
        x, new = self._embedded(params, tokens) if self._is_first else tokens, {"length": lengths.astype(jnp.int32)}
        for name, block in self._blocks(params):
            x, new[name] = self._read(block, cache[name], x, causal)
        return self._head(params, last_tokens(x, lengths)) if self._is_last else x, new

    def decode(self, params: PyTree, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        """One more token (b,) for every slot -> logits (b, vocabulary) of what follows."""
        lengths, max_length = cache["length"], cache[f"block{self.first}"]["key"].shape[2]
        seen = (jnp.arange(max_length)[None] <= lengths[:, None])[:, None, None, None]
        x = self._embedded(params, tokens)[:, None] if self._is_first else tokens
        new = {"length": jnp.minimum(lengths + 1, max_length)}
        for name, block in self._blocks(params):
            x, new[name] = self._extended(block, cache[name], x, lengths, seen)
        return self._head(params, x[:, 0]) if self._is_last else x, new

    # Blocks are functions under jit so that JAX traces one of them and not all.
    @partial(jax.jit, static_argnums=0)
    def _read(self, block: PyTree, cache: Cache, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, Cache]:
        """A block on prompts (b, s, width)."""
        q, k, v = self._projected(block, x, jnp.arange(x.shape[1])[None])
        new = {"key": write_prompt(cache["key"], k), "value": write_prompt(cache["value"], v)}
        return self._mixed(block, x, self._attended(q, k, v, mask)), new

    @partial(jax.jit, static_argnums=0)
    def _extended(
        self, block: PyTree, cache: Cache, x: jax.Array, lengths: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """A block on one token (b, 1, width) of every slot."""
        q, k, v = self._projected(block, x, lengths[:, None])
        new = {
            "key": write_tokens(cache["key"], k[:, :, 0], lengths),
            "value": write_tokens(cache["value"], v[:, :, 0], lengths),
        }
        return self._mixed(block, x, self._attended(q, new["key"], new["value"], mask)), new

    def _blocks(self, params: PyTree) -> list[tuple[str, PyTree]]:
        """Training scans over layers. Here that would copy the cache, which goes through the scan whole, in every step."""
        count = len(self._indices())
        row = partial(jax.lax.index_in_dim, axis=0, keepdims=False)
        rows = [jax.tree.map(lambda x, index=index: row(x, index), params["blocks"]) for index in range(count)]
        return [(f"block{index}", block) for index, block in zip(self._indices(), rows, strict=True)]

    def _picked(self, params: PyTree) -> PyTree:
        """The blocks' rows are slices of arrays: parameters in a checkpoint cannot be picked so."""
        rows = slice(self._indices().start, self._indices().stop)
        names = (["embed"] if self._is_first else []) + (["norm", "head"] if self._is_last else [])
        return {"blocks": jax.tree.map(lambda x: x[rows], params["blocks"]), **{name: params[name] for name in names}}

    def _embedded(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        return params["embed"]["embedding"].astype(self.dtype)[tokens]

    def _dense(self, params: PyTree, x: jax.Array) -> jax.Array:
        return x @ params["kernel"].astype(self.dtype)

    def _norm(self, params: PyTree, x: jax.Array) -> jax.Array:
        return nn.RMSNorm(dtype=self.dtype).apply({"params": params}, x)

    def _projected(self, block: PyTree, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        normed, attention = self._norm(block["attention_norm"], x), block["attention"]
        q, k, v = (
            self._dense(attention[name], normed).reshape(*x.shape[:2], -1, self.config.head_width)
            for name in ("query", "key", "value")
        )
        return rotate_at(q, positions), jnp.swapaxes(rotate_at(k, positions), 1, 2), jnp.swapaxes(v, 1, 2)

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        """Queries (b, s, heads, d) on keys and values (b, k, t, d); the mask is (b or 1, 1, s or 1, 1, t)."""
        q = q.reshape(*q.shape[:2], self.config.num_kv_heads, -1, self.config.head_width)
        scores = jnp.einsum("bskgd,bktd->bksgt", q, k) / jnp.sqrt(jnp.asarray(self.config.head_width, q.dtype))
        return jnp.einsum("bksgt,bktd->bskgd", masked_softmax(scores, mask), v)

    def _mixed(self, block: PyTree, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = x + self._dense(block["attention"]["out"], attended.reshape(*x.shape[:2], -1))
        normed = self._norm(block["mlp_norm"], x)
        return x + self._dense(
            block["down"], jax.nn.silu(self._dense(block["gate"], normed)) * self._dense(block["up"], normed)
        )

    def _head(self, params: PyTree, x: jax.Array) -> jax.Array:
        return self._dense(params["head"], self._norm(params["norm"], x)).astype(jnp.float32)


MODELS = {"gpt": GPT.of, "llama": Llama.of}
