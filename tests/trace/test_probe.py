"""Probing: rules of functions that nobody described. hidet's counts are in ``tests/acceptance/test_hidet_probing.py``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import alpa_lite as al
from alpa_lite.core.rule_text import parse_rule


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def layouts(fn, *args, num_shards=4, **kwargs):
    rule = al.rules.probe(fn, *args, num_shards=num_shards, **kwargs)
    return [str(layout) for layout in al.rules.enumerate_sharded(rule, num_shards)]


def test_one_shard_probes_to_the_trivial_rule():
    assert layouts(jnp.matmul, struct(4, 4), struct(4, 4), num_shards=1) == ["R, R -> R"]
    with pytest.raises(al.AlpaLiteError, match="num_shards=0 was given; it must be at least 1"):
        al.rules.probe(jnp.matmul, struct(4, 4), struct(4, 4), num_shards=0)


def test_what_holds_alone_but_not_together_is_dropped():
    def fn(x):
        return x * 2 if x.shape != (2, 2) else x * 3

    assert len(layouts(fn, struct(4, 4), num_shards=2)) == 2


# --- Kinds of functions ---------------------------------------------------------------------------------------------------

CASES = {
    "max": (lambda x: x.max(0), [struct(8, 16)], {"S0 -> R all-reduce(max)", "S1 -> S0"}),
    "min": (lambda x: x.min(0), [struct(8, 16)], {"S0 -> R all-reduce(min)", "S1 -> S0"}),
    "product": (lambda x: x.prod(1), [struct(8, 16)], {"S1 -> R all-reduce(mul)", "S0 -> S0"}),
    "mean is no sum of means": (lambda x: x.mean(1), [struct(8, 16)], {"S0 -> S0"}),
    "softmax": (jax.nn.softmax, [struct(8, 16)], {"S0 -> S0"}),
    "broadcast operand": (jnp.add, [struct(8, 16), struct(16)], {"S0, R -> S0", "S1, S0 -> S1"}),
    "comparison": (jnp.equal, [struct(8, 16), struct(8, 16)], {"S0, S0 -> S0", "S1, S1 -> S1"}),
    "finite": (jnp.isfinite, [struct(8)], {"S0 -> S0"}),
    "sort": (lambda x: jnp.sort(x, 0), [struct(8, 16)], {"S1 -> S1"}),
    "scan over a dim": (lambda x: jnp.cumsum(x, 0), [struct(8, 16)], {"S1 -> S1"}),
    "integers as indices": (lambda x, i: x[i], [struct(16, 8), np.arange(12)], {"R, S0 -> S0", "S1, R -> S1"}),
    "integer arithmetic": (lambda x: x // 3, [struct(8, dtype=jnp.int32)], {"S0 -> S0"}),
    "several results": (lambda x: (x * 2, x.max(-1), x.T), [struct(8, 16)], {"S0 -> S0, S0, S1"}),
    "blocks of two": (lambda x: x.reshape(-1, 2)[:, ::-1].reshape(-1), [struct(16)], {"S0 -> S0"}),
    "typed key": (lambda k, x: x + jax.random.normal(k, ()), [jax.random.key(0), struct(8)], {"R, S0 -> S0"}),
    "bfloat16": (lambda x: x.sum(0), [struct(8, 4, dtype=jnp.bfloat16)],
                 {"S0 -> R all-reduce(add)", "S0 -> S0 reduce-scatter(add)", "S1 -> S0"}),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("case", CASES)
def test_layouts_found(case):
    fn, args, want = CASES[case]
    found = layouts(fn, *args)
    assert set(found[1:]) == want and len(found) == len(want) + 1


@pytest.mark.medium
def test_pallas_kernel():
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    def matmul(x, w):
        shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, w)

    rule = al.rules.probe(matmul, struct(8, 16), struct(16, 4))
    assert rule.origin == "probed" and rule.reduce_op == "add"
    assert len(al.rules.enumerate_sharded(rule, 4)) == 5


def test_a_factor_is_as_fine_as_was_shown():
    """Pairs swapped in place: blocks of two hold together, so 16 splits into at most 8."""
    rule = al.rules.probe(CASES["blocks of two"][0], struct(16))
    assert str(rule) == "([ij])->([ik]) {i=8,j=2,k=2} replicated={j,k}"
    assert str(al.rules.probe(jnp.tanh, struct(16))) == "([i])->([i]) {i=16}"


@pytest.mark.medium
def test_the_same_seed_finds_the_same_rule():
    rules = [al.rules.probe(jnp.matmul, struct(8, 4), struct(4, 8), seed=3) for _ in range(2)]
    assert rules[0] == rules[1]


def test_pytrees():
    found = layouts(lambda d: {"y": d["x"] @ d["w"]}, {"x": struct(8, 4), "w": struct(4, 3)})
    assert found[1] == "R, S0 -> S0"  # leaves in the order of their keys: w, x


@pytest.mark.medium
@pytest.mark.parametrize(
    ("case", "text", "kinds"),
    [("max", "i j -> j", {"reduction": "i", "reduce_op": "max"}), ("several results", "i j -> i k, i, k i", {})],
)
def test_what_probing_finds_is_what_a_user_would_write(case, text, kinds):
    fn, args, _ = CASES[case]
    results = [r.shape for r in jax.tree.leaves(jax.eval_shape(fn, *args))]
    written = parse_rule(text, **kinds).resolve([a.shape for a in args], results)
    assert {str(layout) for layout in al.rules.enumerate_sharded(written, 4)} == set(layouts(fn, *args))
