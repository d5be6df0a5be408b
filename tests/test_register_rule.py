"""``al.register_rule`` from the decorator to the running step: values, audit, reports, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import RuleError

OPTIONS = al.PlanOptions(mesh_shape=(8,))
NO_GATHER = al.PlanOptions(mesh_shape=(8,), forbid=("all-gather",))  # else small tensors are gathered and not split
CLUSTER = al.Cluster.parse("1x8:cpu")


def matmul_kernel(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] @ w_ref[...]


def matmul(x, w):
    """A Pallas kernel whose access pattern no rule knows."""
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(matmul_kernel, out_shape=shape, interpret=True)(x, w)


ruled = al.register_rule("i k, k j -> i j", reduction="k")(matmul)
column_max = al.register_rule("i j -> j", reduction="i", reduce_op="max")(lambda x: x.max(0))


def data(*shapes):
    """Small integers, so that sums are exact in any order."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-4, 5, size=s), jnp.float32) for s in shapes]


def decisions(plan, label):
    return [d for d in plan.stages[0].decisions if label in d.op]


def assert_runs(fn, plain, args, pins=None, label="user_op:", options=OPTIONS):
    """Exact values, a clean audit; returns the plan, in which the op is split."""
    step = al.parallelize(fn, pins=pins, options=options)
    for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(plain(*args)), strict=True):
        np.testing.assert_array_equal(got, want)
    assert step.compile(*args).audit().ok
    plan = step.plan(*args)
    assert decisions(plan, label) and all(any(s.sharded_axes for s in d.operands) for d in decisions(plan, label))
    return plan


@pytest.mark.medium
@pytest.mark.parametrize(
    ("pins", "kinds"),
    [({"0": P("x")}, []), ({"0": P(None, "x"), "1": P("x"), "out": P()}, ["all-reduce"]),
     ({"0": P(None, "x"), "1": P("x"), "out": P("x")}, ["reduce-scatter"])],
    ids=["rows", "contraction", "contraction scattered"],
)  # fmt: skip
def test_a_registered_kernel_is_split_by_its_rule(pins, kinds):
    args = data((64, 32), (32, 16))
    plan = assert_runs(ruled, matmul, args, pins)
    assert [c.kind.value for c in plan.collectives] == kinds
    assert not any("replicated" in note for note in plan.notes)


def test_without_a_rule_it_is_replicated_and_the_report_says_so():
    plan = al.plan(matmul, *data((64, 32), (32, 16)), cluster=CLUSTER, options=OPTIONS)
    (kernel,) = decisions(plan, "pallas_call")
    assert all(s.is_replicated for s in (*kernel.operands, *kernel.results))
    assert any(note.startswith("replicated: 1 pallas_call (a custom kernel") for note in plan.notes)
    assert "replicated: 1 pallas_call" in str(plan)


@pytest.mark.medium
def test_a_max_is_joined_inside_of_the_op():
    (x,) = data((64, 16))
    plan = assert_runs(column_max, lambda x: x.max(0), [x], {"0": P("x"), "out": P()}, options=NO_GATHER)
    assert [c.kind.value for c in plan.collectives] == ["all-reduce"]


@pytest.mark.medium
def test_in_a_scan_body():
    def step(x, ws, mm=ruled):
        return lax.scan(lambda h, w: (jnp.tanh(mm(h, w)), h.sum()), x, ws)

    args = data((16, 16), (3, 16, 16))
    got = al.parallelize(step, pins={"0": P("x")}, options=OPTIONS)(*args)
    np.testing.assert_allclose(got[0], step(*args, mm=matmul)[0], rtol=1e-6)


@pytest.mark.medium
def test_gradient_goes_through_custom_vjp_with_registered_kernels():
    @jax.custom_vjp
    def mm(x, w):
        return ruled(x, w)

    mm.defvjp(lambda x, w: (ruled(x, w), (x, w)), lambda res, g: (ruled(g, res[1].T), ruled(res[0].T, g)))

    def step(x, w):
        return jax.value_and_grad(lambda w: (mm(x, w) ** 2).sum())(w)

    plan = assert_runs(
        step,
        lambda x, w: (((x @ w) ** 2).sum(), 2 * x.T @ (x @ w)),
        data((64, 16), (16, 8)),
        {"0": P("x")},
        options=NO_GATHER,
    )
    assert len(decisions(plan, "user_op:matmul")) == 2  # forward and the gradient of w


