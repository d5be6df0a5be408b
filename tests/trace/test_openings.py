"""Ops before the first matmul: with the layers that read what they make, and by rows where layers read rows."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.trace.forward_ops import ForwardOps
from alpa_lite.trace.jaxprs import inlined
from alpa_lite.trace.op_places import gathered
from alpa_lite.trace.openings import openings

PARAMS, STACK = jnp.ones((3, 8, 8)), jnp.ones((3, 4, 8))
X, ORDER = jnp.ones((4, 8)), jnp.arange(4)
BATCH = frozenset({2, 3})


def closed(fn: Any, *args: Any) -> Any:
    return inlined(jax.make_jaxpr(fn)(*args))


def names(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def listed(weights: Any, caches: Any, x: jax.Array, order: jax.Array) -> Any:
    caches = [rows[order] for rows in caches]
    for w, rows in zip(weights, caches, strict=True):
        x = (x + rows) @ w
    return x, caches


def scanned(weights: Any, stack: Any, x: jax.Array, order: jax.Array) -> Any:
    stack = 0.5 * stack[:, order]

    def layer(x: jax.Array, row: Any) -> Any:
        w, rows = row
        return (x + rows) @ w, rows

    return lax.scan(layer, x, (weights, stack))


def summed(weights: Any, stack: Any, x: jax.Array, order: jax.Array) -> Any:
    stack = stack[:, order]
    x, rows = lax.scan(lambda x, row: ((x + row[1]) @ row[0], row[1]), x, (weights, stack))
    return x + stack.sum(0), rows


def ops_of(fn: Any) -> tuple[ForwardOps, list[str]]:
    made = closed(fn, PARAMS, STACK, X, ORDER)
    ops = ForwardOps(gathered(made, BATCH), BATCH, frozenset({0, 1}), forward=True)
    return ops, [names(ops.jaxpr)[i] for i in sorted(ops.row_openings)]


def test_each_cache_is_reordered_right_before_its_layer() -> None:
    made = closed(listed, [*PARAMS], [*STACK], X, ORDER)
    batch = frozenset({6, 7})
    assert [n for n in names(made.jaxpr) if n in ("gather", "dot_general")] == ["gather"] * 3 + ["dot_general"] * 3
    ordered = names(gathered(made, batch).jaxpr)
    assert [n for n in ordered if n in ("gather", "dot_general")] == ["gather", "dot_general"] * 3
    found = {names(made.jaxpr)[i] for i in openings(made.jaxpr, batch)}
    assert "gather" in found and "dot_general" not in found and "lt" not in found  # indices are of the batch alone


def test_a_stack_that_layers_read_by_rows_crosses_no_cut() -> None:
    ops, found = ops_of(scanned)
    assert found == ["gather", "mul"]
    assert ops.cut_bytes[-1] == X.nbytes


def test_a_stack_that_is_read_as_a_whole_too_is_none() -> None:
    ops, found = ops_of(summed)
    assert found == []
    assert max(size for size in ops.cut_bytes if math.isfinite(size)) >= X.nbytes + STACK.nbytes


def test_rows_that_lie_on_a_stage_pin_the_layers_that_read_what_is_made_of_them() -> None:
    ops, _ = ops_of(scanned)
    first = ops.first[names(ops.jaxpr).index("scan")]
    pins = ops.home_pins({(1, (0, 2)): (0, "1[0:2]"), (1, (2, 3)): (1, "1[2:3]")})
    assert {(pin.place - first, pin.stage) for pin in pins} == {(0, 0), (1, 0), (2, 1)}
