"""Plans under the counting conventions: training steps, loops, pins, infeasible demands; all of them run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import PinClashError

CLUSTER = al.Cluster.parse("1x4:cpu")
COUNTED = ("slapo-2023-05", "slapo-head", "hidet", "ring")


def loss(params: Any, x: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ params["up"] + params["bias"])
    return jnp.mean(jnp.square(h @ params["down"]))


def train_step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def rolled(params: Any, x: jax.Array) -> jax.Array:
    """The same layer several times, as a scan over stacked weights."""

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weight), None

    return jax.lax.scan(layer, x, params)[0]


def values(*shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s) / s[-1] ** 0.5 for k, s in zip(keys, shapes, strict=True)]


def train_args() -> tuple[Any, jax.Array]:
    up, bias, down, x = values((16, 32), (32,), (32, 16), (4, 8, 16))
    return {"up": up, "bias": bias, "down": down}, x


@pytest.mark.medium
@pytest.mark.parametrize("costs", COUNTED)
def test_a_training_step_runs_as_planned(costs):
    args = train_args()
    step = al.parallelize(train_step, cluster=CLUSTER, options=al.PlanOptions(costs=costs, mesh_shape=(4,)))
    plan = step.plan(*args)
    assert plan.status == "optimal" and plan.cost_table().total == plan.objective
    for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(train_step(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("costs", COUNTED)
def test_a_loop_counts_every_iteration(costs):
    weights, x = values((6, 16, 16), (4, 8, 16))
    options = al.PlanOptions(costs=costs, mesh_shape=(4,))
    pins = {"0": P(None, "x"), "1": P(), "out": P()}
    step = al.parallelize(rolled, cluster=CLUSTER, pins=pins, options=options)
    plan = step.plan(weights, x)
    assert plan.gap == 0 and plan.cost_table().total == plan.objective
    np.testing.assert_allclose(np.asarray(step(weights, x)), np.asarray(rolled(weights, x)), rtol=1e-4, atol=1e-5)
    if costs == "slapo-head":  # rows of the weight: six reductions of 4 * 8 * 16 elements, and a slice of each input
        assert plan.objective == 6 * (4 * 8 * 16 + 1)


@pytest.mark.medium
def test_ends_are_whole_unless_pinned():
    args = train_args()
    options = al.PlanOptions(costs="slapo-head", mesh_shape=(4,), axis_names=("x",))
    free = al.plan(loss, *args, cluster=CLUSTER, options=options)
    assert free.specs_by_path["1"] == P(None, None, None)
    pinned = al.plan(loss, *args, cluster=CLUSTER, pins={"1": P(None, "x")}, options=options)
    assert pinned.specs_by_path["1"] == P(None, "x", None)
    assert pinned.objective == free.objective - 1  # the slice


@pytest.mark.parametrize("costs", ["slapo-head", "hidet"])
def test_a_pin_of_a_result_that_is_an_argument_is_one_of_both(costs):
    (x,) = values((8, 16))
    options = al.PlanOptions(costs=costs, mesh_shape=(4,), axis_names=("x",))
    plan = al.plan(lambda x: (x, x * 2), x, cluster=CLUSTER, pins={"out/0": P("x")}, options=options)
    assert [str(spec) for spec in (*plan.input_specs, *plan.output_specs)] == ["[x,_]", "[x,_]", "[_,_]"]


@pytest.mark.medium
def test_an_argument_shaped_like_the_result_still_arrives_whole():
    """x first, then the weights: x and the result have one layout, but x is no weight."""
    up, bias, down, x = values((16, 32), (32,), (32, 16), (4, 8, 16))
    fn = lambda x, up, bias, down: jnp.tanh(x @ up + bias) @ down  # noqa: E731
    plan = al.plan(fn, x, up, bias, down, cluster=CLUSTER, options=al.PlanOptions(costs="slapo-2023-05"))
    assert plan.objective == 8 * 16 / 4
    assert plan.input_specs[0].is_replicated and plan.output_specs[0].is_replicated


@pytest.mark.medium
def test_of_equally_dear_plans_the_one_with_fewest_slices():
    """Slices are free in slapo-2023-05, yet none is made that nothing needs."""
    params, x = train_args()
    fn = lambda params, x: jnp.tanh(x @ params["up"] + params["bias"])  # noqa: E731
    plan = al.plan(fn, params, x, cluster=CLUSTER, options=al.PlanOptions(costs="slapo-2023-05"))
    slices = [c for c in plan.stages[0].conversions if all(step.kind is None for step in c.steps)]
    assert plan.objective == 8 * 32 / 4
    assert len(slices) <= 1


def test_a_contraction_that_cannot_be_split_is_named():
    with pytest.raises(PinClashError) as error:
        al.plan(
            lambda a, b: a @ b,
            jax.ShapeDtypeStruct((3, 5), jnp.float32),
            jax.ShapeDtypeStruct((5, 7), jnp.float32),
            cluster=CLUSTER,
            options=al.PlanOptions(costs="slapo-head", padding="off"),
        )
    assert error.value.members == ("PlanOptions.costs='slapo-head', which splits every contraction",)


@pytest.mark.medium
def test_contractions_may_stay_whole_on_request():
    options = al.PlanOptions(costs="slapo-head", require_sharded_contractions=False)
    plan = al.plan(loss, *train_args(), cluster=CLUSTER, options=options)
    assert plan.objective == 0 and not plan.stages[0].conversions


@pytest.mark.medium
@pytest.mark.parametrize("costs", ["slapo-head", "hidet"])
def test_the_planner_tries_lines_only(costs):
    plan = al.plan(loss, *train_args(), cluster=CLUSTER, options=al.PlanOptions(costs=costs))
    assert [c.mesh.shape for c in plan.mesh_table] == [(4,)]
    pins = {"0/up": P("x", "y")}
    plan = al.plan(loss, *train_args(), cluster=CLUSTER, pins=pins, options=al.PlanOptions(costs=costs))
    assert {c.mesh.shape for c in plan.mesh_table} == {(1, 4), (4, 1)}
