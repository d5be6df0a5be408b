"""The memory model of XLA:GPU where layers are recomputed and in loops: what barriers store, and what is written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.fusion import fused_values, overwriting_ops
from alpa_lite.costs.late_order import late_order, order_in_loop
from alpa_lite.costs.memory import Order, timeline
from alpa_lite.costs.profile import memory_profile
from alpa_lite.plan.records import LeafRole, OpDecision
from alpa_lite.trace.program import trace
from tests.costs.test_gpu_memory import program_of


def test_partial_products_are_added_before_a_barrier_that_their_sum_passes() -> None:
    """Every product for a weight's gradient is split, and its sum is read by the update at the end of the step."""

    def step(x: jax.Array, *weights: jax.Array) -> Any:
        def loss(weights: Sequence[jax.Array]) -> jax.Array:
            y = x
            for w in weights:
                y = jax.checkpoint(lambda w, y: jnp.tanh(y @ w))(w, y)
            return (y * y).sum()

        return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    program = program_of(step, (1024, 256), *[(256, 256)] * 4)
    mesh, specs = DeviceMesh(shape=(1,), axis_names=("x",)), [ShardingSpec.replicated(2)] * 5
    decisions = [
        OpDecision(
            path=path,
            operands=tuple(ShardingSpec.replicated(len(owner.values[i].shape) if i >= 0 else 0) for i in op.inputs),
            results=tuple(ShardingSpec.replicated(len(owner.values[o].shape) if o >= 0 else 0) for o in op.outputs),
        )
        for path, owner, op in program.walk()
    ]
    report = memory_profile(
        program,
        timeline(program, Order.LATE),
        mesh,
        in_specs=specs,
        out_specs=specs[1:],
        decisions=decisions,
        conversions=[],
        roles=[LeafRole.INPUT] * 5,
    )
    products = [t for t in report.alive if t.name.endswith("partial products")]
    assert len(products) == 1


def test_gradients_that_pass_a_barrier_are_stored_and_their_widening_casts_are_not() -> None:
    def step(x: jax.Array, *weights: jax.Array) -> Any:
        def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
            for w in weights:
                x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w.T.astype(jnp.bfloat16)))(w, x)
            return (x * x).sum()

        return [w - g for w, g in zip(weights, jax.grad(loss)(list(weights), x), strict=True)]

    shapes = [jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), *[jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2]
    program = trace(step, tuple(shapes), {}).program
    fused = fused_values(program, gpu=True)
    casts = [op.outputs[0] for op in program.ops if op.primitive == "convert_element_type"]
    casts = [o for o in casts if program.values[o].dtype == "float32"]
    turned = [op.outputs[0] for op in program.ops if op.primitive == "transpose" and op.inputs[0] in casts]
    assert [fused[o] for o in casts] == [True, True]
    assert [fused[o] for o in turned] == [False, True]  # of the last layer, before the barrier, and of the first


def test_casts_on_the_way_do_not_hinder_writing_over_an_operand() -> None:
    def fn(x: jax.Array) -> jax.Array:
        y = (x @ x).astype(jnp.float32)
        return (y * jnp.exp(y)).astype(jnp.bfloat16) @ x

    program = trace(fn, (jax.ShapeDtypeStruct((16, 16), jnp.bfloat16),), {}).program
    last = max(index for index, op in enumerate(program.ops) if op.primitive == "convert_element_type")
    found = [overwriting_ops(program, fused_values(program, gpu=True), gpu=gpu)[last] for gpu in (True, False)]
    assert found == [True, False]


def test_in_a_loop_reductions_share_the_kernel_that_overwrites_what_they_read() -> None:
    def fn(x: jax.Array, w: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = x @ w
        return jnp.tanh(logits) @ w, (logits * targets).sum(-1)

    program = program_of(fn, (16, 16), (16, 16), (16, 16))
    at = {op.primitive: index for index, op in enumerate(program.ops)}
    plain, joined = late_order(program), order_in_loop(program)
    assert sorted(joined) == sorted(plain)
    assert plain.index(at["tanh"]) < plain.index(at["reduce_sum"])
    assert joined.index(at["mul"]) < joined.index(at["reduce_sum"]) < joined.index(at["tanh"])
