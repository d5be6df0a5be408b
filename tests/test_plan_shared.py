"""``al.plan_shared``: the joint optimum is that of brute force, the plans agree and run, and bad input is named."""

from __future__ import annotations

import gc
import itertools
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import MemoryBudgetError, PinClashError, PinError, PlanFileError
from alpa_lite.intraop.repeated import Repeated
from alpa_lite.planner.joint import EVERYWHERE, side_by_side

SLOW_LINKS = al.Cluster.parse("1x4:h100-sxm")
ONE_AXIS = al.PlanOptions(mesh_shape=(4,), axis_names=("x",))


def shapes(*sizes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    return tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)


def product(params: Any, x: jax.Array) -> Any:
    first, second = params
    return params, x @ first @ second


def rows(params: Any, x: jax.Array) -> Any:
    """Each row divided by its sum: wants matrices split by rows."""
    return tuple(m / m.sum(axis=1, keepdims=True) for m in params), x


def columns(params: Any, x: jax.Array) -> Any:
    return tuple(m / m.sum(axis=0, keepdims=True) for m in params), x


def three_graphs(count: int = 65536, width: int = 2048) -> dict[str, Any]:
    """Their parameters are given back, so that where they lie matters: what lies whole is gathered again."""
    args = shapes((width, 2 * width), (2 * width, width)), *shapes((count, width))
    return {"product": (product, args), "rows": (rows, args), "columns": (columns, args)}


def weighted(costs: dict[str, float], weights: dict[str, float]) -> float:
    return sum(weights[name] * costs[name] for name in costs)


def cost_under(budget: float, graphs: dict[str, Any], specs: Any, weights: dict[str, float]) -> float:
    """Weighted sum of a layout; inf where a graph does not fit."""
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), memory_budget_bytes=budget)
    try:
        return weighted(cost_with(graphs, specs, options), weights)
    except (MemoryBudgetError, PinError):
        return float("inf")


def cost_with(graphs: dict[str, Any], specs: Any, options: al.PlanOptions) -> dict[str, float]:
    """Cost of each graph planned alone with the parameters pinned."""
    pins = {f"0/{i}": spec for i, spec in enumerate(specs)}
    return {
        name: al.plan(fn, *args, cluster=SLOW_LINKS, pins=pins, options=options, donate_argnums=0).objective
        for name, (fn, args) in graphs.items()
    }


@cache
def all_layouts(count: int) -> list[tuple[Any, dict[str, float]]]:
    """Every layout of the two matrices with what each graph costs under it: brute force."""
    choices = P(), P("x"), P(None, "x")
    graphs = three_graphs(count)
    return [(specs, cost_with(graphs, specs, ONE_AXIS)) for specs in itertools.product(choices, choices)]


@pytest.mark.parametrize("count", [65536, 256])
@pytest.mark.parametrize("counts", [(1, 1, 1), (1000, 1, 1), (1, 100, 1), (1, 1, 5000), (300, 1, 300)])
def test_joint_optimum_is_that_of_brute_force(count: int, counts: tuple[int, int, int]) -> None:
    graphs = three_graphs(count)
    weights = dict(zip(graphs, map(float, counts), strict=True))
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0)
    best = min(weighted(costs, weights) for _, costs in all_layouts(count))
    assert layout.objective == pytest.approx(best, rel=1e-9)
    assert layout.gap == 0.0
    assert layout.lower_bound == pytest.approx(best, rel=1e-9)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("budget", "counts", "whole"),
    [
        (60e6, (1000, 1, 1), 2),
        (38e6, (1000, 1, 1), 1),
        (30e6, (1000, 1, 1), 0),
        (38e6, (1, 1, 1), 0),
        (38e6, (10, 3, 1), 1),
        (38e6, (100, 10, 3), None),
    ],
)
def test_joint_optimum_within_a_budget_is_that_of_brute_force(
    budget: float, counts: tuple[int, int, int], whole: int | None
) -> None:
    """Two matrices of 16 MiB: both may lie whole, one, or none. The last three are no graph's own optimum."""
    graphs = three_graphs(256)
    weights = dict(zip(graphs, map(float, counts), strict=True))
    choices = P(), P("x"), P(None, "x")
    best = min(cost_under(budget, graphs, specs, weights) for specs in itertools.product(choices, choices))
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), memory_budget_bytes=budget)
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, options=options, donate_argnums=0)
    assert layout.objective == pytest.approx(best, rel=1e-9)
    assert layout.lower_bound <= best
    assert all(plan.memory.peak <= budget for plan in layout.plans.values())
    assert whole in (None, sum(spec == P(None, None) for _, spec in layout.parameter_layout.values()))


