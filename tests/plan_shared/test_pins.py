"""``al.plan_shared`` with pins and followed plans: they hold in all graphs, or the clash is named."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import PinClashError, PinError
from tests.plan_shared.graphs import (
    ONE_AXIS,
    SLOW_LINKS,
    columns,
    rows,
    shapes,
    three_graphs,
)


def test_pins_hold_in_all_graphs() -> None:
    graphs = three_graphs()
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, pins={"columns": {"0/0": P(None, "model")}})
    assert layout.mesh.axis_names == ("model",)
    assert all(plan.specs_by_path["0/0"] == P(None, "model") for plan in layout.plans.values())
    none = al.plan_shared(
        graphs, shared="0", cluster=SLOW_LINKS, pins={"rows": None, "columns": {"0/0": P(None, "model")}}
    )
    assert none.parameter_layout == layout.parameter_layout
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, pins={"0/*": P("model"), "1": P("model")})
    specs = {plan.specs_by_path[path] for plan in layout.plans.values() for path in ("0/0", "0/1", "1")}
    assert specs == {P("model", None)}


def test_none_leaves_a_graph_its_own_pins() -> None:
    """As leaving it out does: those with which it was parallelized."""
    graphs = three_graphs()
    fn, args = graphs["rows"]
    graphs["rows"] = (al.parallelize(fn, pins={"0/1": P("model", None)}), args)
    for pins in (None, {"columns": {"1": P("model")}}, {"rows": None, "columns": {"1": P("model")}}):
        layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, pins=pins)
        assert [key for key, _ in layout.plans["rows"].pins] == ["0/1"]
        assert layout.parameter_layout["0/1"] == (0, P("model", None))


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


def test_pins_that_differ_on_axes_of_one_device_are_the_same() -> None:
    """On the mesh that is given; where it is searched there are meshes on which they clash."""
    pins = {
        "rows": {"0/0": P("x", "y")},
        "columns": {"0/0": P(None, "y")},
        "product": {"0/0": P(P.UNCONSTRAINED, ("x", "y"))},
    }
    one: list[dict[str, Any]] = [
        {"mesh_shape": (1, 4)},
        {"mesh_shape": (1, 4), "num_stages": 1},
        {"stage_mesh_shapes": ((1, 4),)},
    ]
    for given in one:
        options = al.PlanOptions(axis_names=("x", "y"), **given)
        layout = al.plan_shared(three_graphs(), shared="0", cluster=SLOW_LINKS, options=options, pins=pins)
        assert {plan.specs_by_path["0/0"] for plan in layout.plans.values()} == {P(None, "y")}
    others = (al.PlanOptions(axis_names=("x", "y")), al.PlanOptions(mesh_shape=(2, 2), axis_names=("x", "y")))
    for options in others:
        with pytest.raises(PinError, match=r"pin '0/0' of '.*' fixes the shared leaf '0/0' as .*, and that of '.*'"):
            al.plan_shared(three_graphs(), shared="0", cluster=SLOW_LINKS, options=options, pins=pins)


@pytest.mark.medium
def test_meshes_on_which_padding_keeps_a_pin_are_searched() -> None:
    """Alone one of the graphs is cheapest where the pin divides, which had ruled the other meshes out for both."""

    def one(params: Any, x: Any) -> Any:
        y = jnp.tanh(x @ params["w"])
        return y - y.sum(-1, keepdims=True)

    def two(params: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ params["w"])) @ params["w"].T

    params, *xs = shapes((1026, 514), (64, 1026), (65536, 1026), dtype=jnp.float32)
    graphs = {"one": (one, ({"w": params}, xs[0])), "two": (two, ({"w": params}, xs[1]))}
    given: dict[str, Any] = {"shared": "0", "cluster": SLOW_LINKS, "pins": {"0/w": P("y", "x")}}
    meshes = [(1, 4), (2, 2), (4, 1)]
    fixed = {
        mesh: al.plan_shared(graphs, options=al.PlanOptions(axis_names=("x", "y"), mesh_shape=mesh), **given)
        for mesh in meshes
    }
    layout = al.plan_shared(graphs, options=al.PlanOptions(axis_names=("x", "y")), **given)
    best = min(fixed.values(), key=lambda layout: layout.objective)
    assert (layout.objective, layout.mesh) == (best.objective, best.mesh)
    assert all(plan.paddings for plan in layout.plans.values()), {m: found.objective for m, found in fixed.items()}
    assert layout.lower_bound <= best.objective
    for name, (fn, args) in graphs.items():
        alone = al.plan(
            fn, *args, cluster=SLOW_LINKS, pins=given["pins"], options=al.PlanOptions(axis_names=("x", "y"))
        )
        assert layout.own[name] <= alone.objective


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


def test_graphs_without_a_common_mesh() -> None:
    """The pin of one holds where x has at most 2 devices, that of the other where y has one."""
    graphs = {
        "two": (lambda m, x: m * x.sum(), shapes((64, 64), (2, 64))),
        "one": (lambda m, x: m * x.sum(), shapes((64, 64), (1, 64))),
    }
    options = al.PlanOptions(axis_names=("x", "y"))
    with pytest.raises(PinError, match=r"no mesh of 1x4:h100-sxm has a layout that all of 'two', 'one' can share"):
        al.plan_shared(
            graphs, shared="0", cluster=SLOW_LINKS, options=options, pins={"two": {"1": P("x")}, "one": {"1": P("y")}}
        )


def test_every_mesh_needs_padding_for_a_pin_of_some_graph() -> None:
    """None can be planned as the graphs are, and on each another one is padded."""
    graphs = {
        "two": (lambda m, x: m * x.sum(), shapes((64, 64), (2, 64))),
        "three": (lambda m, x: m * x.sum(), shapes((64, 64), (3, 64))),
    }
    given: dict[str, Any] = {"cluster": SLOW_LINKS, "pins": {"two": {"1": P("x")}, "three": {"1": P("y")}}}
    layout = al.plan_shared(graphs, shared="0", options=al.PlanOptions(axis_names=("x", "y")), **given)
    fixed = [
        al.plan_shared(graphs, shared="0", options=al.PlanOptions(mesh_shape=shape, axis_names=("x", "y")), **given)
        for shape in ((1, 4), (2, 2))
    ]
    assert layout.objective == pytest.approx(min(one.objective for one in fixed))
    assert layout.lower_bound == pytest.approx(min(one.lower_bound for one in fixed))
    assert not layout.plans["two"].paddings and layout.plans["three"].paddings


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
