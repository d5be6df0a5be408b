"""Graphs that write whole rows of a stacked cache and read none of them: rows lie with the layers that make them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al

LAYERS, WIDTH, SLOTS, LENGTH = 2, 32, 8, 4
CLUSTER = al.Cluster.parse("1x4:cpu")
OPTIONS = al.PlanOptions(num_stages=2)
GIVEN: dict[str, Any] = {"cluster": CLUSTER, "donate_argnums": 1}


def prefill(params: Any, cache: jax.Array, tokens: jax.Array) -> Any:
    x = params["emb"][tokens]
    for i in range(LAYERS):
        cache = cache.at[i].set(x @ params[f"l{i}"]["w"])
        x = x + jnp.tanh(x @ params[f"l{i}"]["v"])
    return x[:, -1] @ params["out"], cache


def decode(params: Any, cache: jax.Array, tokens: jax.Array) -> Any:
    x = params["emb"][tokens]
    for i in range(LAYERS):
        row = jnp.roll(cache[i], 1, axis=1).at[:, 0].set(x @ params[f"l{i}"]["w"])
        cache = cache.at[i].set(row)
        x = x + jnp.tanh(row.mean(1) @ params[f"l{i}"]["v"])
    return x @ params["out"], cache


def reorder(params: Any, cache: jax.Array, which: jax.Array) -> Any:
    return jnp.zeros(()), cache[:, which]


def given() -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def array(*shape: int) -> jax.Array:
        return 0.2 * jax.random.normal(next(keys), shape)

    layers = {f"l{i}": {"w": array(WIDTH, WIDTH), "v": array(WIDTH, WIDTH)} for i in range(LAYERS)}
    params = {"emb": array(64, WIDTH), "out": array(WIDTH, 64)} | layers
    tokens = jax.random.randint(next(keys), (SLOTS, LENGTH), 0, 64)
    return params, jnp.zeros((LAYERS, SLOTS, LENGTH, WIDTH)), tokens


def stages(plan: al.Plan) -> dict[str, int]:
    return {leaf.path: leaf.stage for leaf in plan.inputs}


def test_rows_lie_with_their_layers_and_the_plan_can_be_followed() -> None:
    own = al.plan(prefill, *given(), options=OPTIONS, **GIVEN)
    assert stages(own)["1[0:1]"] == stages(own)["0/l0/w"] == stages(own)["0/l0/v"] == 0
    assert stages(own)["1[1:2]"] == stages(own)["0/l1/w"] == stages(own)["0/l1/v"] == 1
    again = al.plan(prefill, *given(), follow=own, **GIVEN)
    assert (again.objective, stages(again)) == (own.objective, stages(own))


@pytest.mark.medium
def test_graphs_share_the_rows_and_follow_the_layout() -> None:
    params, cache, tokens = given()
    which = jnp.array([3, 1, 2, 0, 4, 4, 6, 7])
    last = {"prefill": tokens, "decode": tokens[:, 0], "reorder": which}
    functions = {"prefill": prefill, "decode": decode, "reorder": reorder}
    graphs = {name: (fn, (params, cache, last[name])) for name, fn in functions.items()}
    layout = al.plan_shared(graphs, shared=("0", "1"), options=OPTIONS, **GIVEN)
    assert {path: stage for path, (stage, _) in layout.parameter_layout.items() if path.startswith("1")} == {
        "1[0:1]": 0,
        "1[1:2]": 1,
    }
    steps = {name: al.parallelize(fn, plan=layout.plans[name], donate_argnums=1) for name, fn in functions.items()}
    ours, theirs = cache.copy(), cache
    for name in ("prefill", "decode", "reorder", "decode"):
        made, ours = steps[name](params, ours, last[name])
        wanted, theirs = jax.jit(functions[name])(params, theirs, last[name])
        for a, b in ((made, wanted), (ours, theirs)):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)
    followed = {name: al.plan(fn, *graphs[name][1], follow=layout, **GIVEN) for name, fn in functions.items()}
    assert all(plan.objective <= layout.costs[name] * (1 + 1e-6) for name, plan in followed.items())


def alone(params: Any, cache: jax.Array, tokens: jax.Array) -> Any:
    """What the cache was is of no use: without other graphs it lies in one."""
    x, rows = params["emb"][tokens], []
    for i in range(LAYERS):
        rows.append(jnp.broadcast_to((x @ params["w"][i])[:, None], cache.shape[1:]))
        x = x + jnp.tanh(x @ params["v"][i])
    return x @ params["out"], jnp.stack(rows)


def scanned(params: Any, cache: jax.Array, tokens: jax.Array) -> Any:
    def layer(x: jax.Array, row: Any) -> Any:
        w, v, old = row
        new = old.at[:, 0].set(x @ w)
        return x + jnp.tanh(new.mean(1) @ v), new

    x, cache = jax.lax.scan(layer, params["emb"][tokens], (params["w"], params["v"], cache))
    return x @ params["out"], cache


@pytest.mark.medium
@pytest.mark.parametrize("names", [("alone", "scanned", "reorder"), ("alone", "reorder")], ids=len)
def test_rows_lie_alike_in_all_graphs(names: tuple[str, ...]) -> None:
    """Also those that a graph's own plan, whose layout is tried, has in one; and where no graph reads any."""
    layers = {name: jax.ShapeDtypeStruct((LAYERS, 16, 16), jnp.float32) for name in ("w", "v")}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (("emb", (32, 16)), ("out", (16, 32)))}
    cache = jax.ShapeDtypeStruct((LAYERS, SLOTS, LENGTH, 16), jnp.float32)
    slots = jax.ShapeDtypeStruct((SLOTS,), jnp.int32)
    functions = {"alone": alone, "scanned": scanned, "reorder": reorder}
    graphs = {name: (functions[name], (params | layers, cache, slots)) for name in names}
    layout = al.plan_shared(graphs, shared=("0", "1"), options=OPTIONS, cluster=CLUSTER)
    assert not list(layout.faults())
    assert {path: stage for path, (stage, _) in layout.parameter_layout.items() if path.startswith("1")} == {
        "1[0:1]": 0,
        "1[1:2]": 1,
    }
    assert not layout.plans["reorder"].pipeline.transfers
