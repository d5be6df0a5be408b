"""The memory model of XLA:GPU: which values are stored, in which order ops run, where dims are reordered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.dim_order import reordered_stacks, reordering_ops
from alpa_lite.costs.fusion import fused_values, joined_updates
from alpa_lite.costs.late_order import late_order
from alpa_lite.costs.memory import Order, timeline
from alpa_lite.costs.overlap_order import Move, early_updates, overlap_order
from alpa_lite.costs.profile import memory_profile
from alpa_lite.plan.records import LeafRole, OpDecision
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


def test_updates_follow_their_gradients() -> None:
    def step(w1: jax.Array, w2: jax.Array, x: jax.Array) -> Any:
        g1, g2 = jax.grad(lambda w1, w2: jnp.tanh(jnp.tanh(x @ w1) @ w2).sum(), argnums=(0, 1))(w1, w2)
        return w1 - g1, w2 - g2

    program = program_of(step, (16, 16), (16, 16), (8, 16))
    order = early_updates(program)
    assert sorted(order) == list(range(len(program.ops)))
    maker = {o: i for i, op in enumerate(program.ops) for o in op.outputs}
    last_update = maker[program.outputs[1]]
    first_gradient = maker[program.ops[maker[program.outputs[0]]].inputs[1]]
    assert first_gradient < last_update  # in the program all gradients come first
    assert order.index(last_update) < order.index(first_gradient)


def test_side_branches_fill_the_time_of_a_collective() -> None:
    """The gathered operand is asked for last; the independent product runs between the gather's start and its end."""

    def fn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        side = w @ w
        return jnp.tanh(x) @ w, side

    program = program_of(fn, (512, 512), (512, 512))
    mesh = DeviceMesh(shape=(8,), axis_names=("x",))
    whole, split = ShardingSpec.parse("[_,_]"), ShardingSpec.parse("[x,_]")
    tanh = next(i for i, op in enumerate(program.ops) if op.primitive == "tanh")
    last = len(program.ops) - 1
    value = program.ops[tanh].outputs[0]
    decisions = [
        OpDecision(
            path=str(index),
            operands=tuple(split if index == tanh else whole for _ in op.inputs),
            results=tuple(split if index == tanh else whole for _ in op.outputs),
        )
        for index, op in enumerate(program.ops)
    ]
    gather = Step(before=split, after=whole, kind=CollectiveKind.ALL_GATHER, axes=("x",), source_dim=0)
    conversion = Conversion(op=str(last), value=value, steps=(gather,), collectives=(0,), cost=1e-3)
    schedule = overlap_order(program, mesh, decisions, [conversion])
    start, done = schedule.moves[Move(str(last), value, whole)]
    side = next(i for i, op in enumerate(program.ops) if op.outputs[0] == program.outputs[1])
    assert schedule.overlaps and sorted(schedule.order) == list(range(len(program.ops)))
    assert schedule.order.index(tanh) < start <= schedule.order.index(side) < done <= schedule.order.index(last)
    line = timeline(program, schedule=schedule)
    assert line.moves[Move(str(last), value, whole)][0] < line.moves[Move(str(last), value, whole)][1]