@pytest.mark.medium
def test_a_jax_primitive_by_name_and_its_saved_plan(tmp_path):
    """Shardy has no rule for argmax, so it stays whole, until the user says better; the plan file remembers that."""

    def step(x):
        return jnp.argmax(x, axis=1)

    (x,) = data((64, 16))
    assert any("argmax" in d.op and d.operands[0].is_replicated for d in _plan(step, x, OPTIONS).stages[0].decisions)
    options = al.PlanOptions(mesh_shape=(8,), rules=(al.register_rule("argmax", "i j -> i"),))
    plan = assert_runs(step, step, [x], {"0": P("x")}, label="argmax", options=options)
    assert dict(plan.options)["rules"] == ("argmax: i j -> i",)
    plan.save(tmp_path / "plan.json")
    again = al.parallelize(step, plan=al.load_plan(tmp_path / "plan.json"))
    np.testing.assert_array_equal(again(x), step(x))
    al.load_plan(tmp_path / "plan.json").bind(step, x)


def _plan(fn, x, options):
    return al.plan(fn, x, cluster=CLUSTER, pins={"0": P("x")}, options=options)


@pytest.mark.medium
def test_check_refuses_a_wrong_rule_when_the_plan_is_made():
    @al.register_rule("i j -> i j", check=True)
    def softmax(x):
        return jax.nn.softmax(x)

    (x,) = data((16, 8))
    with pytest.raises(RuleError) as caught:
        al.plan(lambda x: softmax(x) + 1, x, cluster=CLUSTER, options=OPTIONS)
    message = str(caught.value)
    assert "is wrong for softmax at " in message and "test_register_rule.py" in message
    assert "with j in 2, result 0 differs from the unsharded one" in message
    right = al.register_rule(jax.nn.softmax, "i j -> i j", need_replication="j", check=True)
    al.plan(lambda x: right(x) + 1, x, cluster=CLUSTER, options=OPTIONS)


def test_a_rule_that_does_not_fit_the_shapes_is_refused_without_asking():
    @al.register_rule("i j -> i j")
    def fixed(x):
        return x.reshape(4, 16).reshape(8, 8)

    with pytest.raises(RuleError) as caught:
        al.plan(fixed, jnp.ones((8, 8)), cluster=CLUSTER, options=OPTIONS)
    message = str(caught.value)
    assert "with factor i split, on tiles [4, 8] the op fails" in message
    assert "user_op:fixed at " in message and "need_replication" in message


def test_a_rule_with_a_typo_points_at_the_character():
    with pytest.raises(al.AlpaLiteError) as caught:
        al.register_rule("i k, k j -> i j)", reduction="k")
    _, text, caret, allowed, advice = str(caught.value).splitlines()
    assert text == "  i k, k j -> i j)" and caret == "  " + " " * 15 + "^"
    assert "allowed: factor names" in allowed and "next: correct the rule at the caret" in advice


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        (("argmax",), "rules has 'argmax'; allowed are rules by primitive name"),
        ((al.register_rule("argmin", "i j -> i"),), "the primitive 'argmin' does not occur in the function; it has argmax"),
        ((al.register_rule("argmax", "i j -> i"),) * 2, "the primitive 'argmax' has two rules"),
        ((al.register_rule("argmax", "i j -> j"),), "the rule and the op give different results"),
        ((al.register_rule("argmax", "i j -> i", reduction="j", reduce_op="max"),), "Only 'add' is possible"),
    ],
)  # fmt: skip
def test_rules_by_name_are_checked(rules, fault):
    with pytest.raises(al.AlpaLiteError) as caught:
        _plan(lambda x: jnp.argmax(x, axis=1), jnp.ones((16, 16)), al.PlanOptions(mesh_shape=(8,), rules=rules))
    assert fault in str(caught.value)


def test_a_kernel_of_fixed_shapes_takes_no_rule_by_name():
    rules = (al.register_rule("pallas_call", "i k, k j -> i j"),)
    with pytest.raises(RuleError, match=r"the rule and the op give different results|the op fails"):
        al.plan(
            matmul, *data((64, 32), (32, 16)), cluster=CLUSTER, options=al.PlanOptions(mesh_shape=(8,), rules=rules)
        )


def test_misuse_is_explained():
    with pytest.raises(RuleError, match="and no rule; it takes a rule such as"):
        al.register_rule(matmul)
    with pytest.raises(RuleError, match="check=True goes with a function"):
        al.register_rule("argmax", "i j -> i", check=True)
