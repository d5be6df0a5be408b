"""Small graphs that share matrices, and what they cost by brute force."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import MemoryBudgetError, PinError

SLOW_LINKS = al.Cluster.parse("1x4:h100-sxm")
ONE_AXIS = al.PlanOptions(mesh_shape=(4,), axis_names=("x",))
PLAIN = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), padding="off")


def shapes(*sizes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    return tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)


def product(params: Any, x: jax.Array) -> Any:
    first, second = params
    return params, x @ first @ second


def rows(params: Any, x: jax.Array) -> Any:
    """Each row divided by its sum: wants matrices split by rows."""
    return tuple(m / m.sum(axis=1, keepdims=True) for m in params), x


def columns(params: Any, x: jax.Array) -> Any:
    return tuple(m / m.sum(axis=0, keepdims=True) for m in params), x


def three_graphs(count: int = 65536, width: int = 2048) -> dict[str, Any]:
    """Their parameters are given back, so that where they lie matters: what lies whole is gathered again."""
    args = shapes((width, 2 * width), (2 * width, width)), *shapes((count, width))
    return {"product": (product, args), "rows": (rows, args), "columns": (columns, args)}


def scaled(matrix: int, axis: int) -> Any:
    return lambda p, x: (p[matrix] / p[matrix].sum(axis, keepdims=True)).astype(jnp.float32)


def keep(p: Any, x: jax.Array) -> Any:
    return (p[0] * 2, p[1] * 3), x @ p[0] @ p[1]


def two_products(p: Any, x: jax.Array) -> Any:
    return x @ p[0] @ p[1]


def softmax(p: Any, x: jax.Array) -> Any:
    return jax.nn.softmax(x @ p[0]) @ p[1]


def weighted(costs: dict[str, float], weights: dict[str, float]) -> float:
    return sum(weights[name] * costs[name] for name in costs)


def cost_with(graphs: dict[str, Any], specs: Any, options: al.PlanOptions) -> dict[str, float]:
    """Cost of each graph planned alone with the parameters pinned."""
    pins = {f"0/{i}": spec for i, spec in enumerate(specs)}
    return {
        name: al.plan(fn, *args, cluster=SLOW_LINKS, pins=pins, options=options, donate_argnums=0).objective
        for name, (fn, args) in graphs.items()
    }


def cheapest(graphs: dict[str, Any], weights: dict[str, float], options: al.PlanOptions) -> float:
    """Brute force over where two matrices lie."""
    best = float("inf")
    for specs in itertools.product((P(), P("x"), P(None, "x")), repeat=2):
        with suppress(MemoryBudgetError, PinError):
            best = min(best, weighted(cost_with(graphs, specs, options), weights))
    return best
