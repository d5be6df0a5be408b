"""Ops of a function are put where they belong, and never before what they read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import io_callback

import alpa_lite as al
from alpa_lite._jax_compat import evaluate_jaxpr
from alpa_lite.errors import LayerError
from alpa_lite.trace.op_places import gathered
from tests.trace.cases import floats

CLUSTER = al.Cluster.parse("1x4:h100-sxm")
MATRIX = jax.ShapeDtypeStruct((4, 4), jnp.float32)
INPUTS = 3


def called(x: jax.Array) -> jax.Array:
    return io_callback(lambda value: value, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # an effect, and a value


OPS = {"matmul": jnp.matmul, "add": jnp.add, "tanh": lambda a, _: jnp.tanh(a), "called": lambda a, _: called(a)}


@given(st.data())
def test_every_op_stands_behind_what_it_reads(data):
    """Of any function, whatever of it is the batch, and results that nothing else needs."""
    places = st.integers(0, 100)
    ops = data.draw(st.lists(st.tuples(st.sampled_from(list(OPS)), places, places), min_size=1, max_size=8))
    wanted = data.draw(st.lists(places, min_size=1, max_size=3))
    batch = data.draw(st.sets(st.integers(0, INPUTS - 1)))

    def function(*values: Any) -> Any:
        made = list(values)
        for name, a, b in ops:
            made.append(OPS[name](made[a % len(made)], made[b % len(made)]))
        return [made[i % len(made)] for i in wanted]

    closed = jax.make_jaxpr(function)(*[MATRIX] * INPUTS)
    found = gathered(closed, batch)
    assert sorted(map(id, found.jaxpr.eqns)) == sorted(map(id, closed.jaxpr.eqns))
    ready = {*found.jaxpr.invars, *found.jaxpr.constvars}
    for eqn in found.jaxpr.eqns:
        assert all(v in ready for v in eqn.invars)
        ready.update(eqn.outvars)


def test_the_results_are_the_same():
    """A matrix made of parameters that nobody reads, and one whose only reader nobody needs."""

    def function(a: Any, b: Any, x: Any) -> Any:
        unread, read = jnp.tanh(a @ b), jnp.tanh(b @ a)
        return unread, jnp.tanh(x @ a) @ b, read + x

    closed = jax.make_jaxpr(function)(MATRIX, MATRIX, MATRIX)
    values = [floats(4, 4) for _ in range(3)]
    want = evaluate_jaxpr(closed.jaxpr, closed.consts, values)
    for batch in ((), (2,), (0, 1, 2)):
        for one, other in zip(evaluate_jaxpr(gathered(closed, batch).jaxpr, (), values), want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_function_without_a_batch_is_refused_as_what_it_is():
    """Its second argument is the next value of itself, so that nothing is left that could cross a cut."""

    def step(params: Any, h: Any) -> Any:
        h = jnp.tanh(jnp.tanh(h @ params[0]) @ params[1])
        return h[:, :2], h

    with pytest.raises(LayerError, match="can be cut into at most 1"):
        al.plan(step, [MATRIX] * 2, MATRIX, cluster=CLUSTER, options=al.PlanOptions(num_stages=2), donate_argnums=1)