def test_layers_of_equal_prices_are_copies_of_one_another() -> None:
    first, equal, other = np.array([1.0, 2.0]), np.array([1.0, 2.0]), np.array([[1.0, 2.0]])
    parts = Repeated(np.array([0, 1, 0]), [first, equal]), Repeated(np.array([1, 0]), [other, equal.copy()])
    joined = side_by_side(parts)
    assert joined.numbers.tolist() == [0, 0, 0, 0, 1]
    assert [array.tolist() for array in joined] == [[1.0, 2.0]] * 4 + [[[1.0, 2.0]]]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("counts", "better"), [((1, 1, 1), False), ((1, 20, 3), True), ((3, 1, 40), False), ((1e-3, 1, 1e-2), True)]
)
def test_meshes_are_searched_as_by_brute_force(counts: tuple[float, float, float], better: bool) -> None:
    """A matrix with 2 rows more than 4 devices can split: two axes are better where the graph of rows counts."""
    graphs = uneven_graphs()
    weights = dict(zip(graphs, counts, strict=True))
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, donate_argnums=0)
    best = {mesh: min(weighted(costs, weights) for costs in found) for mesh, found in meshes_and_layouts().items()}
    assert layout.objective == pytest.approx(min(best.values()), rel=1e-9)
    assert best[layout.mesh.shape] == pytest.approx(min(best.values()), rel=1e-9)
    assert (best[2, 2] < 0.9 * best[4,]) is better


def uneven_graphs() -> dict[str, Any]:
    def one(graph: Any) -> Any:
        return lambda params, x: graph((params,), x)

    args = jax.ShapeDtypeStruct((2050, 4096), jnp.bfloat16), *shapes((4096, 2050))
    return {
        "product": (lambda m, x: (m, x @ m), args),
        "rows": (one(rows), args),
        "columns": (one(columns), args),
    }


@cache
def meshes_and_layouts() -> dict[tuple[int, ...], list[dict[str, float]]]:
    """Of each mesh what the graphs cost in every layout of the matrix."""
    one_axis = [P(), P("x"), P(None, "x")]
    two_axes = [*one_axis, P("y"), P(None, "y"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("x", "y"))]
    found: dict[tuple[int, ...], list[dict[str, float]]] = {}
    for mesh, specs in (((4,), one_axis), ((2, 2), two_axes)):
        options = al.PlanOptions(mesh_shape=mesh, axis_names=("x", "y")[: len(mesh)])
        for spec in specs:
            with suppress(PinError):
                found.setdefault(mesh, []).append(
                    {
                        name: al.plan(
                            fn, *args, cluster=SLOW_LINKS, pins={"0": spec}, options=options, donate_argnums=0
                        ).objective
                        for name, (fn, args) in uneven_graphs().items()
                    }
                )
    return found


def test_weights_decide_where_parameters_lie() -> None:
    """The layouts of brute force differ from graph to graph, so sharing has a price, and weights say who pays it."""
    graphs = three_graphs()
    found = {}
    for name in graphs:
        layout = al.plan_shared(
            graphs, shared="0", weights={name: 1e6}, cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0
        )
        assert layout.price[name] == pytest.approx(0.0, abs=1e-9)
        assert all(price >= 0 for price in layout.price.values())
        found[name] = tuple(map(str, layout.parameter_layout.values()))
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("weights", [{"product": 100.0}, {"columns": 2000.0, "rows": 3.0}, {}])
def test_never_dearer_than_the_own_optimum_of_one_graph_for_all(weights: dict[str, float]) -> None:
    graphs = three_graphs()
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, donate_argnums=0)
    for name, (fn, args) in graphs.items():
        own = al.plan(fn, *args, cluster=SLOW_LINKS, donate_argnums=0)
        assert layout.own[name] <= own.objective
        options = al.PlanOptions(mesh_shape=own.mesh.shape, axis_names=own.mesh.axis_names)
        costs = cost_with(graphs, [own.specs_by_path[f"0/{i}"] for i in range(2)], options)
        assert layout.objective <= weighted(costs, dict(layout.weights)) * (1 + 1e-12)
    assert layout.lower_bound <= layout.objective
    assert sum(w * layout.own[name] for name, w in layout.weights.items()) <= layout.objective * (1 + 1e-12)


def test_weights_of_numpy() -> None:
    weights = {"product": np.int64(3), "rows": np.float32(0.5)}
    layout = al.plan_shared(three_graphs(), shared="0", weights=weights, cluster=SLOW_LINKS, options=ONE_AXIS)
    assert layout.weights == {"product": 3.0, "rows": 0.5, "columns": 1.0}


