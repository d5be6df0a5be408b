"""Schedules that put several stages on a submesh, split the backward pass, or come from the user: the step stays the same."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, LayerError, MemoryBudgetError, ScheduleError
from alpa_lite.trace.boundary import layer_boundary
from tests.marks import slow_rows_but

pytestmark = pytest.mark.medium
NUM_LAYERS, MICROBATCHES, WIDTH = 4, 4, 8
KEY = jax.random.key(3)


def loss_fn(params: Any, batch: Any) -> Any:
    x, labels = batch
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w["a"] + w["bias"]) @ w["b"] + x
        x = layer_boundary(x) if i < NUM_LAYERS - 1 else x
    return jnp.mean((x - labels) ** 2)


def train_step(params: Any, batch: Any) -> Any:
    loss, grads = al.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments() -> tuple[Any, Any]:
    def weights(i: int, *shape: int) -> Any:
        return jax.random.normal(jax.random.fold_in(KEY, i), shape) * 0.3

    params = [
        {"a": weights(i, WIDTH, 2 * WIDTH), "b": weights(i + 9, 2 * WIDTH, WIDTH), "bias": weights(i + 99, 2 * WIDTH)}
        for i in range(NUM_LAYERS)
    ]
    return params, (weights(50, 16, WIDTH), weights(51, 16, WIDTH))


def one_at_a_time(num_stages: int, num_microbatches: int) -> list[list[str]]:
    return [[f"{s}{kind}{k}" for k in range(num_microbatches) for kind in "FB"] for s in range(num_stages)]


def first_and_last_together(num_stages: int, num_microbatches: int) -> list[list[str]]:
    """Three stages on two submeshes: the outer ones share one."""
    assert num_stages == 3
    outer = [
        f"{s}{kind}{k}" for k in range(num_microbatches) for kind in "FB" for s in ((0, 2) if kind == "F" else (2, 0))
    ]
    return [outer, [f"1{kind}{k}" for k in range(num_microbatches) for kind in "FB"]]


@cache
def parallel(num_stages: int, schedule: Any, num_chunks: int = 1) -> Any:
    options = al.PlanOptions(
        num_stages=num_stages, schedule=schedule, num_chunks=num_chunks, num_microbatches=MICROBATCHES, mesh_shape=(2,)
    )
    return al.parallelize(train_step, cluster=al.Cluster.parse("1x4:cpu"), options=options)


@cache
def run(num_stages: int, schedule: Any, num_chunks: int = 1) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(parallel(num_stages, schedule, num_chunks)(*arguments()))]


@cache
def reference() -> list[np.ndarray]:
    """A plain loop over microbatches, on one device."""
    params, batch = arguments()
    parts = [jax.tree.map(lambda x, i=i: x[i::MICROBATCHES], batch) for i in range(MICROBATCHES)]
    made = [jax.jit(jax.value_and_grad(loss_fn))(params, part) for part in parts]
    loss, grads = jax.tree.map(lambda *xs: sum(xs) / MICROBATCHES, *made)
    return [np.asarray(x) for x in jax.tree.leaves((jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss))]


def halves_or_whole(num_stages: int, num_microbatches: int) -> list[list[str]]:
    """The second stage splits every other backward pass."""
    second = [["1F{k}", "1B{k}"], ["1F{k}", "1I{k}", "1W{k}"]]
    return [
        [f"0{kind}{k}" for k in range(num_microbatches) for kind in "FB"],
        [action.format(k=k) for k in range(num_microbatches) for action in second[k % 2]],
    ]


CASES = [
    (2, "zb-h1", 1),
    (2, halves_or_whole, 1),
    (4, "interleaved-1f1b", 2),
    (2, one_at_a_time, 1),
    (3, first_and_last_together, 1),
]
QUICK = [case for case in CASES if case[1] != "interleaved-1f1b"]  # which test_pipeline_numerics.py has


@pytest.mark.parametrize(("num_stages", "schedule", "num_chunks"), slow_rows_but(QUICK, CASES))
def test_equals_a_plain_loop(num_stages, schedule, num_chunks):
    for got, want in zip(run(num_stages, schedule, num_chunks), reference(), strict=True):
        assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)


@pytest.mark.parametrize(("num_stages", "schedule", "num_chunks"), CASES)
def test_what_is_compiled_is_what_was_planned(num_stages, schedule, num_chunks):
    step = parallel(num_stages, schedule, num_chunks)
    compiled = step.compile(*arguments())
    assert not any(report.unplanned or report.missing for report in compiled.audit())
    planned = [c for _, _, collectives, _ in compiled.programs for c in collectives]
    assert len(planned) == len(step.plan(*arguments()).collectives)


def test_halves_of_a_backward_pass():
    """Weight gradients are in the second half alone; what passes between the halves is counted."""
    step = parallel(2, "zb-h1")
    plan = step.plan(*arguments())
    first, second = plan.stages
    assert first.weight_s == first.backward_s, "the first stage sends no cotangent"
    assert 0 < second.weight_s < second.backward_s
    whole = parallel(2, "1f1b").plan(*arguments())
    assert all(stage.weight_s == 0 for stage in whole.stages)
    assert second.memory.peak > whole.stages[1].memory.peak
    names = [name for name, number, *_ in step.compile(*arguments()).programs if number == 1]
    assert names == ["before", "update 0", "forward", "backward, inputs", "backward, weights"]


def test_the_first_half_sends_and_the_second_sums():
    split, whole = (parallel(2, name)._step(arguments(), {}).step.runners[1].stage for name in ("zb-h1", "1f1b"))
    program = split.program
    body = program.flat.ops[program.loop].bodies[0]
    names = [op.name for op in body.ops]
    matmuls = [
        sum(n == "dot_general" for n in names[a:b])
        for a, b in pairs(program.num_forward, program.weight_half, len(names))
    ]
    assert matmuls == [4, 4, 4]  # two layers with two matmuls each
    assert sorted(names) == sorted(op.name for op in whole.program.flat.ops[whole.program.loop].bodies[0].ops)
    last = split.body.segments[2]
    assert {v for v, _ in last.writes} >= set(body.outputs[: program.flat.ops[program.loop].params["num_carry"]])


def pairs(*cuts: int) -> list[tuple[int, int]]:
    return list(zip((0, *cuts), cuts, strict=False))


def test_chunks_share_a_submesh():
    plan = parallel(4, "interleaved-1f1b", 2).plan(*arguments())
    assert [stage.first_device for stage in plan.stages] == [0, 2, 0, 2]
    assert [leaf.stage for leaf in plan.inputs[: 3 * NUM_LAYERS : 3]] == [0, 1, 2, 3]
    whole = [stage.memory.parameters + stage.memory.optimizer_state for stage in plan.stages]
    assert plan.stages[0].memory.peak == plan.stages[2].memory.peak > whole[0] + whole[2]
    text = str(plan)
    assert "interleaved-1f1b, 4 microbatches, 2 stages on each submesh, bubble" in text
    assert plan.pipeline is not None and plan.pipeline.transfers
    assert len(plan.pipeline.timeline) == 2 and all(row in text for row in plan.pipeline.timeline)
    assert all((t.source - t.target) % 2 for t in plan.pipeline.transfers), "nothing is sent from a submesh to itself"


def test_chunks_fit_the_budget_together():
    peak = parallel(4, "interleaved-1f1b", 2).plan(*arguments()).memory.peak
    options = {"num_stages": 4, "schedule": "interleaved-1f1b", "num_chunks": 2, "num_microbatches": 4, "remat": "none"}

    def plan(budget: float) -> al.Plan:
        chosen = al.PlanOptions(**options, memory_budget_bytes=budget)
        return al.plan(train_step, *arguments(), cluster=al.Cluster.parse("1x4:cpu"), options=chosen)

    assert plan(peak).memory.peak <= peak
    # Each stage alone fits in this.
    with pytest.raises(MemoryBudgetError, match="up to 2 stages of 'interleaved-1f1b' fit on one submesh"):
        plan(0.55 * plan(peak).memory.peak)


def test_a_file_is_a_schedule(tmp_path):
    """Its table stands in the plan, so that the plan runs without the file."""
    path = tmp_path / "mine.csv"
    al.schedule.write_schedule(path, al.schedule.make_schedule(one_at_a_time, 2, MICROBATCHES))
    options = al.PlanOptions(num_stages=2, schedule=path, num_microbatches=MICROBATCHES, mesh_shape=(2,))
    plan = al.plan(train_step, *arguments(), cluster=al.Cluster.parse("1x4:cpu"), options=options)
    path.unlink()
    plan.save(tmp_path / "plan.json")
    loaded = al.load_plan(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline and plan.pipeline.schedule == "mine" and len(plan.pipeline.table) == 2
    got = jax.tree.leaves(al.parallelize(train_step, plan=loaded)(*arguments()))
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(got, run(2, one_at_a_time), strict=True))


# -- bad input ------------------------------------------------------------------------------------------------------


DEADLOCK = "0F0,0B0,0F1,0B1,0F2,0F3,0B2,0B3\n1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3\n"
WHOLE = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n"


@pytest.mark.parametrize(
    ("text", "problem", "part"),
    [
        (DEADLOCK, "deadlock", "wait for each other"),
        (WHOLE.replace("1F2,", ""), "missing", "has no 1F2"),
        (WHOLE.replace("0F1", "0F1,0F1"), "double", "0F1 2 times"),
        (WHOLE.replace("0B0", "0B0,0F9"), "range", "0F9"),
        (WHOLE.replace("0B0", "0RECOMPUTE0,0B0"), "missing", "0RECOMPUTE1"),
        (re.sub(r"0B(\d)", r"0RECOMPUTE\1,0B\1", WHOLE), "kinds", "where jax.checkpoint asks for it"),
        ("0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3\n", "kinds", "has no backward pass"),
    ],
)
def test_a_file_that_is_no_schedule(text, problem, part, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    options = al.PlanOptions(num_stages=2, schedule=str(path), num_microbatches=MICROBATCHES)
    with pytest.raises(ScheduleError) as caught:
        al.plan(train_step, *arguments(), cluster=al.Cluster.parse("1x4:cpu"), options=options)
    assert caught.value.problem == problem and part in str(caught.value) and "'bad'" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"schedule": "1f1b", "num_chunks": 2}, "num_chunks=2 was given with schedule='1f1b'"),
        ({"schedule": "interleaved-1f1b", "num_chunks": 0}, "num_chunks=0"),
        ({"schedule": 7}, "a function that makes the table"),
        ({"schedule": "inference"}, "schedule='inference' was given; allowed are 'gpipe'"),
    ],
)
def test_wrong_options(options, part):
    with pytest.raises(AlpaLiteError, match=part):
        al.PlanOptions(num_stages=2, **options)


@pytest.mark.parametrize("schedule", ["zb-h1", one_at_a_time, "mine.csv"])
def test_a_schedule_without_stages(schedule):
    options = al.PlanOptions(schedule=schedule, num_microbatches=MICROBATCHES)
    with pytest.raises(AlpaLiteError, match=r"without a number of stages.*Give num_stages"):
        al.plan(train_step, *arguments(), cluster=al.Cluster.parse("1x4:cpu"), options=options)


def test_stages_of_one_submesh_with_different_submeshes():
    shapes = ((1, 2), (1, 2), (1, 1), (1, 2))
    options = al.PlanOptions(submeshes=shapes, schedule="interleaved-1f1b", num_chunks=2, num_microbatches=MICROBATCHES)
    with pytest.raises(
        LayerError, match=r"on the submeshes \(0, 1, 0, 1\)\. Stages of one submesh have the same entry"
    ):
        al.plan(train_step, *arguments(), cluster=al.Cluster.parse("1x4:cpu"), options=options)


def test_a_number_of_stages_that_chunks_do_not_divide():
    with pytest.raises(ScheduleError, match="num_chunks=3 does not divide 4 stages"):
        parallel(4, "interleaved-1f1b", 3).plan(*arguments())
