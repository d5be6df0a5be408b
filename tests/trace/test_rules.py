"""Every rule family: random strategies on random meshes compute what the unsharded op computes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite.trace.program import trace
from tests.harness import MESHES, check, draw

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def positive(*shape: int) -> Any:
    return np.abs(floats(*shape)) + 0.5


def ints(high: int, *shape: int, low: int = 0, dtype: str = "int32") -> Any:
    return np.random.default_rng([high, *shape]).integers(low, high, shape).astype(dtype)


def bools(*shape: int) -> Any:
    return floats(*shape) > 0


def grad_of(fn: Callable[..., Any], *args: Any, argnums: Any = 0) -> Case:
    """The value and its gradient under a weighting that makes every element count differently."""

    def loss(*a: Any) -> Any:
        out = fn(*a)
        return (out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum()

    return jax.value_and_grad(loss, argnums), args


def elementwise() -> dict[str, Case]:
    x, y = floats(8, 16), floats(8, 16, seed=1)
    return {
        "unary": (lambda x: [jnp.exp(x), jnp.tanh(x), -x, jnp.abs(x), lax.erf(x), lax.logistic(x), jnp.sign(x)], (x,)),
        "positive": (
            lambda x: [jnp.log(x), jnp.sqrt(x), lax.rsqrt(x), x**3, lax.lgamma(x), jnp.log1p(x)],
            (positive(8, 6),),
        ),
        "binary": (lambda x, y: [x + y, x - y, x * y, x / (y * y + 1), jnp.maximum(x, y), lax.atan2(x, y)], (x, y)),
        "compare": (lambda x, y: [x < y, x == y, (x >= y) & (y > 0), jnp.isfinite(x), ~(x < y)], (x, y)),
        "integer": (lambda n: [n // 3, n % 5, n << 2, n ^ 7, lax.population_count(n)], (ints(100, 8, 12),)),
        "convert": (lambda x: [x.astype(jnp.bfloat16), x.astype(jnp.int32), (x > 0).astype(jnp.float32)], (x,)),
        "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.uint32), (x,)),
        "bitcast_bytes": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), (x,)),
        "clamp": (lambda x: [lax.clamp(-0.5, x, 0.5), jnp.clip(x, -1, 1)], (x,)),
        "clamp_scalar_operands": (lambda lo, x, hi: lax.clamp(lo, x, hi), (np.float32(-0.5), x, np.float32(0.5))),
        "select": (lambda c, x, y: [jnp.where(c, x, y), jnp.where(c, x, 0.0)], (bools(8, 16), x, y)),
        "select_scalar_predicate": (lambda c, x, y: lax.select(c, x, y), (np.bool_(True), x, y)),
        "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), (x,)),
        "complex": (
            lambda x, y: [lax.complex(x, y), jnp.abs(lax.complex(x, y)), jnp.real(lax.complex(x, y) ** 2)],
            (x, y),
        ),
        "softmax_gradient": grad_of(jax.nn.softmax, x),
        "gelu_gradient": grad_of(jax.nn.gelu, x),
    }


def shapes() -> dict[str, Case]:
    x = floats(8, 4, 6)
    return {
        "broadcast": (
            lambda b, x: [b + x, jnp.broadcast_to(b, (8, 16)), jnp.ones((8, 4)) * 2],
            (floats(16), floats(8, 16)),
        ),
        "broadcast_size_one": (lambda a, b: a * b, (floats(8, 1), floats(1, 16))),
        "merge": (lambda x: x.reshape(32, 6), (x,)),
        "merge_all": (lambda x: x.reshape(-1), (x,)),
        "split": (lambda x: x.reshape(4, 2, 4, 6), (x,)),
        "split_twice": (lambda x: x.reshape(2, 2, 2, 24), (x,)),
        "regroup": (lambda x: x.reshape(16, 12), (x,)),
        "unaligned": (lambda x: x.reshape(6, 32), (x,)),
        "ones": (lambda x: [x[:, None], jnp.squeeze(x[:, :1], 1)], (x,)),
        "heads": (lambda x: x.reshape(4, 8, 2, 8).transpose(0, 2, 1, 3).reshape(8, 64), (floats(4, 8, 16),)),
        "transpose": (lambda x: [x.transpose(2, 0, 1), jnp.swapaxes(x, 0, 1)], (x,)),
        "rev": (lambda x: [x[::-1], jnp.flip(x, (0, 2))], (x,)),
        "concatenate": (
            lambda x, y: [jnp.concatenate([x, y], 0), jnp.concatenate([x, y, x], 1)],
            (x, floats(8, 4, 6, seed=2)),
        ),
        "stack": (lambda x, y: jnp.stack([x, y], 1), (x, floats(8, 4, 6, seed=2))),
        "split_pieces": (lambda x: jnp.split(x, 2, 0) + jnp.split(x, [1, 3], 1), (x,)),
        "pad": (
            lambda x: [jnp.pad(x, ((0, 0), (2, 2), (0, 0))), lax.pad(x, 1.0, [(0, 0, 0), (0, 0, 1), (1, -2, 0)])],
            (x,),
        ),
        "pad_gradient": grad_of(lambda x: jnp.pad(x, ((0, 0), (2, 2), (1, 0))), x),
        "tile": (lambda x: jnp.tile(x, (2, 1, 3)), (x,)),
        "repeat": (lambda x: jnp.repeat(x, 2, axis=0), (x,)),
        "iota": (lambda: [jnp.arange(16), lax.broadcasted_iota(jnp.float32, (8, 16), 1), jnp.eye(8)], ()),
        "iota_mask": (lambda x: jnp.where(jnp.tril(jnp.ones((8, 8), bool)), x, -jnp.inf), (floats(8, 8),)),
        "linspace": (lambda x: x + jnp.linspace(0, 1, 16), (floats(8, 16),)),
    }


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


def contractions() -> dict[str, Case]:
    a, b = floats(8, 16), floats(16, 32)
    q, k = floats(4, 8, 2, 8), floats(4, 16, 2, 8)
    return {
        "matmul": (lambda a, b: a @ b, (a, b)),
        "matmul_indivisible": (lambda a, b: a @ b, (floats(6, 12), floats(12, 10))),
        "vector": (lambda a, b: [a @ b, b @ b], (a, floats(16))),
        "batched": (lambda a, b: a @ b, (floats(4, 8, 16), floats(4, 16, 6))),
        "attention": (lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (q, k)),
        "two_contracted": (lambda a, b: jnp.einsum("abc,bcd->ad", a, b), (floats(8, 4, 6), floats(4, 6, 16))),
        "outer": (lambda a, b: jnp.einsum("a,b->ab", a, b), (floats(8), floats(16))),
        "integer": (
            lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32),
            (ints(9, 8, 16, dtype="int8"), ints(9, 16, 8, dtype="int8")),
        ),
        "gradient": grad_of(lambda a, b: jnp.tanh(a @ b), a, b, argnums=(0, 1)),
        "chain": (lambda a, b, c: (a @ b) @ c * 2 + (a @ b)[:, :8].sum(), (a, b, floats(32, 8))),
        "batched_gradient": grad_of(
            lambda q, k: jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), q, k, argnums=(0, 1)
        ),
    }


def convolutions() -> dict[str, Case]:
    def conv(layout: str, stride: int = 1, padding: Any = "SAME", **settings: Any) -> Callable[..., Any]:
        kernel = "HWIO" if layout == "NHWC" else "OIHW"
        return lambda x, w: lax.conv_general_dilated(
            x, w, (stride, stride), padding, dimension_numbers=(layout, kernel, layout), **settings
        )

    nhwc, nchw = floats(8, 8, 8, 4), floats(8, 4, 8, 8)
    hwio, oihw = floats(3, 3, 4, 16), floats(16, 4, 3, 3)
    return {
        "nhwc": (conv("NHWC"), (nhwc, hwio)),
        "nchw": (conv("NCHW"), (nchw, oihw)),
        "strides": (conv("NHWC", 2), (nhwc, hwio)),
        "patches": (conv("NHWC", 2, "VALID"), (nhwc, floats(2, 2, 4, 8))),
        "pointwise": (conv("NHWC"), (nhwc, floats(1, 1, 4, 8))),
        "dilated": (conv("NHWC", rhs_dilation=(2, 2)), (nhwc, hwio)),
        "grouped": (conv("NHWC", feature_group_count=2), (floats(8, 6, 6, 8), floats(3, 3, 4, 16))),
        "depthwise": (conv("NHWC", feature_group_count=8), (floats(8, 6, 6, 8), floats(3, 3, 1, 8))),
        "gradient": grad_of(conv("NHWC"), nhwc, hwio, argnums=(0, 1)),
        "strided_gradient": grad_of(conv("NCHW", 2), nchw, oihw, argnums=(0, 1)),
        "grouped_gradient": grad_of(
            conv("NHWC", feature_group_count=2), floats(8, 6, 6, 8), floats(3, 3, 4, 8), argnums=(0, 1)
        ),
        "one_dim": (
            lambda x, w: lax.conv_general_dilated(x, w, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")),
            (floats(8, 16, 4), floats(3, 4, 8)),
        ),
        "transposed": (lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), (floats(8, 4, 4, 8), floats(3, 3, 8, 4))),
    }


def reductions() -> dict[str, Case]:
    x, n = floats(8, 4, 16), ints(5, 8, 16, low=1)
    return {
        "sum": (lambda x: [x.sum(), x.sum(0), x.sum((0, 2)), x.mean(1, keepdims=True)], (x,)),
        "sum_integer": (lambda n: [n.sum(0), n.sum(dtype=jnp.int16)], (n,)),
        "max": (lambda x: [x.max(), x.max(0), x.min((0, 2)), x.min(1)], (x,)),
        "max_integer": (lambda n: [n.max(1), n.min()], (n,)),
        "prod": (lambda x: [jnp.prod(x, 0), jnp.prod(x)], (positive(8, 8),)),
        "logical": (lambda b: [b.all(), b.any(0), b.all(1), b.any()], (bools(8, 16),)),
        "argmax": (lambda x: [x.argmax(), x.argmax(1), x.argmin(0)], (floats(8, 16),)),
        "norms": (lambda x: [jnp.linalg.norm(x), x.var(0), jax.nn.logsumexp(x, 1)], (floats(8, 16),)),
        "max_gradient": grad_of(lambda x: x.max(0), floats(8, 16)),
        "mean_gradient": grad_of(lambda x: (x - x.mean(0)) / (x.std(0) + 1), floats(8, 16)),
        "custom": (lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b, (0,)), (positive(8, 6),)),
        "bits": (
            lambda n: [
                lax.reduce(n, np.int32(0), lax.bitwise_xor, (1,)),
                lax.reduce(n, np.int32(0), lax.bitwise_or, (0,)),
            ],
            (n,),
        ),
    }


def scans_along_a_dim() -> dict[str, Case]:
    x = floats(8, 16)
    return {
        "cumsum": (lambda x: [jnp.cumsum(x, 0), jnp.cumsum(x, 1), lax.cumsum(x, 1, reverse=True)], (x,)),
        "cumsum_gradient": grad_of(lambda x: jnp.cumsum(x, 1), x),
        "cumlogsumexp": (lambda x: [lax.cumlogsumexp(x, 0), lax.cumlogsumexp(x, 1)], (x,)),
        "cummax": (lambda x: [lax.cummax(x, 0), lax.cummin(x, 1), lax.cumprod(x, 1)], (positive(8, 16),)),
        "associative": (lambda x: lax.associative_scan(jnp.add, x, axis=0), (x,)),
        "sort": (lambda x: [jnp.sort(x, 0), jnp.sort(x, 1), jnp.argsort(x, 1)], (x,)),
        "sort_pairs": (lambda k, x: lax.sort((k, x), dimension=1, num_keys=1), (ints(5, 8, 16), x)),
        "sort_gradient": grad_of(lambda x: jnp.sort(x, 1), x),
        "top_k": (lambda x: lax.top_k(x, 3), (x,)),
        "top_1": (lambda x: lax.top_k(x, 1), (x,)),
        "top_k_gradient": grad_of(lambda x: lax.top_k(x, 2)[0], x),
        "top_k_rank_3": (lambda x: lax.top_k(x, 4), (floats(4, 8, 16),)),
        "top_k_other_axis": (lambda x: lax.top_k(x, 2, axis=0), (x,)),
        "approximate_top_k": (lambda x: lax.approx_max_k(x, 2), (x,)),
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


def random_numbers() -> dict[str, Case]:
    new, old = jax.random.key(3), jax.random.PRNGKey(3)
    cases: dict[str, Case] = {}
    for style, key in (("key", new), ("raw_key", old)):
        cases[f"{style}_normal"] = (lambda k: jax.random.normal(k, (8, 16)), (key,))
        cases[f"{style}_uniform"] = (lambda k: jax.random.uniform(k, (6, 8, 4)), (key,))
        cases[f"{style}_bernoulli"] = (
            lambda k, x: jnp.where(jax.random.bernoulli(k, 0.7, (8, 16)), x, 0),
            (key, floats(8, 16)),
        )
        cases[f"{style}_split"] = (
            lambda k: [jax.random.normal(s, (8,)) for s in jax.random.split(jax.random.fold_in(k, 7), 3)],
            (key,),
        )
    cases["result_key"] = (lambda k: jax.random.split(k)[1], (new,))
    cases["key_batch"] = (lambda k: jax.vmap(lambda s: jax.random.normal(s, (4,)))(jax.random.split(k, 8)), (new,))
    cases["integers"] = (lambda k: jax.random.randint(k, (8, 16), 0, 1000), (new,))
    cases["small_bits"] = (lambda k: [jax.random.bits(k, (8, 16), d) for d in ("uint8", "uint16", "uint32")], (new,))
    cases["permutation"] = (lambda k, x: jax.random.permutation(k, x), (new, floats(16, 4)))
    cases["categorical"] = (lambda k, x: jax.random.categorical(k, x), (new, floats(8, 16)))
    cases["scalar"] = (lambda k: jax.random.normal(k), (new,))
    cases["gumbel_half"] = (lambda k: jax.random.normal(k, (8, 16), jnp.bfloat16), (new,))
    cases["other_generator"] = (lambda k: jax.random.uniform(k, (8, 16)), (jax.random.key(1, impl="rbg"),))
    cases["gamma"] = (lambda k: jax.random.gamma(k, 2.0, (8,)), (new,))
    return cases


def windows() -> dict[str, Case]:
    x = floats(8, 8, 8, 4)

    def pool(reducer: Any, initial: float, size: int, stride: int, padding: str = "VALID") -> Callable[[Any], Any]:
        return lambda x: lax.reduce_window(x, initial, reducer, (1, size, size, 1), (1, stride, stride, 1), padding)

    return {
        "max": (pool(lax.max, -jnp.inf, 2, 2), (x,)),
        "max_overlap": (pool(lax.max, -jnp.inf, 3, 2, "SAME"), (x,)),
        "average": (pool(lax.add, 0.0, 2, 2), (x,)),
        "average_same": (pool(lax.add, 0.0, 3, 1, "SAME"), (x,)),
        "max_gradient": grad_of(pool(lax.max, -jnp.inf, 2, 2), x),
        "max_overlap_gradient": grad_of(pool(lax.max, -jnp.inf, 3, 2, "SAME"), x),
        "average_gradient": grad_of(pool(lax.add, 0.0, 2, 2), x),
        "one_dim": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 4), (1, 4), "VALID"), (floats(8, 16),)),
    }


def linear_algebra() -> dict[str, Case]:
    square = floats(4, 8, 8)
    definite = square @ square.transpose(0, 2, 1) + 8 * np.eye(8, dtype=np.float32)
    return {
        "fft": (lambda x: [jnp.abs(jnp.fft.fft(x)), jnp.fft.irfft(jnp.fft.rfft(x))], (floats(8, 16),)),
        "fft_2d": (lambda x: jnp.abs(jnp.fft.fft2(x)), (floats(4, 8, 8),)),
        "cholesky": (jnp.linalg.cholesky, (definite,)),
        "cholesky_gradient": grad_of(jnp.linalg.cholesky, definite),
        "triangular_solve": (
            lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
            (np.tril(definite), floats(4, 8, 6)),
        ),
        "solve": (jnp.linalg.solve, (definite, floats(4, 8, 6))),
        "inverse": (jnp.linalg.inv, (definite,)),
        "qr": (lambda a: jnp.abs(jnp.linalg.qr(a)[1]), (square,)),
        "eigh": (lambda a: jnp.linalg.eigh(a)[0], (definite,)),
    }


def control_flow() -> dict[str, Case]:
    x, w, c = floats(5, 8, 16), floats(16, 16) * 0.3, floats(8, 16)

    def rnn(w: Any, c: Any, x: Any) -> Any:
        def cell(h: Any, xt: Any) -> Any:
            h = jnp.tanh(h @ w + xt)
            return h, h.sum(1)

        return lax.scan(cell, c, x)

    def loss(w: Any, c: Any, x: Any) -> Any:
        h, ys = rnn(w, c, x)
        return (h**2).sum() + ys.mean()

    def whiles(x: Any) -> Any:
        return lax.while_loop(
            lambda s: (s[0] < 3) & (s[1].sum() < 1e9), lambda s: (s[0] + 1, s[1] * 1.5 + s[0]), (0, x)
        )

    def sums(a: Any, b: Any) -> Any:
        # The carry starts as a partial sum, and the body leaves a literal in one of its places.
        return lax.scan(
            lambda s, r: ((s[0] + r @ b, 1.0), s[1] * r), (a @ b[:, 0] @ jnp.ones(8) * b[0], (a @ b).sum()), a
        )

    return {
        "scan": (rnn, (w, c, x)),
        "scan_gradient": (jax.value_and_grad(loss, (0, 1, 2)), (w, c, x)),
        "scan_reversed": (lambda x: lax.scan(lambda s, r: (s + r, s * r), jnp.zeros((8, 16)), x, reverse=True), (x,)),
        "scan_without_inputs": (lambda c: lax.scan(lambda s, _: (s * 1.1, None), c, None, length=4)[0], (c,)),
        "scan_of_partial_sums": (
            lambda a, b: lax.scan(lambda s, r: (s + r @ b, s.sum()), jnp.zeros(16), a),
            (floats(4, 8), floats(8, 16)),
        ),
        "scan_that_leaves_a_literal": (sums, (floats(8, 8), floats(8, 8))),
        "scan_of_remat": (
            jax.grad(
                lambda w, x: lax.scan(jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None)), x, None, length=3)[0].sum()
            ),
            (w, c),
        ),
        "map": (lambda x: lax.map(lambda r: (r @ r.T).sum(0), x), (x,)),
        "while": (whiles, (c,)),
        "while_with_constants": (
            lambda x, w: lax.while_loop(lambda s: s[1] < 2, lambda s: (s[0] @ w, s[1] + 1), (x, 0))[0],
            (c, w),
        ),
        "fori": (lambda x, w: lax.fori_loop(0, 3, lambda i, s: s @ w + i, x), (c, w)),
        "cond": (lambda p, x: lax.cond(p.sum() > 0, lambda a: (a * 2, a.sum()), lambda a: (a, a.max()), x), (c, c)),
        "cond_leaves_literals": (
            lambda p, x: lax.cond(p, lambda a: (a, 1.0), lambda a: (a + 1, 0.0), x),
            (np.bool_(True), c),
        ),
        "switch": (
            lambda i, x, y: lax.switch(i, [lambda a, b: a + b, lambda a, b: a @ b.T @ a, lambda a, b: b], x, y),
            (np.int32(1), c, floats(8, 16, seed=3)),
        ),
        "cond_gradient": (
            jax.grad(lambda x: lax.cond(x[0, 0] > 0, lambda a: (a**2).sum(), lambda a: a.sum(), x)),
            (c,),
        ),
        "nested": (
            lambda x, w: lax.scan(
                lambda s, r: (lax.fori_loop(0, 2, lambda i, t: jnp.tanh(t @ w), s) + r, None), x[0], x
            )[0],
            (x, w),
        ),
        "remat": (jax.grad(lambda w, x: jax.checkpoint(lambda a: jnp.tanh(a @ w) @ w)(x).sum(), (0, 1)), (w, c)),
        "barrier": (lambda x, w: lax.optimization_barrier((x @ w, w * 2)), (c, w)),
    }


def partial_sums() -> dict[str, Case]:
    """What may and what must not happen to an unreduced value."""
    a, b, s = floats(8, 16), floats(16, 8), floats(8, 8)
    n = ints(7, 16, 8)
    return {
        "not_linear": (lambda a, b: [jnp.exp(a @ b), jnp.abs(a @ b), (a @ b) ** 2, jnp.maximum(a @ b, 0)], (a, b)),
        "linear": (
            lambda a, b: [-(a @ b), (a @ b).T, (a @ b).reshape(4, 16), (a @ b)[2:4], jnp.cumsum(a @ b, 0)],
            (a, b),
        ),
        "scaled": (
            lambda a, b, s: [(a @ b) * s, (a @ b) / (s * s + 1), s / ((a @ b) ** 2 + 1), (a @ b) * (a @ b)],
            (a, b, s),
        ),
        "added": (
            lambda a, b, s: [(a @ b) + (a @ s.repeat(2, 0)), (a @ b) + s, (a @ b) + 1.0, 1.0 - (a @ b)],
            (a, b, s),
        ),
        "zeros": (
            lambda a, b: [
                (a @ b) + 0.0,
                jnp.zeros((8, 8)) + (a @ b),
                jnp.pad(a @ b, 1),
                jnp.where(a[:, :8] > 0, a @ b, 0),
            ],
            (a, b),
        ),
        "ones": (lambda a, b: [jnp.pad(a @ b, 1, constant_values=1.0), jnp.where(a[:, :8] > 0, a @ b, 1.0)], (a, b)),
        "select_by_sum": (lambda a, b, s: jnp.where(a @ b > 0, s, a @ b), (a, b, s)),
        "concatenated": (
            lambda a, b, s: [jnp.concatenate([a @ b, (a @ b) * 2], 1), jnp.concatenate([a @ b, s], 0)],
            (a, b, s),
        ),
        "joined": (lambda a, b: [(a @ b) @ (a @ b), ((a @ b) @ a).sum(0), (a @ b).sum() / 7], (a, b)),
        "integer_division": (lambda n: [n.sum(0) // 2, n.sum(1) % 3, lax.div(n.sum(0), np.int32(2))], (n,)),
        "rounded": (lambda a, b: [(a @ b).astype(jnp.bfloat16), (a @ b).astype(jnp.int32)], (a, b)),
        "updated": (
            lambda a, b, s: [lax.dynamic_update_slice(a @ b, s[:2], (1, 0)), (a @ b).at[2].set(s[0])],
            (a, b, s),
        ),
        "gathered": (
            lambda a, b, i: [(a @ b)[i], (a @ b).at[i].add(1.0), jnp.asarray(s).at[i].add((a @ b)[:4])],
            (a, b, ints(8, 4)),
        ),
        "pooled": (lambda a, b: lax.reduce_window(a @ b, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), (a, b)),
        "compared": (lambda a, b, s: [(a @ b) > s, (a @ b).argmax(1), jnp.sort(a @ b, 0)], (a, b, s)),
    }


FAMILIES: dict[str, Callable[[], dict[str, Case]]] = {
    f.__name__: f
    for f in (
        elementwise,
        shapes,
        slices,
        contractions,
        convolutions,
        reductions,
        scans_along_a_dim,
        gathers,
        scatters,
        random_numbers,
        windows,
        linear_algebra,
        control_flow,
        partial_sums,
    )
}
NAMES = [(family, name) for family, make in FAMILIES.items() for name in make()]


def _mesh_of(family: str, name: str) -> tuple[int, ...]:
    """One mesh per case, spread evenly and the same in every run."""
    return MESHES[1 + zlib.crc32(f"{family}/{name}".encode()) % 2]


# Compiling takes seconds: these run with the many below only.
COSTLY = frozenset(
    """
    softmax_gradient gelu_gradient unaligned associative dynamic_update_gradient slice_gradient batched_gradient
    strided_gradient grouped_gradient transposed dilated depthwise mean_gradient norms cummax cumlogsumexp sort_gradient
    mode_wrap_gradient mode_clip_gradient points_with_slice along_axis_gradient set_gradient add_gradient segment_max
    raw_key_normal raw_key_uniform raw_key_split raw_key_bernoulli key_split integers permutation categorical gumbel_half
    gamma max_overlap_gradient average_gradient cholesky_gradient solve inverse eigh fft_2d scan_of_remat scan_reversed
    nested cond_gradient scaled linear joined compared concatenated one_dim average_same
    """.split()  # noqa: SIM905
)
QUICK = [(f, n) for f, n in NAMES if n not in COSTLY]
# Every second case of each family is quick enough together for `make check`; `make test` runs all of these.
HALVES = [
    pytest.param(f, n, id=f"{f}-{n}", marks=[pytest.mark.medium] if i % 2 else []) for i, (f, n) in enumerate(QUICK)
]


@pytest.mark.parametrize(("family", "name"), HALVES)
def test_random_strategies_compute_the_same(family, name):
    fn, args = FAMILIES[family]()[name]
    check(fn, args, _mesh_of(family, name), seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(("family", "name"), NAMES, ids=[f"{f}-{n}" for f, n in NAMES])
def test_many_random_strategies_compute_the_same(family, name, shape):
    fn, args = FAMILIES[family]()[name]
    check(fn, args, shape, seeds=range(10, 18))


def test_a_wrong_rule_is_noticed(monkeypatch):
    """The property test can fail: exp is not linear, a cumulative sum does depend on the rows before."""
    import alpa_lite.trace.rules as rules

    a, b = floats(8, 16), floats(16, 8) * 0.1
    monkeypatch.setattr(rules, "_LINEAR_FIRST", rules._LINEAR_FIRST | {"exp"})

    def fn(a, b):
        return jnp.exp(a @ b)

    drawn = draw(trace(fn, (a, b), {}), (2, 4), range(40))
    seed = next(i for i, d in enumerate(drawn) if d.realised.decisions[1].operands[0].unreduced)
    with pytest.raises(AssertionError, match="differs"):
        check(fn, (a, b), (2, 4), seeds=[seed])


@pytest.mark.medium
def test_a_blocked_dim_is_noticed(monkeypatch):
    import alpa_lite.trace.rules as rules

    monkeypatch.setattr(rules, "_blocked_in_convolution", lambda op, rule: [])
    fn, args = convolutions()["strided_gradient"]
    with pytest.raises(AssertionError, match="differs"):
        check(fn, args, (2, 4), seeds=range(2))


@pytest.mark.parametrize(
    ("fn", "linear"),
    [
        (lambda x: jnp.exp(x), False),
        (lambda x: x * 2.0, True),
        (lambda x: x + 1.0, False),
        (lambda x: x + 0.0, True),
        (lambda x: 1.0 - x, False),
        (lambda x: x / 3.0, True),
        (lambda x: 3.0 / x, False),
        (lambda x: x.astype(jnp.bfloat16), False),
        (lambda x: x.T, True),
        (lambda x: jnp.abs(x), False),
        (lambda x: jnp.maximum(x, 0.0), False),
        (lambda x: lax.clamp(0.0, x, 1.0), False),
        (lambda x: lax.pad(x, jnp.float32(0), [(1, 0, 0), (0, 0, 0)]), True),
        (lambda x: lax.pad(x, jnp.float32(1), [(1, 0, 0), (0, 0, 0)]), False),
        (lambda x: lax.div(x.astype(jnp.int32), jnp.int32(2)), False),
        (lambda x: x.at[jnp.array([1, 9])].get(mode="fill", fill_value=1.0), False),
        (lambda x: x.at[jnp.array([1, 9])].get(mode="fill", fill_value=0.0), True),
        (lambda x: jnp.sort(x), False),
        (lambda x: jnp.cumsum(x, 0), True),
    ],
)
def test_partial_sums_pass_linear_ops_only(fn, linear):
    program = trace(fn, (floats(8, 8),), {}).program
    (op,) = [op for op in program.ops if 0 in program.outputs or program.outputs[0] in op.outputs]
    assert bool([g for g in op.rule.linear if g]) is linear, f"{op.primitive} {op.rule}"


def test_truth_values_are_never_partial_sums():
    def fn(x):
        return jnp.where(x > 0, jnp.zeros(x.shape, bool), x < 1)

    program = trace(fn, (jax.ShapeDtypeStruct((8, 8), "float32"),), {}).program
    assert all(not op.rule.linear for op in program.ops)


def test_a_slice_that_starts_too_late_is_clamped_before_it_is_cut_into_tiles():
    fn, args = FAMILIES["slices"]()["dynamic_slice_clamps"]
    check(fn, args, (2, 2, 2), seeds=[10])
