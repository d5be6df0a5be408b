"""Functions without a gradient, cut into stages: Alpa's test_inference_only, caches, tied tables, plans from files."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import LayerError, MicrobatchError, ScheduleError
from examples.serving_models import GPT
from tests.marks import slow_but

pytestmark = pytest.mark.medium
CLUSTER = al.Cluster.parse("1x4:cpu")
TWO = al.PlanOptions(num_stages=2)
KEY = jax.random.key(0)


def kernels(*sizes: int) -> list[jax.Array]:
    pairs = itertools.pairwise(sizes)
    return [jax.random.normal(jax.random.fold_in(KEY, i), pair) / 4 for i, pair in enumerate(pairs)]


def mlp(params: Any, x: Any) -> Any:
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return x


def same(found: Any, want: Any, atol: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol)


def stage_of(plan: Any) -> dict[str, int]:
    return {leaf.path: leaf.stage for leaf in plan.inputs}


def test_inference_only():
    params, x = kernels(16, 16, 16, 16, 16), jax.random.normal(KEY, (64, 16))
    step = al.parallelize(mlp, cluster=CLUSTER, options=TWO)
    same(step(params, x), mlp(params, x))
    plan = step.plan(params, x)
    assert [stage_of(plan)[f"0/{i}"] for i in range(4)] == [0, 0, 1, 1]
    assert (plan.pipeline.schedule, len(plan.pipeline.transfers)) == ("inference", 1)
    assert plan.gap < 1e-6  # one stage after the other, each solved exactly
    assert all(report.ok for report in step.compile(params, x).audit())


def test_several_results():
    """A cut in the middle; two results of a batch and a constant, as in Alpa, and an argument."""

    def func(x: Any) -> Any:
        y = x * 2
        return y, al.layer_boundary(y) + 1, 3, x

    x = jnp.ones(32)
    found = al.parallelize(func, cluster=CLUSTER, options=TWO)(x)
    same(found, (jnp.full(32, 2.0), jnp.full(32, 3.0), 3, x))


@pytest.mark.parametrize("donated", [False, True])
def test_what_goes_in_and_out_with_one_type(donated: bool):
    """Activations, that is, which are no next value of one another; whether the caller wants the first one back or not."""

    def func(params: Any, x: Any) -> Any:
        kernels, count = params
        return mlp(kernels, x), count + 1

    params, x = (kernels(16, 16, 16, 16, 16), jnp.zeros(4)), jax.random.normal(KEY, (64, 16))
    want = func(params, x)
    step = al.parallelize(func, cluster=CLUSTER, options=TWO, donate_argnums=1 if donated else ())
    plan = step.plan(params, x)
    assert stage_of(plan)["1"] == 0
    same(step(params, jnp.copy(x)), want)


def test_an_activation_that_keeps_its_name():
    """As a state it would leave nothing to cut."""

    def step(params: Any, x: Any) -> Any:
        h = mlp(params[:2], x["x"])
        return {"x": mlp(params[2:], h), "h": h}

    params, x = kernels(16, 16, 16, 16, 16), {"x": jnp.ones((8, 16))}
    placed = al.parallelize(step, cluster=CLUSTER, options=TWO)
    same(placed(params, x), step(params, x))
    assert len(placed.plan(params, x).stages) == 2
    with pytest.raises(LayerError, match="can be cut into at most 1"):
        al.parallelize(step, cluster=CLUSTER, options=TWO, donate_argnums=1).plan(params, x)


def test_what_cannot_be_cut_is_named():
    def loop(params: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 5, lambda i, x: mlp(params, x), x)

    def recomputed(params: Any, x: Any) -> Any:
        return jax.checkpoint(mlp)(params, x)

    params, x = kernels(16, 16, 16), jnp.ones((8, 16))
    wanted = {loop: "100% of its FLOPs and is one op: scan over parameters", recomputed: "put it around single layers"}
    for fn, words in wanted.items():
        with pytest.raises(LayerError, match=rf"at most 1.* at .*test_forward_stages.py:.*{words}"):
            al.plan(fn, params, x, cluster=CLUSTER, options=TWO)


def test_a_cache_that_two_stages_read_is_carried_by_one():
    """The stage that makes its next value has it, and sends it to the other before each call; its buffer is taken over."""

    def func(params: Any, cache: Any, x: Any) -> Any:
        for kernel in params:
            x = jnp.tanh(x @ kernel + cache["sum"])
        return x, {"sum": 0.5 * cache["sum"] + x.sum(0), "count": cache["count"] + 1}

    params, x = kernels(16, 16, 16, 16, 16), jax.random.normal(KEY, (64, 16))
    cache, want = {"sum": jnp.ones(16), "count": jnp.int32(0)}, {"sum": jnp.ones(16), "count": jnp.int32(0)}
    step = al.parallelize(func, cluster=CLUSTER, options=TWO, donate_argnums=1)
    for _ in range(3):
        before = cache
        found, cache = step(params, cache, x)
        expected, want = func(params, want, x)
        copied = jax.tree.map(jnp.copy, cache)  # JAX 0.11.2 takes over no array that NumPy looked at
        same((found, copied), (expected, want), atol=1e-4)
    assert stage_of(step.plan(params, cache, x))["1/sum"] == 1
    assert before["sum"].is_deleted() and not cache["sum"].is_deleted()


def test_a_table_at_both_ends_lies_with_the_first_and_is_sent():
    def tied(params: Any, tokens: Any) -> Any:
        return mlp(params["layers"], params["table"][tokens]) @ params["table"].T

    params = {"table": jax.random.normal(KEY, (32, 16)), "layers": kernels(16, 16, 16)}
    tokens = jnp.arange(8)
    step = al.parallelize(tied, cluster=CLUSTER, options=TWO)
    same(step(params, tokens), tied(params, tokens))
    plan = step.plan(params, tokens)
    assert stage_of(plan)["0/table"] == 0
    assert [t.when for t in plan.pipeline.transfers if t.tensor == "float32[32,16]"] == ["start"]


def test_casts_and_caches_lie_with_their_layers():
    """All parameters are cast first, all caches are written last, as in an engine's graphs."""

    def cached(params: Any, cache: Any, x: Any) -> Any:
        half = [kernel.astype(jnp.bfloat16) for kernel in params]
        seen = []
        for kernel in half:
            x = jnp.tanh(x.astype(jnp.bfloat16) @ kernel)
            seen.append(x)
        return x, [old.at[0].set(new.astype(old.dtype)) for old, new in zip(cache, seen, strict=True)]

    params, x = kernels(16, 16, 16, 16, 16), jnp.ones((8, 16))
    cache = [jnp.zeros((2, 8, 16))] * 4
    step = al.parallelize(cached, cluster=CLUSTER, options=TWO, donate_argnums=1)
    want = cached(params, cache, x)
    stages = stage_of(step.plan(params, cache, x))
    assert [stages[f"{k}/{i}"] for k in (0, 1) for i in range(4)] == [0, 0, 1, 1] * 2
    found, cache = step(params, [jnp.copy(c) for c in cache], x)
    same((found.astype(jnp.float32), cache), (want[0].astype(jnp.float32), want[1]), 1e-2)  # XLA may keep more digits
    again, _ = step(params, cache, x)  # takes the cache where it lies
    same(again.astype(jnp.float32), want[0].astype(jnp.float32), 1e-2)


