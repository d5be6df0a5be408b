"""What search rules take away from a program, and which arguments count as weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.core.rule import FactorKind
from alpa_lite.costs.model import SearchRules
from alpa_lite.costs.roles import roles_of
from alpa_lite.intraop.restrict import restricted, values_of, weight_positions
from alpa_lite.trace.program import trace


def tensor(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def splittable(fn: Any, args: Any, rules: SearchRules, primitive: str) -> set[int]:
    """Sizes of the factors of the first such op that may be split."""
    program = restricted(trace(fn, args, {}).program, rules)
    op = next(op for _, _, op in program.walk() if op.primitive == primitive)
    return {f.size for f in op.rule.factors if f.kind is not FactorKind.REPLICATED}


def test_nothing_to_restrict_is_the_same_program():
    program = trace(jnp.tanh, (tensor(4, 4),), {}).program
    assert restricted(program, SearchRules()) is program


@pytest.mark.parametrize(
    ("fn", "args", "kept"),
    [
        (lambda x, w: x @ w, (tensor(2, 3, 5), tensor(5, 7)), {3, 5, 7}),
        (lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (tensor(2, 3, 5, 7), tensor(2, 11, 5, 7)), {3, 7, 11}),
        (lambda x, g: jnp.einsum("bsk,bsn->kn", x, g), (tensor(2, 3, 5), tensor(2, 3, 7)), {3, 5, 7}),
        (lambda x, w: jnp.einsum("bshd,hdn->bsn", x, w), (tensor(2, 3, 5, 7), tensor(5, 7, 11)), {3, 7, 11}),
    ],
    ids=["linear", "scores", "weight gradient", "heads merged"],
)
def test_matmuls_keep_row_column_and_contraction(fn, args, kept):
    """Batch dims go, also where they are contracted; so does a contraction's leading dim of a stack (heads)."""
    assert splittable(fn, args, SearchRules(matrix_dims=True), "dot_general") == kept


def test_reductions_outside_contractions_keep_whole_dims():
    rules = SearchRules(whole_reductions=True)
    assert splittable(lambda x: jnp.sum(x, axis=-1), (tensor(3, 5),), rules, "reduce_sum") == {3}
    assert splittable(lambda x, y: x @ y, (tensor(3, 5), tensor(5, 7)), rules, "dot_general") == {3, 5, 7}


def test_partial_sums_do_not_travel():
    program = restricted(trace(lambda x: x + x, (tensor(4),), {}).program, SearchRules(reduced_at_once=True))
    assert all(op.rule.linear == () for op in program.ops)


def test_bodies_are_restricted_too():
    def fn(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c + jnp.sum(c, axis=-1, keepdims=True), None), x, None, length=3)[0]

    assert splittable(fn, (tensor(3, 5),), SearchRules(whole_reductions=True), "reduce_sum") == {3}


def weights_of(fn: Any, *args: Any) -> set[str]:
    program = trace(fn, args, {}).program
    return {program.input_paths[i] for i in weight_positions(program, roles_of(program))}


def test_weights_of_a_function():
    def fn(params: Any, batch: Any) -> jax.Array:
        x = params["table"][batch["ids"]] * params["scale"] + params["positions"]
        return (x @ params["w"].astype(jnp.bfloat16).astype(jnp.float32)) @ batch["mix"]

    params = {"table": tensor(16, 4), "scale": tensor(4), "positions": tensor(3, 4), "w": tensor(4, 8)}
    batch = {"ids": tensor(2, 3, dtype=jnp.int32), "mix": tensor(8, 8)}
    assert weights_of(fn, params, batch) == {"0/table", "0/scale", "0/positions", "0/w", "1/mix", "1/ids"}
    del batch["mix"]
    assert weights_of(lambda p, b: fn(p, b | {"mix": jnp.eye(8)}), params, batch) == {f"0/{name}" for name in params}


def test_weights_as_separate_arguments():
    args = (tensor(2, 3, 4), tensor(4, 8), tensor(8), tensor(8, 4))
    assert weights_of(lambda x, w1, b1, w2: jnp.tanh(x @ w1 + b1) @ w2, *args) == {"1", "2", "3"}


def test_weights_of_a_step_are_its_state():
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.square(x @ w)))(state["w"])
        return {"w": state["w"] - state["rate"] * grad, "rate": state["rate"]}, value

    assert weights_of(step, {"w": tensor(4, 4), "rate": tensor()}, tensor(8, 4)) == {"0/w", "0/rate"}


def test_weights_are_followed_into_scans_but_not_through_carries():
    def fn(stack: jax.Array, shared: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w) @ shared, None), x, stack)[0]

    program = trace(fn, (tensor(3, 4, 4), tensor(4, 4), tensor(2, 4)), {}).program
    weights = weight_positions(program, roles_of(program))
    assert {program.input_paths[i] for i in weights} == {"0", "1"}
    inside = {value for region, value in values_of(program, weights) if region}
    body = next(op for op in program.ops if op.bodies).bodies[0]
    contracted = {op.inputs[1] for op in body.ops if op.primitive == "dot_general"}
    assert inside == contracted
    carried = {program.inputs[2]}
    assert values_of(program, frozenset({2})) == {("", v) for v in carried}
