"""``al.plan_shared`` with stages: one cut and one layout per stage for all graphs, as cheap as brute force finds them."""

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
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.api import shared_stages
from alpa_lite.api.bound import staged_for, traced_for
from alpa_lite.errors import AlpaLiteError, LayerError, MemoryBudgetError, PinClashError, PinError
from alpa_lite.executor.local import local_mesh
from alpa_lite.lowering.segments import crossing_sharding
from alpa_lite.lowering.transfer import Transfers
from alpa_lite.planner.joint_stages import best_cut
from examples.serving_models import GPT

CLUSTER = al.Cluster.parse("1x4:h100-sxm")
TWO = al.PlanOptions(num_stages=2)
ONE_AXIS = al.PlanOptions(num_stages=2, axis_names=("x",), stage_mesh_shapes=((2,), (2,)))
MODEL = GPT.of("small")


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def product(params: Any, x: jax.Array) -> Any:
    first = params[0] * x[0, 0]
    x = al.layer_boundary(x @ params[0])
    return x @ params[1], first, params[1] * x[0, 0]


def normed(axis: int) -> Any:
    """Sums along rows or columns: wants matrices that are split along the other dim."""

    def graph(params: Any, x: jax.Array) -> Any:
        first = params[0] / params[0].sum(axis=axis, keepdims=True) * x[0, 0]
        x = al.layer_boundary(x + first[0, 0])
        return x, first, params[1] / params[1].sum(axis=axis, keepdims=True) * x[0, 0]

    return graph


def three_graphs(width: int = 2048, hidden: int = 4096) -> dict[str, Any]:
    params = shape(width, hidden), shape(hidden, width)
    return {
        "product": (product, (params, shape(65536, width))),
        "rows": (normed(1), (params, shape(16, width))),
        "columns": (normed(0), (params, shape(16, width))),
    }


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
@pytest.mark.parametrize("offers", [True, False], ids=["", "joint problem alone"])
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
    """Too little for what is cheapest, on the stage of the larger matrix alone."""
    graphs = {name: graph for name, graph in three_graphs().items() if name != "product"}
    free = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=ONE_AXIS, donate_argnums=0)
    budget = 0.9 * max(plan.memory.peak for plan in free.plans.values())
    within = replace(ONE_AXIS, memory_budget_bytes=budget)
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=within, donate_argnums=0)
    assert all(stage.memory.peak <= budget for plan in layout.plans.values() for stage in plan.stages)
    sums = []
    for pins in itertools.product((P(), P("x"), P(None, "x")), repeat=2):
        fixed = {"0/0": pins[0], "0/1": pins[1]}
        settings = {"cluster": CLUSTER, "options": within, "pins": fixed, "donate_argnums": 0}
        with suppress(MemoryBudgetError, PinError):
            sums.append(sum(al.plan(fn, *args, **settings).objective for fn, args in graphs.values()))
    assert free.objective < min(sums) and layout.objective <= 1.001 * min(sums)


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


