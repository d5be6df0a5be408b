"""Barriers of rematerialised layers carry the gradients that are finished, so that none is left for the end of the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.lowering.remat_barrier import remat_barrier_p
from alpa_lite.trace.program import trace
from tests.harness import check, draw, jax_mesh

LAYERS = 3


def gradients(weights: list[jax.Array], x: jax.Array) -> Any:
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype))
        for w in weights:
            x = layer(w, x)
        return (x * x).sum()

    return jax.value_and_grad(loss)(weights, x)


def barriers(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "remat_barrier":
            yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from barriers(getattr(inner, "jaxpr", inner))


def test_each_layers_gradient_passes_the_next_barrier_before_it_is_widened() -> None:
    args = ([jnp.ones((16, 16))] * LAYERS, jnp.ones((8, 16)))
    traced = trace(gradients, args, {})
    (drawn,) = draw(traced, (2,), [0])
    leaves = jax.tree.leaves(args)
    found = [
        [(v.aval.dtype.name, v.aval.ndim) for v in eqn.invars]
        for eqn in barriers(jax.make_jaxpr(drawn.function(jax_mesh(drawn.mesh)))(*leaves).jaxpr)
    ]
    joint = [tensors for tensors in found if len(tensors) > 1]
    assert len(joint) == LAYERS
    # The layer's weight, its input and the cotangent; the first barrier holds the loss, each later one the gradient of the
    # layer before, as bfloat16: a tile of bfloat16 is half of what its cast to float32 would keep in memory.
    assert [("bfloat16", 2) in tensors for tensors in joint] == [False, True, True]
    assert ("float32", 0) in joint[0]


@pytest.mark.medium
def test_results_are_unchanged() -> None:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [jax.random.normal(k, (16, 16)) / 4 for k in keys[1:]]

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))

        def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
            for w in weights:
                x = layer(w, x)
            return (x * x).sum()

        return jax.value_and_grad(loss)(weights, x)

    check(step, (weights, jax.random.normal(keys[0], (8, 16))), (2, 2))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool", "float8_e4m3fn", "complex64"]
)
def test_what_passes_a_barrier_keeps_its_bits(dtype: str) -> None:
    x = jnp.array([[0.0, -0.0, 1.5], [jnp.nan, jnp.inf, -3.0]]).astype(dtype)
    key = jax.random.key(5)
    kept, same_key, _ = jax.jit(lambda *xs: remat_barrier_p.bind(*xs, waiting=2))(x, key, x)
    assert kept.dtype == x.dtype
    assert np.asarray(kept).tobytes() == np.asarray(x).tobytes()
    assert jax.random.key_data(same_key).tolist() == jax.random.key_data(key).tolist()


@pytest.mark.medium
def test_recomputation_saves_memory() -> None:
    """Also where the compiler drops barriers: what is recomputed is not joined with the first computation, nor run at once."""
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((2048, 64), jnp.float32)

    def memory(wrap: Any) -> tuple[float, float]:
        def loss(weights: Any, x: Any) -> Any:
            for w in weights:
                x = wrap(lambda w, x: x + jnp.sin(jnp.tanh(x @ w)) * jnp.cos(x))(w, x)
            return (x * x).sum()

        step = al.parallelize(jax.value_and_grad(loss), cluster=al.Cluster.parse("1x1:cpu"))
        return step.plan(weights, x).memory.peak, step.compile(weights, x).peak_bytes()

    kept, recomputed = memory(lambda f: f), memory(jax.checkpoint)
    assert recomputed[1] < 0.6 * kept[1]
    assert recomputed[0] == pytest.approx(recomputed[1], rel=0.05)
