"""Layers between explicit boundaries: every op of the microbatch loop finds the layer that it belongs to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.errors import LayerError
from alpa_lite.trace.flatten import flatten
from alpa_lite.trace.layers import Layered, assign_layers

WIDTH = 4
X = jnp.ones((8, WIDTH))
WEIGHTS = tuple(jnp.full((WIDTH, WIDTH), 0.1 * (i + 1)) for i in range(3))


def loss(weights: Any, x: Any, boundary: Any = al.layer_boundary) -> Any:
    for i, w in enumerate(weights):
        x = jnp.tanh(x @ w)
        x = boundary(x) if i < len(weights) - 1 else x
    return jnp.sum(x)


def layered(f: Any, *args: Any) -> Layered:
    return assign_layers(flatten(jax.make_jaxpr(jax.value_and_grad(f))(*args), keep_boundaries=True))


def dots(found: Layered) -> list[tuple[bool, int]]:
    """(backward, layer) of the matmuls."""
    ops = zip(found.flat.ops, found.backward, found.layer, strict=True)
    return [(back, layer) for op, back, layer in ops if op.name == "dot_general"]


def test_backward_follows_forward():
    found = layered(loss, WEIGHTS, X)
    assert found.num_layers == 3
    # Forward one matmul per layer; backward one for the weight and, but for the first, one for the activation.
    assert dots(found) == [(False, 0), (False, 1), (False, 2), (True, 2), (True, 2), (True, 1), (True, 1), (True, 0)]
    assert all(op.name != "layer_boundary" for op in found.flat.ops)


def test_without_boundaries_there_is_one_layer():
    found = layered(lambda w, x: loss(w, x, boundary=lambda y: y), WEIGHTS, X)
    assert found.num_layers == 1
    assert set(found.layer) == {0}


def test_boundaries_change_no_bit():
    plain = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x, boundary=lambda y: y)))(WEIGHTS, X)
    marked = jax.jit(jax.value_and_grad(loss))(WEIGHTS, X)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(marked), strict=True))


def test_recomputation_belongs_to_its_layer():
    def checkpointed(weights: Any, x: Any) -> Any:
        for i, w in enumerate(weights):
            x = jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w)))(x, w)
            x = al.layer_boundary(x) if i < 2 else x
        return jnp.sum(x)

    found = layered(checkpointed, WEIGHTS, X)
    backward = [layer for back, layer in dots(found) if back]
    assert backward == [2, 2, 2, 1, 1, 1, 0, 0]


def test_what_several_layers_read_lies_in_the_first():
    def masked(weights: Any, x: Any) -> Any:
        mask = jnp.tril(jnp.ones((WIDTH, WIDTH)))
        x = al.layer_boundary(x @ weights[0])
        x = al.layer_boundary(x @ (weights[1] * mask))
        return jnp.sum(x @ (weights[2] * mask))

    found = layered(masked, WEIGHTS, X)
    assert [layer for op, layer in zip(found.flat.ops, found.layer, strict=True) if op.name == "iota"] == [1, 1]


def test_a_pytree_crosses_as_one_boundary():
    def two(weights: Any, x: Any) -> Any:
        pair = al.layer_boundary({"a": x @ weights[0], "b": x @ weights[1]})
        return jnp.sum(pair["a"] * pair["b"] @ weights[2])

    assert layered(two, WEIGHTS, X).num_layers == 2


def test_boundary_inside_a_scan_body():
    def scanned(weights: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (al.layer_boundary(jnp.tanh(x @ w)), None), x, jnp.stack(weights))
        return jnp.sum(x)

    with pytest.raises(LayerError, match=r"boundary inside a scan body.*test_layers.py"):
        layered(scanned, WEIGHTS, X)


def test_boundary_inside_of_checkpoint():
    with pytest.raises(LayerError, match=r"inside of jax.checkpoint, which recomputes across it"):
        layered(jax.checkpoint(loss), WEIGHTS, X)


def test_boundary_that_the_gradient_does_not_pass():
    def before(weights: Any, x: Any) -> Any:
        return loss(weights, al.layer_boundary(x))

    with pytest.raises(LayerError, match=r"3 layer boundaries .* the gradient passes 2"):
        layered(before, WEIGHTS, X)

    def only(weights: Any, x: Any) -> Any:
        return loss(weights, al.layer_boundary(x), boundary=lambda y: y)

    with pytest.raises(LayerError, match=r"1 layer boundaries .* the gradient passes 0"):
        layered(only, WEIGHTS, X)


def test_what_a_result_alone_needs_lies_where_it_is_made():
    """Also where it shares positions with a layer behind."""

    def f(x: Any, at: Any, first: Any, second: Any) -> Any:
        at = at + 1
        for k, w in enumerate(WEIGHTS[:2]):
            x = jnp.tanh(x @ w)
            if k == 0:
                first = lax.dynamic_update_slice_in_dim(first, x, at, axis=0)
                x = al.layer_boundary(x)
        second = lax.dynamic_update_slice_in_dim(second, x + second[:8] * at, at, axis=0)
        return x, first, second, at

    cache = jnp.zeros((16, WIDTH))
    found = assign_layers(flatten(jax.make_jaxpr(f)(X, 0, cache, cache), keep_boundaries=True))
    layer = {op.name: [] for op in found.flat.ops}
    for op, k in zip(found.flat.ops, found.layer, strict=True):
        layer[op.name].append(k)
    assert layer["dynamic_update_slice"] == [0, 1] and layer["dot_general"] == [0, 1]
    assert layer["add"][0] == 0  # the position


def test_masks_of_the_last_layer_are_made_there():
    """They are small where they are made of positions, and large where they are read."""

    def f(x: Any, at: Any, first: Any, second: Any) -> Any:
        at = at + 1
        x = al.layer_boundary(jnp.where(jnp.arange(8)[:, None] < at, jnp.tanh(x @ first), 0.0))
        return jnp.where(jnp.arange(8)[:, None] < at, jnp.tanh(x @ second), 0.0), at

    found = assign_layers(flatten(jax.make_jaxpr(f)(X, 0, *WEIGHTS[:2]), keep_boundaries=True))
    layers = {name: [] for name in ("add", "lt", "iota")}
    for op, layer in zip(found.flat.ops, found.layer, strict=True):
        layers.get(op.name, []).append(layer)
    assert layers == {"add": [0], "lt": [0, 1], "iota": [0, 1]}
