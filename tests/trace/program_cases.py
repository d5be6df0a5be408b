"""Random numbers, control flow, and what may happen to partial sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.trace.cases import Case, floats, ints


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
