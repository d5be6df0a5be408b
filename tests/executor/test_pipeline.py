"""Stages on submeshes of one process: the pipelined step equals the step itself, for any cut and any order of actions."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, ClusterError, LayerError, MemoryBudgetError, PlanFileError
from alpa_lite.planner.stage_layers import layer_cuts
from alpa_lite.trace.program import trace
from alpa_lite.trace.staged import StagedStep, layers_of, staged_step
from tests.executor.pipeline_steps import MICROBATCHES, NUM_LAYERS, OPTIMIZER, arguments, loss_fn, step_of

pytestmark = pytest.mark.medium
train_step = step_of(loss_fn)


@cache
def split(stage_of_layer: tuple[int, ...]) -> StagedStep:
    traced = trace(train_step, arguments(), {}, num_microbatches=MICROBATCHES, layers=layer_cuts(4))
    assert traced.layered is not None
    return staged_step(traced.program, traced.layered, layers_of(traced.layered), stage_of_layer)


@cache
def parallel(num_stages: int, schedule: str) -> Any:
    """Pins, because steps this small are best repeated on every device."""
    pins = {"0/0/layers/*/a": P(None, "x"), "0/0/layers/*/b": P("x"), "1/1": P("x")}
    options = al.PlanOptions(num_stages=num_stages, schedule=schedule, num_microbatches=MICROBATCHES)
    return al.parallelize(train_step, cluster=al.Cluster.parse("1x8:cpu"), pins=pins, options=options)


@cache
def run(num_stages: int, schedule: str) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(parallel(num_stages, schedule)(*arguments()))]


@cache
def reference() -> list[np.ndarray]:
    """A plain loop over microbatches, on one device."""
    state, batch = arguments()
    parts = [jax.tree.map(lambda x, i=i: x[i::MICROBATCHES], batch) for i in range(MICROBATCHES)]
    made = [jax.jit(jax.value_and_grad(loss_fn))(state[0], part) for part in parts]
    loss, grads = jax.tree.map(lambda *xs: sum(xs) / MICROBATCHES, *made)
    updates, optimizer = OPTIMIZER.update(grads, state[1], state[0])
    return [np.asarray(x) for x in jax.tree.leaves(((optax.apply_updates(state[0], updates), optimizer), loss))]


@pytest.mark.parametrize(
    ("num_stages", "schedule"),
    [
        (2, "1f1b"),
        pytest.param(2, "gpipe", marks=pytest.mark.slow),
        pytest.param(4, "eager-1f1b", marks=pytest.mark.slow),
        pytest.param(2, "zb-h1", marks=pytest.mark.slow),
    ],
)
def test_equals_a_plain_loop(num_stages, schedule):
    for got, want in zip(run(num_stages, schedule), reference(), strict=True):
        assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)


def test_the_schedule_does_not_change_a_bit():
    assert all(np.array_equal(a, b) for a, b in zip(run(2, "1f1b"), run(2, "gpipe"), strict=True))


def test_what_stages_exchange_is_no_state():
    step = split((0, 1, 2, 3))
    for part, program in zip(step.stages, step.programs, strict=True):
        assert {(part.args[a], part.results[r]) for a, r in program.aliases} <= set(step.whole.aliases)


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_compiled_is_what_was_planned(num_stages):
    step = parallel(num_stages, "1f1b" if num_stages == 2 else "eager-1f1b")
    compiled = step.compile(*arguments())
    reports = compiled.audit()
    assert not any(report.unplanned or report.missing for report in reports)
    planned = [c for _, _, collectives, _ in compiled.programs for c in collectives]
    assert len(planned) == len(step.plan(*arguments()).collectives) > 0


def test_a_second_step_takes_the_results_of_the_first():
    step = parallel(2, "1f1b")
    state, batch = arguments()
    first, _ = step(state, batch)
    moved = {d.id // 4 for leaf in jax.tree.leaves(first) for d in leaf.devices()}
    assert moved == {0, 1}  # each stage's state lies on its devices
    _, loss = step(first, batch)
    assert float(loss) < float(step(state, batch)[1])


def test_donated_state_is_gone():
    """Every leaf of state, once it lies where its stage wants it; the batch stays."""
    options = al.PlanOptions(num_stages=2, num_microbatches=MICROBATCHES)
    cluster = al.Cluster.parse("1x8:cpu")
    step = al.parallelize(train_step, cluster=cluster, options=options, donate_argnums=0)
    args = arguments()
    first, _ = step(*args)
    kept = jax.tree.map(jnp.copy, first)  # NumPy would look into the buffer, which then cannot be given away
    second, _ = step(first, args[1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((second, args[1])))
    for got, want in zip(jax.tree.leaves(step(kept, args[1])[0]), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_state_is_created_on_its_stage():
    step = parallel(2, "1f1b")
    args = arguments()
    plan = step.plan(*args)
    state = step.init(lambda: arguments()[0])
    for leaf, planned in zip(jax.tree.leaves(state), plan.inputs, strict=False):
        assert {d.id // 4 for d in leaf.devices()} == {planned.stage}
    for a, b in zip(jax.tree.leaves(step(state, args[1])), run(2, "1f1b"), strict=True):
        np.testing.assert_allclose(
            np.asarray(a), b, rtol=1e-3, atol=1e-6
        )  # the random state itself differs in rounding


def test_plan_of_stages():
    plan = parallel(2, "1f1b").plan(*arguments())
    assert [stage.layers for stage in plan.stages] == [(0, 1), (2, 3)]
    assert plan.parameter_layout["0/0/layers/0/a"] == (0, P(None, "x"))
    assert plan.parameter_layout["0/0/layers/3/a"] == (1, P(None, "x"))
    assert plan.pipeline is not None
    assert plan.objective >= plan.lower_bound > 0
    slowest = max(MICROBATCHES * (s.forward_s + s.backward_s) + s.once_s for s in plan.stages)
    assert plan.objective >= slowest
    in_loop = [(t.source, t.target, t.size_bytes) for t in plan.pipeline.transfers if t.when == "loop"]
    assert sorted(in_loop) == [(0, 1, 4096), (1, 0, 4096)]
    assert "on stage 1" in str(plan)


def test_plan_file_of_stages(tmp_path):
    step = parallel(2, "1f1b")
    plan = step.plan(*arguments())
    plan.save(tmp_path / "plan.json")
    loaded = al.load_plan(tmp_path / "plan.json").bind(train_step, *arguments())
    assert loaded == plan
    given = al.parallelize(train_step, plan=loaded)(*arguments())
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(jax.tree.leaves(given), run(2, "1f1b"), strict=True))


def test_planning_is_deterministic():
    options = al.PlanOptions(num_stages=2, num_microbatches=MICROBATCHES)
    first, second = (
        al.plan(train_step, *arguments(), cluster=al.Cluster.parse("1x8:cpu"), options=options) for _ in "ab"
    )
    assert first == second


@pytest.mark.parametrize(
    ("num_stages", "schedule"), [(2, "1f1b"), pytest.param(4, "eager-1f1b", marks=pytest.mark.slow)]
)
def test_no_boundary_goes_through_the_host(num_stages, schedule, monkeypatch):
    """JAX reads an array on the host in one place; on the way it would wait for whatever makes the array."""
    args, read = arguments(), []
    real = type(args[1][0])._value
    run(num_stages, schedule)
    monkeypatch.setattr(type(args[1][0]), "_value", property(lambda self: read.append(self) or real.fget(self)))
    _, loss = parallel(num_stages, schedule)(*args)
    assert not read
    np.asarray(loss)
    assert read, "JAX reads arrays elsewhere now"


def test_one_activation_and_one_gradient_cross_each_boundary():
    step = split((0, 1, 2, 3))
    for number, stage in enumerate(step.stages):
        in_loop = [c for c in stage.received if c.when == "loop"]
        assert sorted(c.source for c in in_loop) == [n for n in (number - 1, number + 1) if 0 <= n < 4]
        assert {step.value_of(c).shape for c in in_loop} == {(4, 16, 16)}


def test_a_weight_of_two_stages_is_sent_once_and_its_gradients_joined_once():
    step = split((0, 1, 2, 3))
    first, *_, last = step.stages
    tied = step.whole.input_paths.index("0/0/emb")
    assert [(c.argument, c.source, c.readers) for c in last.received if c.when == "start"] == [(tied, 0, (3,))]
    shapes = [first.flat.avals[v].shape for v in first.flat.inputs[len(first.args) :]]
    assert shapes.count((48, 16)) == 1  # the last stage's sum of gradients, at the end
    assert all(c.when != "start" for c in first.received)


def test_every_result_and_argument_belongs_to_a_stage():
    step = split((0, 0, 1, 1))
    assert sorted(r for stage in step.stages for r in stage.results) == list(range(len(step.whole.outputs)))
    assert {a for stage in step.stages for a in stage.args} == set(range(len(step.whole.inputs)))


def test_the_mask_is_made_where_it_is_read():
    """It costs less to make than to send."""
    for stage in split((0, 1, 2, 3)).stages:
        names = [op.name for op in stage.flat.ops[stage.loop].bodies[0].ops[: stage.num_forward]]
        assert "iota" in names


@pytest.mark.parametrize(
    "submeshes", [((1, 2), (1, 6)), pytest.param(((1, 1), (1, 1), (1, 2), (1, 4)), marks=pytest.mark.slow)]
)
def test_submeshes_of_any_size_on_one_host(submeshes):
    options = al.PlanOptions(submeshes=submeshes, num_microbatches=MICROBATCHES)
    step = al.parallelize(train_step, cluster=al.Cluster.parse("1x8:cpu"), options=options)
    got = step(*arguments())
    for a, b in zip(jax.tree.leaves(got), reference(), strict=True):
        assert np.linalg.norm(np.asarray(a) - b) <= 2e-5 * np.linalg.norm(b)
    for leaf, planned in zip(jax.tree.leaves(got), step.plan(*arguments()).outputs, strict=True):
        stage = step.plan(*arguments()).stages[planned.stage]
        first = stage.first_device
        assert {d.id for d in leaf.devices()} == set(range(first, first + stage.mesh.num_devices))


# -- bad input ------------------------------------------------------------------------------------------------------


def planned(step: Any = train_step, cluster: str = "1x8:cpu", count: Any = MICROBATCHES, **options: Any) -> Any:
    chosen = al.PlanOptions(num_microbatches=count, **options)
    return al.plan(step, *arguments(), cluster=al.Cluster.parse(cluster), options=chosen)


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"num_stages": 8}, LayerError, ["num_stages=8", "4 layers", "al.layer_boundary"]),
        ({"num_stages": 3}, LayerError, ["num_stages=3", "1x8:cpu", "1-2, 4, 8"]),
        ({"num_stages": 2, "count": "auto"}, AlpaLiteError, ["num_microbatches='auto'"]),
        ({"num_stages": 2, "schedule": "2f2b"}, AlpaLiteError, ["schedule='2f2b'", "'1f1b'"]),
        ({"num_stages": 0}, AlpaLiteError, ["num_stages=0", "numbers from 1"]),
        pytest.param(
            {"num_stages": 2, "memory_budget_bytes": 1000},
            MemoryBudgetError,
            ["layers 0-1", "in flight", "1,000"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wrong_options(options, error, parts):
    with pytest.raises(error) as caught:
        planned(**options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_plan_of_other_boundaries():
    def earlier(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch, ends=range(-1, NUM_LAYERS - 2))

    plan = parallel(2, "1f1b").plan(*arguments())
    with pytest.raises(PlanFileError, match="other layers"):
        al.parallelize(step_of(earlier), plan=plan)(*arguments())


def test_what_plans_of_stages_do_not_have():
    step = parallel(2, "1f1b")
    with pytest.raises(ClusterError, match=r"device .cpu.\. Known GPUs are"):
        step.verify(*arguments())


def test_state_has_its_home_where_it_is_updated():
    plan = parallel(4, "eager-1f1b").plan(*arguments())
    step = split((0, 1, 2, 3))
    for number, stage in enumerate(step.stages):
        for position in stage.args:
            if position in dict(step.whole.aliases):
                assert plan.inputs[position].stage == number
    for number, stage in enumerate(step.stages):
        assert all(plan.outputs[result].stage == number for result in stage.results)
