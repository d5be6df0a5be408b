"""Symbolic plans share what they may, and plan anew what they must."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.plan.encode import encode_plan
from alpa_lite.planner import symbolic
from alpa_lite.planner.plan_step import LIMITED

CLUSTER = al.Cluster.symbolic("n", device="h100-sxm", devices_per_host=8, values=(1, 2, 4, 5, 7, 11))
X = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
EARLY = {"padding": "off", "remat": "none"}  # what is padded or recomputed depends on the number


@pytest.fixture
def planned(monkeypatch):
    """The numbers of devices along the first axis for which a mesh was planned."""
    made = []
    plan_on_mesh = symbolic.plan_on_mesh

    def counted(task, cluster, mesh, **known):
        made.append(mesh.shape[0])
        return plan_on_mesh(task, cluster, mesh, **known)

    monkeypatch.setattr(symbolic, "plan_on_mesh", counted)
    return made


def plan(fn=lambda x: {"y": x @ x}, shape=("n",), **settings):
    return al.plan(fn, X, cluster=CLUSTER, options=al.PlanOptions(mesh_shape=shape), **settings)


def test_numbers_that_divide_nothing_are_planned_once(planned):
    made = plan()
    assert made.regimes[0].values[:1] == (1,) and {5, 7, 11} <= set(made.regimes[0].values)
    assert planned == [1, 2, 4]
    assert [made.specialize(n).mesh.shape for n in CLUSTER.values] == [(n,) for n in CLUSTER.values]
    assert planned == [1, 2, 4]


def test_beside_another_axis_one_device_is_planned_with_numbers_that_divide_nothing(planned):
    """The layouts of partial sums over an axis that splits nothing, here through the sum, are none that can be chosen."""
    made = plan(lambda x: {"y": x @ x + x}, shape=("n", 2))
    assert made.regimes
    assert planned == [1, 2, 4]
    for n in (1, 5):
        cluster, options = CLUSTER.specialize(n, others=2), al.PlanOptions(mesh_shape=(n, 2), **EARLY)
        early = al.plan(lambda x: {"y": x @ x + x}, X, cluster=cluster, options=options)
        assert encode_plan(made.specialize(n)) == encode_plan(early)


def test_across_hosts_other_prices_are_planned_anew(planned):
    """With the fixed axis first, its groups reach across more hosts as the number grows."""
    assert plan(shape=(2, "n")).regimes
    assert [n for n in planned if n == 2] == [2] * len(planned)
    assert len(planned) > 4


@pytest.mark.medium
@pytest.mark.parametrize("costs", ["alpa", "slapo-2023-05", "slapo-head", "hidet", "ring"])
def test_every_convention_specialises_to_what_it_plans(costs):
    """Some charge for every contraction that is repeated, by the number of devices, or forbid it."""
    options = {"costs": costs, **EARLY}
    made = al.plan(step, X, cluster=CLUSTER, options=al.PlanOptions(mesh_shape=("n",), **options))
    for n in CLUSTER.values:
        late = outcome(lambda n=n: made.specialize(n))
        chosen = al.PlanOptions(mesh_shape=(n,), **options)
        assert late == outcome(lambda n=n, o=chosen: al.plan(step, X, cluster=CLUSTER.specialize(n), options=o)), n


def step(x):
    return {"y": x @ x}


def outcome(call):
    """The saved plan, or why there is none (less the line of the call)."""
    try:
        return encode_plan(call())
    except al.AlpaLiteError as error:
        return type(error), str(error).splitlines()[0]


@pytest.mark.parametrize("pinned", ["by path", "inside"])
def test_programs_that_name_axes_are_planned_for_every_number(planned, pinned):
    if pinned == "by path":
        made = plan(pins={"0": P("x", None)})
    else:
        made = plan(lambda x: {"y": al.pin(x @ x, P("x", None))})
    assert made.without_plan == (5, 7, 11)
    assert planned == list(CLUSTER.values)
    with pytest.raises(al.AlpaLiteError, match="dim 0 of size 4096"):
        made.specialize(7)


def test_one_number_plans_that_number_alone(planned):
    made = plan()
    assert made.memory(4) == made.specialize(4).memory
    assert made.objective(4) == made.specialize(4).objective
    assert made.traffic(4) >= 0
    assert planned == [4]


def test_another_budget_shares_the_trace_alone(planned):
    made = plan()
    need = made.memory(1).peak
    assert made.with_budget(need).specialize(1).memory.peak <= need
    assert made.smallest(memory_budget_bytes=need) == 1
    assert made.smallest(memory_budget_bytes=need - 1) in (2, 4)
    with pytest.raises(al.AlpaLiteError, match="memory_budget_bytes=-1"):
        made.smallest(memory_budget_bytes=-1)


def test_within_a_budget_late_plans_say_what_limits_them():
    x, budget = jax.ShapeDtypeStruct((256, 4096), jnp.float32), 60e6

    def planned(cluster, size):
        options = al.PlanOptions(mesh_shape=(size,), memory_budget_bytes=budget, **EARLY)
        return al.plan(lambda x, w: {"y": jnp.tanh(x @ w) @ w}, x, X, cluster=cluster, options=options)

    late = planned(CLUSTER, "n").specialize(4)
    assert late.mesh_table[0].reason == LIMITED
    assert encode_plan(late) == encode_plan(planned(CLUSTER.specialize(4), 4))


@pytest.mark.medium
def test_what_fits_no_memory_is_refused_in_the_same_words():
    """Layers could be recomputed in this step, and early planning does so unless it is told not to."""

    def step(w, x):
        return al.value_and_grad(lambda w, x: jnp.mean(al.layer_boundary(jnp.tanh(x @ w)) @ w))(w, x)[1]

    def refused(cluster, size, **early):
        options = al.PlanOptions(mesh_shape=(size,), num_microbatches=2, memory_budget_bytes=1e4, **early)
        with pytest.raises(al.AlpaLiteError, match="no plan fits") as caught:
            made = al.plan(step, X, jax.ShapeDtypeStruct((64, 4096), jnp.float32), cluster=cluster, options=options)
            made.specialize(n=4)
        return [line for line in str(caught.value).splitlines() if not line.startswith("  where:")]

    late = refused(CLUSTER, "n")
    assert late == refused(CLUSTER.specialize(4), 4, **EARLY) != refused(CLUSTER.specialize(4), 4)


def test_text_says_in_words_that_nothing_changes_and_nothing_is_split():
    cluster = al.Cluster.symbolic("n", device="h100-sxm", values=[2, 4])
    options = al.PlanOptions(mesh_shape=("n",))
    text = str(al.plan(jnp.tanh, jax.ShapeDtypeStruct((7,), jnp.float32), cluster=cluster, options=options))
    assert "one plan is the best for every n" in text
    assert "n in 2, 4; nothing is split over n" in text
    assert "none" not in text


def test_text_names_regimes_conditions_and_numbers_without_plan():
    text = str(plan(pins={"0": P("x", None)}))
    assert "plans for n x h100-sxm, 8 per host, mesh (n), n in 1-2, 4-5, 7, 11" in text
    assert "no plan for n in 5, 7, 11" in text
    assert "n divides 4,096" in text and "split: 0 [4,096/n, 4,096]" in text
