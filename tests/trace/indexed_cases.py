"""Slices, gathers and scatters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.trace.cases import Case, floats, grad_of, ints


def slices() -> dict[str, Case]:
    x, i, j = floats(8, 12, 16), np.int32(3), np.int32(2)
    return {
        "slice": (lambda x: [x[2:6], x[:, 1:9:2], x[:, :, :8], x[..., -1]], (x,)),
        "slice_gradient": grad_of(lambda x: x[2:6, :, ::2], x),
        "dynamic_slice": (lambda x, i, j: lax.dynamic_slice(x, (i, 0, j), (4, 12, 3)), (x, i, j)),
        "dynamic_slice_clamps": (lambda x, i: lax.dynamic_slice(x, (i, i, i), (8, 12, 4)), (x, np.int32(50))),
        "dynamic_slice_gradient": grad_of(lambda x, i: lax.dynamic_slice(x, (i, 0, 0), (2, 12, 16)), x, i),
        "dynamic_index": (lambda x, i: [lax.dynamic_index_in_dim(x, i, 1), x[i]], (x, i)),
        "dynamic_update_slice": (
            lambda x, u, i, j: lax.dynamic_update_slice(x, u, (0, i, j)),
            (x, floats(8, 4, 2), i, j),
        ),
        "dynamic_update_whole": (
            lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i, i)),
            (x, floats(8, 12, 2), np.int32(9)),
        ),
        "dynamic_update_gradient": grad_of(
            lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0, 0)), x, floats(2, 12, 16), i, argnums=(0, 1)
        ),
    }


def gathers() -> dict[str, Case]:
    table, i = floats(32, 8), ints(32, 4, 8)
    x, far = floats(8, 16), ints(40, 8, low=-40)
    cube = floats(8, 4, 16)
    cases: dict[str, Case] = {
        "embedding": (lambda t, i: t[i], (table, i)),
        "embedding_gradient": grad_of(lambda t, i: t[i], table, i),
        "embedding_of_product": (lambda a, b, i: (a @ b)[i] * 2, (floats(32, 8), floats(8, 16), i)),
        "one_hot": (lambda t, i: jax.nn.one_hot(i, 32) @ t, (table, i)),
        "take_axis_1": (lambda t, i: jnp.take(t, i, axis=1), (table, ints(8, 4))),
        "along_axis": (lambda x, i: jnp.take_along_axis(x, i, 1), (x, ints(16, 8, 4))),
        "along_axis_0": (lambda x, i: jnp.take_along_axis(x, i, 0), (x, ints(8, 2, 16))),
        "along_axis_gradient": grad_of(lambda x, i: jnp.take_along_axis(x, i, -1), x, ints(16, 8, 1)),
        "points": (lambda x, i, j: x[i, j], (x, ints(8, 6), ints(16, 6))),
        "points_with_slice": (lambda c, i, j: [c[i, :, j], c[:, i], c[i, j % 4]], (cube, ints(4, 8), ints(16, 8))),
        "unsigned": (lambda t, i: t[i], (table, ints(32, 8, dtype="uint8"))),
        "windows": (
            lambda x, i: jax.vmap(lambda s: lax.dynamic_slice(x, (s, 0), (2, 16)))(i),
            (x, ints(7, 4)),
        ),
        "batched_windows": (
            lambda x, i: jax.vmap(lambda r, s: lax.dynamic_slice(r, (s,), (4,)))(x, i),
            (x, ints(12, 8)),
        ),
        "other_fill": (lambda x, i: (x * 2).at[i].get(mode="fill", fill_value=3.0), (x, far)),
        "other_fill_of_sum": (lambda a, b, i: (a @ b).at[i].get(mode="fill", fill_value=3.0), (x, floats(16, 8), far)),
        "integer_fill": (lambda n, i: n.at[i].get(mode="fill"), (ints(9, 8, 4), far)),
        "integer_fill_of_sum": (lambda n, i: n.sum(1).at[i].get(mode="fill"), (ints(9, 8, 4), far)),
    }
    for mode in ("fill", "clip", "wrap"):
        cases[f"mode_{mode}"] = (lambda t, i, m=mode: jnp.take(t, i, axis=0, mode=m), (table, ints(40, 16, low=-40)))
        cases[f"mode_{mode}_gradient"] = grad_of(
            lambda t, i, m=mode: jnp.take(t, i, 0, mode=m), table, ints(40, 16, low=-40)
        )
    cases["mode_promise"] = (lambda t, i: t.at[i].get(mode="promise_in_bounds"), (table, i))
    return cases


def scatters() -> dict[str, Case]:
    x, u, i = floats(16, 8), floats(4, 8), np.array([3, 9, 3, 12], np.int32)
    distinct, far = np.array([3, 9, 1, 12], np.int32), np.array([3, 40, -1, -40], np.int32)
    rows, columns = np.array([1, 5, 1, 2], np.int32), np.array([0, 3, 0, 7], np.int32)
    cases: dict[str, Case] = {
        "set": (lambda x, i, u: x.at[i].set(u), (x, distinct, u)),
        "set_scalar": (lambda x, i: x.at[i].set(1.0), (x, i)),
        "add": (lambda x, i, u: x.at[i].add(u), (x, i, u)),
        "add_to_zeros": (lambda i, u: jnp.zeros((16, 8)).at[i].add(u), (i, u)),
        "add_many": (lambda i, u: jnp.zeros((16,)).at[i].add(u), (ints(16, 32), floats(32))),
        "multiply": (lambda x, i, u: x.at[i].multiply(u), (x, i, u)),
        "max": (lambda x, i, u: x.at[i].max(u), (x, i, u)),
        "min": (lambda x, i, u: x.at[i].min(u), (x, i, u)),
        "points_add": (lambda x, i, j, u: x.at[i, j].add(u), (x, rows, columns, floats(4))),
        "points_set": (lambda x, i, j: x.at[i, j].set(2.0), (x, rows, columns)),
        "columns": (lambda x, j, u: x.at[:, j].add(u), (x, columns, floats(16, 4))),
        "columns_set": (lambda x, j: x.at[:, j].set(0.0), (x, columns)),
        "one_row": (lambda x, u, i: [x.at[i].set(u), x.at[2].add(u), x.at[:, 1].set(0.0)], (x, floats(8), np.int32(5))),
        "block": (lambda x, u: x.at[2:6, ::2].add(u), (x, floats(4, 4))),
        "set_gradient": grad_of(lambda x, i, u: x.at[i].set(u), x, distinct, u, argnums=(0, 2)),
        "add_gradient": grad_of(lambda x, i, u: x.at[i].add(u), x, i, u, argnums=(0, 2)),
        "along_axis_add": (
            lambda x, i, u: jax.vmap(lambda r, k, v: r.at[k].add(v))(x, i, u),
            (x, ints(8, 16, 2), floats(16, 2)),
        ),
        "segment_sum": (lambda u, i: jax.ops.segment_sum(u, i, 8), (floats(32, 4), ints(8, 32))),
        "segment_max": (lambda u, i: jax.ops.segment_max(u, i, 8), (floats(32, 4), ints(8, 32))),
        "integer_add": (lambda n, i: n.at[i].add(1), (ints(9, 16), i)),
        "bincount": (lambda i: jnp.bincount(i, length=8), (ints(8, 32),)),
    }
    for mode in ("drop", "clip"):
        cases[f"mode_{mode}"] = (lambda x, i, u, m=mode: x.at[i].add(u, mode=m), (x, far, u))
        cases[f"mode_{mode}_set"] = (lambda x, i, m=mode: x.at[i].set(2.0, mode=m), (x, far))
    return cases
