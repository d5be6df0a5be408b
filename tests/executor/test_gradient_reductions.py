"""Gradients are reduced over devices once per step, however many microbatches there are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.trace.boundary import layer_boundary

WIDTH, BATCH = 24, 2**15  # gathering the batch costs more than adding up gradients
WEIGHT_BYTES = 4 * WIDTH * WIDTH
REDUCTIONS = ("all-reduce", "reduce-scatter")


def train_step(params: Any, batch: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        x = layer_boundary(batch + jnp.tanh(batch @ params[0]))
        return jnp.mean((x + jnp.tanh(x @ params[1])) ** 2)

    loss, grads = al.value_and_grad(loss_fn)(params, batch)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss


def gradient_reductions(num_stages: int, num_microbatches: int) -> int:
    """How often devices add up something of a weight's size in a step, as compiled."""
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    args = [weight, weight], jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    pins = {"0/*": P(), "out/0/*": P(), "1": P("x")}
    options = al.PlanOptions(num_stages=num_stages, num_microbatches=num_microbatches)
    step = al.parallelize(train_step, cluster=al.Cluster.parse("1x4:cpu"), pins=pins, options=options)
    compiled = step.compile(*args)
    if num_stages == 1:
        runs = [(1, compiled.audit())]
    else:
        names = [name for name, *_ in compiled.programs]
        often = [num_microbatches if name in ("forward", "backward") else 1 for name in names]
        runs = list(zip(often, compiled.audit(), strict=True))
    assert all(report.ok for _, report in runs)
    return sum(
        times * c.count
        for times, report in runs
        for c in report.compiled
        if c.kind in REDUCTIONS and c.size_bytes == WEIGHT_BYTES
    )


@pytest.mark.medium
@pytest.mark.parametrize("num_stages", [1, 2])
def test_reductions_do_not_grow_with_microbatches(num_stages: int) -> None:
    assert [gradient_reductions(num_stages, m) for m in (1, 4, 8)] == [2, 2, 2]
