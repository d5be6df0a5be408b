"""``al.plan_shared`` with stages: pins hold in all graphs, or are refused with the clash."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.api.bound import staged_for, traced_for
from alpa_lite.errors import AlpaLiteError, LayerError, MemoryBudgetError, PinClashError, PinError
from tests.marks import slow_but
from tests.plan_shared.stages import (
    CLUSTER,
    KERNELS,
    NARROW,
    ONE_AXIS,
    SEARCHED,
    TWO,
    WIDE,
    chain,
    shape,
)


def backwards(params: Any, x: Any) -> Any:
    return chain(params[::-1], x)


def bounded(params: Any, x: Any) -> Any:
    return chain(params[2:], al.layer_boundary(chain(params[:2], x)))


def by_rows(params: Any, x: Any) -> Any:
    """As a token reads a stacked cache."""
    kernels, cache = params
    for kernel, row in zip(kernels, cache, strict=True):
        x = jnp.tanh(x @ kernel + row)
    return x


def as_a_whole(params: Any, x: Any) -> Any:
    """As no layer has rows of it."""
    kernels, cache = params
    for kernel in kernels:
        x = jnp.tanh(x @ kernel)
    return x, jnp.cumsum(cache, axis=0)


STACKED = KERNELS, shape(4, 256)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("graphs", "options", "error", "message"),
    [
        (
            {"one": (as_a_whole, (STACKED, WIDE[1])), "other": (by_rows, (STACKED, NARROW[1]))},
            {},
            LayerError,
            r"'one', cut as 'other'.*'0/1\[0:1\]' asks for stage 0.*both are in op 0.*rows of '0/1' .*a leaf per layer",
        ),
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
    with pytest.raises(error, match=message) as caught:
        al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=al.PlanOptions(**{"num_stages": 2, **options}))
    assert "test_stage_pins.py" in str(caught.value) or error is MemoryBudgetError


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


@pytest.mark.medium
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


KERNELS_8 = [shape(256, 256)] * 8
PINNED = {
    "boundaries": ({"one": ({1: 0}, (0, 1)), "other": ({}, (0, 1))}, 4),
    "boundaries, in both": ({"one": ({1: 0}, (0, 1)), "other": ({1: 0, 2: 1}, (0, 1))}, 4),
    "none": ({"one": ({2: 0}, ()), "other": ({}, ())}, 4),
    "in both": ({"one": ({0: 0}, ()), "other": ({2: 0}, ())}, 4),
    "within a layer": ({"one": ({2: 0, 3: 1}, ()), "other": ({}, ())}, 8),
}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(case, options, id=f"{case}-{name}", marks=[pytest.mark.slow] * (case not in quick))
        for options, name, quick in (
            (TWO, "equal", ("within a layer",)),
            (SEARCHED, "searched", ("boundaries",)),
        )
        for case in PINNED
    ],
)
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


@pytest.mark.medium
@pytest.mark.parametrize("options", [TWO, SEARCHED], ids=["equal", "searched"])
@pytest.mark.parametrize("boundaries", slow_but([(0, 1), ()], [(0, 1), (0, 1, 2), ()]))
def test_pins_to_stages_of_two_graphs_that_clash_are_refused(boundaries, options):
    """``one`` wants value 2 on the first stage, and ``other`` value 1 on the last, each of which alone can be."""
    one, other = pinned_chain({2: 0} if len(boundaries) != 2 else {1: 0}, boundaries), pinned_chain({1: 1}, boundaries)
    for weight in (1e-3, 1e3):
        graphs = {"one": (one, WIDE), "other": (other, NARROW)}
        with pytest.raises(LayerError, match=r"al.pin_stage at ") as raised:
            al.plan_shared(graphs, shared="0", weights={"other": weight}, cluster=CLUSTER, options=options)
        assert "'one'" in str(raised.value) and "'other'" in str(raised.value)


@pytest.mark.medium
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
