"""``al.plan_shared`` with a training step that recomputes layers where it is planned alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.api import shared
from tests.recomputed_steps import step_for_one_by_four


def array(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@pytest.mark.slow
def test_layers_recomputed_alone_rule_no_mesh_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another layout others may be, or none: the bounds of the graph alone hold for its own choice."""

    def loss_fn(ws: Any, x: Any) -> Any:
        for i in range(3):
            x = x + jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) @ ws[2]
            x = al.layer_boundary(x) if i < 2 else x
        return jnp.mean(x**2)

    def step(ws: Any, x: Any) -> Any:
        loss, grads = al.value_and_grad(loss_fn)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), loss

    args = ((array(32, 128), array(128, 128), array(128, 32)), array(4096, 32))
    tried: list[Any] = []
    of_mesh = shared._Search.joint
    monkeypatch.setattr(shared._Search, "joint", lambda search, mesh: tried.append(mesh) or of_mesh(search, mesh))
    layout = al.plan_shared(
        {"train": (step, args), "apply": (lambda ws, x: x @ ws[0], args)},
        shared="0",
        cluster=al.Cluster.parse("1x4:cpu"),
        options=al.PlanOptions(memory_budget_bytes=4.2e6),
    )
    assert layout.plans["train"].remat is not None
    assert sorted(mesh.shape for mesh in tried) == [(2, 2), (4,)]
    assert layout.lower_bound <= layout.objective


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.01, 1.05, 1.1])
def test_on_another_mesh_it_need_not_recompute(share: float) -> None:
    """Alone it recomputes on (1, 4); with another graph (4, 1) is better, where all that it keeps fits."""

    def apply(weights: Any, x: Any, m: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x @ m)
        return x

    weights = [array(512, 512)] * 2
    graphs = {
        "step": (step_for_one_by_four, (weights, array(2048, 512), array(8192, 1024), array(256, 256))),
        "apply": (apply, (weights, array(4096, 1024), array(1024, 1024))),
    }
    pins = {"step": {"2": P("x"), "3": P("x")}, "apply": {"1": P("x"), "2": P(), "out": P("x")}}
    settings: Any = {"cluster": al.Cluster.parse("1x4:h100-sxm"), "donate_argnums": 0}
    options = al.PlanOptions(memory_budget_bytes=61.5e6, axis_names=("x", "y"), time_limit_s=5)

    def planned(name: str, shape: tuple[int, int] | None, more: Any = None) -> al.Plan:
        fn, args = graphs[name]
        own = pins[name] | (more or {})
        return al.plan(fn, *args, pins=own, options=replace(options, mesh_shape=shape), **settings)

    alone, kept = planned("step", None), planned("step", (4, 1))
    assert alone.mesh.shape == (1, 4) and alone.remat is not None and kept.remat is None
    dear, cheap = (planned("apply", shape).objective for shape in ((1, 4), (4, 1)))
    weight = share * (kept.objective - alone.objective) / (dear - cheap)

    layout = al.plan_shared(graphs, shared="0", weights={"apply": weight}, options=options, pins=pins, **settings)
    fixed = {path: spec for path, spec in kept.specs_by_path.items() if path.startswith("0/")}
    costs = {name: planned(name, (4, 1), fixed).objective for name in graphs}
    known = costs["step"] + weight * costs["apply"]
    assert layout.lower_bound <= layout.objective <= known * (1 + 1e-9)
    assert layout.lower_bound <= known