@given(st.data())
def test_the_best_cut_is_that_of_brute_force(data):
    layers, kinds = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    stages = data.draw(st.integers(1, min(4, layers)))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=kinds, max_size=kinds))
    price = st.integers(0, 9) | st.just(np.inf)
    row = st.lists(price, min_size=layers, max_size=layers)
    prices = data.draw(st.lists(row, min_size=kinds, max_size=kinds))
    pinned = data.draw(st.dictionaries(st.integers(0, layers - 1), st.integers(0, stages - 1), max_size=2))
    holds = data.draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))
    budget = data.draw(st.sampled_from([5, 15, np.inf]))
    known = data.draw(st.lists(st.integers(0, kinds - 1), min_size=stages, max_size=stages) | st.none())
    devices = data.draw(st.integers(1, 8)) if known is None else sum(sizes[m] for m in known)

    def cost(cut: Any, on: Any) -> tuple[float, float]:
        runs = [[k for k in range(layers) if cut[k] == s] for s in range(stages)]
        if any(sum(holds[k] for k in run) > budget * sizes[m] for run, m in zip(runs, on, strict=True)):
            return np.inf, np.inf
        sums = [sum(prices[m][k] for k in run) for run, m in zip(runs, on, strict=True)]
        return max(sums), sum(sums)

    best = np.inf, np.inf
    for ends in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *ends, layers)
        cut = tuple(s for s in range(stages) for _ in range(edges[s], edges[s + 1]))
        if all(cut[layer] == stage for layer, stage in pinned.items()):
            for on in itertools.product(range(kinds), repeat=stages) if known is None else [known]:
                if sum(sizes[m] for m in on) == devices:
                    best = min(best, cost(cut, on))
    found = best_cut(
        prices, sizes, devices, pinned, num_stages=stages, submeshes=known, holds=holds, budget=budget
    )  # fmt: skip
    assert (found is None) == (best[0] == np.inf)
    if found is not None:
        cut, on = found
        assert all(cut[layer] == stage for layer, stage in pinned.items())
        assert known is None or list(on) == known
        assert sum(sizes[m] for m in on) == devices and cost(cut, on) == best


def chain(params: Any, x: Any) -> Any:
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return x


KERNELS = [shape(256, 256)] * 4
WIDE, NARROW = (KERNELS, shape(4096, 256)), (KERNELS, shape(2, 256))


def test_the_cut_is_for_all_graphs(monkeypatch):
    """The last layers are dear in one graph alone, which is called most; with equal layers stages are halves."""
    monkeypatch.setattr(shared_stages._StagedSearch, "own_cuts", lambda self: ())

    def stages(weight: float) -> list[int]:
        graphs = {"even": (chain, WIDE), "late": (dear(1024), NARROW)}
        layout = al.plan_shared(graphs, shared="0", weights={"late": weight}, cluster=CLUSTER, options=TWO)
        return [layout.parameter_layout[f"0/{i}"][0] for i in range(4)]

    assert stages(1e-3) == [0, 0, 1, 1]
    assert stages(1e3) == [0, 0, 0, 1]


def dear(rows: int) -> Any:
    """A chain whose last layer has so many times the rows of the others."""
    return lambda params, x: chain(params[3:], jnp.tile(chain(params[:3], x), (rows, 1)))


NARROWING = [shape(a, b) for a, b in itertools.pairwise((4096, 4096, 64, 64, 4096))]
CUT_OTHERWISE = {
    "by what crosses": ({"big": (chain, (NARROWING, shape(8192, 4096))), "small": (chain, (NARROWING, shape(2, 4096)))},
                        {"small": 1000.0}),
    "by a dear layer": ({"even": (chain, WIDE), "late": (dear(1024), NARROW)}, {"late": 1e3}),
    "by the other": ({"even": (chain, WIDE), "late": (dear(1024), NARROW)}, {"late": 1e-3}),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("options", [TWO, al.PlanOptions(num_stages=2, submeshes="auto")], ids=["equal", "searched"])
@pytest.mark.parametrize("case", CUT_OTHERWISE)
def test_never_dearer_than_with_the_stages_of_one_graph(case, options):
    """With the stages and layouts of any graph's own plan as pins, all together cost as much or more."""
    graphs, weights = CUT_OTHERWISE[case]
    settings = {"shared": "0", "weights": weights, "cluster": CLUSTER}
    layout = al.plan_shared(graphs, options=options, **settings)
    assert not list(layout.faults())
    for name, graph in graphs.items():
        own = al.plan_shared({name: graph}, shared="0", cluster=CLUSTER, options=options).plans[name]
        if options is TWO:
            own = min(own, al.plan(graph[0], *graph[1], cluster=CLUSTER, options=options), key=lambda p: p.objective)
        as_own = al.plan_shared(graphs, follow=own, **settings)
        assert layout.objective <= as_own.objective * (1 + 1e-9), name
    assert all(price >= 0 for price in layout.price.values())


def searched(graphs: dict[str, Any], budget: float | None = None, **weights: float) -> list[tuple[Any, int]]:
    """Of three stages the submesh and the number of layers."""
    options = al.PlanOptions(num_stages=3, submeshes="auto", memory_budget_bytes=budget)
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=CLUSTER, options=options)
    assert not list(layout.faults()) and all(price >= 0 for price in layout.price.values())
    stages = [stage for stage, _ in layout.parameter_layout.values()]
    return [(s.submesh, stages.count(n)) for n, s in enumerate(next(iter(layout.plans.values())).stages)]


