"""``al.layer_boundary``: marks where one layer ends and the next begins. An identity everywhere."""

from __future__ import annotations

from typing import Any

import jax

from alpa_lite._jax_compat import boundary_primitive
from alpa_lite.errors import LayerError
from alpa_lite.trace.marked import check_arrays

layer_boundary_p = boundary_primitive("layer_boundary")


def layer_boundary(x: Any) -> Any:
    """``x``, with the end of a layer marked for pipelines: what is computed from the result belongs to later layers.

    The gradient passes the same boundary on its way back, so the backward part of a layer is found beside its forward part.

    Args:
        x: a pytree of arrays: everything that the next layer reads of this one.

    Raises:
        LayerError: a leaf is no array.

    Example:
        >>> for block in blocks:
        ...     x = al.layer_boundary(block(x))
    """
    check_arrays(x, "al.layer_boundary(x)", LayerError)
    leaves, tree = jax.tree_util.tree_flatten(x)
    passed = layer_boundary_p.bind(*leaves, backward=False) if leaves else []
    return jax.tree_util.tree_unflatten(tree, passed)
