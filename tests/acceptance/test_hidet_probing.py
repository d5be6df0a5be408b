"""hidet 335: the rows of its table on rules, each a test of that name (RFC 0003; the rest is in ``test_hidet.py``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.trace.program import trace
from tests.acceptance.models import resnet18, resnet18_shapes

pytestmark = pytest.mark.medium


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layouts(fn, *args, **kwargs):
    rule = al.rules.probe(fn, *args, num_shards=4, **kwargs)
    return [str(layout) for layout in al.rules.enumerate_sharded(rule, 4)]


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
    images = struct(8, 224, 224, 3)
    ops = {op.key: op for _, _, op in trace(resnet18, (resnet18_shapes(), images), {}).program.walk()}
    assert len(ops) > 30
    for op in ops.values():
        assert op.rule.origin != "none"
        found = al.rules.enumerate_sharded(op.rule, 4)
        assert found[0].is_trivial
        if op.primitive in ("conv_general_dilated", "dot_general", "add", "mul", "max"):
            assert len(found) > 1, op
        (trivial,) = al.rules.enumerate_sharded(op.rule, 1)
        assert trivial.is_trivial


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
