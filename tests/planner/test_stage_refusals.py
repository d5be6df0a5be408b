"""What cannot be cut into stages, or run in the asked order, is refused in the user's words, before anything is planned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, LayerError, MemoryBudgetError, MicrobatchError, ScheduleError

W = {"a": jax.ShapeDtypeStruct((8, 8), jnp.float32), "b": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
X = jax.ShapeDtypeStruct((12, 8), jnp.float32)
DEADLOCK = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(al.layer_boundary(jnp.tanh(x @ w["a"])) @ w["b"]) ** 2)


def step_of(loss: Any) -> Any:
    def step(w: Any, x: Any) -> Any:
        value, grads = al.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    return step


def boundary_in_scan(w: Any, x: Any) -> Any:
    x, _ = lax.scan(lambda x, _: (al.layer_boundary(jnp.tanh(x @ w["a"])), None), x, None, length=3)
    return jnp.mean((x @ w["b"]) ** 2)


def against_the_flow(w: Any, x: Any) -> Any:
    h = al.layer_boundary(al.pin_stage(jnp.tanh(x @ w["a"]), 1))
    return jnp.mean(al.pin_stage(h @ w["b"], 0) ** 2)


def two_gradients(w: Any, x: Any) -> Any:
    return al.grad(loss_fn)(w, x), al.grad(lambda w, x: loss_fn(w, x) ** 2)(w, x)


def no_gradient(w: Any, x: Any) -> Any:
    return loss_fn(w, x)


@pytest.mark.parametrize(
    ("step", "options", "error", "parts"),
    [
        (
            step_of(loss_fn),
            {"num_microbatches": 5},
            MicrobatchError,
            ["num_microbatches=5", "(12, 8)", "1, 2, 3, 4, 6, 12", "test_stage_refusals.py"],
        ),
        (
            step_of(boundary_in_scan),
            {},
            LayerError,
            ["boundary inside a scan body", "test_stage_refusals.py", "scans over layers are cut by themselves"],
        ),
        (
            step_of(against_the_flow),
            {},
            LayerError,
            [
                "contradicts the flow of data",
                "from stage 1 back to stage 0",
                "(against_the_flow)",
                "drop one of the pins",
            ],
        ),
        (
            step_of(loss_fn),
            {"num_stages": 4},
            LayerError,
            ["num_stages=4 for a step of 2 layers", "test_stage_refusals.py", "at most 2 stages"],
        ),
        (
            step_of(loss_fn),
            {"num_stages": 3},
            LayerError,
            ["num_stages=3 does not cut", "1-2, 4, 8 stages are allowed", "test_stage_refusals.py"],
        ),
        (step_of(loss_fn), {"schedule": "2f2b"}, AlpaLiteError, ["schedule='2f2b'", "'gpipe', '1f1b'"]),
        (
            step_of(loss_fn),
            {"schedule": "table.csv", "num_microbatches": 2},
            ScheduleError,
            ["the schedule 'table' is a deadlock", "0F1 (mesh 0, place 3) comes after 0B0"],
        ),
        (two_gradients, {}, MicrobatchError, ["2 gradients", "test_stage_refusals.py", "sum of the losses"]),
        (
            no_gradient,
            {},
            MicrobatchError,
            [
                "no al.value_and_grad or al.grad",
                "num_microbatches=4",
                "leave num_microbatches at 1",
                "test_stage_refusals.py",
            ],
        ),
        (
            jax.grad(loss_fn),
            {"num_microbatches": 1},
            MicrobatchError,
            ["no al.value_and_grad or al.grad", "num_stages", "test_stage_refusals.py"],
        ),
    ],
)
def test_bad_input(step, options, error, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(DEADLOCK)
    with pytest.raises(error) as caught:
        chosen = al.PlanOptions(**{"num_stages": 2, "num_microbatches": 4, **options})
        al.plan(step, W, X, cluster=al.Cluster.parse("1x8:v100-sxm2-16gb"), options=chosen)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.medium
def test_a_stage_without_a_gradient_that_does_not_fit_has_no_microbatches():
    def apply(weights: Any, x: Any) -> Any:
        for k, w in enumerate(weights):
            x = jnp.tanh((al.layer_boundary(x) if k else x) @ w)
        return x

    args = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2, jax.ShapeDtypeStruct((64, 512), jnp.float32)
    options = al.PlanOptions(num_stages=2, memory_budget_bytes=1e5)
    with pytest.raises(
        MemoryBudgetError, match=r"stage of layers 0-0 was found that fits: .*smaller inputs \(batch"
    ) as caught:
        al.plan(apply, *args, cluster=al.Cluster.parse("1x4:h100-sxm"), options=options)
    assert "in flight" not in str(caught.value) and not caught.value.proven
