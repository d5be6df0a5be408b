"""From logits to the next token: greedy, or drawn with temperature, top-k and top-p, each row by its own settings.

A row's draws depend on its key and on how many tokens it has drawn, and on nothing else: not on its slot, nor on what the
other slots do. The same request gives the same tokens however it is batched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.errors import RequestError, user_line
from alpa_lite.numeric import real, whole

_KEY_TYPE = "threefry2x32"
NO_TOKEN = -1
_HOTTEST = 1e6  # all tokens are as likely long before; logits divided by it stay numbers


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: what logits are divided by, up to 1e6; 0 takes the likeliest token (greedy), whatever the others say.
        top_k: only so many of the likeliest tokens are drawn from; 0 = all.
        top_p: only the fewest likeliest tokens whose probabilities reach this sum are drawn from; 1 = all.
        seed: of the draws.
        key: a JAX key instead of a seed; it is read now.

    Raises:
        RequestError: a value is not allowed.

    Example:
        >>> al.serve.Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=7)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    key: Any = field(default=None, compare=False)  # its words are compared
    _words: tuple[int, int] = field(default=(0, 0), init=False, repr=False)

    def __post_init__(self) -> None:
        temperature, top_p = real(self.temperature), real(self.top_p)
        top_k, seed = whole(self.top_k), whole(self.seed)
        for name, good, allowed in (
            ("temperature", 0 <= temperature <= _HOTTEST, f"a number from 0 to {_HOTTEST:g}"),
            ("top_k", top_k is not None and top_k >= 0, "a whole number from 0 (all tokens)"),
            ("top_p", 0 < top_p <= 1, "a number above 0, up to 1 (all tokens)"),
            ("seed", seed is not None and 0 <= seed < 2**32, "a whole number from 0 to 2**32 - 1"),
            ("key", self.key is None or _is_key(self.key), f"a JAX key of type {_KEY_TYPE}, as of jax.random.key(0)"),
        ):
            if not good:
                wrong = getattr(self, name)
                advice = (
                    "Give it as key= instead" if name == "seed" and _is_key(wrong) else "Correct it, or leave it out"
                )
                raise RequestError(
                    f"Sampling: {name}={wrong!r:.60} was given; it must be {allowed}. At {user_line()}. {advice}."
                )
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("seed", seed)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_words", self._read_key())

    def key_words(self) -> np.ndarray:
        """The key as uint32[2]."""
        return np.array(self._words, np.uint32)

    def _read_key(self) -> tuple[int, int]:
        if self.key is None:
            return 0, self.seed
        words = jax.random.key_data(self.key) if jnp.issubdtype(self.key.dtype, jax.dtypes.prng_key) else self.key
        high, low = np.array(words, np.uint32).tolist()
        return high, low


class Rows(NamedTuple):
    """Settings of all rows as arrays of one number (the key: two) per row; ``drawn`` counts a row's tokens so far."""

    temperature: Any
    top_k: Any
    top_p: Any
    key: Any
    drawn: Any

    @classmethod
    def greedy(cls, count: int) -> Rows:
        """Rows that take the likeliest token."""
        return cls(
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
            np.ones(count, np.float32),
            np.zeros((count, 2), np.uint32),
            np.zeros(count, np.int32),
        )

    def set(self, row: int, sampling: Sampling, drawn: int = 0) -> None:
        """In place."""
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, 2**31 - 1)
        self.top_p[row] = sampling.top_p
        self.key[row] = sampling.key_words()
        self.drawn[row] = drawn

    def reset(self, row: int) -> None:
        """The row is greedy again: as long as all are, no row draws."""
        self.temperature[row] = 0

    def row(self, row: int) -> Rows:
        """One row alone."""
        return Rows(*(x[row : row + 1] for x in self))


class Sampler:
    """``sample`` where logits lie on a mesh, which may have devices of other processes: all of them call it.

    Args:
        mesh: on which logits lie, in whatever layout.
    """

    def __init__(self, mesh: Mesh) -> None:
        whole = NamedSharding(mesh, PartitionSpec())
        self._sample = jax.jit(sample, in_shardings=(None, whole), out_shardings=whole)
        self._gather = jax.jit(lambda x: x, out_shardings=whole)

    def __call__(self, logits: jax.Array, rows: Rows) -> jax.Array:
        """The next tokens, on the devices."""
        return self._sample(logits, rows)

    def fetched(self, x: jax.Array) -> np.ndarray:
        """An array of the mesh on the host, whole."""
        return np.asarray(x if x.is_fully_addressable else self._gather(x))


def sample(logits: jax.Array, rows: Rows) -> jax.Array:
    """The next token of every row; to be jitted.

    Args:
        logits: (rows, vocabulary).
        rows: the settings, each with one entry per row.

    Returns:
        int32 (rows,); ``NO_TOKEN`` where the largest logit is no finite number.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    largest = jnp.max(logits, axis=-1, keepdims=True)  # of any and nan it is nan

    def drawn() -> jax.Array:
        # Their differences alone count; numbers of 64 bits need not be numbers of 32, and of large ones these have few digits.
        wide = logits.dtype if logits.dtype.itemsize > 4 else jnp.float32
        narrow = (logits.astype(wide) - largest.astype(wide)).astype(jnp.float32)
        found = jax.vmap(_draw)(narrow, *rows)
        return jnp.where(rows.temperature > 0, found, greedy)

    found = jax.lax.cond(jnp.any(rows.temperature > 0), drawn, lambda: greedy)
    return jnp.where(jnp.isfinite(largest[:, 0]), found, NO_TOKEN)


def _draw(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, key: jax.Array, drawn: jax.Array
) -> jax.Array:
    """A token of one row (vocabulary,): sorted, with what is too unlikely cut off, and the rest drawn by Gumbel's trick."""
    order = jnp.argsort(-logits)
    scaled = logits[order] / jnp.where(temperature > 0, temperature, 1.0)
    kept = jnp.arange(logits.size) < jnp.where(top_k > 0, top_k, logits.size)
    probabilities = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf))
    before = jnp.cumsum(probabilities) - probabilities
    kept &= (before < top_p) | (top_p >= 1)  # a cumulative sum may round to 1 before its end
    own = jax.random.fold_in(jax.random.wrap_key_data(key, impl=_KEY_TYPE), drawn)
    noise = jax.random.gumbel(own, logits.shape, jnp.float32)  # with 64 bits enabled, too: a seed gives one answer
    return order[jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf))].astype(jnp.int32)


def _is_key(x: Any) -> bool:
    if not isinstance(x, jax.Array):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == () and str(jax.random.key_impl(x)) == _KEY_TYPE
    return x.shape == (2,) and x.dtype == jnp.uint32