@pytest.mark.slow
def test_graphs_of_an_engine():
    model = GPT.of("small")
    params = model.init_params(KEY)
    graphs = al.serve.graphs(model, params, slots=4, max_length=32, buckets=(8,))
    cache = model.init_cache(4, 32)
    prompt = jnp.arange(8)[None]
    given = {"prefill_8": (jnp.int32(1), prompt, jnp.array([5])), "decode": (jnp.arange(4),)}
    for name, (fn, _) in graphs.items():
        step = al.parallelize(fn, cluster=CLUSTER, options=TWO)
        plan = step.plan(params, cache, *given[name])
        blocks = {path.split("/")[1]: stage for path, stage in stage_of(plan).items() if "/block" in path}
        assert blocks == {"block0": 0, "block1": 1}
        want = fn(params, cache, *given[name])
        found = step(params, cache, *given[name])
        same(found, want)
        cache = jax.device_get(found[1])


def test_layers_of_a_scan():
    def scanned(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params)[0]

    params, x = jnp.stack(kernels(16, 16, 16, 16, 16)), jax.random.normal(KEY, (8, 16))
    step = al.parallelize(scanned, cluster=CLUSTER, options=TWO)
    same(step(params, x), scanned(params, x))
    assert stage_of(step.plan(params, x)) == {"0[0:2]": 0, "0[2:4]": 1, "1": 0}


