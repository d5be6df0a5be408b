"""``al.plan_shared``: the joint optimum is that of brute force, over layouts, meshes and conventions."""

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
from alpa_lite.api import shared
from alpa_lite.api.shared_graphs import given_graphs
from alpa_lite.errors import PinError
from alpa_lite.intraop.repeated import Repeated
from alpa_lite.planner.joint import side_by_side
from alpa_lite.planner.plan_step import DEARER
from tests.plan_shared.graphs import (
    ONE_AXIS,
    PLAIN,
    SLOW_LINKS,
    cheapest,
    columns,
    cost_with,
    rows,
    scaled,
    shapes,
    softmax,
    three_graphs,
    weighted,
)


@cache
def all_layouts(count: int) -> list[tuple[Any, dict[str, float]]]:
    """Every layout of the two matrices with what each graph costs under it: brute force."""
    choices = P(), P("x"), P(None, "x")
    graphs = three_graphs(count)
    return [(specs, cost_with(graphs, specs, ONE_AXIS)) for specs in itertools.product(choices, choices)]


@pytest.mark.medium
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


@pytest.mark.parametrize(("factor", "planned"), [(1.0, True), (2.0, False)])
def test_what_is_dearer_by_its_own_prices_is_not_planned(
    factor: float, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the proposal of a search that ended early can be."""
    proposed, offered = [], []
    solve, offer = shared.solve_jointly, shared._Search.offer

    def dearer(*args: Any, **kwargs: Any) -> Any:
        found = solve(*args, **kwargs)
        proposed.append(found.specs)
        return replace(found, objective=factor * found.objective)

    monkeypatch.setattr(shared, "solve_jointly", dearer)
    monkeypatch.setattr(shared._Search, "offer", lambda s, mesh, specs: offered.append(specs) or offer(s, mesh, specs))
    graphs = three_graphs(256)
    weights = dict(zip(graphs, (1.0, 30.0, 30.0), strict=True))  # no graph's own layout is the joint optimum
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, options=ONE_AXIS)
    assert len(proposed) == 1 and (proposed[0] in offered) == planned
    assert layout.gap == 0.0 or not planned


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


@pytest.mark.medium
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


def test_price_where_alone_a_graph_is_free() -> None:
    """Where collectives alone count, each graph has a layout of its own that needs none."""
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), costs="alpa")
    graphs = {name: graph for name, graph in three_graphs().items() if name != "product"}
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, options=options, donate_argnums=0)
    assert layout.objective > 0 and set(layout.own.values()) == {0.0}
    assert layout.price == {name: float("inf") if cost else 0.0 for name, cost in layout.costs.items()}
    assert "+inf%" in str(layout)


def test_weights_of_numpy() -> None:
    weights = {"product": np.int64(3), "rows": np.float32(0.5)}
    layout = al.plan_shared(three_graphs(), shared="0", weights=weights, cluster=SLOW_LINKS, options=ONE_AXIS)
    assert layout.weights == {"product": 3.0, "rows": 0.5, "columns": 1.0}


@pytest.mark.medium
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


@pytest.mark.parametrize("weight", [2.0**28, 0.3])
def test_weights_of_whole_prices(weight: float) -> None:
    """A price of slices that only decides between equals, weighted, made the layout that costs nothing look dear."""
    args = shapes((16, 64), (16, 16), dtype=jnp.float32)
    graphs = {name: (lambda m, x: (x @ m).astype(jnp.bfloat16), args) for name in ("often", "rare")}
    options = al.PlanOptions(mesh_shape=(2,), axis_names=("x",), padding="off", costs="hidet")
    pins = {"often": {"out": P(None, "x")}, "rare": {"out": P()}}
    layout = al.plan_shared(
        graphs, shared="0", weights={"often": weight}, cluster=al.Cluster.parse("1x2:cpu"), options=options, pins=pins
    )
    assert (layout.objective, layout.lower_bound, layout.gap) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["product", "rows", "columns"])
def test_a_plan_alone_bounds_the_meshes_that_it_does_not_write_out(name: str) -> None:
    """What is cheaper on another mesh is known by its bound, which is that of a plan for all meshes."""
    graphs = uneven_graphs() if name == "rows" else three_graphs()
    fn, args = graphs[name]
    cluster = al.Cluster.parse("1x8:h100-sxm")  # two axes are tried first
    (graph,) = given_graphs({name: (fn, args)}, "0", None, None, (None, (), (), 0, None, None), cluster, "here")
    graph.plan_own(cluster)
    graph.planned(cluster, graph.optimum.mesh, graph.own_layout())
    whole = al.plan(fn, *args, cluster=cluster, donate_argnums=0)
    assert graph.best().objective == whole.objective and graph.best().mesh == whole.mesh
    left_out = {row.mesh for row in graph.best().mesh_table if row.reason == DEARER}
    for row in whole.mesh_table:
        assert row.objective is not None and row.lower_bound is not None and row.peak_bytes is not None
        assert (row.mesh in left_out) is (row.lower_bound > whole.objective)
        assert graph.bound(row.mesh) == pytest.approx(row.lower_bound, rel=1e-12)
    assert bool(left_out) is (name == "rows")
