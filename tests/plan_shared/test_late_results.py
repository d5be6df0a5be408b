"""A cache lies with the layers of the graph that counts most; another graph may make its next value in layers behind, on another
stage, which sends it back after each call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from tests.marks import slow_but

WIDTH, SLOTS = 64, 8


def layers(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def early(params: Any, cache: Any, x: jax.Array) -> Any:
    new = 0.5 * cache["rows"] + x
    return layers(params, new), {"rows": new}


def late(params: Any, cache: Any, x: jax.Array) -> Any:
    made = layers(params, x + cache["rows"])
    return made, {"rows": 2 * cache["rows"].at[:4].set(made[:4])}


@pytest.mark.medium
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize("donated", slow_but([(1,)], [(), (1,)]), ids=["kept", "donated"])
def test_a_next_value_comes_back_to_its_stage(spec: P, donated: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    params = [0.2 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[:4]]
    x = jax.random.normal(keys[4], (SLOTS, WIDTH))
    graphs = {"early": early, "late": late}
    layout = al.plan_shared(
        {name: (fn, (params, {"rows": x}, x)) for name, fn in graphs.items()},
        shared=("0", "1"),
        weights={"early": 100},
        cluster=al.Cluster.parse("1x4:cpu"),
        options=al.PlanOptions(num_stages=2, axis_names=("x",)),
        pins={"1/rows": spec},
        donate_argnums=donated,
    )
    assert layout.parameter_layout["1/rows"][0] == 0
    plan = layout.plans["late"]
    assert plan.pipeline is not None
    assert [(t.source, t.target) for t in plan.pipeline.transfers if t.when == "end"] == [(1, 0)]
    steps = {name: al.parallelize(fn, plan=layout.plans[name], donate_argnums=donated) for name, fn in graphs.items()}
    ours, theirs = {"rows": x.copy()}, {"rows": x}
    for name in ("early", "late", "early", "late"):
        made, ours = steps[name](params, ours, x)
        wanted, theirs = jax.jit(graphs[name])(params, theirs, x)
        for a, b in zip(jax.tree.leaves((made, ours)), jax.tree.leaves((wanted, theirs)), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_what_follows_the_leaves_of_a_layer_is_cut_where_that_costs_least() -> None:
    """An addition behind a layer's last leaf belongs to no layer: before the cut it is one array to send, behind it two."""
    width, slots, length = 128, 4, 64

    def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    params = {f"l{k}": {"w": shape(width, width), "v": shape(width, width)} for k in range(2)}
    params |= {"emb": shape(256, width), "out": shape(width, 256)}
    cache = {f"l{k}": shape(slots, length, width) for k in range(2)}

    def prefill(p: Any, c: Any, tokens: Any) -> Any:
        x, new = p["emb"][tokens], {}
        for i in c:
            new[i] = x @ p[i]["w"]
            x = x + jnp.tanh(x @ p[i]["v"])
        return x[:, -1] @ p["out"], new

    def decode(p: Any, c: Any, tokens: Any) -> Any:
        x, new = p["emb"][tokens], {}
        for i in c:
            new[i] = jnp.roll(c[i], 1, axis=1).at[:, 0].set(x @ p[i]["w"])
            x = x + jnp.tanh(jnp.einsum("sw,stw->st", x, new[i]) @ new[i][0] @ p[i]["v"])
        return x @ p["out"], new

    graphs = {
        "prefill": (prefill, (params, cache, shape(slots, length, dtype=jnp.int32))),
        "decode": (decode, (params, cache, shape(slots, dtype=jnp.int32))),
    }
    settings: Any = {"cluster": al.Cluster.parse("1x4:h100-sxm"), "donate_argnums": 1}
    options = al.PlanOptions(num_stages=2)
    layout = al.plan_shared(graphs, shared=("0", "1"), weights={"decode": 26.0}, options=options, **settings)
    assert not list(layout.faults())
    for name, (fn, args) in graphs.items():
        followed = al.plan(fn, *args, follow=layout, **settings)
        assert layout.costs[name] <= followed.objective * (1 + 1e-9), name


@pytest.mark.medium
def test_a_leaf_that_is_sent_to_another_stage_lies_there_as_suits_that_stage() -> None:
    """Wherever it lies at home, and whatever says so: following a plan, or a layout for one graph, costs what the plan does."""
    size = 4096

    def step(p: Any, x: Any) -> Any:
        new = p["t"] / p["t"].sum(1, keepdims=True)  # on its own stage: whole rows
        x = al.layer_boundary(x @ new)
        u = p["t"] / p["t"].sum(0, keepdims=True)  # on the next one: whole columns
        return {"t": new, "w": p["w"]}, x @ p["w"] + u.sum(0), jnp.sort(u, axis=0)

    square = jax.ShapeDtypeStruct((size, size), jnp.float32)
    args = ({"t": square, "w": square}, jax.ShapeDtypeStruct((4, size), jnp.float32))
    settings: Any = {"cluster": al.Cluster.parse("1x4:h100-sxm"), "donate_argnums": 0}
    options = al.PlanOptions(num_stages=2, axis_names=("x",), stage_mesh_shapes=((2,), (2,)))
    own = al.plan(step, *args, options=options, **settings)
    followed = al.plan(step, *args, follow=own, **settings)
    assert followed.objective == pytest.approx(own.objective)
    layout = al.plan_shared({"one": (step, args)}, shared="0", options=options, **settings)
    assert layout.price["one"] == 0 and layout.gap == 0