def test_submeshes_are_searched_for_all_graphs(monkeypatch):
    monkeypatch.setattr(shared_stages._StagedSearch, "own_cuts", lambda self: ())
    graphs = {"even": (chain, WIDE), "late": (dear(2**16), NARROW)}
    assert sorted(searched(graphs, late=1e-3)) == [((1, 1), 1), ((1, 1), 1), ((1, 2), 2)]
    assert searched(graphs, late=1e3) == [((1, 1), 1), ((1, 1), 2), ((1, 2), 1)]


def test_searched_submeshes_have_room_for_what_is_shared():
    """A table of 64 MiB that costs little, and a dear layer of 8 MiB: within 40 MiB the table has the two devices."""

    def looked_up(params: Any, x: jax.Array) -> jax.Array:
        x = al.layer_boundary(params[0][x])
        x = al.layer_boundary(jnp.tanh(x @ params[1]))
        return jnp.tanh(jnp.tile(x, (1024, 1)) @ params[2])

    params = shape(2**14, 2048), shape(2048, 2048), shape(2048, 2048)
    graphs = {"looked_up": (looked_up, (params, shape(2, dtype=jnp.int32)))}
    assert [submesh for submesh, _ in searched(graphs)] == [(1, 1), (1, 1), (1, 2)]
    assert [submesh for submesh, _ in searched(graphs, 40 * 2**20)] == [(1, 2), (1, 1), (1, 1)]


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


def test_stacked_layers_scanned_and_written_out():
    """One graph scans over the layers, the other takes rows: the same rows lie on each stage."""

    def scanned(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params)[0]

    params = shape(6, 256, 256)
    graphs = {
        "scanned": (scanned, (params, shape(512, 256))),
        "taken": (lambda p, x: chain(list(p), x), (params, shape(2, 256))),
    }
    for weights in ({"scanned": 1e3}, {"taken": 1e3}):  # either may lead
        layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=CLUSTER, options=TWO)
        rows = {path: stage for path, (stage, _) in layout.parameter_layout.items()}
        assert sum(stage == 0 for stage in rows.values()) and set(rows.values()) == {0, 1}
        assert all(layout.shared[name] == tuple(rows) for name in graphs)


def backwards(params: Any, x: Any) -> Any:
    return chain(params[::-1], x)


def bounded(params: Any, x: Any) -> Any:
    return chain(params[2:], al.layer_boundary(chain(params[:2], x)))


@pytest.mark.parametrize(
    ("graphs", "options", "error", "message"),
    [
        (
            {"one": (chain, WIDE), "other": (backwards, NARROW)},
            {},
            LayerError,
            r"'other', cut as 'one'.*contradicts the flow.*a cycle of stages",
        ),
        (
            {"one": (chain, WIDE), "other": (bounded, NARROW)},
            {},
            LayerError,
            r"'other', cut as 'one'.*2 layers and 'one' has 4|'0/1' for stage 1, and both are in layer 0",
        ),
        ({"one": (chain, WIDE)}, {"num_microbatches": 2}, AlpaLiteError, "stages with several microbatches"),
        ({"one": (chain, WIDE)}, {"num_stages": 3}, LayerError, "equal submeshes"),
        (
            {"one": (chain, WIDE)},
            {"num_stages": 5, "submeshes": "auto"},
            LayerError,
            "num_stages=5 was given for the 4 devices",
        ),
        (
            {"one": (chain, WIDE)},
            {"submeshes": "auto", "memory_budget_bytes": 1e5},
            MemoryBudgetError,
            "the graph 'one': no cut of 4 layers into 2 stages.*has room for the shared leaves.*97.7 KiB",
        ),
        ({"one": (chain, WIDE)}, {"memory_budget_bytes": 1000}, MemoryBudgetError, "the graph 'one'"),
    ],
)
def test_what_is_refused(graphs, options, error, message):
    with pytest.raises(error, match=message):
        al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=al.PlanOptions(**{"num_stages": 2, **options}))