def test_from_a_file(tmp_path):
    params, x = kernels(16, 16, 16), jnp.ones((8, 16))
    plan = al.plan(mlp, params, x, cluster=CLUSTER, options=TWO)
    plan.save(tmp_path / "plan.json")
    again = al.load_plan(tmp_path / "plan.json").bind(mlp, params, x)
    assert again == plan
    same(al.parallelize(mlp, plan=again, cluster=CLUSTER)(params, x), mlp(params, x))


@pytest.mark.parametrize(
    ("fn", "options", "error", "message"),
    [
        (jax.grad(lambda p, x: mlp(p, x).sum()), {}, MicrobatchError, "no al.value_and_grad"),
        (mlp, {"num_microbatches": 2}, MicrobatchError, "no al.value_and_grad"),
        (mlp, {"schedule": "gpipe"}, ScheduleError, "without al.value_and_grad.*forward passes alone"),
    ],
)
def test_what_is_refused(fn, options, error, message):
    with pytest.raises(error, match=message):
        al.plan(
            fn, kernels(16, 16, 16), jnp.ones((8, 16)), cluster=CLUSTER, options=al.PlanOptions(num_stages=2, **options)
        )


def test_rows_that_layers_take():
    """Layers written out over stacked parameters: each stage has the rows that it takes."""

    def written_out(params: Any, x: Any) -> Any:
        for i in range(4):
            x = jnp.tanh(x @ params["w"][i] + params["b"][i])
        return x * params["all"].sum()

    params = {"w": jnp.stack(kernels(16, 16, 16, 16, 16)), "b": jnp.ones((4, 16)), "all": jnp.ones((4, 2))}
    x = jax.random.normal(KEY, (8, 16))
    step = al.parallelize(written_out, cluster=CLUSTER, options=TWO)
    same(step(params, x), written_out(params, x))
    stages = stage_of(step.plan(params, x))
    assert {path: stage for path, stage in stages.items() if "/w" in path} == {"0/w[0:2]": 0, "0/w[2:4]": 1}
    assert "0/all" in stages


@jax.jit
def passed(*values: Any) -> Any:
    """What JAX does not see through while it traces what calls this."""
    return values


