"""Graphs that only copy, reorder or reset slots of a cache, beside graphs with layers: each stage does it for its own rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.errors import LayerError
from tests.marks import slow_rows_but

LAYERS, SLOTS, WIDTH = 4, 8, 32
CLUSTER = al.Cluster.parse("1x4:cpu")


def stacked(params: Any, cache: Any, x: jax.Array) -> Any:
    def layer(x: jax.Array, row: Any) -> Any:
        w, rows = row
        rows = 0.5 * rows + x
        return jnp.tanh(rows @ w), rows

    x, rows = lax.scan(layer, x, (params["w"], cache["rows"]))
    return x @ params["head"], {"rows": rows, "length": cache["length"] + 1}


def listed(params: Any, cache: Any, x: jax.Array) -> Any:
    made = []
    for w, rows in zip(params["w"], cache["rows"], strict=True):
        made.append(0.5 * rows + x)
        x = jnp.tanh(made[-1] @ w)
    return x @ params["head"], {"rows": made, "length": cache["length"] + 1}


def slots_of(change: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    """``change`` of one layer's slots, of all layers."""

    def step(params: Any, cache: Any, which: jax.Array) -> Any:
        def changed(leaf: jax.Array) -> jax.Array:
            return jax.vmap(change, in_axes=(0, None))(leaf, which) if leaf.ndim > 2 else change(leaf, which)

        return jnp.zeros(()), jax.tree.map(changed, cache)

    return step


CHANGES = {
    "copy": slots_of(lambda rows, which: rows.at[which[1]].set(rows[which[0]])),
    "reorder": slots_of(lambda rows, which: rows[which]),
    "reset": slots_of(lambda rows, which: rows.at[which[0]].set(0)),
}
DECODES = {"stacked": stacked, "listed": listed}


def given(form: str) -> tuple[Any, Any, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    w = 0.2 * jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH))
    rows = jax.random.normal(keys[1], (LAYERS, SLOTS, WIDTH))
    if form == "listed":
        w, rows = list(w), list(rows)
    params = {"w": w, "head": jax.random.normal(keys[2], (WIDTH, 64))}
    cache = {"rows": rows, "length": jnp.arange(SLOTS)}
    return params, cache, jax.random.normal(keys[3], (SLOTS, WIDTH)), jnp.array([3, 1, 2, 0, 4, 4, 6, 7])


def copied(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.copy(), tree)


def same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("donated", [pytest.param((), marks=pytest.mark.slow), (1,)], ids=["kept", "donated"])
@pytest.mark.parametrize(
    ("form", "change"), slow_rows_but([("stacked", "copy"), ("listed", "reorder")], itertools.product(DECODES, CHANGES))
)
def test_nothing_is_sent(form: str, change: str, donated: tuple[int, ...], stages: int) -> None:
    params, cache, x, which = given(form)
    graphs = {change: (CHANGES[change], (params, cache, which)), "decode": (DECODES[form], (params, cache, x))}
    options = al.PlanOptions(num_stages=stages)
    layout = al.plan_shared(graphs, shared=("0", "1"), cluster=CLUSTER, options=options, donate_argnums=donated)
    plan = layout.plans[change]
    assert plan.pipeline is not None
    # Lengths, which the first stage keeps, are all that anybody could want.
    assert sum(sent.size_bytes for sent in plan.pipeline.transfers) <= (stages - 1) * cache["length"].nbytes
    assert layout.price[change] == 0.0
    steps = {
        name: al.parallelize(fn, plan=layout.plans[name], donate_argnums=donated) for name, (fn, _) in graphs.items()
    }
    ours, theirs = copied(cache), cache
    for name in ("decode", change, "decode"):
        last = graphs[name][1][2]
        made, ours = steps[name](params, ours, last)
        wanted, theirs = jax.jit(graphs[name][0])(params, theirs, last)
        same((made, ours), (wanted, theirs))


@pytest.mark.medium
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_plan(change: str, tmp_path: Any) -> None:
    params, cache, x, which = given("stacked")
    plan = al.plan(stacked, params, cache, x, cluster=CLUSTER, options=al.PlanOptions(num_stages=2))
    step = al.parallelize(CHANGES[change], cluster=CLUSTER, follow=plan, donate_argnums=1)
    own = step.plan(params, cache, which)
    stages = {leaf.path: leaf.stage for leaf in own.inputs if leaf.path.startswith("1/rows")}
    assert stages == {leaf.path: leaf.stage for leaf in plan.inputs if leaf.path.startswith("1/rows")}
    assert own.pipeline is not None and not own.pipeline.transfers
    same(step(params, copied(cache), which), CHANGES[change](params, cache, which))
    own.save(tmp_path / "plan.json")
    again = al.parallelize(CHANGES[change], plan=al.load_plan(tmp_path / "plan.json"), donate_argnums=1)
    same(again(params, copied(cache), which), CHANGES[change](params, cache, which))


@pytest.mark.medium
def test_what_is_no_work_row_by_row_is_refused() -> None:
    def mixed(params: Any, cache: Any, which: jax.Array) -> Any:
        return jnp.zeros(()), {"rows": cache["rows"][::-1], "length": cache["length"]}

    params, cache, x, which = given("stacked")
    graphs = {"mixed": (mixed, (params, cache, which)), "decode": (stacked, (params, cache, x))}
    options = al.PlanOptions(num_stages=2)
    with pytest.raises(LayerError, match=r"the graph 'mixed', .*reads rows of '1/rows' that other layers have"):
        al.plan_shared(graphs, shared=("0", "1"), cluster=CLUSTER, options=options)


@pytest.mark.medium
def test_alone_it_is_refused() -> None:
    params, cache, _, which = given("stacked")
    with pytest.raises(LayerError, match=r"at most 1.* has no matmul.*al\.plan_shared, follow="):
        al.plan(CHANGES["copy"], params, cache, which, cluster=CLUSTER, options=al.PlanOptions(num_stages=2))
    graphs = {name: (CHANGES[name], (params, cache, which)) for name in ("copy", "reset")}
    with pytest.raises(LayerError, match=r"the graph 'copy': .* has no matmul"):
        al.plan_shared(graphs, shared=("0", "1"), cluster=CLUSTER, options=al.PlanOptions(num_stages=2))
