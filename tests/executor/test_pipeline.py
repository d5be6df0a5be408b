"""Stages on submeshes of one process: the pipelined step equals the step itself, for any cut and any order of actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.executor.local import local_mesh
from alpa_lite.executor.pipeline import Action, LoweredStage, PipelinedStep
from alpa_lite.lowering.lower import Lowering
from alpa_lite.planner.plan_step import Versions, plan_step
from alpa_lite.trace.boundary import layer_boundary
from alpa_lite.trace.commute import commute_sums
from alpa_lite.trace.flatten import flatten
from alpa_lite.trace.layers import Layered, assign_layers
from alpa_lite.trace.microbatch import microbatches
from alpa_lite.trace.pins import resolve_pins
from alpa_lite.trace.program import build_program, trace
from alpa_lite.trace.stages import StageProgram, split_step

pytestmark = pytest.mark.medium
NUM_LAYERS, MICROBATCHES = 4, 4
KEY = jax.random.key(0)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def block(w: Any, x: Any, mask: Any) -> Any:
    h = jnp.tanh(x @ w["a"])
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", h, h) + mask)
    return x + jnp.einsum("bst,btd->bsd", scores, h) @ w["b"]


def loss_fn(params: Any, batch: Any) -> Any:
    """Tied embedding, a shared mask, every second layer recomputed."""
    tokens, labels = batch
    x = params["emb"][tokens]
    mask = jnp.where(jnp.tril(jnp.ones((16, 16))), 0, -1e9)
    for i, w in enumerate(params["layers"]):
        x = jax.checkpoint(block)(w, x, mask) if i % 2 else block(w, x, mask)
        x = layer_boundary(x) if i < NUM_LAYERS - 1 else x
    return jnp.mean((x @ params["emb"].T - labels) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    """Clipping by the global norm, so that the update needs values of all stages."""
    params, optimizer = state
    loss, grads = al.value_and_grad(loss_fn)(params, batch)
    updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
    return (optax.apply_updates(params, updates), optimizer), loss


def arguments() -> tuple[Any, Any]:
    def weights(i: int) -> Any:
        return jax.random.normal(jax.random.fold_in(KEY, i), (16, 16)) * 0.3

    layers = [{"a": weights(i), "b": weights(i + 9)} for i in range(NUM_LAYERS)]
    params = {"emb": jax.random.normal(KEY, (48, 16)) * 0.1, "layers": layers}
    batch = jax.random.randint(KEY, (16, 16), 0, 48), jax.random.normal(KEY, (16, 16, 48))
    return (params, OPTIMIZER.init(params)), batch


def split(stage_of_layer: Sequence[int]) -> tuple[Any, Layered, tuple[StageProgram, ...]]:
    args = arguments()
    whole = trace(train_step, args, {}, num_microbatches=MICROBATCHES).program
    with microbatches(MICROBATCHES):
        flat = flatten(jax.jit(lambda *a: train_step(*a)).trace(*args).jaxpr, keep_boundaries=True)
    loop = next(i for i, op in enumerate(flat.ops) if op.name == "scan")
    flat, layered = commute_sums(flat, loop, assign_layers(flat.ops[loop].bodies[0]), stage_of_layer)
    return whole, layered, split_step(flat, loop, layered, stage_of_layer, whole.aliases)


@cache
def pipeline(stage_of_layer: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Any, list[LoweredStage]]:
    """The whole program, and its stages planned on consecutive devices."""
    whole, _, programs = split(stage_of_layer)
    stages, first = [], 0
    for stage, size in zip(programs, sizes, strict=True):
        inputs = [whole.input_paths[a] for a in stage.args] + [f"received/{i}" for i in range(len(stage.received))]
        outputs = [whole.output_paths[r] for r in stage.results] + [f"sent/{i}" for i in range(len(stage.sent))]
        program = build_program(stage.flat, inputs, outputs, [False] * len(inputs))
        # Pins, because steps this small are best repeated on every device.
        wanted = {"0/0/layers/*/a": P(None, "x"), "0/0/layers/*/b": P("x"), "1/1": P("x")}
        pins = {k: v for k, v in wanted.items() if any(p.startswith(k.split("*")[0]) for p in inputs)}
        resolved = resolve_pins(
            pins,
            None,
            program.input_paths,
            [program.values[v].shape for v in program.inputs],
            program.output_paths,
            [program.values[v].shape if v >= 0 else () for v in program.outputs],
            mesh=None,
            source="",
            annotations=None,
        )
        options = al.PlanOptions(mesh_shape=(size,), axis_names=("x",))
        cluster = al.Cluster.parse(f"1x{size}:cpu")
        plan = plan_step(program, cluster, resolved, options, Versions(jax="", alpa_lite=""))
        decided = plan.stages[0]
        lowering = Lowering.of(decided.mesh, decided.decisions, decided.conversions, decided.collectives)
        mesh = local_mesh(decided.mesh, jax.devices()[first : first + size])
        stages.append(LoweredStage(stage, lowering, plan.input_specs, plan.output_specs, mesh))
        first += size
    return whole, stages


def gpipe(num_stages: int) -> list[Action]:
    forward = [Action("F", s, i) for i in range(MICROBATCHES) for s in range(num_stages)]
    return forward + [Action("B", s, i) for i in range(MICROBATCHES) for s in reversed(range(num_stages))]


def one_at_a_time(num_stages: int) -> list[Action]:
    passes = [("F", s) for s in range(num_stages)] + [("B", s) for s in reversed(range(num_stages))]
    return [Action(kind, s, i) for i in range(MICROBATCHES) for kind, s in passes]


def run(stage_of_layer: tuple[int, ...], sizes: tuple[int, ...], order: Any) -> list[np.ndarray]:
    whole, stages = pipeline(stage_of_layer, sizes)
    step = PipelinedStep(stages, order(len(sizes)), len(whole.outputs))
    return [np.asarray(x) for x in step(jax.tree.leaves(arguments()))]


@cache
def reference() -> list[np.ndarray]:
    """A plain loop over microbatches, on one device."""
    state, batch = arguments()
    parts = [jax.tree.map(lambda x, i=i: x[i::MICROBATCHES], batch) for i in range(MICROBATCHES)]
    made = [jax.jit(jax.value_and_grad(loss_fn))(state[0], part) for part in parts]
    loss, grads = jax.tree.map(lambda *xs: sum(xs) / MICROBATCHES, *made)
    updates, optimizer = OPTIMIZER.update(grads, state[1], state[0])
    return [np.asarray(x) for x in jax.tree.leaves(((optax.apply_updates(state[0], updates), optimizer), loss))]


CUTS = [((0, 0, 1, 1), (4, 4)), ((0, 1, 1, 1), (2, 4)), ((0, 1, 2, 3), (2, 2, 2, 2)), ((0, 0, 0, 0), (8,))]


@pytest.mark.parametrize(("stage_of_layer", "sizes"), CUTS)
def test_equals_a_plain_loop(stage_of_layer, sizes):
    for got, want in zip(run(stage_of_layer, sizes, gpipe), reference(), strict=True):
        assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)


def test_the_order_of_actions_does_not_change_a_bit():
    first, second = (run(*CUTS[0], order) for order in (gpipe, one_at_a_time))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_stages_do_communicate():
    """The pins make every stage reduce something, so the equality above is not that of repeated work."""
    _, stages = pipeline(*CUTS[0])
    assert all(stage.lowering.conversions for stage in stages)


def test_one_activation_and_one_gradient_cross_each_boundary():
    _, layered, stages = split((0, 1, 2, 3))
    for number, stage in enumerate(stages):
        in_loop = [c for c in stage.received if c.when == "loop"]
        assert sorted(c.source for c in in_loop) == [n for n in (number - 1, number + 1) if 0 <= n < 4]
        assert {layered.flat.avals[c.value].shape for c in in_loop} == {(4, 16, 16)}


def test_a_weight_of_two_stages_is_sent_once_and_its_gradients_joined_once():
    whole, _, (first, *_, last) = split((0, 1, 2, 3))
    tied = whole.input_paths.index("0/0/emb")
    assert [(c.argument, c.source, c.readers) for c in last.received if c.when == "start"] == [(tied, 0, (3,))]
    shapes = [first.flat.avals[v].shape for v in first.flat.inputs[len(first.args) :]]
    assert shapes.count((48, 16)) == 1  # the last stage's sum of gradients, at the end
    assert all(c.when != "start" for c in first.received)


def test_every_result_and_argument_belongs_to_a_stage():
    whole, _, stages = split((0, 0, 1, 1))
    assert sorted(r for stage in stages for r in stage.results) == list(range(len(whole.outputs)))
    assert {a for stage in stages for a in stage.args} == set(range(len(whole.inputs)))


def test_the_mask_is_made_where_it_is_read():
    """It costs less to make than to send."""
    _, _, stages = split((0, 1, 2, 3))
    for stage in stages:
        names = [op.name for op in stage.flat.ops[stage.loop].bodies[0].ops[: stage.num_forward]]
        assert "iota" in names
