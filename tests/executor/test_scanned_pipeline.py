"""A scan over layers on stages: each owns, reads, and updates its slice of the stacked parameters, and the step is the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import ArgumentsError, PinError
from alpa_lite.executor.staged_array import StagedArray
from alpa_lite.plan.leaf_rows import split_path
from tests.executor.pipeline_steps import MICROBATCHES, NUM_LAYERS, arguments, scanned_loss_fn, step_of

pytestmark = pytest.mark.medium
train_step = step_of(scanned_loss_fn)
STATE, BATCH = arguments(stacked=True)
PINS = {"0/0/layers/a": P(None, None, "x"), "0/0/layers/b": P(None, "x")}


@cache
def parallel(num_stages: int) -> Any:
    """Pins, because steps this small are best repeated on every device."""
    options = al.PlanOptions(num_stages=num_stages, num_microbatches=MICROBATCHES)
    cluster = al.Cluster.parse("1x8:cpu")
    return al.parallelize(train_step, cluster=cluster, options=options, pins=PINS, pin_like={"0/1/1/0/mu": "0/0"})


@cache
def result(num_stages: int) -> Any:
    return parallel(num_stages)(STATE, BATCH)


def numbers(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def stacked(leaves: Any) -> list[Any]:
    return [leaf for leaf in leaves if "layers" in leaf.path]


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_the_step_itself(num_stages):
    want = numbers(jax.jit(train_step)(STATE, BATCH))
    for a, b in zip(numbers(result(num_stages)), want, strict=True):
        assert np.linalg.norm(a - b) <= 2e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_stage_owns_its_slice_of_stacked_state(num_stages):
    """Parameters, both moments and the new values of each; none is sent, and none is moved for the next step."""
    plan = parallel(num_stages).plan(STATE, BATCH)
    rows = NUM_LAYERS // num_stages
    for number, stage in enumerate(plan.stages):
        own = [split_path(leaf.path)[1] for leaf in stacked(plan.inputs) if leaf.stage == number]
        assert own == [(number * rows, (number + 1) * rows)] * 6
        given, made = stacked(stage.inputs), stacked(stage.outputs)
        assert [leaf.value.shape for leaf in (*given, *made)] == [(rows, 16, 16)] * 12
        shapes = {leaf.value.shape for leaf in (*stage.inputs, *stage.outputs)}
        assert (NUM_LAYERS, 16, 16) not in shapes
    assert plan.pipeline is not None
    assert not [t for t in plan.pipeline.transfers if f"[{rows},16,16]" in t.tensor]
    state, _ = result(num_stages)
    weights = state[0]["layers"]["a"]
    assert isinstance(weights, StagedArray)
    for part, stage in zip(weights.parts, plan.stages, strict=True):
        assert {d.id for d in part.devices()} == set(range(stage.first_device, stage.first_device + 8 // num_stages))


def test_pins_hold_for_every_part():
    plan = parallel(2).plan(STATE, BATCH)
    assert plan.parameter_layout["0/0/layers/a[0:2]"] == (0, P(None, None, "x"))
    assert plan.parameter_layout["0/0/layers/a[2:4]"] == (1, P(None, None, "x"))
    assert plan.specs_by_path["0/1/1/0/mu/layers/b[2:4]"] == P(None, "x", None)
    assert plan.in_specs[0][0]["layers"] == {"a": P(None, None, "x"), "b": P(None, "x", None)}
    assert jax.tree.structure(plan.out_specs) == jax.tree.structure((STATE, 0.0))


def test_a_second_step_takes_the_results_of_the_first():
    state, loss = result(2)
    assert parallel(2).plan(state, BATCH) == parallel(2).plan(STATE, BATCH)
    fresh = al.PlanOptions(num_stages=2, num_microbatches=MICROBATCHES)
    planned = al.plan(train_step, state, BATCH, cluster=al.Cluster.parse("1x8:cpu"), options=fresh)
    assert planned.input_paths == parallel(2).plan(STATE, BATCH).input_paths
    after, second = parallel(2)(state, BATCH)
    assert float(second) < float(loss)
    want = jax.jit(train_step)(*jax.jit(train_step)(STATE, BATCH)[:1], BATCH)
    for a, b in zip(numbers((after, second)), numbers(want), strict=True):
        assert np.linalg.norm(a - b) <= 2e-4 * np.linalg.norm(b)


def test_state_is_created_by_slices():
    state = parallel(2).init(lambda: STATE)
    assert isinstance(state[0]["layers"]["a"], StagedArray)
    for a, b in zip(numbers(state), numbers(STATE), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(
        np.array_equal(a, b) for a, b in zip(numbers(parallel(2)(state, BATCH)), numbers(result(2)), strict=True)
    )
    with pytest.raises(ArgumentsError, match="first difference at 0/0/layers/a"):
        parallel(2).init(lambda: ({**STATE[0], "layers": {"a": jnp.ones(3), "b": jnp.ones(3)}}, STATE[1]))


def test_plan_file(tmp_path):
    plan = parallel(2).plan(STATE, BATCH)
    plan.save(tmp_path / "plan.json")
    loaded = al.load_plan(tmp_path / "plan.json").bind(train_step, STATE, BATCH)
    assert loaded == plan
    given = al.parallelize(train_step, plan=loaded)(STATE, BATCH)
    assert all(np.array_equal(a, b) for a, b in zip(numbers(given), numbers(result(2)), strict=True))
    with pytest.raises(ArgumentsError, match=r"they lack '0/0/layers/b' \(\d+ leaves given, \d+ planned\)"):
        less = ({**STATE[0], "layers": {"a": STATE[0]["layers"]["a"]}}, STATE[1])
        loaded.bind(train_step, less, BATCH)


def test_tied_leaves_must_lie_alike():
    """``other`` is as large as the weights and is read whole."""

    def step(w: Any, other: Any, x: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            y, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
            return jnp.mean(y**2) + jnp.sum(other[::-1] * 0.1)

        value, grads = al.value_and_grad(loss)(w, x)
        return w - grads, value

    shape = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)
    batch = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    options = al.PlanOptions(num_stages=2, num_microbatches=2)
    with pytest.raises(PinError, match=r"pin_like ties '0' to '1', and only one of them lies by layers"):
        al.plan(step, shape, shape, batch, cluster=al.Cluster.parse("1x8:cpu"), options=options, pin_like={"1": "0"})
