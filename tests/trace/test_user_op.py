"""The op that a registered function becomes: one equation, differentiable, batchable, the same values everywhere."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.trace.program import trace


@al.register_rule("i k, k j -> i j", reduction="k")
def dense(x, w, *, activation="tanh"):
    """Docs stay."""
    return getattr(jnp, activation)(x @ w)


X = jnp.linspace(-1, 1, 32).reshape(4, 8)
W = jnp.linspace(-1, 1, 48).reshape(8, 6)


def names(fn, *args):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).eqns]


def test_it_is_one_op_with_the_values_of_the_function():
    assert names(dense, X, W) == ["user_op"]
    assert dense.__doc__ == "Docs stay." and dense.__name__ == "dense" and "i k, k j -> i j" in repr(dense)
    for run in (dense, jax.jit(dense)):
        np.testing.assert_allclose(run(X, W), jnp.tanh(X @ W), rtol=1e-6)


def test_the_program_knows_its_rule_and_its_work():
    (op,) = trace(dense, (X, W), {}).program.ops
    assert op.primitive == "user_op:dense" and op.rule.origin == "user"
    assert str(op.rule) == "([i,j],[j,k])->([i,k]) {i=4,j=8,k=6} reduction={j}"
    assert op.flops == 2 * 4 * 8 * 6 + 4 * 6
    (row,) = al.rules.coverage(dense, X, W).rows
    assert (row.primitive, row.origin, row.splittable) == ("user_op:dense", "user", 1)


def test_loops_in_a_body_count_by_their_trips():
    @al.register_rule("i j -> i j", need_replication="j")
    def power(x):
        return jax.lax.fori_loop(0, 5, lambda i, h: h * x, x)

    (op,) = trace(power, (X,), {}).program.ops
    assert op.flops >= 5 * X.size


def test_keywords_are_static():
    np.testing.assert_allclose(dense(X, W, activation="exp"), jnp.exp(X @ W), rtol=1e-6)
    two = trace(lambda x, w: (dense(x, w), dense(x, w, activation="exp")), (X, W), {}).program
    assert [op.primitive for op in two.ops] == ["user_op:dense"] * 2


@pytest.mark.medium
def test_derivatives_are_those_of_the_body():
    def loss(fn):
        return lambda x, w: (fn(x, w) ** 2).sum()

    plain = dense.__wrapped__
    for argnum in (0, 1):
        got = jax.grad(loss(dense), argnums=argnum)(X, W)
        np.testing.assert_allclose(got, jax.grad(loss(plain), argnums=argnum)(X, W), rtol=1e-5)
    tangent = jax.jvp(dense, (X, W), (X, W))[1]
    np.testing.assert_allclose(tangent, jax.jvp(plain, (X, W), (X, W))[1], rtol=1e-5)
    assert "user_op" in names(jax.grad(loss(dense)), X, W)


def test_integers_have_no_derivative():
    @al.register_rule("i, n -> i, n")
    def both(x, n):
        return x * 2, n + 1

    got = jax.grad(lambda x: both(x, jnp.arange(3))[0].sum())(jnp.ones(4))
    np.testing.assert_array_equal(got, 2 * np.ones(4))


@pytest.mark.parametrize(
    ("axes", "mapped"), [((0, None), "([i,j,k],[k,l])->([i,j,l])"), ((2, 1), "([i,j,k],[i,k,l])->([i,j,l])")]
)
def test_vmap_adds_a_dim_to_the_rule(axes, mapped):
    x = jnp.stack([X, 2 * X], axis=axes[0])
    w = W if axes[1] is None else jnp.stack([W, 3 * W], axis=axes[1])
    batched = jax.vmap(dense, in_axes=axes)
    np.testing.assert_allclose(batched(x, w), jax.vmap(dense.__wrapped__, in_axes=axes)(x, w), rtol=1e-6)
    (op,) = [op for op in trace(batched, (x, w), {}).program.ops if op.primitive.startswith("user_op")]
    assert str(op.rule).startswith(mapped) and "reduction={k}" in str(op.rule)


def test_pytrees_in_and_out():
    @al.register_rule("i j, j -> i j, i")
    def normed(tree):
        x = tree["x"] * tree["y"]
        return {"out": x, "size": x.shape and jnp.sum(x, 1)}

    out = normed({"x": X, "y": W[:, 0]})
    assert set(out) == {"out", "size"} and out["size"].shape == (4,)
    np.testing.assert_allclose(out["out"], X * W[:, 0], rtol=1e-6)


def test_scalars_may_be_literals():
    scale = al.register_rule("i j, -> i j")(lambda x, s: x * s)
    ops = [op for op in trace(lambda x: scale(x, 3.0), (X,), {}).program.ops if op.primitive.startswith("user_op")]
    assert len(ops) == 1
    np.testing.assert_allclose(scale(X, 3.0), 3 * X)


def test_nothing_is_registered_globally():
    al.register_rule("argmax", "i j -> i")
    al.register_rule("i j -> i j")(dense.__wrapped__)
    (op,) = trace(lambda x: jnp.argmax(x, 1), (X,), {}).program.ops
    assert op.rule.origin != "user"
    assert not any(o.rule.origin == "user" for o in trace(dense.__wrapped__, (X, W), {}).program.ops)


def test_arrays_as_keywords_are_refused_with_advice():
    with pytest.raises(al.AlpaLiteError, match="Keyword arguments of a registered function are static") as caught:
        dense(X, W, activation=X)
    assert "the keyword 'activation' of type" in str(caught.value) and "Pass arrays by position" in str(caught.value)


def test_partials_take_a_rule_too():
    half = al.register_rule(functools.partial(jnp.multiply, 0.5), "i j -> i j")
    (op,) = trace(half, (X,), {}).program.ops
    assert op.primitive == "user_op:partial"
    np.testing.assert_allclose(half(X), X / 2)
