"""``al.plan_shared`` with stages: what is shared lies on one stage in all graphs, whatever its dtype and shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import LayerError
from tests.plan_shared.stages import TWO, shape

CLUSTER = al.Cluster.parse("1x2:cpu")
KEY = jax.random.key(0)


def plain(params: Any, x: Any) -> Any:
    return jnp.tanh(al.layer_boundary(jnp.tanh(x @ params["a"])) @ params["b"])


def params_with(leaf: Any) -> dict[str, Any]:
    return {"a": shape(64, 64, dtype=jnp.float32), "b": shape(64, 64, dtype=jnp.float32), "s": leaf}


def batch(size: int) -> Any:
    return shape(size, 64, dtype=jnp.float32)


READERS = {
    "float32[]": lambda p, x: plain(p, x) * p["s"],
    "bool[64]": lambda p, x: jnp.where(p["s"], plain(p, x), 0),
    "int32[64]": lambda p, x: plain(p, x) + p["s"],
    "int8[64,64]": lambda p, x: plain(p, x) @ p["s"].astype(jnp.float32),
}
LEAVES = {
    "float32[]": shape(dtype=jnp.float32),
    "bool[64]": shape(64, dtype=jnp.bool_),
    "int32[64]": shape(64, dtype=jnp.int32),
    "int8[64,64]": shape(64, 64, dtype=jnp.int8),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", READERS)
def test_a_leaf_that_one_graph_reads(name):
    """Behind the cut: without a reader it would lie on the first stage."""
    params = params_with(LEAVES[name])
    graphs = {"reads": (READERS[name], (params, batch(8))), "not": (plain, (params, batch(4)))}
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=TWO)
    stages = [{leaf.path: leaf.stage for leaf in plan.inputs} for plan in layout.plans.values()]
    assert stages == [{"0/a": 0, "0/b": 1, "0/s": 1, "1": 0}] * 2
    assert not list(layout.faults())
    assert al.plan(plain, params, batch(2), cluster=CLUSTER, follow=layout).specs_by_path.keys() >= {"0/s"}


def test_rows_of_a_table_are_sent_and_not_the_table():
    """Rows of codes are looked up where the codes lie, and read again behind the cut."""

    def looked_up(params: Any, tokens: Any) -> Any:
        x = params["s"][tokens].astype(jnp.float32) * 0.1
        return plain(params, x) + x

    params = params_with(shape(1000, 64, dtype=jnp.int8))
    graphs = {f"{n}": (looked_up, (params, shape(n, dtype=jnp.int32))) for n in (4, 8)}
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=TWO)
    assert layout.parameter_layout["0/s"][0] == 0
    for name, plan in layout.plans.items():
        assert {t.tensor for t in plan.pipeline.transfers} == {f"float32[{name},64]"}


def quantised(params: Any, x: Any) -> Any:
    """The codes of the first layer are read in both, in other ops; a scale of all, one of the second layer, and a mask."""
    kernel = params["codes"][0].astype(jnp.float32) * params["scale"]
    x = jnp.tanh(x @ kernel)
    x = al.layer_boundary(jnp.where(params["mask"], x, 0.0))
    x = x @ (params["codes"][1].astype(jnp.float32) * params["scale"] * params["second"])
    return x @ kernel.T


def late(params: Any, x: Any) -> Any:
    """Does not read the scale of the second layer."""
    return quantised({**params, "second": jnp.ones(())}, x)


def quantised_params() -> dict[str, Any]:
    codes = [jax.random.randint(jax.random.fold_in(KEY, i), (64, 64), -127, 127, jnp.int8) for i in range(2)]
    mask = jnp.arange(64) % 3 > 0
    return {"codes": codes, "scale": jnp.float32(1e-3), "second": jnp.float32(2.0), "mask": mask}


@pytest.mark.medium
def test_quantised_parameters_run_from_one_copy(tmp_path):
    """From a file, too: nothing but the plan says there that codes are no batch."""
    params, x = quantised_params(), jax.random.normal(KEY, (8, 64))
    graphs = {"all": (quantised, (params, x)), "late": (late, (params, x[:4]))}
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=TWO)
    layout.save(tmp_path / "layout.json")
    layout = al.SharedLayout.load(tmp_path / "layout.json")
    lies = {path: stage for path, (stage, _) in layout.parameter_layout.items()}
    assert lies == {"0/codes/0": 0, "0/codes/1": 1, "0/scale": 0, "0/second": 1, "0/mask": 0}
    for name, (fn, args) in graphs.items():
        plan = layout.plans[name]
        own = [leaf.path for stage in plan.stages for leaf in stage.inputs if leaf.path in lies]
        sent = [t for t in plan.pipeline.transfers if t.when == "start"]
        assert len(own) == len(lies) + len(sent)  # each an argument of one stage
        step = al.parallelize(fn, plan=plan, cluster=CLUSTER)
        np.testing.assert_allclose(step(*args), jax.jit(fn)(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_who_follows_the_layout_has_them_there(tmp_path):
    """A function that reads nothing of the second stage's codes."""
    params, x = quantised_params(), jax.random.normal(KEY, (8, 64))
    graphs = {"all": (quantised, (params, x)), "late": (late, (params, x[:4]))}
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=TWO)

    def first(params: Any, x: Any) -> Any:
        return al.layer_boundary(x @ params["codes"][0].astype(jnp.float32)) * params["second"]

    for followed in (layout, layout.plans["all"]):
        plan = al.plan(first, params, x, cluster=CLUSTER, follow=followed)
        stages = {leaf.path: leaf.stage for leaf in plan.inputs if leaf.path != "1"}
        assert stages == {path: stage for path, (stage, _) in layout.parameter_layout.items()}
        plan.save(tmp_path / "plan.json")
        again = al.load_plan(tmp_path / "plan.json").bind(first, params, x)
        step = al.parallelize(first, plan=again, cluster=CLUSTER)
        np.testing.assert_allclose(step(params, x), first(params, x), rtol=1e-4, atol=1e-4)


