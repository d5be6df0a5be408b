"""A small training step for tests of exports: a key, bfloat16 weights, a batch, and state that is donated."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.plan.plan import Plan


def step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["w1"].astype(jnp.float32))
        noise = 0.01 * jax.random.normal(state["key"], hidden.shape)
        return jnp.mean(((hidden + noise) @ params["w2"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), state["params"], grads)
    return {"key": jax.random.split(state["key"])[0], "params": params}, value


def state() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    w1 = 0.3 * jax.random.normal(first, (16, 32))
    params = {"w1": w1.astype(jnp.bfloat16), "w2": jax.random.normal(second, (32, 8))}
    return {"key": jax.random.key(7), "params": params}


def batch() -> Any:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((8, 16), dtype="float32"), "y": rng.standard_normal((8, 8), dtype="float32")}


def shapes(tree: Any) -> Any:
    return jax.eval_shape(lambda: tree)


@cache
def plan(num_devices: int) -> Plan:
    """With split weights and a split batch, so that there is something to slice and to reduce."""
    pins = {"0/params/w1": P(None, "x"), "1/x": P("x", None)}
    cluster = al.Cluster.parse(f"1x{num_devices}:cpu")
    return al.plan(step, state(), shapes(batch()), cluster=cluster, pins=pins, donate_argnums=0)
