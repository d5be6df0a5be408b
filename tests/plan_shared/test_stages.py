"""``al.plan_shared`` with stages: one layout per stage for all graphs, as cheap as brute force finds it, and run."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.api import shared_stages
from alpa_lite.errors import MemoryBudgetError, PinError
from alpa_lite.executor.local import local_mesh
from alpa_lite.lowering.segments import crossing_sharding
from alpa_lite.lowering.transfer import Transfers
from examples.serving_models import GPT
from tests.marks import slow_but
from tests.plan_shared.stages import (
    CLUSTER,
    KERNELS,
    NARROW,
    ONE_AXIS,
    TWO,
    WIDE,
    chain,
    shape,
    three_graphs,
)

MODEL = GPT.of("small")


@cache
def all_layouts() -> list[dict[str, float]]:
    """What each graph costs in every layout of the two matrices, one on each stage."""
    found = []
    for first, second in itertools.product((P(), P("x"), P(None, "x")), repeat=2):
        pins = {"0/0": first, "0/1": second}
        settings = {"cluster": CLUSTER, "options": ONE_AXIS, "pins": pins, "donate_argnums": 0}
        found.append({n: al.plan(fn, *args, **settings).objective for n, (fn, args) in three_graphs().items()})
    return found


@pytest.mark.medium
@pytest.mark.parametrize("offers", slow_but([True], [True, False]), ids=["", "joint problem alone"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (1000, 1, 1), (1, 100, 1), (1, 1, 5000), (300, 1, 300)])
def test_equals_brute_force(counts, offers, monkeypatch):
    if not offers:
        monkeypatch.setattr(shared_stages._StagedSearch, "own_layouts", lambda self, cut: None)
    graphs = three_graphs()
    weights = dict(zip(graphs, counts, strict=True))
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=CLUSTER, options=ONE_AXIS, donate_argnums=0)
    sums = [sum(weights[name] * cost for name, cost in costs.items()) for costs in all_layouts()]
    assert layout.objective == pytest.approx(min(sums), rel=1e-9)
    assert layout.gap < 1e-6  # solved exactly
    assert {path: stage for path, (stage, _) in layout.parameter_layout.items()} == {"0/0": 0, "0/1": 1}
    for name, costs in layout.costs.items():
        assert layout.own[name] == pytest.approx(min(each[name] for each in all_layouts()), rel=1e-9)
        assert layout.price[name] == pytest.approx(costs / layout.own[name] - 1)
    assert any(price > 0.2 for price in layout.price.values())


@pytest.mark.medium
def test_a_budget_holds_on_every_stage():
    """Too little for what is cheapest, on the stage of three matrices alone."""

    def scaled(axis: int) -> Any:
        def graph(params: Any, x: jax.Array) -> Any:
            made = [p / p.sum(axis=axis, keepdims=True) * x[0, 0] for p in params]
            for first in made[:3]:
                x = x + first[0, 0]  # an element is taken where its matrix lies whole
            x = al.layer_boundary(x)
            return x + made[3][0, 0], {"scaled": made}  # not the next values of the matrices, which lay where these do

        return graph

    args = [shape(1024, 2048)] * 4, shape(16, 1024)
    graphs = {"rows": (scaled(1), args), "columns": (scaled(0), args)}
    whole = {"out/1/scaled/*": P()}
    free = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=ONE_AXIS, pins=whole)
    budget = 0.9 * max(plan.memory.peak for plan in free.plans.values())
    within = replace(ONE_AXIS, memory_budget_bytes=budget)
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=within, pins=whole)
    assert all(stage.memory.peak <= budget for plan in layout.plans.values() for stage in plan.stages)
    sums = []
    for pins in itertools.product((P(), P("x")), repeat=4):
        fixed = whole | {f"0/{i}": pin for i, pin in enumerate(pins)}
        settings = {"cluster": CLUSTER, "options": within, "pins": fixed}
        with suppress(MemoryBudgetError, PinError):
            sums.append(sum(al.plan(fn, *args, **settings).objective for fn, args in graphs.values()))
    assert 1.1 * free.objective < min(sums) and layout.objective <= 1.001 * min(sums)


@pytest.mark.medium
def test_meshes_are_searched_for_all_graphs(monkeypatch):
    """Matrices that four devices on one axis cannot split."""
    monkeypatch.setattr(shared_stages._StagedSearch, "own_layouts", lambda self, cut: None)

    def objective(**options: Any) -> float:
        chosen = al.PlanOptions(num_stages=2, **options)
        cluster = al.Cluster.parse("1x8:h100-sxm")
        weights = {"rows": 500, "columns": 500}
        graphs = three_graphs(2050, 4102)
        return al.plan_shared(graphs, shared="0", weights=weights, cluster=cluster, options=chosen).objective

    shapes = itertools.product(((4,), (2, 2)), repeat=2)
    fixed = [objective(stage_mesh_shapes=pair) for pair in shapes]
    assert max(fixed) > 1.02 * min(fixed)
    assert objective() == pytest.approx(min(fixed), rel=1e-9)


def engine_graphs(params: Any, buckets: tuple[int, ...] = (8, 16)) -> dict[str, Any]:
    return al.serve.graphs(MODEL, params, slots=4, max_length=32, buckets=buckets)


@pytest.mark.medium
def test_all_graphs_have_the_same_stages(tmp_path, golden):
    graphs = engine_graphs(jax.eval_shape(MODEL.init_params, jax.random.key(0)))
    layout = al.plan_shared(
        graphs, shared=("0", "1"), weights={"decode": 100}, cluster=CLUSTER, options=TWO, donate_argnums=1
    )
    stages = [[(s.submesh, s.first_device, s.mesh) for s in plan.stages] for plan in layout.plans.values()]
    assert all(one == stages[0] for one in stages) and len(stages[0]) == 2
    leaves = [
        {leaf.path: (leaf.stage, leaf.spec) for leaf in plan.inputs if leaf.path[0] in "01"}
        for plan in layout.plans.values()
    ]
    assert all(one == leaves[0] for one in leaves)
    blocks = {path.split("/")[1]: stage for path, (stage, _) in leaves[0].items() if "block" in path}
    assert blocks == {"block0": 0, "block1": 1}
    assert not list(layout.faults())
    layout.save(tmp_path / "layout.json")
    again = al.SharedLayout.load(tmp_path / "layout.json")
    golden("layout_text_stages", str(layout))
    assert str(again) == str(layout)
    assert (again.parameter_layout, again.plans) == (layout.parameter_layout, layout.plans)


@pytest.mark.slow
def test_graphs_run_on_one_copy(monkeypatch):
    """A prompt into a slot, then tokens: parameters and cache stay on their stages."""
    params, cluster = MODEL.init_params(jax.random.key(0)), al.Cluster.parse("1x4:cpu")
    graphs = engine_graphs(params, (8,))
    pins = {"0/**/up/kernel": P(None, "x"), "1/**/key": P("x")}  # so small a model would lie whole everywhere
    layout = al.plan_shared(graphs, shared=("0", "1"), cluster=cluster, options=TWO, pins=pins, donate_argnums=1)
    steps = {
        name: al.parallelize(fn, plan=layout.plans[name], cluster=cluster, donate_argnums=1)
        for name, (fn, _) in graphs.items()
    }
    given = {
        "prefill_8": (jnp.int32(1), jnp.arange(8)[None], jnp.array([5])),
        "decode": (jnp.arange(4),),
    }
    cache = MODEL.init_cache(4, 32)
    want = dict.fromkeys(graphs)
    for name, (fn, _) in graphs.items():
        want[name], cache = jax.jit(fn)(params, cache, *given[name])
    plan = layout.plans["decode"]
    meshes = [local_mesh(stage.mesh, jax.devices()[stage.first_device :]) for stage in plan.stages]
    lies = {leaf.path: crossing_sharding(leaf.spec, meshes[leaf.stage]) for leaf in plan.inputs}

    def placed(tree: Any, argument: str) -> Any:
        def put(path: Any, leaf: Any) -> Any:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return jax.device_put(leaf, lies[f"{argument}/{name}"])

        return jax.tree_util.tree_map_with_path(put, tree)

    params, cache = placed(params, "0"), placed(MODEL.init_cache(4, 32), "1")
    state = {leaf.shape for leaf in jax.tree.leaves((params, cache)) if leaf.ndim > 1}
    moved, send = [], Transfers.send

    def noted(self: Any, array: Any, sharding: Any) -> Any:
        if array.shape in state and not array.sharding.is_equivalent_to(sharding, array.ndim):
            moved.append(array.shape)
        return send(self, array, sharding)

    monkeypatch.setattr(Transfers, "send", noted)
    for name, step in steps.items():
        found, cache = step(params, cache, *given[name])
        np.testing.assert_allclose(found, want[name], rtol=1e-4, atol=1e-5)
    assert not moved


def test_where_training_has_them():
    def train(params: Any, x: Any, y: Any) -> Any:
        loss, grads = al.value_and_grad(lambda p, b: jnp.mean((chain(p, b[0]) - b[1]) ** 2))(params, (x, y))
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    options = al.PlanOptions(submeshes=((1, 1), (1, 3)), num_microbatches=2)
    plan = al.plan(train, KERNELS, shape(24, 256), shape(24, 256), cluster=CLUSTER, options=options)
    graphs = {"many": (chain, WIDE), "few": (chain, NARROW)}
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, follow=plan)
    assert layout.parameter_layout == plan.parameter_layout
    again = al.plan(chain, *NARROW, cluster=CLUSTER, follow=layout)
    assert {leaf.path: leaf.stage for leaf in again.inputs if leaf.path[0] == "0"} == {
        path: stage for path, (stage, _) in plan.parameter_layout.items()
    }


@pytest.mark.medium
def test_a_budget_in_which_alone_no_plan_is_found():
    """The search for one graph ends with a plan that is too large, and there is one with a layout that is fixed."""
    graph = (
        (lambda p, x: al.layer_boundary(x @ p[0]) @ p[1]),
        ((shape(1024, 2048), shape(2048, 1024)), shape(1024, 1024)),
    )
    settings = {
        "cluster": CLUSTER,
        "options": replace(ONE_AXIS, memory_budget_bytes=11_722_078),
        "donate_argnums": 0,
    }
    with pytest.raises(MemoryBudgetError) as raised:
        al.plan(graph[0], *graph[1], **settings)
    assert not raised.value.proven
    pinned = al.plan(graph[0], *graph[1], pins={"0/0": P(), "0/1": P("x")}, **settings)
    layout = al.plan_shared({"one": graph}, shared="0", **settings)
    assert layout.objective <= pinned.objective * (1 + 1e-9)
    assert all(stage.memory.peak <= 11_722_078 for stage in layout.plans["one"].stages)
    assert layout.price["one"] == 0.0
