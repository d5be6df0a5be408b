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