def test_plans_are_ordinary_agree_and_are_the_same_again() -> None:
    graphs = three_graphs()
    layout, again = (al.plan_shared(graphs, shared="0/*", cluster=SLOW_LINKS) for _ in range(2))
    assert list(layout.plans) == list(graphs)
    assert (layout, str(layout)) == (again, str(again))
    for plan in layout.plans.values():
        assert plan.mesh == layout.mesh
        for path, (stage, spec) in layout.parameter_layout.items():
            assert (stage, plan.specs_by_path[path]) == (0, spec)
    assert list(layout.parameter_layout) == ["0/0", "0/1"]


def test_saved_and_loaded(tmp_path: Path) -> None:
    graphs = three_graphs()
    layout = al.plan_shared(graphs, shared="0", weights={"product": 3}, cluster=SLOW_LINKS)
    layout.save(tmp_path / "layout.json")
    loaded = al.SharedLayout.load(tmp_path / "layout.json")
    assert loaded == layout
    assert str(loaded) == str(layout)
    fn, args = graphs["product"]
    assert loaded.plans["product"].bind(fn, *args).in_specs == layout.plans["product"].in_specs
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "layout.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is no layout file"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 9', 1), "version 9"),
        (lambda text: text.replace('"0/0"', '"0/7"', 1), "inconsistent: .*has not all the leaves"),
        (lambda text: text.replace('"product"', '"other"', 1), "inconsistent: .*is of the graphs"),
        (lambda text: text.replace('"product":3.0', '"product":-3.0', 1), "the weight of 'product' is -3"),
        (
            lambda text: re.sub(r'"own": \{"product":[^,]*', '"own": {"product":9', text),
            "own optimum of 'product' is 9",
        ),
        (lambda text: re.sub(r'"lower_bound": [^,]*', '"lower_bound": 99', text, count=1), "lower bound 99.0 is above"),
        (lambda text: text.replace('"0/1"', '"0/0"', 1), "shares no leaf, or one twice: 0/0, 0/0"),
        (lambda text: text.replace("1x4:h100-sxm", "2x2:h100-sxm", 1), "the plan of .* is for .*h100-sxm"),
    ],
)
def test_damaged_file(tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "layout.json"
    al.plan_shared(
        three_graphs(), shared="0", weights={"product": 3}, cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0
    ).save(file)
    changed = change(file.read_text())
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(PlanFileError, match=message):
        al.SharedLayout.load(file)


def test_text_shows_the_price_of_each_graph(golden: Any) -> None:
    """Its numbers are those of plans made with ``al.plan``."""
    graphs, weights = three_graphs(), {"product": 5.0, "rows": 9.0, "columns": 400.0}
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0)
    golden("layout_text", str(layout))
    costs = cost_with(graphs, [spec for _, spec in layout.parameter_layout.values()], ONE_AXIS)
    assert layout.costs == pytest.approx(costs)
    for name, (fn, args) in graphs.items():
        own = al.plan(fn, *args, cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0).objective
        assert layout.own[name] == pytest.approx(own)
        assert layout.price[name] == pytest.approx(costs[name] / own - 1)
    assert len({f"{price:.4f}" for price in layout.price.values()}) == 3


# -- odd graphs --------------------------------------------------------------------------------------------------------


def test_leaves_used_often_of_several_types_and_uneven() -> None:
    """A tied embedding, a dim of 10 that 4 devices cannot split, and int8 beside float32."""

    def tied(params: Any, tokens: jax.Array) -> jax.Array:
        hidden = params["embed"][tokens] @ params["narrow"] * params["scale"].astype(jnp.float32)
        return hidden @ params["narrow"].T @ params["embed"].T

    params = {
        "embed": jax.ShapeDtypeStruct((4096, 512), jnp.float32),
        "narrow": jax.ShapeDtypeStruct((512, 10), jnp.float32),
        "scale": jax.ShapeDtypeStruct((10,), jnp.int8),
    }
    graphs = {f"b{n}": (tied, (params, jax.ShapeDtypeStruct((n,), jnp.int32))) for n in (4, 4096)}
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS)
    assert set(layout.parameter_layout) == {"0/embed", "0/narrow", "0/scale"}
    assert not list(layout.faults())


def test_padded_graph_shares_too() -> None:
    """Ten rows of work pay for padding inside one graph; its shared leaves lie as in the other."""
    params = shapes((8192, 8192))
    graphs = {
        "uneven": (lambda params, x: jax.nn.relu(x @ params[0]) @ params[0], (params, *shapes((4097, 8192)))),
        "even": (lambda params, x: x @ params[0], (params, *shapes((4096, 8192)))),
    }
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0)
    assert layout.plans["uneven"].paddings
    assert layout.plans["uneven"].inputs[0].spec == layout.plans["even"].inputs[0].spec


