"""Why there is no plan: each kind of demand in a smallest clash, and how far a budget is off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import MemoryBudgetError, PinClashError

CLUSTER = al.Cluster.parse("1x4:v100-sxm2-16gb")
SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
MIB = 2**20


def options(**settings):
    return al.PlanOptions(mesh_shape=(2, 2), axis_names=("data", "model"), **settings)


def clash(fn, *args, **settings):
    with pytest.raises(PinClashError) as error:
        al.plan(fn, *args, cluster=CLUSTER, **settings)
    message = str(error.value)
    assert "on the mesh (data=2, model=2)" in message
    assert "allowed: " in message and "next: " in message
    assert "test_explain.py" in message
    return error.value.members


def test_an_argument_and_its_next_value_have_one_layout():
    members = clash(
        lambda state, x: {"w": state["w"] + x},
        {"w": SQUARE},
        SQUARE,
        pins={"0/w": P("data"), "out/w": P("model"), "1": P()},
        options=options(),
    )
    assert members == (
        "pin '0/w': 0/w [1024,1024] is [data,_]",
        "pin 'out/w': out/w [1024,1024] is [model,_] (the next value of 0/w, so of one layout with it)",
    )


def test_a_pin_and_the_budget():
    """x is 4 MiB, its tanh 4 MiB; split over four devices both are 2 MiB, with x whole they are 5 MiB."""
    budget = options(memory_budget_bytes=3 * MIB)
    assert al.plan(jnp.tanh, SQUARE, cluster=CLUSTER, options=budget).memory.peak == 2 * MIB
    members = clash(jnp.tanh, SQUARE, pins={"0": P()}, options=budget)
    assert members == (
        "pin '0': 0 [1024,1024] is [_,_]",
        "the memory budget of 3.00 MiB per device",
    )


def test_a_budget_alone_says_what_is_possible_and_what_helps():
    with pytest.raises(MemoryBudgetError) as error:
        al.plan(jnp.tanh, SQUARE, cluster=CLUSTER, options=options(memory_budget_bytes=MIB))
    message = str(error.value)
    assert "smallest possible peak 2.00 MiB > budget 1.00 MiB per device" in message
    assert "largest arguments, unsharded: 0 4.00 MiB" in message
    assert "test_explain.py" in message
    assert "donate_argnums" in message and "jax.checkpoint" in message and "memory_budget_bytes" in message


def test_without_a_proof_the_error_says_what_was_found(monkeypatch):
    """As when the time for the bisection ends before anything above the budget is ruled out."""
    monkeypatch.setattr("alpa_lite.planner.explain._smallest_peak", lambda task, *_: (task.budget, 2.0 * MIB))
    with pytest.raises(MemoryBudgetError) as error:
        al.plan(jnp.tanh, SQUARE, cluster=CLUSTER, options=options(memory_budget_bytes=MIB))
    assert (
        "no plan was found that fits: smallest peak found 2.00 MiB > budget 1.00 MiB per device, 1.00 MiB too much"
        in str(error.value)
    )


def test_the_smallest_possible_peak_is_really_possible():
    """Two results of one argument: what the error names as possible is accepted, one percent less is not."""

    def fn(x):
        return x @ x, jnp.tanh(x)

    with pytest.raises(MemoryBudgetError) as error:
        al.plan(fn, SQUARE, cluster=CLUSTER, options=options(memory_budget_bytes=MIB))
    named = float(str(error.value).split("smallest possible peak ")[1].split(" MiB")[0])
    plan = al.plan(fn, SQUARE, cluster=CLUSTER, options=options(memory_budget_bytes=(named + 0.01) * MIB))
    assert plan.memory.peak <= (named + 0.01) * MIB
    with pytest.raises(MemoryBudgetError):
        al.plan(fn, SQUARE, cluster=CLUSTER, options=options(memory_budget_bytes=named * 0.98 * MIB))


def test_al_pin_and_a_ban():
    """The product is pinned split and its only reader whole: without collectives that cannot be."""

    def fn(x):
        return al.pin(al.pin(x, P("data")) * 2.0, P())

    members = clash(fn, SQUARE, options=options(forbid=("all-gather", "all-to-all", "collective-permute")))
    assert len(members) == 3
    assert all("al.pin at" in m and "test_explain.py" in m for m in members[:2])
    assert members[2].startswith("PlanOptions.forbid=")


def test_leaves_that_follow_one_another():
    """Both are free in one dim, so they share one layout; their results are pinned apart."""
    members = clash(
        lambda state: {"m": state["m"] * 2.0, "w": state["w"] + 1.0},
        {"m": SQUARE, "w": SQUARE},
        pins={"out/m": P("data"), "out/w": P("model")},
        pin_like={"0/m": "0/w"},
        options=options(),
    )
    assert members[-1] == "pin_like: 0/m has the layout of 0/w"
    assert len(members) == 3