def test_a_leaf_that_a_training_step_copies_is_named():
    """Its stages are as without other graphs: whole numbers are copied to the stages that read them."""

    def scaled(params: Any, x: Any) -> Any:
        return plain(params, x) * params["s"][0]

    def train(params: Any, x: Any) -> Any:
        def loss(weights: Any, x: Any) -> Any:
            first = jnp.tanh(x @ weights["a"]) * params["s"][0]
            return jnp.mean((al.layer_boundary(first) @ weights["b"]) ** 2) * params["s"][0]

        return al.value_and_grad(loss)({"a": params["a"], "b": params["b"]}, x)

    params = params_with(shape(1, dtype=jnp.int32))
    graphs = {"train": (train, (params, batch(8))), "scaled": (scaled, (params, batch(4)))}
    with pytest.raises(
        LayerError,
        match=r"the shared leaf '0/s' lies on stage 0 and 1 in the graph 'train' and on stage \d in the graph 'scaled', so that "
        r"stage \d has other leaves.* At .*\. .*Read it in the same layers of both, .* take this leaf out of shared\.",
    ):
        al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=TWO)


@pytest.mark.medium
def test_a_layout_is_followed_by_all_its_graphs_together():
    """Leaves that one of them reads on another stage than their own do not say where the layers of all end."""
    params = {"table": jnp.ones((12, 8)), "bias": jnp.ones(8), "a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}

    def part(w):
        return w / (1 + jnp.abs(w).sum(0, keepdims=True))

    def begun(p, x):
        return x + p["table"][jnp.abs(x[:, 0]).astype(jnp.int32) % 12] + p["bias"]

    def plain(p, x):
        return jnp.tanh(jnp.tanh(begun(p, x) @ p["a"]) @ p["b"])

    def tied(p, x):
        return plain(p, x) @ p["table"].T, part(p["b"])

    def looked_up(p, x):
        x = jnp.tanh(begun(p, x) @ p["a"])
        x = x + jax.nn.softmax(x @ p["table"].T) @ p["table"]
        return jnp.tanh(x @ p["b"]), part(p["a"])

    args = params, jnp.ones((8, 8))
    graphs = {"tied": (tied, args), "plain": (plain, args), "looked_up": (looked_up, args)}
    settings: Any = {"shared": "0", "cluster": CLUSTER, "weights": {"plain": 10}}
    layout = al.plan_shared(graphs, options=al.PlanOptions(num_stages=2), **settings)
    again = al.plan_shared(graphs, follow=layout, **settings)
    assert again.parameter_layout == layout.parameter_layout
    assert again.objective == pytest.approx(layout.objective)