def test_donated_state_is_one_leaf() -> None:
    """What is donated and given back lies in one place before and after, in all graphs."""

    def write(params: Any, cache: jax.Array, x: jax.Array) -> Any:
        return x @ params[0], jax.lax.dynamic_update_slice(cache, x @ params[0], (0, 0))

    def read(params: Any, cache: jax.Array) -> Any:
        return (cache @ params[0]).sum(), cache * 2

    params, cache_ = shapes((1024, 1024)), jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    graphs = {"write": (write, (params, cache_, *shapes((64, 1024)))), "read": (read, (params, cache_))}
    layout = al.plan_shared(graphs, shared=("0", "1"), cluster=SLOW_LINKS, donate_argnums=1)
    assert list(layout.parameter_layout) == ["0/0", "1"]
    leaves = [leaf for plan in layout.plans.values() for leaf in (*plan.inputs, *plan.outputs)]
    specs = {leaf.spec for leaf in leaves if leaf.path in ("1", "out/1")}
    assert len(specs) == 1


def test_other_arguments_in_each_graph() -> None:
    params = shapes((512, 512))
    graphs = {
        "first": (lambda params, x: x @ params[0], (params, *shapes((64, 512)))),
        "last": (lambda x, state: x @ state["params"][0], (*shapes((64, 512)), {"params": params})),
    }
    layout = al.plan_shared(graphs, shared={"first": "0", "last": "1/params"}, cluster=SLOW_LINKS)
    assert layout.shared == {"first": ("0/0",), "last": ("1/params/0",)}
    assert layout.plans["first"].specs_by_path["0/0"] == layout.plans["last"].specs_by_path["1/params/0"]


def test_pins_hold_in_all_graphs() -> None:
    graphs = three_graphs()
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, pins={"columns": {"0/0": P(None, "model")}})
    assert layout.mesh.axis_names == ("model",)
    assert all(plan.specs_by_path["0/0"] == P(None, "model") for plan in layout.plans.values())
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, pins={"0/*": P("model"), "1": P("model")})
    specs = {plan.specs_by_path[path] for plan in layout.plans.values() for path in ("0/0", "0/1", "1")}
    assert specs == {P("model", None)}


def test_pins_on_axes_of_one_device_are_pins_of_whole_dims() -> None:
    """Also for graphs whose own optimum is not what is shared."""
    graphs = three_graphs()
    options = al.PlanOptions(mesh_shape=(1, 4), axis_names=("x", "y"))
    for name in graphs:
        layout = al.plan_shared(
            graphs, shared="0", weights={name: 1e6}, cluster=SLOW_LINKS, options=options, pins={"0/0": P("x")}
        )
        assert layout.parameter_layout["0/0"] == (0, P(None, None))
        assert set(layout.costs) == set(graphs)


def test_pins_of_two_graphs_that_clash_are_named() -> None:
    """Each has plans, but what it pins decides where the shared leaf lies; other pins are not named."""
    graphs = {"rows": (rows, three_graphs()["rows"][1]), "columns": (columns, three_graphs()["columns"][1])}
    pins = {
        "rows": {"out/0/1": P("x"), "1": P()},
        "columns": {"out/0/1": P(None, "x"), "0/0": P("x"), "out/1": P("x")},
    }
    given: dict[str, Any] = {"shared": "0", "cluster": SLOW_LINKS, "options": ONE_AXIS}
    with pytest.raises(PinClashError, match=r"no layout of the shared leaves on the mesh \(x=4\)") as raised:
        al.plan_shared(graphs, pins=pins, **given)
    assert [text.split(" (")[0] for text in raised.value.members] == [
        "pin 'out/0/1': out/0/1 [4096,2048] is [x,_]",
        "pin 'out/0/1': out/0/1 [4096,2048] is [_,x]",
    ]
    text = str(raised.value)
    assert "of 'rows': pin" in text and "of 'columns': pin" in text and __file__ in text
    for name in graphs:
        other = {k: dict(v) for k, v in pins.items()}
        del other[name]["out/0/1"]
        assert al.plan_shared(graphs, pins=other, **given).plans


def test_pins_of_a_shared_leaf_that_are_given_in_one_graph() -> None:
    """They hold on the mesh that is given, under its names; a wrong one is shown with its graph."""
    given: dict[str, Any] = {"shared": "0", "cluster": SLOW_LINKS, "options": al.PlanOptions(mesh_shape=(2, 2))}
    layout = al.plan_shared(three_graphs(), pins={"columns": {"0/0": P("model"), "1": P("model")}}, **given)
    assert layout.mesh.axis_names == ("model", "x")
    assert {plan.specs_by_path["0/0"] for plan in layout.plans.values()} == {P("model", None)}
    partial = {"rows": {"0/0": P("x", P.UNCONSTRAINED)}, "columns": {"0/0": P(P.UNCONSTRAINED, "y")}}
    layout = al.plan_shared(three_graphs(), pins=partial, **given)
    assert layout.parameter_layout["0/0"] == (0, P("x", "y"))
    twice = {"rows": {"0/0": P("x", P.UNCONSTRAINED)}, "columns": {"0/0": P(P.UNCONSTRAINED, "x")}}
    with pytest.raises(PinError, match=r"pin '0/0' of 'columns' .* as \[\?,x\], and that of 'rows' as \[x,\?\]"):
        al.plan_shared(three_graphs(), pins=twice, **given)
    named = given | {"options": al.PlanOptions(mesh_shape=(2, 2), axis_names=("x", "y"))}
    with pytest.raises(
        PinError, match=r"the graph 'product': the pin .*'0/0' of the graph 'columns'.* uses the axis 'q'"
    ):
        al.plan_shared(three_graphs(), pins={"columns": {"0/0": P("q")}}, **named)


