"""Inlining of calls, dead code, control flow and what stays opaque."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import PinError
from alpa_lite.trace.program import trace
from tests.harness import check, device_mesh, draw, jax_mesh

X = np.linspace(0.1, 1.0, 32, dtype=np.float32).reshape(8, 4)


def names(fn, *args):
    return [op.primitive for _, _, op in trace(fn, args, {}).program.walk()]


def test_nested_jit_is_inlined():
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    assert names(lambda x: jax.jit(lambda y: inner(y) + 1)(x), X) == ["sin", "mul", "add"]


def test_the_same_function_twice_gives_two_copies():
    inner = jax.jit(jnp.sin)
    assert names(lambda x: inner(inner(x)), X) == ["sin", "sin"]


def test_custom_jvp_and_vjp_are_inlined_with_their_own_derivatives():
    assert "custom_jvp_call" not in names(jax.nn.relu, X)

    @jax.custom_vjp
    def clipped(x):
        return jnp.exp(x)

    clipped.defvjp(lambda x: (jnp.exp(x), x), lambda x, g: (g * jnp.cos(x),))
    assert names(lambda x: clipped(x), X) == ["exp"]
    assert "cos" in names(jax.grad(lambda x: clipped(x).sum()), X)
    check(jax.grad(lambda x: clipped(x).sum()), (X,), (2, 4))


def test_remat_recomputes_behind_a_barrier():
    fn = jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum())
    found = names(fn, X)
    assert found.count("optimization_barrier") >= 1
    assert found.index("optimization_barrier") < max(i for i, n in enumerate(found) if n == "sin")
    check(fn, (X,), (2, 4))


def test_a_users_barrier_over_many_tensors_becomes_one_op_per_tensor():
    assert names(lambda x: lax.optimization_barrier((x, x * 2)), X).count("optimization_barrier") == 2


def test_control_flow_keeps_its_bodies():
    def fn(x):
        c, ys = lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(4), x)
        n = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, c))
        return ys, n, lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

    program = trace(fn, (X,), {}).program
    ops = {op.primitive: op for op in program.ops}
    assert (ops["scan"].trip_count, ops["scan"].num_consts, ops["scan"].num_carry) == (8, 0, 1)
    assert [len(ops[n].bodies) for n in ("scan", "while", "cond")] == [1, 2, 2]
    assert [op.primitive for op in ops["cond"].bodies[0].ops] == ["cos"]
    assert "x8" in str(program)


def test_dead_code_is_dropped():
    def fn(x):
        unused = jnp.exp(x).sum()  # noqa: F841
        lax.scan(lambda c, r: (c + r, None), jnp.zeros(4), x)
        return x + 1

    assert names(fn, X) == ["add"]


def test_an_unused_result_is_marked():
    program = trace(lambda x: lax.top_k(x, 2)[0], (X,), {}).program
    assert [o >= 0 for o in program.ops[-1].outputs] == [True, False]


def test_captured_arrays_are_constants():
    table = jnp.asarray(X)
    program = trace(lambda x: x + table, (X,), {}).program
    assert len(program.constants) == 1 and "const" in str(program)
    check(lambda x: x @ table.T, (X,), (2, 4))


def test_results_that_are_literals_or_arguments():
    program = trace(lambda x: (x, 2.0, x * 1.5), (X,), {}).program
    assert program.outputs[0] == program.inputs[0]
    check(lambda x: (x, jnp.float32(2.0), x * 1.5), (X,), (2, 4))


def test_custom_linear_solve_is_inlined():
    found = names(jnp.linalg.solve, np.eye(8, dtype=np.float32) + 1, X)
    assert "triangular_solve" in found and "custom_linear_solve" not in found


# -- opaque: shard_map, callbacks --------------------------------------------------------------------------------------


def users(x, w, *, mesh, check_vma=True):
    def body(x, w):
        def more(c, _):
            return c + lax.psum(x @ w, "y"), None

        return lax.scan(more, jnp.zeros((x.shape[0], w.shape[1])) + lax.psum(x @ w, "y"), None, length=2)[0]

    specs = (P("x", "y"), P("y", None))
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x", None), check_vma=check_vma)(x, w)


W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


@pytest.mark.medium
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_users_shard_map_runs_on_its_own_layout(check_vma):
    mesh = jax_mesh(device_mesh((2, 4)))

    def fn(x, w):
        return jnp.tanh(users(x * 2, w, mesh=mesh, check_vma=check_vma)) @ w.T

    drawn = draw(trace(fn, (X, W), {}), (2, 4), [0])[0]
    decision = {
        op.primitive: d for d, (_, _, op) in zip(drawn.realised.decisions, drawn.traced.program.walk(), strict=True)
    }
    assert [str(s) for s in decision["shard_map"].operands] == ["[x,y]", "[y,_]"]
    check(fn, (X, W), (2, 4), seeds=range(3))


@pytest.mark.medium
def test_the_gradient_through_a_users_shard_map():
    mesh = jax_mesh(device_mesh((2, 4)))
    check(jax.grad(lambda x, w: (users(x, w, mesh=mesh) ** 2).sum(), (0, 1)), (X, W), (2, 4))


def test_a_users_shard_map_needs_its_own_mesh():
    mesh = jax_mesh(device_mesh((2, 4)))
    with pytest.raises(PinError, match=r"test_flatten.py:\d+.*mesh_shape=\(2, 4\), axis_names=\('x', 'y'\)"):
        draw(trace(lambda x, w: users(x, w, mesh=mesh), (X, W), {}), (8,), [0])


def test_a_users_shard_map_is_planned_and_run():
    mesh = jax_mesh(device_mesh((2, 4)))

    def fn(x, w):
        return users(x, w, mesh=mesh).sum(1)

    step = al.parallelize(fn, cluster=al.Cluster.parse("1x8:cpu"), options=al.PlanOptions(mesh_shape=(2, 4)))
    np.testing.assert_allclose(step(X, W), jax.jit(fn)(X, W), rtol=1e-5)


def test_a_pure_callback_sees_whole_arrays():
    def fn(x):
        total = jax.pure_callback(
            lambda a: np.cumsum(np.asarray(a)[::-1], 0), jax.ShapeDtypeStruct((8, 4), jnp.float32), x * 2
        )
        return total + 1

    assert "pure_callback" in names(fn, X)
    check(fn, (X,), (2, 4))


def test_a_debug_print_stays_and_prints_once(capfd):
    def fn(x):
        y = jnp.sin(x)
        jax.debug.print("total {}", y.sum())
        return y

    check(fn, (X,), (2, 4), seeds=[0])
    jax.effects_barrier()
    assert capfd.readouterr().out.count("total") == 2  # once by the unsharded run, once by the plan


def test_a_debug_callback_in_a_loop_is_not_dead():
    seen = []

    def fn(x):
        def body(c, r):
            jax.debug.callback(lambda v: seen.append(float(v)), r.sum())
            return c + r, None

        lax.scan(body, jnp.zeros(4), x)
        return x * 2

    check(fn, (X,), (2, 4), seeds=[0])
    jax.effects_barrier()
    assert len(seen) == 2 * 8


@pytest.mark.medium
def test_rows_that_are_taken_one_by_one_are_slices():
    """JAX 0.12 has one op for all rows of an array that is iterated over; each row may lie on another stage."""

    def fn(x):
        return sum(jnp.sin(row) * k for k, row in enumerate(x))

    assert {"slice", "squeeze"} <= set(names(fn, X)) and "unstack" not in names(fn, X)
    check(fn, (X,), (2, 4))
