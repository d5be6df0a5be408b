"""Memory under XLA:CPU: one rule per test on hand-made instructions, then whole small functions beside what XLA compiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_lite._jax_compat import CPU_KEEPS_BARRIERS
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.buffers import temporaries
from alpa_lite.costs.instructions import (
    BROADCAST,
    CALL,
    COPY,
    HELD,
    JOIN,
    LOOP,
    Instruction,
    InstructionGraph,
    Traits,
    instruction_graph,
)
from alpa_lite.costs.loop_fusion import fuse
from alpa_lite.lowering.lower import Lowering
from alpa_lite.plan.records import OpDecision
from alpa_lite.trace.program import trace

ELEMENTWISE = Traits(loop=True, elementwise=True)
EXPENSIVE = Traits(loop=True, elementwise=True, expensive=True)
PRODUCT = Traits(loop=True, elementwise=True, product=True)
REDUCTION = Traits(reduction=True)
UPDATE = Traits(updates=True)


def graph(
    *lines: tuple[Traits, list[int]], outputs: list[int], sizes: dict[int, int] | None = None
) -> InstructionGraph:
    """Instructions of 100 elements and rank 2 (``sizes`` overrides the elements), one byte each."""
    made = []
    for number, (traits, operands) in enumerate(lines):
        elements = (sizes or {}).get(number, 100)
        made.append(
            Instruction(
                name=f"%{number}",
                operands=operands,
                size_bytes=elements,
                elements=elements,
                rank=2 if elements >= 100 else 1,
                traits=traits,
            )
        )
    return InstructionGraph(made, outputs, {})


def reads(g: InstructionGraph) -> dict[int, list[int]]:
    return {root: fusion.reads for root, fusion in fuse(g).items()}


# -- fusion ---------------------------------------------------------------------------------------------------------


def test_a_loop_is_computed_inside_its_reader_but_not_inside_a_call():
    lines = (HELD, []), (ELEMENTWISE, [0]), (ELEMENTWISE, [1]), (CALL, [2])
    assert reads(graph(*lines, outputs=[3])) == {0: [], 2: [0], 3: [2]}


def test_a_cheap_unary_loop_is_computed_again_by_loops_and_stored_for_calls():
    lines = (HELD, []), (CALL, [0]), (ELEMENTWISE, [1]), (ELEMENTWISE, [2]), (CALL, [2]), (CALL, [3, 4])
    assert reads(graph(*lines, outputs=[5])) == {0: [], 1: [0], 2: [1], 3: [1], 4: [2], 5: [3, 4]}


@pytest.mark.parametrize("traits", [EXPENSIVE, JOIN])
def test_expensive_loops_and_concatenations_are_not_computed_twice(traits):
    lines = (HELD, []), (CALL, [0]), (traits, [1]), (ELEMENTWISE, [2]), (ELEMENTWISE, [2]), (CALL, [3]), (CALL, [4, 5])
    assert reads(graph(*lines, outputs=[6]))[3] == [2]


def test_an_expensive_loop_joins_a_fusion_that_holds_all_its_readers():
    lines = (HELD, []), (EXPENSIVE, [0]), (ELEMENTWISE, [1]), (ELEMENTWISE, [1]), (ELEMENTWISE, [2, 3])
    assert reads(graph(*lines, outputs=[4])) == {0: [], 4: [0]}


def test_a_loop_of_two_large_operands_is_stored_if_one_reader_is_a_call():
    """Computing it again would read two tensors instead of one."""
    lines = (HELD, []), (HELD, []), (ELEMENTWISE, [0, 1]), (ELEMENTWISE, [2]), (CALL, [2]), (CALL, [3, 4])
    assert reads(graph(*lines, outputs=[5]))[3] == [2]
    small = graph(*lines, outputs=[5], sizes={1: 10})
    assert reads(small)[3] == [0, 1]


def test_a_loop_of_two_large_operands_is_repeated_only_if_all_ways_to_the_reader_fuse():
    two = (HELD, []), (HELD, []), (ELEMENTWISE, [0, 1])
    assert 2 not in reads(graph(*two, (ELEMENTWISE, [2]), (ELEMENTWISE, [2, 3]), outputs=[4]))
    blocked = reads(graph(*two, (ELEMENTWISE, [2]), (CALL, [3]), (ELEMENTWISE, [2, 4]), outputs=[5]))
    assert blocked[5] == [2, 4]


def test_an_expensive_loop_is_not_computed_once_per_element_of_a_broadcast():
    lines = (HELD, []), (EXPENSIVE, [0]), (BROADCAST, [1]), (ELEMENTWISE, [2])
    assert reads(graph(*lines, outputs=[3], sizes={0: 10, 1: 10})) == {0: [], 1: [0], 3: [1]}


def test_a_reduction_multiplies_what_it_alone_reads_and_reads_the_rest_from_memory():
    lines = (HELD, []), (ELEMENTWISE, [0]), (PRODUCT, [1]), (REDUCTION, [2])
    assert reads(graph(*lines, outputs=[3])) == {0: [], 1: [0], 3: [1]}
    shared = graph(*lines, (CALL, [2, 3]), outputs=[4])
    assert reads(shared)[3] == [2]


def test_what_nobody_reads_is_not_computed():
    assert reads(graph((HELD, []), (CALL, [0]), (CALL, [0]), outputs=[2])) == {0: [], 2: [0]}


# -- order and buffers ----------------------------------------------------------------------------------------------


def test_what_depends_on_arguments_alone_is_made_first_and_kept():
    """The last call needs a copy of the argument: in program order it would be made there, XLA:CPU makes it at once."""
    chain = (HELD, []), (CALL, [0]), (CALL, [1]), (LOOP, [0]), (CALL, [2, 3])
    block = temporaries(graph(*chain, outputs=[4]))
    assert block.size_bytes == 300 - 100  # of three temporaries one lies in the memory of the result
    assert {b.instruction.name for b in temporaries(graph(*chain, (CALL, [4]), outputs=[5])).alive} >= {"%3"}


def test_elementwise_loops_write_over_an_operand_that_dies():
    lines = (HELD, []), (CALL, [0]), (ELEMENTWISE, [1]), (CALL, [2])
    sizes = {3: 1}
    assert temporaries(graph(*lines, outputs=[3], sizes=sizes)).size_bytes == 100
    moved = (HELD, []), (CALL, [0]), (LOOP, [1]), (CALL, [2])
    assert temporaries(graph(*moved, outputs=[3], sizes=sizes)).size_bytes == 200
    kept = (HELD, []), (CALL, [0]), (ELEMENTWISE, [1]), (CALL, [2, 1])
    assert temporaries(graph(*kept, outputs=[3], sizes=sizes)).size_bytes == 200


def test_updates_write_into_their_first_operand():
    lines = (HELD, []), (CALL, [0]), (CALL, [0]), (UPDATE, [1, 2]), (CALL, [3])
    assert temporaries(graph(*lines, outputs=[4], sizes={2: 10, 4: 1})).size_bytes == 110
    kept = (*lines[:4], (CALL, [3, 1]))
    assert temporaries(graph(*kept, outputs=[4], sizes={2: 10, 4: 1})).size_bytes >= 200


def test_temporaries_lie_in_the_memory_of_results_that_do_not_exist_yet():
    lines = (HELD, []), (CALL, [0]), (CALL, [1]), (CALL, [2])
    assert temporaries(graph(*lines, outputs=[3])).size_bytes == 100
    assert temporaries(graph(*lines, outputs=[3]), frozenset([0])).size_bytes == 200  # an argument's memory is taken
    assert temporaries(graph(*lines, outputs=[3], sizes={3: 99})).size_bytes == 200


def test_gaps_between_buffers_count():
    """The large ones come first and share their place; %2 lies above %1, and so %3 above %2 although %2 is gone later."""
    lines = [(HELD, []), (CALL, [0]), (CALL, [1]), (CALL, [2]), (CALL, [3]), (CALL, [3, 4])]
    block = temporaries(graph(*lines, outputs=[5], sizes={1: 100, 2: 30, 3: 30, 4: 100, 5: 1}))
    assert sum(b.size_bytes for b in block.alive) == 130
    assert block.size_bytes == 160


# -- instructions of a plan -----------------------------------------------------------------------------------------

MESH = DeviceMesh(shape=(4,), axis_names=("x",))


def whole(owner: Program, value: int) -> ShardingSpec:
    return ShardingSpec.replicated(len(owner.values[value].shape) if value >= 0 else 0)


def decision(path: str, owner: Program, op: Op) -> OpDecision:
    """Nothing is split; a dropped result of a loop has the rank that the body gives it."""
    results = [whole(owner, o) for o in op.outputs]
    if op.bodies:
        body = op.bodies[-1]
        stacked = [op.primitive == "scan" and k >= op.num_carry for k in range(len(op.outputs))]
        ranks = [whole(body, o).rank + s for o, s in zip(body.outputs, stacked, strict=True)]
        results = [ShardingSpec.replicated(rank) for rank in ranks]
    return OpDecision(path=path, operands=tuple(whole(owner, i) for i in op.inputs), results=tuple(results))


def unsplit(fn: Callable[..., Any], *args: Any, conversions: tuple[Conversion, ...] = ()) -> InstructionGraph:
    program = trace(fn, args, {}).program
    return instruction_graph(
        program,
        MESH,
        in_specs=[whole(program, i) for i in program.inputs],
        out_specs=[conversions[-1].target] if conversions else [whole(program, o) for o in program.outputs],
        decisions=[decision(path, owner, op) for path, owner, op in program.walk()],
        conversions=conversions,
        barriers_copy=not CPU_KEEPS_BARRIERS,
    )


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def num_copies(g: InstructionGraph) -> int:
    return sum(i.traits == LOOP for i in g.instructions)


@pytest.mark.parametrize(
    ("equation", "left", "right", "copies"),
    [
        ("mk,kn->mn", (8, 4), (4, 6), 0),
        ("km,kn->mn", (4, 8), (4, 6), 0),  # a matrix is read in either order
        ("mk,nk->mn", (8, 4), (6, 4), 0),
        ("bmk,bkn->bmn", (3, 8, 4), (3, 4, 6), 0),
        ("bsd,df->bsf", (3, 8, 4), (4, 6), 0),
        ("bsd,bsf->df", (3, 8, 4), (3, 8, 6), 1),  # the gradient of a kernel contracts leading dims
        ("bsd,bsf->df", (1, 8, 4), (1, 8, 6), 0),  # which are one here
        ("bshd,bthd->bhst", (2, 3, 4, 5), (2, 6, 4, 5), 2),  # heads stand between the dims of the matmul
    ],
)
def test_matmul_operands_are_transposed_where_their_dims_are_not_in_the_librarys_order(equation, left, right, copies):
    g = unsplit(lambda a, b: jnp.einsum(equation, a, b), array(*left), array(*right))
    calls = [i for i in g.instructions if i.traits == CALL]
    assert len(calls) == 1
    assert sum(g.instructions[o].traits == LOOP for o in calls[0].operands) == copies


def test_a_transpose_before_a_matmul_is_folded_into_it():
    g = unsplit(lambda a, b: a.T @ b, array(4, 8), array(4, 6))
    (call,) = [i for i in g.instructions if i.traits == CALL]
    assert all(g.instructions[o].traits == HELD for o in call.operands)


def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_a_kernel_larger_than_the_image_is_reversed():
    assert num_copies(unsplit(convolve, array(2, 4, 4, 3), array(3, 3, 3, 5))) == 0
    g = unsplit(convolve, array(2, 2, 2, 3), array(3, 3, 3, 5))
    (copy,) = [i for i in g.instructions if i.traits == LOOP]
    assert copy.shape == (3, 3, 3, 5)


def test_a_kernel_gradient_reads_transposed_images_and_is_transposed_itself():
    def gradient(x, k):
        return jax.grad(lambda k: convolve(x, k).sum())(k)

    g = unsplit(gradient, array(2, 4, 4, 3), array(3, 3, 3, 5))
    (call,) = [i for i in g.instructions if i.traits == CALL]
    assert [g.instructions[o].traits for o in call.operands] == [LOOP, LOOP]
    assert g.instructions[g.outputs[0]].traits == LOOP


def test_a_scatter_add_to_zeros_starts_from_what_it_is_added_to():
    """As the gradient of a table does over microbatches; not where others read it, and not where the target is no constant."""

    def made(fn: Callable[..., Any]) -> Any:
        g = unsplit(fn, array(512, 128), array(512, 128), array(64, 32, dtype=jnp.int32))
        return g, g.instructions[g.outputs[0]]

    g, total = made(lambda total, table, tokens: total + jax.grad(embedding)(table, tokens))
    assert total.traits.updates and g.instructions[total.operands[0]].traits.held

    def read_twice(total: jax.Array, table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = jax.grad(embedding)(table, tokens)
        return total + gradient, gradient

    assert made(read_twice)[1].traits.elementwise
    _, total = made(lambda total, table, tokens: total + table.at[tokens].add(1.0))
    assert total.traits.elementwise


def test_what_is_smaller_than_the_result_is_broadcast_once():
    g = unsplit(lambda x, s: (x * s, (x + 1) * s), array(8, 4), array(1, 4))
    assert sum(i.traits == BROADCAST for i in g.instructions) == 1


def conversion(value: int, *steps: tuple[CollectiveKind | None, int, int, str, str]) -> Conversion:
    made = tuple(
        Step(
            kind=kind,
            axes=("x",),
            source_dim=source,
            target_dim=target,
            before=ShardingSpec.parse(before),
            after=ShardingSpec.parse(after),
        )
        for kind, source, target, before, after in steps
    )
    return Conversion(op="out", value=value, steps=made, collectives=(0,) * len(made))


@pytest.mark.parametrize(("dim", "copies"), [(0, 0), (1, 2)])
def test_a_gathered_dim_is_laid_outermost_and_back(dim, copies):
    before = "[x,_]" if dim == 0 else "[_,x]"
    program = trace(jnp.tanh, (array(8, 8),), {}).program
    out = program.outputs[0]
    g = instruction_graph(
        program,
        MESH,
        in_specs=[ShardingSpec.parse(before)],
        out_specs=[ShardingSpec.parse("[_,_]")],
        decisions=[OpDecision(path="0", operands=(ShardingSpec.parse(before),), results=(ShardingSpec.parse(before),))],
        conversions=[conversion(out, (CollectiveKind.ALL_GATHER, dim, -1, before, "[_,_]"))],
    )
    assert num_copies(g) == copies
    assert [i.size_bytes for i in g.instructions if i.traits == CALL] == [256]


def test_an_all_to_all_is_slices_an_exchange_and_a_concatenation():
    program = trace(jnp.tanh, (array(8, 8),), {}).program
    split = ShardingSpec.parse("[x,_]")
    g = instruction_graph(
        program,
        MESH,
        in_specs=[split],
        out_specs=[ShardingSpec.parse("[_,x]")],
        decisions=[OpDecision(path="0", operands=(split,), results=(split,))],
        conversions=[conversion(program.outputs[0], (CollectiveKind.ALL_TO_ALL, 0, 1, "[x,_]", "[_,x]"))],
    )
    assert [i.traits for i in g.instructions[-3:]] == [LOOP, CALL, JOIN]
    assert {i.size_bytes for i in g.instructions} == {64}


def test_a_loop_keeps_copies_of_its_state_and_arrays_of_its_stacked_results():
    def step(h, x):
        h = jnp.tanh(h @ x)
        return h, h

    g = unsplit(lambda h, xs: lax.scan(step, h, xs), array(4, 4), array(10, 4, 4))
    buffers = [i for i in g.instructions if i.size_bytes and not i.traits.held]
    assert [(i.traits, i.size_bytes) for i in buffers] == [(COPY, 64), (CALL, 640)]
    assert [g.instructions[o].buffer >= 0 for o in g.outputs] == [True, True]


# -- beside XLA -----------------------------------------------------------------------------------------------------


def mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def attention(w: jax.Array, x: jax.Array) -> jax.Array:
    b, s, d = x.shape
    q, k, v = ((x @ w[i]).reshape(b, s, 4, d // 4) for i in range(3))
    a = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    y = jnp.einsum("bhst,bthd->bshd", a, v).reshape(b, s, d)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return ((y @ w[3]) ** 2).mean()


def batch_norm(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    for k in kernels:
        x = convolve(x, k)
        x = x - x.mean((0, 1, 2))
        x = jax.nn.relu(x * lax.rsqrt((x * x).mean((0, 1, 2)) + 1e-5))
    return (x**2).mean()


def rnn(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(h: jax.Array, xt: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w + xt)
        return h, h

    h, ys = lax.scan(step, jnp.zeros(x.shape[1:]), x)
    return (ys**2).mean() + h.sum()


def rematerialised(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
    for w in weights:
        x = layer(w, x)
    return (x**2).mean()


def embedding(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return (table[tokens] ** 2).mean()


def branch(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.cond(x.sum() > 0, lambda v: jnp.tanh(v @ w) @ w, lambda v: v * 2.0, x)


def repeated(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.sin(c[1] @ w) + c[1]), (0, x))[1]


def lowered(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """The function as a plan's lowering runs it where nothing is split."""
    traced = trace(fn, args, {})
    program = traced.program
    decisions = [decision(path, owner, op) for path, owner, op in program.walk()]
    ends = [[whole(program, v) for v in values] for values in (program.inputs, program.outputs)]
    return Lowering.of(MESH, decisions, (), ()).local_function(traced.flat, *ends)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (jax.grad(mlp), ([array(256, 256)] * 4, array(512, 256))),
        (jax.grad(attention), (array(4, 128, 128), array(8, 64, 128))),
        (jax.grad(batch_norm), ([array(3, 3, 32, 32)] * 3, array(8, 16, 16, 32))),
        (jax.grad(rnn), (array(64, 64), array(32, 64, 64))),
        (jax.grad(rematerialised), ([array(256, 256)] * 4, array(512, 256))),
        (jax.grad(embedding), (array(512, 128), array(64, 32, dtype=jnp.int32))),
        (branch, (array(64, 64), array(256, 64))),
        (repeated, (array(64, 64), array(256, 64))),
    ],
    ids=["mlp", "attention", "batch_norm", "rnn", "remat", "embedding", "branch", "while"],
)
def test_temporaries_of_whole_functions_are_those_of_xla(fn, args):
    predicted = temporaries(unsplit(fn, *args)).size_bytes
    compiled = jax.jit(lowered(fn, *args)).lower(*jax.tree.leaves(args)).compile().memory_analysis().temp_size_in_bytes
    assert math.isclose(predicted, compiled, rel_tol=0.02)