def test_parallelized_steps_keep_their_own_pins_and_options() -> None:
    """As ``al.plan`` of one keeps them, unless others are given."""
    graphs = three_graphs()
    fn, args = graphs["rows"]
    graphs["rows"] = al.parallelize(fn, cluster=SLOW_LINKS, pins={"0/0": P(None, "x")}, options=ONE_AXIS), args
    with pytest.raises(al.AlpaLiteError, match=r"'product' and 'rows' are parallelized with different options"):
        al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS)
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, options=ONE_AXIS)
    assert layout.parameter_layout["0/0"] == (0, P(None, "x"))
    alone = al.plan_shared({"rows": graphs["rows"]}, shared="0", cluster=SLOW_LINKS)
    assert alone.mesh.shape == (4,) and alone.parameter_layout["0/0"] == (0, P(None, "x"))
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, options=ONE_AXIS, pins={"0/0": P("x")})
    assert layout.parameter_layout["0/0"] == (0, P("x", None))


def test_follow_like_of_each_graph() -> None:
    """Where the graphs have the followed leaves at different paths."""
    params = shapes((512, 512))
    first = lambda params, x: x @ params[0]  # noqa: E731
    last = lambda x, state: x @ state["params"][0]  # noqa: E731
    plan = al.plan(first, params, *shapes((64, 512)), cluster=SLOW_LINKS, pins={"0/0": P(None, "x")}, options=ONE_AXIS)
    graphs = {"first": (first, (params, *shapes((8, 512)))), "last": (last, (*shapes((8, 512)), {"params": params}))}
    shared = {"first": "0", "last": "1/params"}
    like = {"first": {"0": "0"}, "last": {"1/params": "0"}}
    layout = al.plan_shared(graphs, shared=shared, cluster=SLOW_LINKS, follow=plan, follow_like=like)
    assert layout.plans["last"].specs_by_path["1/params/0"] == P(None, "x")


@pytest.mark.parametrize(
    ("graph", "settings", "message"),
    [
        ((lambda p, x: x @ p, shapes((4, 4))), {}, r"the graph 'other': .*cannot be traced"),
        ((lambda p, x: x @ p, shapes((4, 4), (4, 4))), {"donate_argnums": 7}, r"the graph 'one': .*donate_argnums"),
    ],
)
def test_whatever_is_wrong_with_a_graph_names_it(graph: Any, settings: dict[str, Any], message: str) -> None:
    graphs = {"one": (lambda p, x: x @ p, shapes((4, 4), (4, 4))), "other": graph}
    with pytest.raises(al.AlpaLiteError, match=message):
        al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, **settings)


def test_graphs_follow_a_training_plan() -> None:
    """Parameters stay where training has them, though the graphs alone want them elsewhere."""
    graphs = three_graphs()
    fn, args = graphs["columns"]
    trained = al.plan(fn, *args, cluster=SLOW_LINKS, donate_argnums=0)
    del graphs["columns"]
    free = al.plan_shared(graphs, shared="0", weights={"rows": 1e6}, cluster=SLOW_LINKS, donate_argnums=0)
    layout = al.plan_shared(
        graphs, shared="0", weights={"rows": 1e6}, cluster=SLOW_LINKS, donate_argnums=0, follow=trained
    )
    assert free.parameter_layout != layout.parameter_layout
    assert layout.mesh == trained.mesh
    for plan in layout.plans.values():
        assert [leaf.spec for leaf in plan.inputs[:2]] == [leaf.spec for leaf in trained.inputs[:2]]


# -- binding budgets ---------------------------------------------------------------------------------------------------


def scaled(matrix: int, axis: int) -> Any:
    return lambda p, x: (p[matrix] / p[matrix].sum(axis, keepdims=True)).astype(jnp.float32)


def keep(p: Any, x: jax.Array) -> Any:
    return (p[0] * 2, p[1] * 3), x @ p[0] @ p[1]


def two_products(p: Any, x: jax.Array) -> Any:
    return x @ p[0] @ p[1]


def softmax(p: Any, x: jax.Array) -> Any:
    return jax.nn.softmax(x @ p[0]) @ p[1]