def new_leaves(cache: Any, x: Any, h: Any, params: Any) -> dict[str, Any]:
    a, b = cache["a"], cache["b"]
    twice = h + 1
    return {
        "exchanged": passed(b, a),
        "shifted": passed(b, h),
        "the batch": passed(x, x),
        "a parameter and a number": (passed(params[0])[0], passed(jnp.full_like(b, 7))[0]),
        "one new value twice": (twice, twice),
        "an old one twice": passed(a, a),
    }


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("boundaries", slow_but([True], [True, False]))
@pytest.mark.parametrize("what", new_leaves(dict.fromkeys("ab", jnp.ones(2)), jnp.ones(2), jnp.ones(2), [jnp.ones(2)]))
def test_next_values_that_no_op_makes_alone(what: str, boundaries: bool, donated: bool) -> None:
    """Each is an array of its own, and the value that it should be, call after call."""
    params = kernels(16, 16, 16, 16)

    def step(params: Any, cache: Any, x: Any) -> Any:
        h = mlp(params[:2], x + cache["a"])
        h = mlp(params[2:], al.layer_boundary(h) if boundaries else h) + cache["b"]
        return h, dict(zip("ab", new_leaves(cache, x, h, params)[what], strict=True))

    placed = al.parallelize(step, cluster=CLUSTER, options=TWO, donate_argnums=1 if donated else ())
    cache = {"a": jnp.zeros((16, 16)), "b": jnp.ones((16, 16))}
    want = jax.tree.map(jnp.copy, cache)
    for number in range(3):
        x = jax.random.normal(jax.random.fold_in(KEY, number), (16, 16))
        found, cache = placed(params, cache, x)
        expected, want = step(params, want, x)
        same((found, cache), (expected, want))


RESULTS = {
    "a constant array": lambda params, cache, x: (x[:, jnp.array([1, 0, *range(2, 16)])] * np.arange(16.0), cache),
    "parameters turned": lambda params, cache, x: (x, cache, params.transpose(0, 2, 1), 2 * params),
    "an empty cache": lambda params, cache, x: (x, cache * 0),
    "a callback": lambda params, cache, x: (jax.debug.callback(lambda y: None, x), (x, cache))[1],
}


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("what", RESULTS)
def test_results_behind_a_scan_over_layers(what: str, donated: bool) -> None:
    """Its parameters, and a cache, are split by rows."""
    params = jnp.stack(kernels(16, 16, 16, 16, 16))

    def step(params: Any, cache: Any, x: Any) -> Any:
        def layer(x: Any, row: Any) -> Any:
            x = jnp.tanh(x @ row[0] + row[1])
            return x, row[1] + x

        x, cache = jax.lax.scan(layer, x, (params, cache))
        return RESULTS[what](params, cache, x)

    placed = al.parallelize(step, cluster=CLUSTER, options=TWO, donate_argnums=1 if donated else ())
    cache = want = jnp.ones((4, 8, 16))
    want = jnp.copy(want)
    for number in range(2):
        x = jax.random.normal(jax.random.fold_in(KEY, number), (8, 16))
        found, expected = placed(params, cache, x), step(params, want, x)
        same(found, expected)
        cache, want = found[1], expected[1]


def test_a_constant_array_in_the_loss():
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(mlp(params, x)[:, jnp.array([1, 0, 2, 3])] * np.arange(4.0))

    params, x = kernels(16, 16, 16), jax.random.normal(KEY, (8, 16))
    options = al.PlanOptions(num_stages=2, num_microbatches=2)
    step = al.parallelize(lambda p, x: al.value_and_grad(loss)(p, x), cluster=CLUSTER, options=options)
    same(step(params, x), jax.value_and_grad(loss)(params, x))


def test_a_copy_within_a_cache_is_made_part_by_part():
    params = jnp.stack(kernels(16, 16, 16, 16, 16))

    def step(params: Any, cache: Any, x: Any) -> Any:
        def layer(x: Any, row: Any) -> Any:
            x = jnp.tanh(x @ row[0] + row[1][:, 0])
            return x, row[1].at[:, 1].set(x)

        return jax.lax.scan(layer, x, (params, cache))

    placed = al.parallelize(step, cluster=CLUSTER, options=TWO, donate_argnums=1)
    cache, x = jnp.ones((4, 8, 3, 16)), jax.random.normal(KEY, (8, 16))
    _, want = step(params, cache, x)
    _, held = placed(params, cache, x)
    copied = jax.jit(lambda rows: rows.at[:, 3].set(rows[:, 1]))
    assert isinstance(held, al.StagedArray) and len(held.parts) == 2
    same(placed(params, al.StagedArray([copied(part) for part in held.parts]), x), step(params, copied(want), x))