def scan_with_fill() -> Program:
    def fn(xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        fill = jnp.full((16, 16), -1.0)

        def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            product = carry @ x
            chosen = jnp.where(product > 0, product, fill)
            return chosen.sum(0, keepdims=True) + carry, chosen * 2

        return jax.lax.scan(body, jnp.zeros((16, 16)) + xs[0], xs)

    return program_of(fn, (4, 16, 16))


def test_fills_that_a_loop_reads_are_made_inside_of_it() -> None:
    program = scan_with_fill()
    scan = next(op for op in program.ops if op.primitive == "scan")
    fills = [i for i in scan.inputs[: scan.num_consts] if i >= 0]
    assert fills and all(fused_values(program, gpu=True)[i] for i in fills)
    assert not any(fused_values(program)[i] for i in fills)


def test_stacked_results_have_no_buffer_inside_of_the_loop() -> None:
    program = scan_with_fill()
    scan = next(op for op in program.ops if op.primitive == "scan")
    stacked = scan.bodies[0].outputs[scan.num_carry]
    inside = {i.value for i in timeline(program).intervals if i.region}
    assert stacked not in inside
    assert stacked in {i.value for i in timeline(program, Order.BREADTH_FIRST).intervals if i.region}


@pytest.mark.parametrize("both_stored", [False, True])
def test_values_for_one_kernel_are_computed_in_it(both_stored: bool) -> None:
    """Two ops read the product of two stored tensors; if one kernel computes both, it need not be stored."""

    def fn(x: jax.Array, w: jax.Array) -> Any:
        joined = (x @ x) * w
        sine, cosine = jnp.sin(joined), jnp.cos(joined)
        return (sine, cosine) if both_stored else sine * cosine

    program = program_of(fn, (64, 64), (64, 64))
    value = next(op.outputs[0] for op in program.ops if op.primitive == "mul")
    assert fused_values(program, gpu=True)[value] is not both_stored
    assert not fused_values(program)[value]


def test_results_made_of_one_gradient_share_a_kernel() -> None:
    def fn(p: jax.Array, m: jax.Array, q: jax.Array, x: jax.Array) -> Any:
        first, second = x @ x, jnp.tanh(x) @ x
        return p - first, m + first, q - second

    program = program_of(fn, *[(64, 64)] * 4)
    maker = {o: index for index, op in enumerate(program.ops) for o in op.outputs}
    assert joined_updates(program, fused=fused_values(program, gpu=True)) == {maker[program.outputs[1]]}


def two_loops(*, transposed: bool) -> Program:
    """The first stacks up masked products, the second multiplies products with them."""

    def fn(xs: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((16, 16), dtype=bool))

        def first(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            product = x @ carry
            return carry + 1, jnp.where(mask, product.T if transposed else product, 0.0)

        def second(carry: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return (x[0] @ carry) * x[1], None

        _, stacked = jax.lax.scan(first, xs[0], xs)
        return jax.lax.scan(second, xs[0], (xs, stacked))[0]

    return program_of(fn, (4, 16, 16))


def test_a_loop_gets_stacks_in_the_order_of_its_own_products() -> None:
    program = two_loops(transposed=True)
    writer, reader = (index for index, op in enumerate(program.ops) if op.primitive == "scan")
    stacked = program.ops[writer].outputs[1]
    assert reordered_stacks(program) == [(reader, stacked)]
    line = timeline(program)
    start = line.start[str(reader)]
    assert [(i.lo, i.hi) for i in line.intervals if i.copy and i.value == stacked] == [(start, start + 1)]
    assert reordered_stacks(two_loops(transposed=False)) == []


@pytest.mark.parametrize(("order", "carried_first"), [(Order.PROGRAM, True), (Order.BREADTH_FIRST, False)])
def test_loops_make_what_they_stack_up_after_what_they_carry(order: Order, carried_first: bool) -> None:
    def fn(xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            stacked = x @ carry
            return jnp.tanh(carry) @ x, stacked

        return jax.lax.scan(body, xs[0], xs)

    program = program_of(fn, (4, 16, 16))
    index, scan = next((i, op) for i, op in enumerate(program.ops) if op.primitive == "scan")
    body = scan.bodies[0]
    maker = {o: f"{index}.0.{i}" for i, op in enumerate(body.ops) for o in op.outputs}
    start = timeline(program, order).start
    carried, stacked = (start[maker[o]] for o in body.outputs)
    assert (carried < stacked) is carried_first


def test_a_converted_carry_goes_on_in_the_buffer_of_the_loop() -> None:
    def fn(x: jax.Array, xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, y: (total @ y, None), x @ x, xs)[0]

    program = program_of(fn, (512, 512), (4, 512, 512))
    mesh = DeviceMesh(shape=(8,), axis_names=("x",))
    whole, split = ShardingSpec.parse("[_,_]"), ShardingSpec.parse("[x,_]")
    layouts = {2: whole, 3: ShardingSpec.parse("[_,_,_]")}
    decisions = [
        OpDecision(
            path=path,
            operands=tuple(layouts[len(owner.values[v].shape)] for v in op.inputs),
            results=tuple(layouts[len(owner.values[v].shape)] for v in op.outputs),
        )
        for path, owner, op in program.walk()
    ]
    (index, loop), (value,) = (
        next((i, op) for i, op in enumerate(program.ops) if op.primitive == "scan"),
        program.ops[0].outputs,
    )
    for number, decision in enumerate(decisions):
        if decision.path == str(index):
            operands = tuple(split if v == value else s for v, s in zip(loop.inputs, decision.operands, strict=True))
            decisions[number] = OpDecision(path=decision.path, operands=operands, results=decision.results)
    step = Step(before=whole, after=split, kind=CollectiveKind.ALL_TO_ALL, axes=("x",))
    line = timeline(program)
    report = memory_profile(
        program,
        line,
        mesh,
        in_specs=(whole, layouts[3]),
        out_specs=(whole,),
        decisions=decisions,
        conversions=[Conversion(op=str(index), value=value, steps=(step,), collectives=(0,), cost=1e-3)],
        roles=(LeafRole.INPUT, LeafRole.INPUT),
    )
    (converted,) = (t for t in report.stored if " as " in t.name)
    assert converted.hi <= line.start[str(index)] + 1 < line.end[str(index)]


def test_donated_arguments_are_saved_from_early_updates() -> None:
    """Both steps compute the same; in one of them the new weight is made before the old one's last reader."""

    def early(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        read = jnp.tanh(w @ x) @ x
        return w - x @ x, read

    def late(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        updated = w - x @ x
        return updated, jnp.tanh(w @ x) @ x

    shape = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    cluster = al.Cluster.parse("1x1:h100-sxm")
    peaks = [al.plan(fn, shape, shape, cluster=cluster, donate_argnums=0).memory.peak for fn in (early, late)]
    assert peaks[1] - peaks[0] == 8192 * 8192 * 4
