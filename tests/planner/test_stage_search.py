"""Stages are searched: no cut that a user could give is better, equal layers are priced once, memory decides where it must."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, MemoryBudgetError
from alpa_lite.interop import slice_stages
from alpa_lite.plan.plan import Plan
from alpa_lite.planner import searched as searched_module
from alpa_lite.planner import stage_prices, stage_search
from alpa_lite.planner.stage_search import StageSearch
from alpa_lite.planner.stage_table import Cell, StageTable

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


def plan(num_layers: int = 4, cluster: Any = CLUSTER, *, many: bool = False, **options: Any) -> Plan:
    """``many`` examples and narrow layers: what is kept for the backward pass takes nearly all of the memory."""
    step, args = step_of(num_layers, 256, 16384) if many else step_of(num_layers)
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


def test_what_the_search_made_is_gone_without_the_collector():
    plan(2)
    gc.collect()
    gc.disable()
    try:
        plan(2)
        left = gc.collect()
    finally:
        gc.enable()
    assert left < 2_000  # one priced run alone has more objects


@pytest.mark.slow
def test_memory_forces_stages():
    # A stage's weights and gradient sums leave one device no room for more than one layer: stages, or weights that are split.
    budget = 0.55 * plan(num_stages=1).memory.peak
    found = searched(budget)
    assert found.memory.peak <= budget
    # One mesh for all layers costs twice as much there, and its proofs take minutes.
    assert found.objective <= cheapest(memory_budget_bytes=budget, time_limit_s=1.0) * 1.02
    assert len(found.stages) > 1


def test_no_equal_cut_is_better_where_the_schedule_waits_for_transfers():
    # Hosts with slow links: the formula, which hides transfers, prefers a stage per host. With two per host only every second
    # boundary lies between hosts.
    step, args = step_of(16, 2048, batch=4096)
    hosts = al.Cluster.parse("8x2:v100-sxm2-16gb")
    switch = replace(hosts.inside, topology="switch", wiring=(), detour_bytes_per_s=0.0)
    cluster = replace(hosts, inside=switch)

    def planned(**cut: Any) -> Plan:
        return al.plan(step, *args, cluster=cluster, options=al.PlanOptions(num_microbatches=64, **cut))

    found = planned()
    equal = [planned(submeshes=((1, 16 // n),) * n, stage_layers=(16 // n,) * n).objective for n in (8, 16)]
    assert found.objective <= min(equal) * (1 + 1e-9)
    assert len(found.stages) == 16
    estimates = {c.num_stages: c.status for c in found.stage_counts}
    assert estimates[16] == "planned" and estimates[8] == "estimated"


# -- recomputation ----------------------------------------------------------------------------------------------------------


@cache
def ample() -> int:
    """Peak of the best plan where memory is ample."""
    return plan(many=True, remat="none").memory.peak


def kept_or(remat: str, budget: float) -> float:
    """Objective of the searched plan; inf where there is none."""
    try:
        found = plan(many=True, remat=remat, memory_budget_bytes=budget)
    except MemoryBudgetError:
        return math.inf
    assert found.memory.peak <= budget
    return found.objective


@pytest.mark.parametrize(
    ("share", "more"),
    [(0.8, 1.01), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((0.5, 1.3), (0.3, math.inf)))],
)
def test_recomputation_is_searched_with_the_cut(share, more):
    """It keeps the cut where that is cheaper than another one, or the only way; no cut that a user could give is better."""
    budget = share * ample()
    found = kept_or("auto", budget)
    assert found <= 1.001 * cheapest(many=True, memory_budget_bytes=budget)
    assert more * found <= kept_or("none", budget)


@pytest.mark.slow
def test_what_fits_at_none_of_the_tables_rents_is_planned():
    """One rent leaves too much of what is held, the next one of what is at work."""
    budget = 0.28 * ample()
    found = plan(many=True, remat="all", memory_budget_bytes=budget)
    assert found.memory.peak <= budget
    assert found.objective == pytest.approx(cheapest(many=True, remat="all", memory_budget_bytes=budget), rel=1e-9)


def test_what_does_not_fit_at_one_rent_is_not_asked_for_at_another(search_of):
    table = search_of().table
    cell = cells_of(table)[0]
    table.solve([cell])
    table.forbid(cell, 0)
    row, meshes = table.kinds[cell.kind], table.num_meshes(cell.submesh)
    given = table.choices[cell.submesh]
    same = [c for c, choice in enumerate(given) if replace(choice, rent=0) == replace(given[cell.choice], rent=0)]
    assert len(same) == len(stage_prices.RENTS) and meshes * len(same) < len(given)
    assert (table.tolerated[row, cell.submesh, same] == -1).all()


def test_what_must_be_recomputed_is_priced_so():
    """All layers are recomputed by request; in this budget no cut fits without that."""
    found = plan(many=True, remat="all", memory_budget_bytes=0.3 * ample())
    assert len(found.stages) > 1 and found.remat.layers == (0, 1, 2, 3)


def test_where_memory_is_ample_nothing_is_priced_recomputed(monkeypatch):
    def never(*args):
        raise AssertionError("recomputed runs were asked for")

    monkeypatch.setattr(searched_module, "with_recomputed_layers", never)
    assert plan(many=True).objective == plan(many=True, remat="none").objective


def cells_of(table: StageTable) -> list[Cell]:
    return [Cell(k, m, c) for k in table.kinds for m, given in enumerate(table.choices) for c in range(len(given))]


def search_at_its_beginning(planned: Callable[[], Plan]) -> Callable[[], StageSearch]:
    """Makes the search that such planning runs."""
    given: list[tuple[Any, ...]] = []

    class Told(StageSearch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            given.append(args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searched_module, "StageSearch", Told)
        planned()
    return lambda: StageSearch(*given[-1])


@pytest.fixture(scope="module")
def search_of() -> Callable[[], StageSearch]:
    """Makes the search of a step that must recompute."""
    return search_at_its_beginning(lambda: plan(many=True, memory_budget_bytes=0.3 * ample()))


@pytest.fixture(scope="module")
def full(search_of) -> StageSearch:
    """The same with every entry of its table solved."""
    search = search_of()
    for _ in range(2):  # at first what recomputation repeats
        search.table.solve(cells_of(search.table))
    return search


@pytest.mark.parametrize("num_stages", [None, 1, 2, 3, 4])
def test_what_is_solved_when_it_is_asked_for_is_as_good_as_all(search_of, full, num_stages):
    lazy, best = search_of().best(num_stages), full.best(num_stages)
    assert (lazy is None) == (best is None) == (num_stages == 4)
    if lazy is not None:
        assert lazy.slicing.objective == pytest.approx(best.slicing.objective, rel=1e-12)


def test_an_infinite_budget_is_ample():
    """Entries that are none take infinitely much: no warning, and the same plan."""
    assert plan(many=True, memory_budget_bytes=math.inf).objective == plan(many=True).objective


def test_entries_that_are_not_solved_are_bounds(search_of, full):
    table, solved = search_of().table, full.table
    layers = [cell for cell in cells_of(table) if len(cell.kind) == 1]
    # Without what recomputation repeats, with it, with all layers but nothing longer.
    for cells in ([], layers, layers):
        if cells:
            table.solve(cells)
        assert (table.cost_s <= solved.cost_s * (1 + 1e-12)).all()
        assert (table.tolerated >= solved.tolerated).all()


@pytest.mark.parametrize(("device", "bounds"), [("h100-sxm", True), ("v100-sxm2-16gb", False)])
def test_two_devices_bound_more_unless_these_exchange_faster(device, bounds):
    """Of a host wired in pairs two neighbours exchange slower than four; elsewhere no more devices are faster per device."""
    cluster = al.Cluster.parse(f"1x8:{device}")
    table = search_at_its_beginning(lambda: plan(2, cluster))().table
    kind, two, four = (
        next(k for k in table.kinds if len(k) == 1),
        table.submeshes.index((1, 2)),
        table.submeshes.index((1, 4)),
    )
    table.known[kind] = np.full((len(table.submeshes), table.width, 5), np.nan)
    table.known[kind][two] = (1.0, 0.0, 0.0, 0.0, 0.0)
    table.summands.clear()
    table.refresh([kind])
    assert (table.cost_s[table.kinds[kind], four].min() >= 0.5) == bounds


def test_a_table_that_did_not_change_is_not_sliced_again(search_of, monkeypatch):
    search, calls = search_of(), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["num_stages"])
        return slice_stages(*args, **kwargs)

    monkeypatch.setattr(stage_search, "slice_stages", counted)
    best = search.best()
    assert best is not None
    calls.clear()
    assert search.bound_s(best.cut.num_stages) == best.slicing.objective
    assert search.best(best.cut.num_stages) == search.best() == best
    assert not calls
    search.forbid(best)
    assert search.bound_s(best.cut.num_stages) >= best.slicing.objective
    assert calls == [best.cut.num_stages]


def test_a_layer_that_recomputes_holds_its_input_for_each_microbatch(full):
    prices = full.prices
    inner = prices.kind((1, 1))
    kept, recomputed = (
        next(p for (k, m, c), p in prices.solved.items() if (k, m, c.recomputed, c.rent) == (inner, (1, 1), again, 0))
        for again in (False, True)
    )
    x = 16384 // MICROBATCHES * 256 * 4
    assert recomputed.residual_bytes == x < kept.residual_bytes
    assert recomputed.time_s > kept.time_s


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


@pytest.mark.slow
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
