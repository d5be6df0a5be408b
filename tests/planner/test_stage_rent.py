"""What a stage holds is counted per decision, and a rent on it gives leaner plans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.planner import stage_prices

pytestmark = pytest.mark.medium
WIDTH, ROWS, MICROBATCHES, LAYERS = 512, 8192, 4, 4
WEIGHTS = 2 * WIDTH * 4 * WIDTH * 4  # bytes of a layer
BOUNDARY = ROWS * WIDTH * 4  # of one microbatch


def plan(cluster: str, **options: Any) -> al.Plan:
    """Of equal layers of two matmuls, recomputed: a microbatch keeps the layer's input alone."""

    @jax.checkpoint
    def layer(weights: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ weights[0]) @ weights[1]

    def loss_fn(params: Any, x: Any) -> Any:
        for i, weights in enumerate(params):
            x = layer(weights, x if i == 0 else al.layer_boundary(x))
        return jnp.mean(x**2)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = al.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    pair = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))
    batch = jax.ShapeDtypeStruct((ROWS * MICROBATCHES, WIDTH), jnp.float32)
    options = {"num_microbatches": MICROBATCHES, **options}
    return al.plan(
        step,
        [pair] * LAYERS,
        batch,
        cluster=al.Cluster.parse(cluster),
        options=al.PlanOptions(**options),
        donate_argnums=0,
    )


def test_held_bytes_of_a_whole_layer(monkeypatch):
    found = []
    real = stage_prices.held_bytes

    def counted(pricer: Any, part: Any, program: Any, in_flight: float) -> Any:
        held = real(pricer, part, program, in_flight)
        if part.layers == (1,) and pricer.graph.conversions.mesh.num_devices == 1:
            found.append((sum(int(sizes[0]) for sizes in held.values()), in_flight))
        return held

    monkeypatch.setattr(stage_prices, "held_bytes", counted)
    plan("1x2:h100-sxm")
    assert found
    for size, in_flight in found:  # arguments, which the loop reads as constants, sums; what microbatches keep
        assert size == 3 * WEIGHTS + in_flight * BOUNDARY


def test_a_higher_rent_gives_a_leaner_plan(monkeypatch):
    prices: dict[Any, dict[int, Any]] = {}
    real = stage_prices.RunPrices.price

    def kept(self: Any, kind: Any, submesh: Any, choice: Any) -> Any:
        for rent in range(len(stage_prices.RENTS)):
            dearer = stage_prices.Choice(mesh=choice.mesh, rent=rent)
            prices.setdefault((kind, submesh, choice.mesh), {})[rent] = real(self, kind, submesh, dearer)
        return real(self, kind, submesh, choice)

    monkeypatch.setattr(stage_prices.RunPrices, "price", kept)
    plan("1x4:h100-sxm", memory_budget_bytes=2e8)  # small enough for a rent to matter
    most = [by_rent for key, by_rent in prices.items() if key[2].shape == (4,)]
    assert most
    for by_rent in most:
        first, last = by_rent[0], by_rent[len(stage_prices.RENTS) - 1]
        assert last.held_bytes <= first.held_bytes and last.time_s >= first.time_s * (1 - 1e-9)
    assert any(by_rent[2].held_bytes < by_rent[0].held_bytes for by_rent in most)
