"""A graph's own optimum whose price is known without its plan: the plan's own price, and only where a plan says no more."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.api.shared_graph import SharedGraph
from alpa_lite.api.shared_graphs import given_graphs
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.planner import price_step
from tests.plan_shared.graphs import SLOW_LINKS, keep, shapes, softmax, three_graphs

EIGHT = al.Cluster.parse("1x8:h100-sxm")
ARGS = shapes((1024, 4096), (4096, 1024)), *shapes((8192, 1024))
GRAPHS: dict[str, Any] = {**three_graphs(), "softmax": (softmax, ARGS), "keep": (keep, ARGS)}


def graph_of(graph: Any, options: al.PlanOptions | None = None, cluster: al.Cluster = EIGHT) -> SharedGraph:
    (found,) = given_graphs({"graph": graph}, "0", None, None, (options, (), (), 0, None, None), cluster, "here")
    found.plan_own(cluster)
    return found


@pytest.mark.parametrize("name", list(GRAPHS))
def test_a_price_is_that_of_the_plan(name: str) -> None:
    graph = graph_of(GRAPHS[name])
    assert graph.own is None and graph.price is not None
    fn, args = GRAPHS[name]
    plan = al.plan(fn, *args, cluster=EIGHT, donate_argnums=0)
    assert graph.price.objective == pytest.approx(plan.objective, rel=1e-12) and graph.price.mesh == plan.mesh
    assert graph.price.in_specs == tuple(leaf.spec for leaf in plan.inputs)
    made = graph.planned(EIGHT, graph.price.mesh, graph.own_layout())
    assert made is graph.own
    assert (made.stages, made.inputs, made.outputs, made.search) == (
        plan.stages,
        plan.inputs,
        plan.outputs,
        plan.search,
    )


def test_layouts_are_those_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another graph's own optimum wins."""
    weights = ({}, {"rows": 1e6}, {"product": 1e6}, {"rows": 5.0, "columns": 7.0})
    graphs = three_graphs()

    def layouts() -> list[al.SharedLayout]:
        return [al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, weights=of, donate_argnums=0) for of in weights]

    priced = layouts()
    monkeypatch.setattr(price_step, "_COPIES", math.inf)
    for layout, other in zip(priced, layouts(), strict=True):
        assert (layout.plans, layout.lower_bound) == (other.plans, other.lower_bound)
        assert layout.own == pytest.approx(other.own, rel=1e-12) and str(layout) == str(other)


def test_a_plan_in_a_layout_is_on_its_mesh() -> None:
    """Of meshes that are equal but for the last digit, the price may name another one than the plan."""
    graph = graph_of(GRAPHS["product"])
    assert graph.price is not None
    (other,) = [row.mesh for row in graph.price.mesh_table if row.mesh != graph.price.mesh]
    whole = tuple(ShardingSpec(((),) * len(spec.dims)) for spec in graph.price.in_specs)
    graph.price = replace(graph.price, mesh=other, in_specs=whole)
    made = graph.planned(EIGHT, other, graph.own_layout())
    assert made.mesh == other and tuple(made.inputs[i].spec for i in graph.leaves) == graph.own_layout()


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (GRAPHS["keep"], al.PlanOptions(memory_budget_bytes=20_000_000)),
        (GRAPHS["keep"], al.PlanOptions(costs="hidet", mesh_shape=(8,), padding="off")),
        ((keep, (shapes((1000, 4099), (4099, 1024)), *shapes((8192, 1000)))), al.PlanOptions()),
    ],
    ids=["near the budget", "rounded", "padded"],
)
def test_where_a_plan_says_more_it_is_made(graph: Any, options: al.PlanOptions) -> None:
    assert graph_of(graph, options).own is not None


def test_a_search_that_another_mesh_ended_is_not_kept() -> None:
    """Where memory makes that one dearer, this one is searched to the end."""
    graph = graph_of(GRAPHS["keep"])
    assert graph.price is not None and graph.task is not None
    (known,) = [
        graph.tasks.priced(graph.task, row.mesh) for row in graph.price.mesh_table if row.mesh == graph.price.mesh
    ]
    assert known is not None and known.solution is not None and known.realised is None
    graph.tasks.keep_priced(graph.task, replace(known, solution=replace(known.solution, limit_used="cutoff")))
    assert graph.tasks.priced(graph.task, known.mesh) is None
    others = replace(graph.task, pins=replace(graph.task.pins, source="elsewhere"))
    assert graph.tasks.priced(others, known.mesh) is None
