"""Stages and shardings chosen together against stages first, by balanced FLOPs: the case of docs/pipelines.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import MemoryBudgetError

pytestmark = pytest.mark.medium
WIDTH, LAYERS, VOCAB, TOKENS = 512, 6, 131_072, 4096


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """The table costs memory and no FLOPs, so that balanced work is not balanced memory."""
    x = params["embed"][batch["tokens"]]
    for w in params["layers"]:
        x = al.layer_boundary(x + jax.nn.relu(x @ w["up"]) @ w["down"])
    return jnp.mean((x @ params["head"] - batch["labels"]) ** 2)


def train_step(params: Any, batch: Any) -> Any:
    loss, grads = al.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), loss


@cache
def plan(num_stages: int | str, budget: float) -> al.Plan:
    def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layers = [{"up": of(WIDTH, 4 * WIDTH), "down": of(4 * WIDTH, WIDTH)}] * LAYERS
    params = {"embed": of(VOCAB, WIDTH), "layers": layers, "head": of(WIDTH, WIDTH)}
    batch = {"tokens": of(TOKENS, dtype=jnp.int32), "labels": of(TOKENS, WIDTH)}
    return al.plan(
        al.parallelize(train_step, donate_argnums=0),
        params,
        batch,
        cluster=al.Cluster.parse("1x4:h100-sxm"),
        options=al.PlanOptions(num_microbatches=4, num_stages=num_stages, memory_budget_bytes=budget),
    )


def test_stages_by_balanced_flops_are_more_than_a_tenth_slower():
    separate = [plan(count, 1e9) for count in (1, 2, 4)]
    joint = plan("auto", 1e9)
    assert 1.1 * joint.objective < min(p.objective for p in separate)
    assert {s.submesh for s in joint.stages} == {(1, 1), (1, 2)}  # more devices, and fewer layers, where the table lies


def test_under_a_budget_one_of_these_cuts_does_not_fit():
    with pytest.raises(MemoryBudgetError):
        plan(4, 500e6)
    joint = plan("auto", 500e6)
    assert max(stage.memory.peak for stage in joint.stages) <= 500e6
    assert 1.1 * joint.objective < min(plan(count, 500e6).objective for count in (1, 2))