PLAIN = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), padding="off")


def cheapest(graphs: dict[str, Any], weights: dict[str, float], options: al.PlanOptions) -> float:
    """Brute force over where two matrices lie."""
    best = float("inf")
    for specs in itertools.product((P(), P("x"), P(None, "x")), repeat=2):
        with suppress(MemoryBudgetError, PinError):
            best = min(best, weighted(cost_with(graphs, specs, options), weights))
    return best


@pytest.mark.medium
@pytest.mark.parametrize(
    ("graphs", "sizes", "weights", "budget"),
    [
        # The joint problem proposes whole matrices at every limit, and the graphs do not fit with them.
        ({"rows": (scaled(0, 1), 256), "keep": (keep, 1024)}, (2048, 2048), (1.56, 0.715), 33_365_688),
        ({"columns": (scaled(1, 0), 1024), "keep": (keep, 1024)}, (1024, 1024), (10, 7.44), 11_826_789),
        (
            {"keep": (keep, 4096), "soft": (softmax, 1), "product": (two_products, 64)},
            (1024, 2050),
            (3.98, 30.5, 62.1),
            26_501_321,
        ),
        # Alone no plan of "keep" is found within the budget.
        ({"keep": (keep, 1024), "rows": (scaled(0, 1), 256)}, (2048, 2048), (13, 10), 11_754_836),
        ({"soft": (softmax, 256), "keep": (keep, 4096)}, (1024, 1024), (4.1, 36.4), 11_015_795),
    ],
)
def test_layouts_that_do_not_fit_are_passed_over(
    graphs: dict[str, Any], sizes: tuple[int, int], weights: tuple[float, ...], budget: float
) -> None:
    params = shapes(sizes, sizes[::-1])
    made = {name: (fn, (params, *shapes((count, sizes[0])))) for name, (fn, count) in graphs.items()}
    counts = dict(zip(made, weights, strict=True))
    options = replace(PLAIN, memory_budget_bytes=budget)
    best = cheapest(made, counts, options)
    layout = al.plan_shared(made, shared="0", weights=counts, cluster=SLOW_LINKS, options=options, donate_argnums=0)
    assert layout.objective <= best * (1 + 1e-9) < float("inf")
    assert layout.lower_bound <= best
    assert all(plan.memory.peak <= budget for plan in layout.plans.values())
    assert all(price >= 0 for price in layout.price.values())


def test_own_optimum_under_a_budget_is_no_dearer_than_its_layout() -> None:
    """Alone the graph is found dearer than with its own layout pinned: under a budget the search is no proof."""
    args = shapes((1024, 2050), (2050, 1024)), *shapes((1024, 1024))
    graphs = {"columns": (scaled(0, 0), args), "product": (two_products, args)}
    weights = {"columns": 0.01, "product": 25.0}
    options = replace(PLAIN, memory_budget_bytes=18_171_858)
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, options=options)
    own = al.plan(two_products, *args, cluster=SLOW_LINKS, options=options)
    pins = {path: own.specs_by_path[path] for path in ("0/0", "0/1")}
    costs = {
        name: al.plan(fn, *args, cluster=SLOW_LINKS, options=options, pins=pins).objective
        for name, (fn, args) in graphs.items()
    }
    assert costs["product"] < 0.8 * own.objective
    assert layout.objective <= weighted(costs, weights) * (1 + 1e-9)
    assert layout.own["product"] <= costs["product"]
    assert all(price >= 0 for price in layout.price.values())


def test_regions_have_every_layout_once() -> None:
    """Without the layout that was taken out of each."""
    whole, first, last = (ShardingSpec(dims=dims) for dims in (((), ()), (("x",), ()), ((), ("x",))))
    layouts = list(itertools.product((whole, first, last), repeat=3))
    regions, taken = [EVERYWHERE], []
    while regions:
        region = regions.pop()
        inside = [ls for ls in layouts if all(region.allows(number, spec) for number, spec in enumerate(ls))]
        if inside:
            taken.append(inside[len(inside) // 2])
            regions += region.without(taken[-1])
    assert len(taken) == len(set(taken)) == len(layouts)


# -- conventions -------------------------------------------------------------------------------------------------------


def test_shared_leaves_are_no_ends_of_graphs_where_they_are_no_weights() -> None:
    """What slapo wants whole at the ends may be split where another graph reads it as a weight."""
    params = shapes((1024, 96), (96, 1024))
    graphs = {
        "rows": (scaled(0, 1), (params, *shapes((65536, 1024)))),
        "soft": (softmax, (params, *shapes((1, 1024)))),
    }
    options = replace(PLAIN, costs="slapo-head")
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, options=options, donate_argnums=0)
    best = cheapest(graphs, dict.fromkeys(graphs, 1.0), options)
    assert layout.objective == layout.lower_bound == best


def test_own_optimum_is_no_bound_where_it_has_shared_leaves_whole() -> None:
    """Alone the argument arrives whole and is cut for 1; as a shared leaf it may lie as the result does."""
    x = shapes((64, 64))
    graphs = {name: (lambda x, by=by: (x * by).astype(jnp.float32), x) for name, by in (("twice", 2), ("thrice", 3))}
    options, pins = replace(PLAIN, costs="slapo-head"), {"out": P("x")}
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, options=options, pins=pins)
    assert al.plan(graphs["twice"][0], *x, cluster=SLOW_LINKS, options=options, pins=pins).objective == 1.0
    assert (layout.objective, layout.lower_bound, layout.gap) == (0.0, 0.0, 0.0)


