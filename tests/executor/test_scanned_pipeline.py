"""A scan over layers on stages: each owns, reads, and updates its slice of the stacked parameters, and the step is the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.executor.pipeline import runnable_pipeline
from alpa_lite.interop import cluster_layers
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.pipeline import plan_pipeline
from alpa_lite.planner.plan_step import Versions
from alpa_lite.planner.stage_cut import StageCut
from alpa_lite.trace.pins import resolve_pins
from alpa_lite.trace.program import Traced, trace
from alpa_lite.trace.staged import StagedStep, layers_of, staged_step
from alpa_lite.trace.unstack import LayeredStep, unstacked

pytestmark = pytest.mark.medium
NUM_LAYERS, MICROBATCHES = 4, 4
KEY = jax.random.key(0)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def block(w: Any, x: Any, mask: Any) -> Any:
    h = jnp.tanh(x @ w["a"])
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", h, h) + mask)
    return x + jnp.einsum("bst,btd->bsd", scores, h) @ w["b"]


def loss_fn(params: Any, batch: Any) -> Any:
    """Tied embedding, a mask that every layer reads, every layer recomputed."""
    tokens, labels = batch
    mask = jnp.where(jnp.tril(jnp.ones((16, 16))), 0, -1e9)
    body = jax.checkpoint(lambda w, x: block(w, x, mask))
    x, _ = lax.scan(lambda x, w: (body(w, x), None), params["emb"][tokens], params["layers"])
    return jnp.mean((x @ params["emb"].T - labels) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    params, optimizer = state
    loss, grads = al.value_and_grad(loss_fn)(params, batch)
    updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
    return (optax.apply_updates(params, updates), optimizer), loss


def arguments() -> tuple[Any, Any]:
    layers = {name: jax.random.normal(KEY, (NUM_LAYERS, 16, 16)) * 0.3 for name in "ab"}
    params = {"emb": jax.random.normal(KEY, (48, 16)) * 0.1, "layers": layers}
    batch = jax.random.randint(KEY, (16, 16), 0, 48), jax.random.normal(KEY, (16, 16, 48))
    return (params, OPTIMIZER.init(params)), batch


@cache
def traced() -> tuple[Traced, LayeredStep]:
    def balanced(flops: Any, cut_bytes: Any) -> tuple[int, ...]:
        return cluster_layers(flops, cut_bytes, NUM_LAYERS, tolerance=0.3).cuts

    return unstacked(trace(train_step, arguments(), {}, num_microbatches=MICROBATCHES, layers=balanced))


@cache
def staged(stage_of_layer: tuple[int, ...]) -> StagedStep:
    step, _ = traced()
    assert step.layered is not None
    return staged_step(step.program, step.layered, layers_of(step.layered), stage_of_layer)


def planned(stage_of_layer: tuple[int, ...]) -> Plan:
    program = staged(stage_of_layer).whole
    free = resolve_pins(
        {},
        None,
        program.input_paths,
        [program.values[v].shape for v in program.inputs],
        program.output_paths,
        [program.values[v].shape if v >= 0 else () for v in program.outputs],
        mesh=None,
        source="",
        annotations=None,
    )
    options = al.PlanOptions(num_stages=1 + stage_of_layer[-1], num_microbatches=MICROBATCHES)
    count = options.stage_count
    cut = StageCut(stage_of_layer=stage_of_layer, submeshes=((1, 8 // count),) * count, mesh_shapes=(None,) * count)
    cluster = al.Cluster.parse("1x8:cpu")
    return plan_pipeline(staged(stage_of_layer), cut, cluster, free, options, Versions(jax="", alpa_lite=""))


@pytest.mark.parametrize("stage_of_layer", [(0, 0, 1, 1), (0, 1, 2, 3)])
def test_equals_the_step_itself(stage_of_layer):
    step, leaves = traced()
    pipeline = runnable_pipeline(step, staged(stage_of_layer), planned(stage_of_layer), jax.devices())
    made = pipeline.run(*leaves.split(jax.tree.leaves(arguments())))
    got = leaves.join([np.asarray(x) for x in made])
    want = jax.tree.leaves(jax.jit(train_step)(*arguments()))
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= 2e-5 * np.linalg.norm(b)


def test_each_stage_owns_its_part_of_stacked_state():
    """Parameters, both moments and the new values of each; none is sent."""
    step = staged((0, 1, 2, 3))
    paths = step.whole.input_paths
    for layer, stage in enumerate(step.stages):
        owned = [paths[a] for a in stage.args if "layers" in paths[a]]
        assert [path.partition("[")[2] for path in owned] == [f"{layer}:{layer + 1}]"] * 6
        made = [r for r in stage.results if "layers" in step.whole.output_paths[r]]
        assert [step.whole.output_paths[r].partition("[")[2] for r in made] == [f"{layer}:{layer + 1}]"] * 6
        assert {paths[c.argument] for c in stage.received if c.when == "start"} <= {"0/0/emb"}
        received = {step.value_of(c).shape for c in stage.received}
        assert (1, 16, 16) not in received
        assert (4, 16, 16) in received  # the activations of a microbatch


def test_one_activation_and_one_gradient_cross_each_boundary():
    step = staged((0, 1, 2, 3))
    for number, stage in enumerate(step.stages):
        in_loop = [c for c in stage.received if c.when == "loop"]
        assert sorted(c.source for c in in_loop) == [n for n in (number - 1, number + 1) if 0 <= n < 4]
