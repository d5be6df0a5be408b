"""The barrier before a layer is recomputed: nothing that passes it is read before all of it exists.

XLA:CPU drops optimization barriers before it joins equal computations and schedules (up to jaxlib 0.10), so that recomputation
would be joined with what it repeats. There the barrier is a loop over all of the arrays that runs zero times: XLA cannot see
that, as the number of iterations is made of an element of an array. Finished gradients pass beside it: XLA:CPU runs what it can
as soon as it can.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite._jax_compat import barrier_primitive

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def _hold(*arrays: Any, waiting: int) -> list[Any]:
    """The first ``waiting`` arrays behind a loop, and the others."""
    stop = next((zero for x in arrays[:waiting] if (zero := _zero(x)) is not None), None)
    if stop is None:
        return list(arrays)

    def step(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        number, values = state
        return number + 1, [_other(x) for x in values]

    _, held = lax.while_loop(lambda s: s[0] < stop, step, (jnp.zeros_like(stop), list(arrays[:waiting])))
    return [*held, *arrays[waiting:]]


def _zero(x: Any) -> Any:
    """A zero made of the first element's bits; None for arrays without numbers of whole bytes."""
    if not x.size or not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        return None
    if jnp.iinfo(x.dtype).bits < 8 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo(x.dtype).bits < 8:
        return None
    bits = lax.bitcast_convert_type(x[(0,) * x.ndim], _BITS[x.dtype.itemsize])
    return (bits.astype(jnp.uint32) >> 31) >> 1


def _other(x: Any) -> Any:
    """Another value for every element, so that no pass takes the array for one that the loop leaves as it is."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(x) + 1, impl=jax.random.key_impl(x))
    return ~x if x.dtype == jnp.bool_ else -x


remat_barrier_p = barrier_primitive("remat_barrier", _hold)