# -- bad input ---------------------------------------------------------------------------------------------------------


def with_params(*sizes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    return lambda params, x: x @ params[0], (shapes(*sizes, dtype=dtype), *shapes((8, 4096)))


SMALL = with_params((4096, 64))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"weights": {"fewer": 1}},
            al.AlpaLiteError,
            r"weights has 'fewer', which is no graph. There are 'product', 'rows'",
        ),
        ({"weights": {"product": 0}}, al.AlpaLiteError, r"weight of 'product' is 0. It must be a number above 0"),
        ({"weights": {"product": float("nan")}}, al.AlpaLiteError, r"weight of 'product' is nan"),
        ({"weights": {"product": 10**400}}, al.AlpaLiteError, r"weight of 'product' is 1000"),
        ({"weights": {"product": True}}, al.AlpaLiteError, r"weight of 'product' is True"),
        ({"weights": [1, 2]}, al.AlpaLiteError, r"weights=\[1, 2\] was given"),
        ({"shared": "3"}, al.AlpaLiteError, r"shared='3' matches no argument leaf of 'product'"),
        ({"shared": 0}, al.AlpaLiteError, r"shared=0 was given"),
        (
            {"shared": {"product": "0"}},
            al.AlpaLiteError,
            r"shared is of the graphs 'product'. There are 'product', 'rows', 'columns'",
        ),
        ({"pins": {"0/7": P("x")}}, PinError, r"the graph 'product': .*'0/7' matches no"),
        ({"pins": {"fewer": {"0/0": P("x")}}}, PinError, r"pins has 'fewer', which is no graph"),
        ({"pins": P("x")}, PinError, r"pins=.* was given"),
        (
            {"pins": {"product": {"0/0": P("x")}, "rows": {"0/0": P(None, "x")}}},
            PinError,
            r"the pin '0/0' of 'rows' fixes the shared leaf '0/0' as \[_,x\], and that of 'product' as \[x,_\]",
        ),
        (
            {"options": al.PlanOptions(num_stages=2, num_microbatches=2)},
            al.AlpaLiteError,
            r"was given stages with several microbatches",
        ),
        ({"options": 3}, al.AlpaLiteError, r"options=3 was given"),
        (
            {"options": al.PlanOptions(memory_budget_bytes=200e6), "graphs": dict(reversed(three_graphs().items()))},
            MemoryBudgetError,
            r"^the graph 'product': no plan fits",
        ),
        ({"graphs": {}}, al.AlpaLiteError, r"was given {}. Graphs are a dict"),
        ({"graphs": {"a": rows}}, al.AlpaLiteError, r"was given <function rows .* for 'a'"),
        (
            {"graphs": {"a": SMALL, "b": with_params((4096, 128))}},
            al.AlpaLiteError,
            r"the shared leaf '0/0' is bfloat16\[4096,128\] in 'b' and bfloat16\[4096,64\] in 'a'",
        ),
        (
            {"graphs": {"a": SMALL, "b": with_params((4096, 64), dtype=jnp.float32)}},
            al.AlpaLiteError,
            r"the shared leaf '0/0' is float32\[4096,64\] in 'b' and bfloat16",
        ),
        (
            {"graphs": {"a": SMALL, "b": with_params((4096, 64), (2, 2))}},
            al.AlpaLiteError,
            r"the leaf '0/1' of 'b' is shared, and 'a' has none at that path",
        ),
    ],
)
def test_bad_input(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"graphs": three_graphs(), "shared": "0", "options": ONE_AXIS, "cluster": SLOW_LINKS, **settings}
    with pytest.raises(error, match=message) as raised:
        al.plan_shared(given.pop("graphs"), **given)
    assert __file__ in str(raised.value)