def test_pins_hold_on_their_stages():
    options = al.PlanOptions(num_stages=2, mesh_shape=(2,), axis_names=("x",))
    graphs = {"many": (chain, WIDE), "few": (chain, NARROW)}
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=options, pins={"0/3": P("x")})
    assert layout.parameter_layout["0/3"] == (1, P("x", None))
    with pytest.raises(PinError, match="0/3"):
        al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=options,
                       pins={"many": {"0/3": P("x")}, "few": {"0/3": P()}})  # fmt: skip


def stepped(axis: int) -> Any:
    """Gives the matrices back, so that each lies as its next value."""

    def graph(params: Any, x: jax.Array) -> Any:
        first = params[0] / params[0].sum(axis=axis, keepdims=True)
        x = al.layer_boundary(x + first[0, 0])
        return (first, params[1] / params[1].sum(axis=axis, keepdims=True) * x[0, 0]), x * 2

    return graph


@pytest.mark.parametrize("options", [ONE_AXIS, al.PlanOptions(num_stages=2, submeshes="auto", axis_names=("x",))])
def test_pins_of_two_graphs_that_clash_are_named(options):
    """And no others."""
    args = (shape(2048, 4096), shape(4096, 2048)), shape(16, 2048)
    graphs = {"rows": (stepped(1), args), "columns": (stepped(0), args)}
    pins = {
        "rows": {"out/0/1": P("x"), "out/1": P()},
        "columns": {"out/0/1": P(None, "x"), "0/0": P("x"), "out/1": P()},
    }
    with pytest.raises(PinClashError, match=r"no layout of the shared leaves.*these 2 demands") as raised:
        al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=options, pins=pins)
    assert [text.split(" (")[0] for text in raised.value.members] == [
        "pin 'out/0/1': out/0/1 [4096,2048] is [x,_]",
        "pin 'out/0/1': out/0/1 [4096,2048] is [_,x]",
    ]
    assert "of 'rows': pin" in str(raised.value) and __file__ in str(raised.value)
    on_one_device = replace(
        options, axis_names=("x", "y"), stage_mesh_shapes=options.stage_mesh_shapes and ((1, 2), (1, 2))
    )
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=on_one_device, pins=pins)
    assert [stage.mesh.axis_size("x") for stage in layout.plans["rows"].stages][1] == 1
    assert layout.parameter_layout["0/1"][1] in (P(None, None), P("y", None), P(None, "y"))
    del pins["rows"]["out/0/1"]
    assert al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=options, pins=pins).plans


def test_a_stage_without_work_is_refused():
    def graph(params: Any, x: jax.Array) -> Any:
        x = al.layer_boundary(x @ params[0])
        return x, params[1] * 2

    args = (shape(64, 64), shape(64, 64)), shape(16, 64)
    for plan in (
        lambda: al.plan(graph, *args, cluster=CLUSTER, options=TWO),
        lambda: al.plan_shared({"one": (graph, args)}, shared="0", cluster=CLUSTER, options=TWO),
    ):
        with pytest.raises(LayerError, match=r"stage 1 has nothing to do.*Give the boundary all"):
            plan()


