"""The memory model of XLA:GPU: which values are stored, in which order ops run, where dims are reordered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.core.program import Program
from alpa_lite.costs.dim_order import reordering_ops
from alpa_lite.costs.fusion import fused_values
from alpa_lite.costs.late_order import late_order
from alpa_lite.costs.memory import Order, timeline
from alpa_lite.trace.program import trace


def program_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Program:
    return trace(fn, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), {}).program


def remat_mlp(layers: int) -> Program:
    """Gradients of a chain of rematerialised layers."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
        for w in weights:
            x = layer(w, x)
        return (x * x).sum()

    def step(x: jax.Array, *weights: jax.Array) -> Any:
        return jax.value_and_grad(loss)(list(weights), x)

    return program_of(step, (8, 16), *[(16, 16)] * layers)


def softmax_gradient(*, transposed: bool) -> Program:
    spec = "bsd,btd->bts" if transposed else "bsd,btd->bst"

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum(spec, q, k)
        scores = scores.swapaxes(1, 2) if transposed else scores
        return jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), v).sum()

    return program_of(jax.grad(attention, argnums=(0, 1, 2)), *[(2, 4, 8)] * 3)


def test_late_order_is_a_permutation_that_respects_operands() -> None:
    program = remat_mlp(3)
    order = late_order(program)
    assert sorted(order) == list(range(len(program.ops)))
    made = {*program.inputs, *program.constants, -1}
    for index in order:
        assert set(program.ops[index].inputs) <= made
        made.update(program.ops[index].outputs)


def test_weight_gradients_are_done_before_the_next_layers_barrier() -> None:
    program = remat_mlp(3)
    place = {index: position for position, index in enumerate(late_order(program))}
    barriers = [i for i, op in enumerate(program.ops) if op.primitive == "optimization_barrier"]
    weights = program.outputs[1:]  # of the first to the last layer; the last one's gradient comes first
    maker = {o: i for i, op in enumerate(program.ops) for o in op.outputs}
    last_group = max(place[b] for b in barriers)
    assert place[maker[weights[2]]] < last_group < place[maker[weights[0]]]


def test_side_branches_run_after_the_newest_chain() -> None:
    """Without barriers the first weight's gradient is asked for first, and drags the whole backward chain along."""

    def loss(w1: jax.Array, w2: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w1) @ w2).sum()

    program = program_of(jax.grad(loss, argnums=(0, 1)), (16, 16), (16, 16), (8, 16))
    place = {index: position for position, index in enumerate(late_order(program))}
    maker = {o: i for i, op in enumerate(program.ops) for o in op.outputs}
    first, second = (place[maker[v]] for v in program.outputs)
    assert maker[program.outputs[1]] < maker[program.outputs[0]]  # in the program the last layer's comes first
    assert first < second


@pytest.mark.parametrize(("transposed", "copies"), [(False, False), (True, True)])
def test_orders_meet_only_if_the_scores_are_transposed(transposed: bool, copies: bool) -> None:
    program = softmax_gradient(transposed=transposed)
    found = [
        index for index in reordering_ops(program) if program.values[program.ops[index].outputs[0]].shape == (2, 4, 4)
    ]
    assert bool(found) is copies


def test_reordering_adds_a_second_buffer_for_a_moment() -> None:
    program = softmax_gradient(transposed=True)
    copies = [i for i in timeline(program).intervals if i.copy]
    assert copies and all(i.hi == i.lo + 1 for i in copies)
    assert not [i for i in timeline(program, Order.BREADTH_FIRST).intervals if i.copy]


@pytest.mark.parametrize(
    ("dtype", "size", "exp_kept", "tanh_kept"),
    [("bfloat16", 2048, False, True), ("bfloat16", 16, False, False), ("float32", 2048, False, False)],
)
def test_gpu_keeps_only_large_dear_values_in_half_precision(
    dtype: str, size: int, exp_kept: bool, tanh_kept: bool
) -> None:
    def fn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x @ x
        e, t = jnp.exp(y), jnp.tanh(y)
        return (e.max(0) + e.max(1), t.max(0) + t.max(1))

    program = trace(fn, (jax.ShapeDtypeStruct((size, size), dtype),), {}).program
    made = {op.primitive: op.outputs[0] for op in program.ops}
    on_gpu, on_cpu = fused_values(program, gpu=True), fused_values(program)
    assert (on_gpu[made["exp"]], on_gpu[made["tanh"]]) == (not exp_kept, not tanh_kept)
    assert not on_cpu[made["exp"]] and not on_cpu[made["tanh"]]


def test_a_view_keeps_its_operand() -> None:
    """The product is read through a reshape by a later product: its buffer must last until then."""

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        a = (x @ w).reshape(2, 8, 16)
        b = jnp.tanh(w @ w)
        return jnp.einsum("aij,jk->aik", a, b @ b)

    program = program_of(fn, (16, 16), (16, 16))
    line = timeline(program)
    maker = {o: i for i, op in enumerate(program.ops) for o in op.outputs}
    product = program.ops[maker[program.ops[maker[program.ops[-1].inputs[0]]].inputs[0]]].outputs[0]
    life = next(i for i in line.intervals if i.value == product)
    assert life.hi == line.end[str(len(program.ops) - 1)]
