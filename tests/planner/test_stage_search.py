"""Stages are searched: no cut that a user could give is better, equal layers are priced once, memory decides where it must."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, MemoryBudgetError
from alpa_lite.plan.plan import Plan
from alpa_lite.planner import stage_prices

pytestmark = pytest.mark.medium
WIDTH, BATCH, MICROBATCHES = 1024, 64, 8
CLUSTER = al.Cluster.parse("1x4:h100-sxm")


def step_of(num_layers: int, width: int = WIDTH, batch: int = BATCH) -> tuple[Any, tuple[Any, Any]]:
    """Equal layers of two matmuls, a boundary after each."""

    def loss_fn(params: Any, x: Any) -> Any:
        for i, (up, down) in enumerate(params):
            x = x + jnp.tanh(x @ up) @ down
            x = al.layer_boundary(x) if i < num_layers - 1 else x
        return jnp.mean(x**2)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = al.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    up, down = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((width, 4 * width), (4 * width, width)))
    return step, ([(up, down)] * num_layers, jax.ShapeDtypeStruct((batch, width), jnp.float32))


def plan(num_layers: int = 4, cluster: Any = CLUSTER, **options: Any) -> Plan:
    step, args = step_of(num_layers)
    return al.plan(
        step, *args, cluster=cluster, options=al.PlanOptions(**{"num_microbatches": MICROBATCHES, **options})
    )


@cache
def searched(budget: float | None = None) -> Plan:
    return plan(memory_budget_bytes=budget)


def cuts() -> Iterator[dict[str, Any]]:
    """Every way to give 4 layers to submeshes of 4 devices, as a user would."""
    yield {"num_stages": 1}
    for count in (2, 3, 4):
        for sizes in itertools.product((1, 2, 4), repeat=count):
            for layers in itertools.product((1, 2, 3), repeat=count):
                if sum(sizes) == 4 and sum(layers) == 4:
                    yield {"submeshes": tuple((1, n) for n in sizes), "stage_layers": layers}


def cheapest(**options: Any) -> float:
    """Of all cuts, each planned exactly."""
    found = []
    for cut in cuts():
        try:
            found.append(plan(**cut, **options).objective)
        except MemoryBudgetError:
            continue
    return min(found)


def test_no_cut_is_better():
    assert searched().objective == pytest.approx(cheapest(), rel=1e-12)
    assert len(searched().stages) > 1


def test_memory_forces_stages():
    # A stage's weights and gradient sums leave one device no room for more than one layer: stages, or weights that are split.
    budget = 0.55 * plan(num_stages=1).memory.peak
    found = searched(budget)
    assert found.memory.peak <= budget
    assert found.objective <= cheapest(memory_budget_bytes=budget) * 1.02
    assert len(found.stages) > 1


def test_no_equal_cut_is_better_where_the_schedule_waits_for_transfers():
    # Hosts with slow links: the formula, which hides transfers, prefers a stage per host. With two per host only every second
    # boundary lies between hosts.
    step, args = step_of(16, 2048, batch=4096)
    cluster = al.Cluster.parse("8x2:v100-sxm2-16gb")

    def planned(**cut: Any) -> Plan:
        return al.plan(step, *args, cluster=cluster, options=al.PlanOptions(num_microbatches=64, **cut))

    found = planned()
    equal = [planned(submeshes=((1, 16 // n),) * n, stage_layers=(16 // n,) * n).objective for n in (8, 16)]
    assert found.objective <= min(equal) * (1 + 1e-9)
    assert len(found.stages) == 16
    estimates = {c.num_stages: c.status for c in found.stage_counts}
    assert estimates[16] == "planned" and estimates[8] == "estimated"


def test_the_plan_says_why():
    counts = {c.num_stages: c for c in searched().stage_counts}
    assert sorted(counts) == [1, 2, 3, 4]
    chosen = counts[len(searched().stages)]
    assert (chosen.status, chosen.objective) == ("planned", searched().objective)
    assert all(chosen.objective <= c.objective for c in counts.values() if c.objective is not None)
    text = str(searched())
    assert "Numbers of stages" in text and "no less" in text


def test_the_same_bytes_twice(tmp_path):
    for name in ("a", "b"):
        plan(num_layers=3).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert al.load_plan(tmp_path / "a").stage_counts == plan(num_layers=3).stage_counts


def test_equal_layers_are_priced_once(monkeypatch):
    solved = []
    real = stage_prices.plan_on_mesh
    monkeypatch.setattr(stage_prices, "plan_on_mesh", lambda *a, **k: solved.append(1) or real(*a, **k))
    counts = []
    for num_layers in (6, 10):
        solved.clear()
        plan(num_layers=num_layers)
        counts.append(len(solved))
    # First, inner and last layer, and pairs of them, whatever the depth.
    assert counts[1] <= counts[0] + 4


def test_one_microbatch_is_one_stage_as_before():
    step, args = step_of(2)
    assert al.plan(step, *args, cluster=CLUSTER).stage_counts == ()


def test_a_searched_pipeline_runs_from_its_file(tmp_path):
    step, args = step_of(4, width=8)
    options = al.PlanOptions(num_microbatches=4)
    # Few bytes per link: what is exchanged decides, and stages exchange least.
    made = al.plan(step, *args, cluster=al.Cluster.parse("1x4:cpu"), options=options)
    made.save(tmp_path / "plan.json")
    run = al.parallelize(step, plan=al.load_plan(tmp_path / "plan.json"))
    given = jax.tree.map(lambda s: jax.random.normal(jax.random.key(0), s.shape) * 0.3, args)
    for got, want in zip(jax.tree.leaves(run(*given)), jax.tree.leaves(jax.jit(step)(*given)), strict=True):
        assert jnp.allclose(got, want, atol=1e-5)


def test_a_step_that_nothing_fits_says_so():
    with pytest.raises(AlpaLiteError, match="budget"):
        plan(memory_budget_bytes=1e6)


def test_pins_to_stages_are_kept():
    def loss_fn(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = al.layer_boundary(x) if i < 3 else x
            x = al.pin_stage(x, 0) if i == 1 else x  # the third layer is in the first stage
        return jnp.mean(x)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = al.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda w, g: w - g, params, grads), loss

    args = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    made = al.plan(step, *args, cluster=CLUSTER, options=al.PlanOptions(num_microbatches=MICROBATCHES))
    # Without the pin the third layer begins the second stage.
    assert made.pipeline is None or made.pipeline.stage_of_layer[:3] == (0, 0, 0)


def test_a_pin_asks_for_no_more_stages_than_it_names():
    made = al.plan(*_pinned_late(), cluster=CLUSTER, options=al.PlanOptions(num_microbatches=MICROBATCHES))
    assert made.pipeline is not None and made.pipeline.stage_of_layer[-1] == 1


def _pinned_late() -> tuple[Any, ...]:
    """Four layers of which the last is pinned to the second stage: no more than two stages are possible."""

    def loss_fn(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = al.layer_boundary(x) if i < 3 else x
            x = al.pin_stage(x, 1) if i == 2 else x
        return jnp.mean(x)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = al.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda w, g: w - g, params, grads), loss

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
    return step, weights, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
