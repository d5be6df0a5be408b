"""Small graphs in stages that share matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import alpa_lite as al

CLUSTER = al.Cluster.parse("1x4:h100-sxm")
TWO = al.PlanOptions(num_stages=2)
SEARCHED = al.PlanOptions(num_stages=2, submeshes="auto")
ONE_AXIS = al.PlanOptions(num_stages=2, axis_names=("x",), stage_mesh_shapes=((2,), (2,)))


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def product(params: Any, x: jax.Array) -> Any:
    first = params[0] * x[0, 0]
    x = al.layer_boundary(x @ params[0])
    return x @ params[1], first, params[1] * x[0, 0]


def normed(axis: int) -> Any:
    """Sums along rows or columns: wants matrices that are split along the other dim."""

    def graph(params: Any, x: jax.Array) -> Any:
        first = params[0] / params[0].sum(axis=axis, keepdims=True) * x[0, 0]
        x = al.layer_boundary(x + first[0, 0])
        return x, first, params[1] / params[1].sum(axis=axis, keepdims=True) * x[0, 0]

    return graph


def three_graphs(width: int = 2048, hidden: int = 4096) -> dict[str, Any]:
    params = shape(width, hidden), shape(hidden, width)
    return {
        "product": (product, (params, shape(65536, width))),
        "rows": (normed(1), (params, shape(16, width))),
        "columns": (normed(0), (params, shape(16, width))),
    }


def chain(params: Any, x: Any) -> Any:
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return x


KERNELS = [shape(256, 256)] * 4


WIDE, NARROW = (KERNELS, shape(4096, 256)), (KERNELS, shape(2, 256))