def pinned_chain(pins: dict[int, int], boundaries: tuple[int, ...] = ()) -> Any:
    """A chain whose values are pinned to stages, by their number."""

    def graph(params: Any, x: Any) -> Any:
        for i, kernel in enumerate(params):
            x = jnp.tanh(x @ kernel)
            x = al.pin_stage(x, pins[i]) if i in pins else x
            x = al.layer_boundary(x) if i in boundaries else x
        return x

    return graph


def stages_of_values(layout: Any, graphs: dict[str, Any]) -> dict[str, list[int]]:
    """Per graph the stages that compute the values of a chain."""
    found = {}
    for name, (fn, args) in graphs.items():
        plan = layout.plans[name]
        step = staged_for(plan, traced_for(plan, fn, args, {}))
        ops = [(stage, op) for stage, program in enumerate(step.programs) for _, _, op in program.walk()]
        found[name] = [stage for stage, op in ops if op.primitive == "tanh"]
    return found


SEARCHED = al.PlanOptions(num_stages=2, submeshes="auto")
KERNELS_8 = [shape(256, 256)] * 8
PINNED = {
    "boundaries": ({"one": ({1: 0}, (0, 1)), "other": ({}, (0, 1))}, 4),
    "boundaries, in both": ({"one": ({1: 0}, (0, 1)), "other": ({1: 0, 2: 1}, (0, 1))}, 4),
    "none": ({"one": ({2: 0}, ()), "other": ({}, ())}, 4),
    "in both": ({"one": ({0: 0}, ()), "other": ({2: 0}, ())}, 4),
    "within a layer": ({"one": ({2: 0, 3: 1}, ()), "other": ({}, ())}, 8),
}


@pytest.mark.medium
@pytest.mark.parametrize("options", [TWO, SEARCHED], ids=["equal", "searched"])
@pytest.mark.parametrize("case", PINNED)
def test_pins_to_stages_hold_in_any_graph(case, options):
    """Whichever leads, and in either order."""
    given, count = PINNED[case]
    for first, second in itertools.permutations(given):
        for weight in (1.0, 1e6):
            rows = {first: 64, second: 2}
            graphs = {
                name: (pinned_chain(*given[name]), (KERNELS_8[:count], shape(rows[name], 256)))
                for name in (first, second)
            }
            layout = al.plan_shared(graphs, shared="0", weights={second: weight}, cluster=CLUSTER, options=options)
            for name, stages in stages_of_values(layout, graphs).items():
                pins = given[name][0]
                assert {i: stages[i] for i in pins} == pins, (name, first, weight)
            assert not list(layout.faults())


@pytest.mark.parametrize("options", [TWO, SEARCHED], ids=["equal", "searched"])
@pytest.mark.parametrize("boundaries", [(0, 1), (0, 1, 2), ()])
def test_pins_to_stages_of_two_graphs_that_clash_are_refused(boundaries, options):
    """``one`` wants value 2 on the first stage, and ``other`` value 1 on the last, each of which alone can be."""
    one, other = pinned_chain({2: 0} if len(boundaries) != 2 else {1: 0}, boundaries), pinned_chain({1: 1}, boundaries)
    for weight in (1e-3, 1e3):
        graphs = {"one": (one, WIDE), "other": (other, NARROW)}
        with pytest.raises(LayerError, match=r"al.pin_stage at ") as raised:
            al.plan_shared(graphs, shared="0", weights={"other": weight}, cluster=CLUSTER, options=options)
        assert "'one'" in str(raised.value) and "'other'" in str(raised.value)


