"""Probing: rules of functions that nobody described. The counts are those of hidet's rule discovery at 4 shards (RFC 0003)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import alpa_lite as al
from alpa_lite.core.rule_text import parse_rule
from alpa_lite.trace.program import trace
from examples import resnet18


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def layouts(fn, *args, num_shards=4, **kwargs):
    rule = al.rules.probe(fn, *args, num_shards=num_shards, **kwargs)
    return [str(layout) for layout in al.rules.enumerate_sharded(rule, num_shards)]


def same_conv(x, w):
    return jax.lax.conv(x, w, (1, 1), "SAME")


# --- Rule discovery by probing + index analysis -------------------------------------------------------------------------

ROWS = {
    "matmul": (jnp.matmul, [struct(32, 64), struct(64, 32)],
               {"S0, R -> S0", "R, S1 -> S1", "S1, S0 -> R all-reduce(add)", "S1, S0 -> S0 reduce-scatter(add)"}),
    "conv": (same_conv, [struct(8, 8, 8, 8), struct(8, 8, 3, 3)],
             {"S0, R -> S0", "R, S0 -> S1", "S1, S1 -> R all-reduce(add)", "S1, S1 -> S0 reduce-scatter(add)"}),
    "transpose": (lambda x: x.transpose(3, 1, 0, 2), [struct(4, 8, 12, 16)],
                  {"S0 -> S2", "S1 -> S1", "S2 -> S3", "S3 -> S0"}),
    "pad": (lambda x: jnp.pad(x, ((2, 2), (2, 2), (0, 0))), [struct(4, 4, 4)], {"S2 -> S2"}),
    "reshape to (32, 4)": (lambda x: x.reshape(-1, 4), [struct(4, 8, 4)], {"S0 -> S0"}),
    "reshape to (4, 32)": (lambda x: x.reshape(4, -1), [struct(4, 8, 4)], {"S1 -> S1"}),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_rule_discovery_by_probing_and_index_analysis(row):
    """hidet's counts, the trivial rule included: 5, 5, 5, 2, 2, 2."""
    fn, args, want = ROWS[row]
    found = layouts(fn, *args)
    assert set(found[1:]) == want and len(found) == len(want) + 1
    assert found[0] == ", ".join("R" * len(args)) + " -> R"


@pytest.mark.parametrize(
    ("sizes", "extra"), [((-1, 4), "S2 -> S1"), ((4, -1), "S0 -> S0")], ids=["to (32, 4)", "to (4, 32)"]
)
def test_rule_discovery_the_reshapes_algebraic_rule_has_one_layout_more(sizes, extra):
    """With attributes that adapt to the shard the outer (inner) dim may be split too; so says Shardy's rule."""

    def fn(x):
        return x.reshape(sizes)

    fixed, adapted = layouts(fn, struct(4, 8, 4)), layouts(fn, struct(4, 8, 4), same_code=False)
    assert set(adapted) - set(fixed) == {extra} and len(adapted) == 3
    (op,) = trace(fn, (struct(4, 8, 4),), {}).program.ops
    assert set(adapted) == {str(layout) for layout in al.rules.enumerate_sharded(op.rule, 4)}


def test_rule_discovery_conv_of_the_published_size():
    """32x64x224x224 by 64x64x3x3 has the same 5 layouts; by its rule, since running it some hundred times takes hours."""
    (op,) = trace(same_conv, (struct(32, 64, 224, 224), struct(64, 64, 3, 3)), {}).program.ops
    assert {str(layout) for layout in al.rules.enumerate_sharded(op.rule, 4)[1:]} == ROWS["conv"][2]


def test_every_op_has_a_rule():
    """ResNet-18, batch 8, 4 shards: every distinct op has a rule; one shard gives exactly the trivial one."""
    example = resnet18.make("small")
    state, batch = example.abstract_args()
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((8, *leaf.shape[1:]), leaf.dtype), batch)
    ops = {op.key: op for _, _, op in trace(example.train_step, (state, batch), {}).program.walk()}
    assert len(ops) > 100
    for op in ops.values():
        assert op.rule.origin != "none"
        found = al.rules.enumerate_sharded(op.rule, 4)
        assert found[0].is_trivial
        if op.primitive in ("conv_general_dilated", "dot_general"):
            assert len(found) > 1, op
        (trivial,) = al.rules.enumerate_sharded(op.rule, 1)
        assert trivial.is_trivial


def test_one_shard_probes_to_the_trivial_rule():
    assert layouts(jnp.matmul, struct(4, 4), struct(4, 4), num_shards=1) == ["R, R -> R"]
    with pytest.raises(al.AlpaLiteError, match="num_shards=0 was given; it must be at least 1"):
        al.rules.probe(jnp.matmul, struct(4, 4), struct(4, 4), num_shards=0)


# --- Wrong shapes rejected by data dependency, not only by shape ----------------------------------------------------------


def test_wrong_shapes_rejected_by_data_dependency_not_only_by_shape():
    """reshape (4,8,4) -> (4,32): a split of input dim 1 or 2 gives a quarter of result dim 0, of wrong values."""

    def fn(x):
        return x.reshape(-1, 32)

    whole = struct(4, 8, 4)
    for dim in (1, 2):
        local = tuple(n // 4 if d == dim else n for d, n in enumerate(whole.shape))
        assert jax.eval_shape(fn, struct(*local)).shape == (1, 32)  # the shape fits
    assert layouts(fn, whole) == ["R -> R", "S0 -> S0"]
    for text in ("x (a y) z -> a w", "x y (a z) -> a w"):
        with pytest.raises(al.AlpaLiteError, match="differs from the unsharded one"):
            al.rules.check(fn, text, whole, a=4)


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


@pytest.mark.parametrize("case", CASES)
def test_layouts_found(case):
    fn, args, want = CASES[case]
    found = layouts(fn, *args)
    assert set(found[1:]) == want and len(found) == len(want) + 1


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


def test_the_same_seed_finds_the_same_rule():
    rules = [al.rules.probe(jnp.matmul, struct(8, 4), struct(4, 8), seed=3) for _ in range(2)]
    assert rules[0] == rules[1]


def test_pytrees():
    found = layouts(lambda d: {"y": d["x"] @ d["w"]}, {"x": struct(8, 4), "w": struct(4, 3)})
    assert found[1] == "R, S0 -> S0"  # leaves in the order of their keys: w, x


@pytest.mark.parametrize(
    ("case", "text", "kinds"),
    [("max", "i j -> j", {"reduction": "i", "reduce_op": "max"}), ("several results", "i j -> i k, i, k i", {})],
)
def test_what_probing_finds_is_what_a_user_would_write(case, text, kinds):
    fn, args, _ = CASES[case]
    results = [r.shape for r in jax.tree.leaves(jax.eval_shape(fn, *args))]
    written = parse_rule(text, **kinds).resolve([a.shape for a in args], results)
    assert {str(layout) for layout in al.rules.enumerate_sharded(written, 4)} == set(layouts(fn, *args))
