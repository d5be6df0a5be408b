"""Ops on whole tensors: elementwise, reshapes, contractions, convolutions, reductions, windows, linear algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.trace.cases import Case, bools, floats, grad_of, ints, positive


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
        "convert": (
            lambda x: [
                x.astype(jnp.bfloat16),
                x.astype(jnp.int32),
                (x > 0).astype(jnp.float32),
                x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
            ],
            (x,),
        ),
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
