"""Values that the user gives to stages: the stages keep them, whoever finds the layers, or the clash is named."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.errors import LayerError
from alpa_lite.planner.pinned_stages import check_stage_pins, pinned_cuts
from alpa_lite.trace.stage_pin import StagePin

pytestmark = pytest.mark.medium
SIZE, DEPTH = 8, 4
X = jax.ShapeDtypeStruct((8, SIZE), jnp.float32)
WEIGHTS = [jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)] * DEPTH


def step_of(stages: dict[int, int], *, boundaries: bool, wrap: Any = lambda f: f) -> Any:
    """Four layers, of which those in ``stages`` are pinned."""

    def loss(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            x = x @ w
            x = jnp.tanh(al.pin_stage(x, stages[i]) if i in stages else x)
            x = al.layer_boundary(x) if boundaries and i < DEPTH - 1 else x
        return jnp.mean(x**2)

    return sgd(wrap(loss))


def sgd(loss: Any) -> Any:
    def train_step(params: Any, x: Any) -> Any:
        value, grads = al.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step


def planned(step: Any, **options: Any) -> al.Plan:
    chosen = al.PlanOptions(**{"num_stages": 2, "num_microbatches": 2, **options})
    return al.plan(step, WEIGHTS, X, cluster=al.Cluster.parse("1x8:v100-sxm2-16gb"), options=chosen)


def homes(plan: al.Plan) -> list[int]:
    """The stage of each weight."""
    return [plan.parameter_layout[f"0/{i}"][0] for i in range(DEPTH)]


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize(
    ("stages", "want"),
    [
        ({}, [0, 0, 1, 1]),
        ({1: 1}, [0, 1, 1, 1]),
        ({2: 0}, [0, 0, 0, 1]),
        ({0: 0, 2: 0, 3: 1}, [0, 0, 0, 1]),
    ],
)
def test_layers_lie_where_they_are_pinned(boundaries, stages, want):
    assert homes(planned(step_of(stages, boundaries=boundaries))) == want


def test_with_layers_per_stage():
    step = step_of({1: 1}, boundaries=False)
    plan = planned(step, stage_layers=(1, 2))
    assert [stage.layers for stage in plan.stages] == [(0,), (1, 2)]
    assert homes(plan)[:2] == [0, 1]
    with pytest.raises(
        LayerError, match=r"stage_layers=\(2, 2\) puts layer 1 on stage 0, al.pin_stage at .* on stage 1"
    ):
        planned(step_of({1: 1}, boundaries=True), stage_layers=(2, 2))


def test_right_behind_a_boundary_the_layer_that_begins_there():
    def loss(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = al.layer_boundary(x) if i < DEPTH - 1 else x
            x = al.pin_stage(x, 1) if i == 0 else x
        return jnp.mean(x**2)

    assert homes(planned(sgd(loss))) == [0, 1, 1, 1]


def test_a_parameter_pins_the_first_layer_that_reads_it():
    def loss(params: Any, x: Any) -> Any:
        params = [*params[:2], al.pin_stage(params[2], 0), params[3]]
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = al.layer_boundary(x) if i < DEPTH - 1 else x
        return jnp.mean(x**2)

    assert homes(planned(sgd(loss))) == [0, 0, 0, 1]


@pytest.mark.parametrize("boundaries", [True, False])
def test_under_checkpoint_and_vmap(boundaries):
    assert homes(planned(step_of({2: 0}, boundaries=boundaries, wrap=per_example))) == [0, 0, 0, 1]


def per_example(loss: Any) -> Any:
    return lambda params, x: jnp.mean(jax.vmap(lambda row: loss(params, row[None]))(x))


def test_recomputed_layers_are_pinned():
    def loss(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            x = jax.checkpoint(lambda w, x, i=i: al.pin_stage(jnp.tanh(x @ w), 0 if i < 3 else 1))(w, x)
            x = al.layer_boundary(x) if i < DEPTH - 1 else x
        return jnp.mean(x**2)

    assert homes(planned(sgd(loss))) == [0, 0, 0, 1]


def test_outside_of_stages_it_is_an_identity():
    tree = {"a": jnp.ones(3), "b": 2.0}
    assert jax.tree.map(float, jax.tree.map(jnp.sum, al.pin_stage(tree, 7))) == {"a": 3.0, "b": 2.0}
    plan = planned(step_of({1: 1}, boundaries=True), num_stages=1)
    assert plan.pipeline is None
    assert plan.identity.fingerprint == planned(step_of({}, boundaries=True), num_stages=1).identity.fingerprint


def test_a_plan_file_knows_its_layers(tmp_path):
    step = step_of({2: 0}, boundaries=False)
    plan = planned(step)
    plan.save(tmp_path / "plan.json")
    assert al.load_plan(tmp_path / "plan.json").bind(step, WEIGHTS, X) == plan


def test_cuts_keep_pins_and_balance():
    """Against all cuts: none is lighter by more than the share that is given up for fewer bytes."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        ops, stages = int(rng.integers(6, 12)), int(rng.integers(2, 4))
        some = np.sort(rng.choice(np.arange(1, ops), stages - 1, replace=False))
        stage_of = np.searchsorted(some, np.arange(ops), side="right")  # a cut that exists gives pins that can be kept
        places = rng.choice(ops, int(rng.integers(1, 4)), replace=False)
        pins = [StagePin(place=int(p), stage=int(stage_of[p]), source="") for p in places]
        flops = rng.integers(0, 9, ops)

        def keeps(cuts: Any, pins: Any = pins) -> bool:
            return all(sum(cut <= pin.place for cut in cuts) == pin.stage for pin in pins)

        def largest(cuts: Any, flops: Any = flops) -> float:
            return max(part.sum() for part in np.split(flops, cuts))

        found = pinned_cuts(flops.tolist(), rng.integers(1, 9, ops - 1).tolist(), pins, (1,) * stages)
        assert len(found) == stages - 1
        assert keeps(found)
        least = min(largest(cuts) for cuts in itertools.combinations(range(1, ops), stages - 1) if keeps(cuts))
        assert largest(found) <= max(least, 1.1 * flops.sum() / stages) * 1.001


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize(
    ("stages", "parts"),
    [
        ({1: 1, 2: 0}, ["contradicts the flow of data", "on stage 0", "back to stage 0", "Swap"]),
        ({1: 2}, ["asks for stage 2 of 2", "0 to 1", "num_stages"]),
        ({3: 0}, ["asks for stage 0", "1 stages behind it", "at least one"]),
    ],
)
def test_pins_that_no_stages_keep(boundaries, stages, parts):
    if stages == {3: 0} and not boundaries:  # the mean of squares is left for stage 1
        assert homes(planned(step_of(stages, boundaries=boundaries))) == [0, 0, 0, 0]
        return
    with pytest.raises(LayerError) as caught:
        planned(step_of(stages, boundaries=boundaries))
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "test_pinned_stages.py" in message


