"""``pad_mask``: the op that sets the padding of a padded dim to a neutral value. Only ``trace.pad_program`` makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite._jax_compat import calling_primitive


def neutral(fill: str, dtype: Any) -> Any:
    """The fill "0", "-inf" or "inf" as a value of a type; integers take their smallest and largest number."""
    if fill == "0":
        return jnp.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(float(fill), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(fill == "inf")
    return jnp.asarray(jnp.iinfo(dtype).min if fill == "-inf" else jnp.iinfo(dtype).max, dtype)


def masked(x: jax.Array, *, dim: int, size: int, fill: str, offset: Any = 0) -> jax.Array:
    """``x`` with ``fill`` at positions ``size`` and above of ``dim``; ``offset`` is the position at which a tile begins."""
    place = lax.broadcasted_iota(jnp.int32, x.shape, dim) + jnp.asarray(offset, jnp.int32)
    return jnp.where(place < size, x, neutral(fill, x.dtype))


def _function(*, dim: int, size: int, fill: str) -> Callable[..., list[jax.Array]]:
    return lambda x: [masked(x, dim=dim, size=size, fill=fill)]


def _batched(mapped: tuple[bool, ...], *, dim: int, size: int, fill: str) -> dict[str, Any]:
    return {"dim": dim + 1, "size": size, "fill": fill}


pad_mask_p = calling_primitive("pad_mask", _function, _batched)
