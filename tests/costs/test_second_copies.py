"""What XLA:GPU stores twice for the order of dims, and products and casts that it does not store at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.dim_order import gathers_features, is_turned
from alpa_lite.costs.fusion import fused_values, updating_products
from alpa_lite.costs.memory import timeline
from alpa_lite.costs.overlap_order import overlap_order
from alpa_lite.costs.profile import PeakReport, memory_profile
from alpa_lite.plan.records import LeafRole, OpDecision
from alpa_lite.trace.program import trace
from tests.costs.test_gpu_memory import program_of

SIZE = 512


def gathered(fn: Callable[..., Any], dims: tuple[int, ...]) -> PeakReport:
    """``fn`` of as many tanh as there are ``dims``; each lies split along its dim and is gathered for its readers."""
    program = program_of(lambda *xs: fn(*map(jnp.tanh, xs)), *[(SIZE, SIZE)] * len(dims))
    mesh, whole = DeviceMesh(shape=(8,), axis_names=("x",)), ShardingSpec.parse("[_,_]")
    split = [ShardingSpec.parse("[x,_]" if dim == 0 else "[_,x]") for dim in dims]
    made = {op.outputs[0]: s for op, s in zip(program.ops, split, strict=False)}
    replicated = {v: ShardingSpec.replicated(len(program.values[v].shape)) for v in range(len(program.values))}
    decisions = [
        OpDecision(
            path=str(index),
            operands=tuple(split[index] if index < len(dims) else replicated[i] for i in op.inputs),
            results=tuple(made.get(o, replicated[o]) for o in op.outputs),
        )
        for index, op in enumerate(program.ops)
    ]
    conversions = [
        Conversion(
            op=str(next(n for n, op in enumerate(program.ops) if value in op.inputs)),
            value=value,
            steps=(Step(before=s, after=whole, kind=CollectiveKind.ALL_GATHER, axes=("x",), source_dim=dim),),
            collectives=(0,),
            cost=1e-3,
        )
        for (value, s), dim in zip(made.items(), dims, strict=True)
    ]
    assert [is_turned(c, program) for c in conversions] == [dim == 0 for dim in dims]
    assert [gathers_features(c, program) for c in conversions] == [dim == 1 for dim in dims]
    return memory_profile(
        program,
        timeline(program, schedule=overlap_order(program, mesh, decisions, conversions)),
        mesh,
        in_specs=tuple(split),
        out_specs=tuple(replicated[o] for o in program.outputs),
        decisions=decisions,
        conversions=conversions,
        roles=(LeafRole.INPUT,) * len(dims),
    )


def norm_gradients(dy: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of a norm's scale, and a product that reads the gathered rows too."""
    return (dy * x).sum(0), dy @ x


def bias_gradient(dy: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums rows without another tensor."""
    return dy.sum(0), x.sum(0), dy @ x


@pytest.mark.parametrize(
    ("fn", "dims", "copied"),
    [
        (norm_gradients, (0, 1), 1),
        (norm_gradients, (1, 0), 1),
        (norm_gradients, (0, 0), 0),
        (norm_gradients, (1, 1), 0),
        (bias_gradient, (0, 1), 0),
    ],
)
def test_rows_that_meet_tensors_gathered_by_features_lie_twice(
    fn: Callable[..., Any], dims: tuple[int, ...], copied: int
) -> None:
    report = gathered(fn, dims)
    assert [t.whole_bytes for t in report.stored if "turned" in t.name] == [SIZE * SIZE * 4] * copied


def attention(heads: int) -> Callable[..., Any]:
    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        query, key, value = ((x @ w).reshape(*x.shape[:2], heads, -1) for w in weights[:3])
        share = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", query, key))
        return (jnp.einsum("bhst,bthd->bshd", share, value).reshape(x.shape) @ weights[3]).sum()

    return run


SHAPES = [(20, 256, 512), *[(512, 512)] * 4]


def on_one_device(fn: Callable[..., Any]) -> PeakReport:
    program = program_of(fn, *SHAPES)
    specs = [ShardingSpec.replicated(len(value.shape)) for value in program.values]
    decisions = [
        OpDecision(
            path=path,
            operands=tuple(specs[i] if i >= 0 else ShardingSpec.replicated(0) for i in op.inputs),
            results=tuple(specs[o] if o >= 0 else ShardingSpec.replicated(0) for o in op.outputs),
        )
        for path, _, op in program.walk()
    ]
    return memory_profile(
        program,
        timeline(program),
        DeviceMesh(shape=(1,), axis_names=("x",)),
        in_specs=tuple(specs[i] for i in program.inputs),
        out_specs=tuple(specs[o] for o in program.outputs),
        decisions=decisions,
        conversions=[],
        roles=(LeafRole.INPUT,) * len(program.inputs),
    )


@pytest.mark.parametrize(
    ("heads", "backward", "copied"),
    [(4, True, 2), (1, True, 0), (4, False, 0)],
)
def test_queries_and_values_lie_twice_while_keys_wait_for_their_second_order(
    heads: int, backward: bool, copied: int
) -> None:
    """With one head the order of dims is that of the product. Forward alone nothing is wanted in two orders."""
    fn = attention(heads)
    alive = on_one_device(jax.grad(fn, argnums=range(1, 5)) if backward else fn).alive
    assert [t.size_bytes for t in alive if "by head" in t.name] == [20 * 256 * 512 * 4] * copied


def products_in_updates(fn: Callable[..., Any]) -> list[str]:
    """``fn``: of a weight, a second state, and what the weight's gradient is a product of."""
    program = program_of(fn, *[(64, 64)] * 4)
    return [program.ops[i].primitive for i in updating_products(program, fused=fused_values(program, gpu=True))]


def test_a_plain_update_is_computed_in_the_product() -> None:
    assert products_in_updates(lambda w, m, x, y: w - 0.1 * (x @ y)) == ["dot_general"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, m, x, y: (lambda g: (w - 0.1 * g, m + g))(x @ y),
        lambda w, m, x, y: (lambda g: (g, w - g))(x @ y),
        lambda w, m, x, y: w - (x @ y) * (y @ x),
        lambda w, m, x, y: w - jnp.tanh(x @ y).sum(),
    ],
)
def test_other_products_are_stored(fn: Callable[..., Any]) -> None:
    """With several readers, as a result, with another product, or read otherwise than element by element."""
    assert not products_in_updates(fn)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("bool", False), ("bfloat16", False), ("float32", True)],  # of what is cast to single precision or half
)
def test_a_cast_to_more_bytes_is_computed_in_the_product_that_reads_it(dtype: str, stored: bool) -> None:
    """``GemmFusion`` takes in what it reads fewer bytes for."""
    wide = "bfloat16" if stored else "float32"

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return x.astype(wide) @ w

    args = jax.ShapeDtypeStruct((64, 64), dtype), jax.ShapeDtypeStruct((64, 64), wide)
    program = trace(fn, args, {}).program
    value = next(op.outputs[0] for op in program.ops if op.primitive == "convert_element_type")
    assert fused_values(program, gpu=True)[value] is not stored
    assert not fused_values(program)[value]
