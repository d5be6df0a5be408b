"""``al.pin``: fixes the layout of a tensor inside the function. An identity everywhere else."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from alpa_lite._jax_compat import identity_primitive
from alpa_lite.errors import PinError, user_line
from alpa_lite.plan.pins import PinnedDims
from alpa_lite.trace.marked import check_arrays
from alpa_lite.trace.pins import pinned_dims, spec_text

pin_p = identity_primitive("pin")


def pin(x: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """``x``, with its layout fixed to ``spec`` when the function is planned.

    The pin holds for this value, not for its gradient, and is dropped under ``jax.vmap`` (the spec no longer fits).

    Args:
        x: an array of any shape.
        spec: a ``PartitionSpec``; missing trailing dims are replicated, ``P.UNCONSTRAINED`` leaves a dim free,
            None leaves all free.

    Raises:
        PinError: the spec is none, or has more entries than ``x`` has dims; ``x`` is no array.

    Example:
        >>> hidden = al.pin(x @ w, P(None, "model"))
    """
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise PinError(
            f"al.pin got {spec!r:.60} of type {type(spec).__name__}. A pin is a jax.sharding.PartitionSpec, or None for free. "
            f"At {user_line()}. Write for example al.pin(x, P(None, 'model'))."
        )
    check_arrays(x, "al.pin(x, spec)", PinError, one=True)
    rank = jax.numpy.ndim(x)
    dims = pinned_dims(spec, rank)
    if len(dims) > rank:
        raise PinError(
            f"al.pin got {spec_text(spec)} for a tensor of shape {jax.numpy.shape(x)}: {len(dims)} entries for {rank} "
            "dims. A spec has at most one entry per dim. Remove entries at this al.pin."
        )
    text: Any = str(PinnedDims(path="al.pin", shape=jax.numpy.shape(x), dims=dims))
    return pin_p.bind(x, pinned=text)