def test_two_stages_of_one_layer():
    def loss(w: Any, x: Any) -> Any:
        h = al.pin_stage(x @ w, 0)
        return jnp.mean(al.pin_stage(al.layer_boundary(jnp.tanh(al.pin_stage(h * 2, 1))), 1) ** 2)

    def step(w: Any, x: Any) -> Any:
        return al.value_and_grad(loss)(w, x)

    with pytest.raises(LayerError, match=r"for stage 0, al.pin_stage at .* for stage 1, and both are in layer 0"):
        al.plan(
            step,
            WEIGHTS[0],
            X,
            cluster=al.Cluster.parse("1x8:cpu"),
            options=al.PlanOptions(num_stages=2, num_microbatches=2),
        )


def test_too_few_layers_between():
    pins = [StagePin(place=0, stage=0, source="a.py:1"), StagePin(place=1, stage=2, source="a.py:2")]
    with pytest.raises(LayerError, match=r"asks for stage 2: 2 stages since a.py:1, for 1 layers"):
        check_stage_pins(pins, 4, 3)
    with pytest.raises(LayerError, match="asks for stage 2: 2 stages before it, for 1 layers"):
        check_stage_pins(pins[1:], 4, 3)


@pytest.mark.parametrize("stage", [-1, 1.0, True, "1"])
def test_no_stage(stage):
    with pytest.raises(LayerError, match=r"al.pin_stage got stage=.* whole number from 0.*test_pinned_stages.py"):
        al.pin_stage(jnp.ones(2), stage)


def test_where_it_cannot_stand():
    def in_update(params: Any, x: Any) -> Any:
        value, grads = al.value_and_grad(lambda p, x: jnp.mean(al.layer_boundary(x @ p[0]) @ p[1]))(params, x)
        return al.pin_stage(jax.tree.map(lambda p, g: p - g, params, grads), 1), value

    def in_scan(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            x, _ = lax.scan(lambda x, _: (al.pin_stage(jnp.tanh(x @ params[0]), 0), None), x, None, length=3)
            return jnp.mean(al.layer_boundary(x) @ params[1])

        return al.value_and_grad(loss)(params, x)

    with pytest.raises(LayerError, match=r"stands outside of what al.value_and_grad repeats"):
        planned(in_update)
    with pytest.raises(LayerError, match=r"pin to a stage inside a scan body: al.pin_stage at .*test_pinned_stages"):
        planned(in_scan)


@pytest.mark.parametrize(
    ("places", "advice"),
    [
        ((1, 1), r"both are in layer 1.*Read each in a layer of its own stage"),
        ((1, 0), r"Read what lies on the earlier"),
    ],
)
def test_where_parameters_say_the_stages_there_is_no_pin_to_drop(places, advice):
    pins = [StagePin(place=place, stage=stage, source="", leaf=f"0/{stage}") for stage, place in enumerate(places)]
    with pytest.raises(LayerError, match=advice) as caught:
        check_stage_pins(pins, 2, 2)
    assert "drop one" not in str(caught.value).lower()