def test_a_clash_is_looked_for_on_a_mesh_that_all_pins_fit() -> None:
    """A dim of two does not divide over the first mesh's axis of four."""
    graphs = {
        "two": (lambda m, x: m * x.sum(), shapes((64, 64), (64, 2))),
        "three": (lambda m, x: m * x.sum(), shapes((64, 64), (64, 64))),
    }
    pins = {"two": {"out": P("x"), "1": P(None, "y")}, "three": {"out": P(None, "x")}}
    with pytest.raises(PinClashError, match=r"no layout of the shared leaves") as raised:
        al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, pins=pins)
    assert [text.split(" (")[0] for text in raised.value.members] == [
        "pin 'out': out [64,64] is [x,_]",
        "pin 'out': out [64,64] is [_,x]",
    ]


def test_a_budget_that_each_graph_keeps_alone_and_no_layout_for_both() -> None:
    """Whichever way the matrix lies, one graph needs it a third time to bring it into its result's layout."""
    graphs = {name: (lambda m: m.T * 2, shapes((8192, 4096))) for name in ("one", "other")}
    pins = {"one": {"out": P("x")}, "other": {"out": P(None, "x")}}
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), memory_budget_bytes=36e6)
    for name, (fn, args) in graphs.items():
        assert al.plan(fn, *args, cluster=SLOW_LINKS, options=options, pins=pins[name]).memory.peak <= 36e6
    message = r"the graph '(one|other)' in the layout that it would share(.|\n)*pin 'out'(.|\n)*the memory budget of 34\.3 MiB"
    with pytest.raises(PinClashError, match=message) as raised:
        al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, options=options, pins=pins)
    assert len(raised.value.members) == 3


def test_graphs_without_a_common_mesh() -> None:
    """The pin of one holds where x has at most 2 devices, that of the other where y has one."""
    graphs = {
        "two": (lambda m, x: m * x.sum(), shapes((64, 64), (2, 64))),
        "three": (lambda m, x: m * x.sum(), shapes((64, 64), (3, 64))),
    }
    options = al.PlanOptions(axis_names=("x", "y"))
    with pytest.raises(PinError, match=r"no mesh of 1x4:h100-sxm has a layout that all of 'two', 'three' can share"):
        al.plan_shared(
            graphs, shared="0", cluster=SLOW_LINKS, options=options, pins={"two": {"1": P("x")}, "three": {"1": P("y")}}
        )


# -- running -----------------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_buckets_run_on_one_copy_of_the_parameters() -> None:
    """Acceptance 1.3: buckets 1, 128, 512, 2048 report equal parameter shardings, hold 1x bytes, move nothing, and are right."""

    def model(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        scores = jax.nn.softmax(jnp.where(jnp.tri(len(tokens), dtype=bool), x @ params["qk"] @ x.T, -1e9))
        return jax.nn.relu(scores @ x @ params["up"]) @ params["down"]

    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"embed": (256, 64), "qk": (64, 64), "up": (64, 256), "down": (256, 64)}
    params = {name: jax.random.normal(key, sizes[name]) / 16 for name, key in zip(sizes, keys, strict=True)}
    buckets = 1, 128, 512, 2048
    graphs = {f"b{n}": (model, (params, jax.ShapeDtypeStruct((n,), jnp.int32))) for n in buckets}
    layout = al.plan_shared(
        graphs, shared="0", cluster=al.Cluster.parse("1x8:cpu"), pins={"0/up": P(None, "x"), "0/down": P("x")}
    )
    first = layout.plans["b1"].in_specs[0]
    assert all(plan.in_specs[0] == first for plan in layout.plans.values())
    steps = {name: al.parallelize(fn, plan=layout.plans[name]) for name, (fn, _) in graphs.items()}
    mesh = jax.make_mesh(layout.mesh.shape, layout.mesh.axis_names)
    put = {name: jax.device_put(x, NamedSharding(mesh, first[name])) for name, x in params.items()}
    once = sum(device_bytes(x) for x in put.values())
    places = {name: pointers(x) for name, x in put.items()}
    for n in (*buckets, *reversed(buckets)):
        tokens = jax.random.randint(jax.random.key(n), (n,), 0, 256)
        spec = layout.plans[f"b{n}"].in_specs[1]
        lying = jax.device_put(tokens, NamedSharding(mesh, spec))
        steps[f"b{n}"].compile(put, lying)
        with jax.transfer_guard("disallow_explicit"):  # raises if as much as one byte of an argument has to move
            out = steps[f"b{n}"](put, lying)
        np.testing.assert_allclose(out, model(params, tokens), rtol=1e-4, atol=1e-5)
    assert {name: pointers(x) for name, x in put.items()} == places
    gc.collect()
    sizes_of = {x.shape for x in put.values()}
    held = [x for x in jax.live_arrays() if x.shape in sizes_of and len(x.devices()) == mesh.size]
    assert sum(map(device_bytes, held)) == once


def device_bytes(x: jax.Array) -> int:
    """On all devices together."""
    return len(x.devices()) * int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


def pointers(x: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