def test_pins_to_stages_beside_given_layers():
    def planned(pins: dict[int, int], alone: bool = False) -> Any:
        graphs = {"one": (pinned_chain({}), WIDE), "other": (pinned_chain(pins), NARROW)}
        graphs = {"other": graphs["other"]} if alone else graphs
        options = al.PlanOptions(num_stages=2, stage_layers=(2, 2))
        layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=options)
        return stages_of_values(layout, graphs)["other"]

    assert planned({1: 0})[1] == 0
    assert planned({2: 1}, alone=True)[2] == 1
    assert planned({2: 1})[2] == 1
    assert planned({2: 0})[2] == 0  # as the other graph alone would be cut, not the first

    def bounded(pins: dict[int, int]) -> Any:
        return {
            "one": (pinned_chain({}, (0, 1, 2)), WIDE),
            "other": (pinned_chain(pins, (0, 1, 2)), NARROW),
        }

    with pytest.raises(
        LayerError, match=r"stage_layers=\(2, 2\) puts layer 2 on stage 1, al.pin_stage at .* on stage 0"
    ):
        al.plan_shared(bounded({2: 0}), shared="0", cluster=CLUSTER,
                       options=al.PlanOptions(num_stages=2, stage_layers=(2, 2)))  # fmt: skip


@pytest.mark.parametrize("weight", [1e-3, 1e3])
def test_leaves_that_a_graph_does_not_read(weight):
    """The other graph tells no layers apart by them, whichever leads."""
    for unread in (slice(1, None), slice(2, None), slice(0, None, 2)):
        part = lambda params, x, unread=unread: chain(params[unread], x)  # noqa: E731
        graphs = {"all": (chain, WIDE), "part": (part, NARROW)}
        layout = al.plan_shared(graphs, shared="0", weights={"part": weight}, cluster=CLUSTER, options=TWO)
        assert not list(layout.faults())
        stages = [stage for stage, _ in layout.parameter_layout.values()]
        assert stages == sorted(stages) and set(stages) == {0, 1}


def updated(params: Any, x: Any) -> Any:
    """Reads every matrix twice."""
    return [kernel * 2 for kernel in params], chain(params, x)


def tied(params: Any, x: Any) -> Any:
    return chain(params["kernels"], x @ params["table"]) @ params["table"].T


UPDATED = [shape(64, 1024), shape(1024, 256)]
TIED = {"table": shape(64, 256), "kernels": KERNELS}
READ_TWICE = {
    "alone": ({"one": (updated, (UPDATED, shape(2, 64)))}, "0"),
    "leads": ({"one": (updated, (UPDATED, shape(64, 64))), "other": (chain, (UPDATED, shape(2, 64)))}, "0"),
    "follows": ({"one": (updated, (UPDATED, shape(2, 64))), "other": (chain, (UPDATED, shape(64, 64)))}, "0"),
    "both": ({"one": (updated, (UPDATED, shape(2, 64))), "other": (updated, (UPDATED, shape(64, 64)))}, "0"),
    "table": ({"one": (tied, (TIED, shape(64, 64)))}, "0/table"),
    "tables": ({"one": (tied, (TIED, shape(64, 64))), "other": (tied, (TIED, shape(2, 64)))}, "0/table"),
}


@pytest.mark.parametrize("options", [TWO, SEARCHED], ids=["equal", "searched"])
@pytest.mark.parametrize("case", READ_TWICE)
def test_leaves_that_two_layers_read(case, options):
    """They tell no layers apart, and layers are needed all the same."""
    graphs, shared = READ_TWICE[case]
    layout = al.plan_shared(graphs, shared=shared, cluster=CLUSTER, options=options)
    assert not list(layout.faults())
    assert all(
        len(plan.stages) == 2 and all(stage.decisions for stage in plan.stages) for plan in layout.plans.values()
    )
    assert all(price >= 0 for price in layout.price.values())


def test_results_of_parameters_alone():
    """Nobody reads them, and what they are made of comes first."""
    graph = lambda p, x: (jnp.tanh(p[0] @ p[1]), chain(p, x)[:, :8])  # noqa: E731
    layout = al.plan_shared({"one": (graph, WIDE)}, shared="0", cluster=CLUSTER, options=TWO)
    assert {stage for stage, _ in layout.parameter_layout.values()} == {0, 1}
