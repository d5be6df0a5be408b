"""Stages that compute the same share their functions; stages that do not, do not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.lowering.segments import CutRegion
from alpa_lite.lowering.stage import first_equal, lowered_stages
from alpa_lite.planner.stage_layers import layer_cuts
from alpa_lite.trace.boundary import layer_boundary
from alpa_lite.trace.program import trace
from alpa_lite.trace.staged import layers_of, staged_step

WIDTH, BATCH, MICROBATCHES = 8, 8, 2


def step_of(num_layers: int, rate: Any = 0.1) -> Any:
    """One layer per stage; ``rate`` is a learning rate, or one per layer."""
    rates = [rate] * num_layers if isinstance(rate, float) else rate

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch
        for i, w in enumerate(params):
            x = x + jnp.tanh(x @ w)
            x = layer_boundary(x) if i < num_layers - 1 else x
        return jnp.mean(x**2)

    def train_step(params: Any, batch: Any) -> Any:
        loss, grads = al.value_and_grad(loss_fn)(params, batch)
        return [p - r * g for p, r, g in zip(params, rates, grads, strict=True)], loss

    return train_step


def arguments(num_layers: int) -> Any:
    keys = jax.random.split(jax.random.key(0), num_layers + 1)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) * 0.3 for k in keys[1:]]
    return params, jax.random.normal(keys[0], (BATCH, WIDTH))


def parallel(num_stages: int, rate: Any = 0.1) -> Any:
    options = al.PlanOptions(num_stages=num_stages, num_microbatches=MICROBATCHES)
    return al.parallelize(step_of(num_stages, rate), cluster=al.Cluster.parse(f"1x{num_stages}:cpu"), options=options)


def made(step: Any, num_stages: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many functions are written and lowered for all of the step's programs."""
    real, written = CutRegion.function, []
    monkeypatch.setattr(CutRegion, "function", lambda *a, **k: written.append(a) or real(*a, **k))
    compiled = step.compile(*arguments(num_stages))
    monkeypatch.undo()
    assert len(compiled.programs) == 4 * num_stages
    return len(written)


@pytest.mark.medium
def test_equal_stages_are_lowered_once(monkeypatch):
    """The first stage, the last, and one for all in between: four functions each."""
    assert [made(parallel(n), n, monkeypatch) for n in (4, 8)] == [12, 12]


@pytest.mark.medium
def test_shared_functions_run_on_every_stage():
    args = arguments(8)
    piped = parallel(8)(*args)
    single = jax.jit(step_of(8))(*args)
    for got, want in zip(jax.tree.leaves(piped), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-5, atol=1e-6)


@pytest.mark.medium
def test_a_literal_makes_another_stage():
    """A fingerprint holds no literals, for they change no plan; they do change what runs."""
    found = []
    for rates in ([0.1] * 4, [0.1, 0.1, 0.2, 0.1]):
        step, args = step_of(4, rates), arguments(4)
        options = al.PlanOptions(num_stages=4, num_microbatches=MICROBATCHES)
        plan = al.plan(step, *args, cluster=al.Cluster.parse("1x4:cpu"), options=options)
        traced = trace(step, args, {}, num_microbatches=MICROBATCHES, layers=layer_cuts(4))
        assert traced.layered is not None
        staged = staged_step(traced.program, traced.layered, layers_of(traced.layered), (0, 1, 2, 3))
        found.append(first_equal(lowered_stages(staged, plan)))
    assert found == [(0, 1, 1, 3), (0, 1, 2, 3)]
