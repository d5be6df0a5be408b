"""``al.plan_shared`` where the memory budget binds: as brute force finds it, and never over the budget."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import BudgetClashError, MemoryBudgetError, PinClashError, PinError
from alpa_lite.planner.joint import EVERYWHERE
from tests.plan_shared.graphs import (
    PLAIN,
    SLOW_LINKS,
    cheapest,
    cost_with,
    keep,
    scaled,
    shapes,
    softmax,
    three_graphs,
    two_products,
    weighted,
)


def cost_under(budget: float, graphs: dict[str, Any], specs: Any, weights: dict[str, float]) -> float:
    """Weighted sum of a layout; inf where a graph does not fit."""
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), memory_budget_bytes=budget)
    try:
        return weighted(cost_with(graphs, specs, options), weights)
    except (MemoryBudgetError, PinError):
        return float("inf")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("budget", "counts", "whole"),
    [
        (60e6, (1000, 1, 1), 2),
        (38e6, (1000, 1, 1), 1),
        pytest.param(30e6, (1000, 1, 1), 1, marks=pytest.mark.slow),
        (38e6, (1, 1, 1), 0),
        (38e6, (10, 3, 1), 1),
        (38e6, (100, 10, 3), None),
    ],
)
def test_joint_optimum_within_a_budget_is_that_of_brute_force(
    budget: float, counts: tuple[int, int, int], whole: int | None
) -> None:
    """Two matrices of 16 MiB: both may lie whole, one, or none. The last three are no graph's own optimum.

    Plans with pins are no optimum where the budget binds: at 30 MB a layout is cheaper of which brute force finds no plan.
    """
    graphs = three_graphs(256)
    weights = dict(zip(graphs, map(float, counts), strict=True))
    choices = P(), P("x"), P(None, "x")
    best = min(cost_under(budget, graphs, specs, weights) for specs in itertools.product(choices, choices))
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), memory_budget_bytes=budget)
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, options=options, donate_argnums=0)
    assert layout.objective == pytest.approx(best, rel=1e-9) or (budget == 30e6 and layout.objective < best)
    assert layout.lower_bound <= min(best, layout.objective)
    assert all(plan.memory.peak <= budget for plan in layout.plans.values())
    assert whole in (None, sum(spec == P(None, None) for _, spec in layout.parameter_layout.values()))


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
        pytest.param(
            {"keep": (keep, 1024), "rows": (scaled(0, 1), 256)},
            (2048, 2048),
            (13, 10),
            11_754_836,
            marks=pytest.mark.slow,
        ),
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


@pytest.mark.medium
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


@pytest.mark.medium
def test_a_mesh_where_a_graph_alone_was_not_found_within_the_budget_is_no_mesh_without_plans() -> None:
    """There it has one in a layout that is fixed, which is better for both than what is left."""
    params = shapes((1024, 1024), (1024, 1024))
    options = al.PlanOptions(padding="off", memory_budget_bytes=9556618, axis_names=("x", "y"))
    alone = (two_products, (params, *shapes((1024, 1024))))
    own = al.plan(alone[0], *alone[1], cluster=SLOW_LINKS, options=options)
    assert {c.mesh.shape: c.status for c in own.mesh_table}[1, 4] == "over budget"

    def heavy(params: Any, x: Any, m: Any) -> Any:
        for _ in range(4):
            x = jax.nn.softmax(x @ m)
        return x

    def planned(graph: Any, own_pins: Any) -> al.SharedLayout:
        graphs, pins = {"alone": alone, "other": graph}, {"other": own_pins}
        weights = {"other": 10.0}
        return al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, options=options, pins=pins)

    layout = planned((heavy, (params, *shapes((2048, 512), (512, 512)))), {"1": P("y"), "out": P("y"), "2": P()})
    assert layout.mesh.shape == (1, 4)
    fixed = {path: P(*spec) for path, (_, spec) in layout.parameter_layout.items()}
    on_mesh = replace(options, mesh_shape=(1, 4))
    assert al.plan(alone[0], *alone[1], cluster=SLOW_LINKS, options=on_mesh, pins=fixed).memory.peak <= 9556618

    # Of 3 rows there is one part on this mesh alone.
    layout = planned((lambda params, t: t * params[0][0, 0], (params, *shapes((3, 4)))), {"1": P("x")})
    assert layout.mesh.shape == (1, 4)


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


@pytest.mark.medium
def test_a_pin_and_a_budget_that_a_graph_alone_was_not_found_to_keep() -> None:
    """No proof, as without the pin: a layout that is fixed keeps both."""
    params = shapes((1024, 1024), (1024, 1024))
    options = replace(PLAIN, memory_budget_bytes=5284764)
    args = (params, *shapes((256, 1024)))
    settings: Any = {"cluster": SLOW_LINKS, "options": options, "donate_argnums": 0}
    pins = {"out": P("x"), "0/1": P()}
    with pytest.raises(BudgetClashError) as caught:
        al.plan(softmax, *args, pins=pins, **settings)
    assert not caught.value.proven
    fixed = al.plan(softmax, *args, pins=pins | {"0/0": P("x")}, **settings)
    layout = al.plan_shared({"one": (softmax, args)}, shared="0", pins=pins, **settings)
    assert layout.objective <= fixed.objective


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
