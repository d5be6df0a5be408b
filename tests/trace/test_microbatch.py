"""``al.value_and_grad``: m microbatches equal a plain loop over slices of the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import MemoryBudgetError, MicrobatchError
from alpa_lite.trace.microbatch import microbatches
from tests.trace.cases import floats

X, Y = floats(16, 6), np.linspace(-1, 1, 16 * 3, dtype=np.float32).reshape(16, 3)
W = {"a": floats(6, 8), "b": np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)}


def mse(params: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(batch[0] @ params["a"]) @ params["b"] - batch[1]) ** 2)


def slices(tree: Any, count: int) -> list[Any]:
    """Every ``count``-th example, starting from the first, the second, ..."""
    return [jax.tree.map(lambda x, i=i: x[i::count], tree) for i in range(count)]


def interleaved(parts: list[Any], axis: int = 0) -> Any:
    joined = jnp.stack(parts, axis + 1)
    return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])


def mean(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: sum(xs) / len(xs), *trees)


def close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


def in_microbatches(f: Any, count: int, *args: Any, **kwargs: Any) -> Any:
    """``f(*args)`` as a plan for ``count`` microbatches traces it."""
    with microbatches(count):
        return f(*args, **kwargs)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.medium
def test_equals_a_plain_loop(count, reduction):
    loss = mse if reduction == "mean" else lambda p, b: 16 * mse(p, b)
    got = in_microbatches(al.value_and_grad(loss, reduction=reduction), count, W, (X, Y))
    parts = [jax.value_and_grad(loss)(W, part) for part in slices((X, Y), count)]
    close(got, mean(parts) if reduction == "mean" else jax.tree.map(lambda *xs: sum(xs), *parts))


@pytest.mark.medium
def test_outside_of_plans_it_is_jax():
    close(al.value_and_grad(mse)(W, (X, Y)), jax.value_and_grad(mse)(W, (X, Y)))
    close(al.grad(mse)(W, (X, Y)), jax.grad(mse)(W, (X, Y)))


@pytest.mark.medium
def test_grad_and_several_argnums():
    loss = lambda a, batch, b: mse({"a": a, "b": b}, batch)  # noqa: E731
    got = in_microbatches(al.grad(loss, argnums=(0, 2)), 4, W["a"], (X, Y), W["b"])
    close(got, mean([jax.grad(loss, (0, 2))(W["a"], part, W["b"]) for part in slices((X, Y), 4)]))


@pytest.mark.medium
def test_auxiliary_results():
    def loss(params, batch, step):
        p = jnp.tanh(batch[0] @ params["a"]) @ params["b"]
        hits = jnp.sum(p > 0)
        return jnp.mean((p - batch[1]) ** 2), {"p": p, "hits": hits, "mean": p.mean(0), "step": step, "t": p.T}

    (value, aux), grads = in_microbatches(al.value_and_grad(loss, has_aux=True), 4, W, (X, Y), jnp.int32(7))
    parts = [jax.value_and_grad(loss, has_aux=True)(W, part, jnp.int32(7)) for part in slices((X, Y), 4)]
    auxes = [a for (_, a), _ in parts]
    close((value, grads), mean([(v, g) for (v, _), g in parts]))
    close(aux["p"], interleaved([a["p"] for a in auxes]))
    close(aux["t"], interleaved([a["t"] for a in auxes], axis=1))
    close(aux["mean"], mean([a["mean"] for a in auxes]))
    assert aux["hits"] == sum(a["hits"] for a in auxes)
    assert aux["step"] == 7
    assert aux["hits"].dtype == jnp.int32


@pytest.mark.medium
def test_batch_axes_per_leaf():
    def loss(params, batch):
        return mse(params, (batch["x"].T, batch["y"])) * batch["scale"] + batch["table"].sum()

    batch = {"x": X.T, "y": Y, "scale": jnp.float32(2.0), "table": jnp.ones((5,))}
    axes = {"x": -1, "y": 0, "scale": None, "table": None}
    got = in_microbatches(al.value_and_grad(loss, batch_axes=axes), 4, W, batch)
    parts = [batch | {"x": x.T, "y": y} for x, y in slices((X, Y), 4)]
    close(got, mean([jax.value_and_grad(loss)(W, part) for part in parts]))


@pytest.mark.medium
def test_two_batch_arguments_and_keywords():
    loss = lambda p, x, y, scale: mse(p, (x, y)) * scale  # noqa: E731
    got = in_microbatches(al.value_and_grad(loss, batch_argnums=(1, 2), batch_axes=(0, 0)), 2, W, X, Y, scale=3.0)
    close(got, mean([jax.value_and_grad(loss)(W, *part, scale=3.0) for part in slices((X, Y), 2)]))


@pytest.mark.medium
@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
@pytest.mark.parametrize("closed_over", [True, False])
@pytest.mark.parametrize("fold", [True, False])
def test_keys_are_folded_with_the_index(key, closed_over, fold):
    def loss(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch[0].shape)
        return mse(params, (batch[0] * kept, batch[1]))

    def run(params, batch, key):
        if closed_over:
            return al.value_and_grad(lambda p, b: loss(p, b, key), fold_keys=fold)(params, batch)
        return al.value_and_grad(loss, fold_keys=fold)(params, batch, key)

    got = in_microbatches(jax.jit(run), 4, W, (X, Y), key)
    keys = [jax.random.fold_in(key, i) if fold else key for i in range(4)]
    parts = [jax.value_and_grad(loss)(W, part, k) for part, k in zip(slices((X, Y), 4), keys, strict=True)]
    close(got, mean(parts))


@pytest.mark.medium
def test_half_precision_is_added_up_in_single():
    def loss(params, batch):
        return mse(jax.tree.map(lambda w: w.astype(jnp.float32), params), batch)

    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), W)
    _, grads = in_microbatches(al.value_and_grad(loss), 8, low, (X, Y))
    parts = [jax.grad(loss)(low, part) for part in slices((X, Y), 8)]
    wide = mean([jax.tree.map(lambda g: g.astype(jnp.float32), g) for g in parts])
    assert grads["a"].dtype == jnp.bfloat16
    assert jnp.array_equal(grads["a"], wide["a"].astype(jnp.bfloat16))


# -- under a plan ---------------------------------------------------------------------------------------------------


def train(params, batch):
    loss, grads = al.value_and_grad(mse)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.medium
@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_planned_step_equals_a_plain_loop(mesh):
    names = ("x", "y")[: len(mesh)]
    pins = {"1/0": P("x"), "0/a": P(None, "y") if len(mesh) > 1 else None}
    options = al.PlanOptions(mesh_shape=mesh, axis_names=names)
    cluster = al.Cluster.parse("1x8:cpu")
    step = al.parallelize(train, cluster=cluster, pins=pins, num_microbatches=2, options=options)
    parts = [jax.value_and_grad(mse)(W, part) for part in slices((X, Y), 2)]
    loss, grads = mean(parts)
    close(step(W, (X, Y)), (jax.tree.map(lambda p, g: p - 0.1 * g, W, grads), loss))
    report = step.compile(W, (X, Y)).audit()
    assert not report.unplanned
    assert not report.missing
    assert step.plan(W, (X, Y)).parameter_layout.keys() == {"0/a", "0/b"}


def test_gradients_are_summed_over_devices_once_per_step():
    """Partial sums stay on their devices while microbatches are added up, however many there are."""
    params = {"a": jnp.zeros((256, 1024)), "b": jnp.zeros((1024, 64))}
    batch = jnp.zeros((65536, 256)), jnp.zeros((65536, 64))
    runs = {}
    for count in (2, 8):
        plan = al.plan(
            train,
            params,
            batch,
            cluster=al.Cluster.parse("1x8:h100-sxm"),
            pins={"0/**": P(), "1/**": P("x")},
            options=al.PlanOptions(mesh_shape=(8,), num_microbatches=count),
        )
        runs[count] = sum(c.count for c in plan.collectives if c.kind in ("all-reduce", "reduce-scatter"))
    assert runs == {2: 3, 8: 3}  # two gradients and the loss


@pytest.mark.medium
def test_saved_plan_knows_its_microbatches(tmp_path):
    cluster = al.Cluster.parse("1x8:cpu")
    plan = al.plan(train, W, (X, Y), cluster=cluster, options=al.PlanOptions(mesh_shape=(8,), num_microbatches=4))
    plan.save(tmp_path / "plan.json")
    loaded = al.load_plan(tmp_path / "plan.json").bind(train, W, (X, Y))
    close(al.parallelize(train, plan=loaded)(W, (X, Y)), al.parallelize(train, plan=plan)(W, (X, Y)))


@pytest.mark.medium
def test_auto_takes_the_fewest_that_fit():
    batch = jax.ShapeDtypeStruct((4096, 6), jnp.float32), jax.ShapeDtypeStruct((4096, 3), jnp.float32)

    cluster = al.Cluster.parse("1x1:h100-sxm")

    def peak(count: int) -> int:
        options = al.PlanOptions(num_microbatches=count)
        return al.plan(train, W, batch, cluster=cluster, options=options).memory.peak

    # Two microbatches need no less than one: the batch in slices is a copy, and here the batch is most of the memory.
    sizes = {count: peak(count) for count in (1, 2, 4, 8)}
    assert sizes[8] < sizes[4] < min(sizes[1], sizes[2])
    budgets = {1: 2 * sizes[1], 4: (sizes[4] + min(sizes[1], sizes[2])) // 2, 8: (sizes[4] + sizes[8]) // 2}
    for want, budget in budgets.items():
        options = al.PlanOptions(num_microbatches="auto", memory_budget_bytes=budget)
        plan = al.plan(train, W, batch, cluster=cluster, options=options)
        assert dict(plan.options).get("num_microbatches", 1) == want
        assert any("num_microbatches='auto'" in note for note in plan.notes)
    with pytest.raises(MemoryBudgetError, match="smallest possible peak"):
        al.plan(
            train,
            W,
            batch,
            cluster=cluster,
            options=al.PlanOptions(num_microbatches="auto", memory_budget_bytes=10),
        )


# -- bad input ------------------------------------------------------------------------------------------------------


def planned(step: Any, count: int = 4, batch: Any = (X, Y)) -> Any:
    options = al.PlanOptions(mesh_shape=(8,), num_microbatches=count)
    return al.plan(step, W, batch, cluster=al.Cluster.parse("1x8:cpu"), options=options)


def refused(call: Any, *parts: str) -> None:
    with pytest.raises(MicrobatchError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_batch_that_does_not_divide():
    refused(lambda: planned(train, 5), "num_microbatches=5", "'1/0'", "(16, 6)", "1, 2, 4, 8, 16")


def test_step_without_a_marked_gradient():
    plain = lambda p, b: jax.grad(mse)(p, b)  # noqa: E731
    asked = "num_microbatches=4, and the step has no al.value_and_grad"
    searched = al.PlanOptions(num_microbatches=4)  # and stages are searched, which nobody asked for
    refused(lambda: al.plan(plain, W, (X, Y), cluster=al.Cluster.parse("1x8:cpu"), options=searched), asked)
    refused(lambda: planned(plain), "no al.value_and_grad", "leave num_microbatches at 1", "test_microbatch.py")


def test_two_gradients():
    def step(params, batch):
        return al.grad(mse)(params, batch), al.grad(lambda p, b: mse(p, b) ** 2)(params, batch)

    refused(lambda: planned(step), "2 gradients", "test_microbatch.py", "sum of the losses")


def test_gradient_inside_a_loop():
    def step(params, batch):
        return jax.lax.fori_loop(0, 2, lambda _, p: al.grad(mse)(p, batch), params)

    refused(lambda: planned(step), "inside a loop or branch", "test_microbatch.py")


def test_inner_jit_that_was_traced_for_another_number():
    inner = jax.jit(lambda p, b: al.grad(mse)(p, b))
    step = lambda p, b: inner(p, b)  # noqa: E731
    planned(step, 4)
    refused(lambda: planned(step, 2), "traced for 4", "num_microbatches=2", "Take jax.jit off")
    refused(lambda: planned(step, 1), "traced for 4")


@pytest.mark.parametrize(
    ("settings", "args", "parts"),
    [
        ({"reduction": "max"}, (), ["reduction='max'", "'mean' and 'sum'"]),
        ({"batch_argnums": (5,)}, (W, (X, Y)), ["batch_argnums=(5,)", "mse", "2 positional"]),
        ({"batch_axes": {"z": 0}}, (W, (X, Y)), ["batch_axes={'z': 0}", "argument 1"]),
        ({"batch_axes": 3}, (W, (X, Y)), ["'1/0'", "no dim 3", "batch_axes=None"]),
        ({"batch_argnums": (0, 1), "batch_axes": (0, 0, 0)}, (W, (X, Y)), ["2 batch arguments"]),
    ],
)
def test_wrong_settings(settings, args, parts):
    refused(lambda: in_microbatches(al.value_and_grad(mse, **settings), 2, *args), *parts)


def test_auxiliary_results_that_cannot_be_joined():
    flag = lambda p, b: (mse(p, b), {"flag": b[0].sum() > 0})  # noqa: E731
    gram = lambda p, b: (mse(p, b), {"gram": b[0] @ b[0].T})  # noqa: E731
    for loss, parts in ((flag, ["'flag'", "bool"]), (gram, ["'gram'", "(4, 4)", "(16, 16)"])):
        refused(lambda loss=loss: in_microbatches(al.value_and_grad(loss, has_aux=True), 4, W, (X, Y)), *parts)
