"""A budget on CPU, where the solver's constraint is only an estimate of the memory that is then counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import alpa_lite as al

CLUSTER = al.Cluster.parse("1x8:cpu")


def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


ARGS = ([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((128, 64), jnp.float32))


def plan(budget: float) -> al.Plan:
    options = al.PlanOptions(mesh_shape=(8,), memory_budget_bytes=budget)
    return al.plan(step, *ARGS, cluster=CLUSTER, options=options)


def test_the_peak_of_the_free_plan_is_budget_enough():
    free = plan(1e12)
    bound = plan(free.memory.peak)
    assert (bound.objective, bound.memory.peak) == (free.objective, free.memory.peak)


def test_a_smaller_budget_is_kept():
    free = plan(1e12)
    bound = plan(0.9 * free.memory.peak)
    assert bound.memory.peak <= 0.9 * free.memory.peak
    assert bound.objective >= free.objective
