"""An engine that runs a joint plan with stages: the tokens of the unsharded model, parameters once, groups of slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import ServeError
from alpa_lite.serve.pipeline import Pipeline
from examples.serving_models import GPT
from tests.marks import slow_but
from tests.serve.engines import STAGED_SIZES as SIZES
from tests.serve.engines import addresses, model_and_params
from tests.serve.engines import staged_expected as expected
from tests.serve.engines import staged_layout as layout
from tests.serve.engines import staged_prompts as prompts

pytestmark = pytest.mark.medium


def held(trees: Any) -> dict[int, int]:
    """Device -> bytes of arrays, or rows of them, there."""
    found: dict[int, int] = {}
    for leaf in jax.tree.leaves(trees):
        for part in getattr(leaf, "parts", (leaf,)):
            for shard in part.addressable_shards:
                found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return found


@pytest.mark.parametrize(("name", "slots"), [("gpt", 8), pytest.param("llama", 4, marks=pytest.mark.slow)])
def test_answers_are_those_of_one_mesh_and_parameters_lie_once(name: str, slots: int) -> None:
    model, params = model_and_params(name)
    planned = layout(name)
    with al.serve.Engine(model, params, planned, **SIZES | {"slots": slots}) as engine:
        assert isinstance(engine.programs, Pipeline) and engine.programs.num_groups == slots // 4
        assert engine.generate(prompts(), max_tokens=8) == expected(name)
        stages = planned.plans["decode"].stages
        wanted = {
            stage.first_device + number: sum(
                int(np.prod(leaf.spec.local_shape(leaf.value.shape, stage.mesh))) * leaf.value.itemsize
                for leaf in planned.shared_leaves
                if leaf.path.startswith("0/") and leaf.stage == k
            )
            for k, stage in enumerate(stages)
            for number in range(stage.mesh.num_devices)
        }
        assert held(engine.params) == wanted
        before = [id(leaf) for leaf in jax.tree.leaves(engine.params)]
        assert engine.generate(prompts()[::-1], max_tokens=8) == expected(name)[::-1]
        assert [id(leaf) for leaf in jax.tree.leaves(engine.params)] == before


@pytest.mark.slow
def test_from_a_file_and_a_checkpoint_of_another_plan(tmp_path: Path) -> None:
    """Rows of stacked parameters are read where they shall lie."""
    model, params = model_and_params("llama")
    step = al.parallelize(lambda state: state, cluster=al.Cluster.parse("1x1:cpu"))
    step.plan({"params": params})
    step.save(tmp_path / "checkpoints", {"params": params}, step=1)
    layout("llama").save(tmp_path / "layout.json")
    stored = al.serve.StoredParams(tmp_path / "checkpoints", jax.eval_shape(lambda: params))
    with al.serve.Engine(model, stored, al.SharedLayout.load(tmp_path / "layout.json"), **SIZES) as engine:
        assert engine.generate(prompts(), max_tokens=8) == expected("llama")


class Louder(GPT):
    def decode(self, params: Any, cache: Any, tokens: Any) -> Any:
        logits, cache = super().decode(params, cache, tokens)
        return 2 * logits, cache


class Shorter(GPT):
    def prefill(self, params: Any, cache: Any, tokens: Any, lengths: Any) -> Any:
        return jax.numpy.zeros((1, 256)), cache


class Early(GPT):
    """Tells the token after a prompt from its embedding alone."""

    def prefill(self, params: Any, cache: Any, tokens: Any, lengths: Any) -> Any:
        _, cache = super().prefill(params, cache, tokens, lengths)
        table = params["tokens"]["embedding"]
        return table[tokens[0, lengths - 1]] @ table.T, cache


@pytest.mark.slow
def test_logits_in_two_places_are_refused() -> None:
    model, params = model_and_params("gpt")
    early = Early(model.config)
    graphs, options = al.serve.graphs(early, params, **SIZES), al.PlanOptions(num_stages=2)
    cluster = al.Cluster.parse("1x4:cpu")
    planned = al.plan_shared(graphs, shared=("0", "1"), cluster=cluster, donate_argnums=1, options=options)
    with pytest.raises(
        ServeError, match=r"the logits of 'prefill_8' are made on .*, those of 'decode' on .*test_staged_layout"
    ):
        al.serve.Engine(early, params, planned, **SIZES)


def test_what_does_not_fit_is_refused() -> None:
    model, params = model_and_params("gpt")
    planned = layout("gpt")
    for given, message in (
        ({"slots": 6}, r"slots=6 was given, and the layout is for 4.*test_staged_layout"),
        ({"num_stages": 3}, r"a layout of 2 stages was given with num_stages=3"),
        ({"executor": "ray", "slots": 6}, r"slots=6 was given, and the layout is for 4.*test_staged_layout"),
        ({"buckets": (8, 16)}, r"the layout has no plan for 'prefill_16'"),
        ({"max_length": 24}, r"the leaf '1/block0/key' is .*4, 8, 32, .* there and .*4, 8, 24, .* here"),
    ):
        with pytest.raises(ServeError, match=message):
            al.serve.Engine(model, params, planned, **SIZES | given)
    graphs = al.serve.graphs(model, params, **SIZES)
    # Where cache and parameters are on different stages for different graphs, no graph can be planned again by itself.
    options = al.PlanOptions(num_stages=2)
    alone = al.plan_shared(graphs, shared="0", cluster=al.Cluster.parse("1x4:cpu"), donate_argnums=1, options=options)
    with pytest.raises(
        ServeError, match=r"the leaf of the cache '1/block0/key' lies as .*test_staged_layout.*shared=\(\"0\", \"1\"\)"
    ):
        al.serve.Engine(model, params, alone, **SIZES)
    for other, shown in ((Louder, "connected or may be split"), (Shorter, "it has other layers")):
        with pytest.raises(
            ServeError, match=rf"of another model, as its plan of '.*' shows: .*{shown}.*test_staged_layout"
        ):
            al.serve.Engine(other(model.config), params, planned, **SIZES)
    one_mesh = al.plan_shared(graphs, shared=("0", "1"), cluster=al.Cluster.parse("1x2:cpu"), donate_argnums=1)
    with pytest.raises(ServeError, match=r"num_stages=2 was given with a layout of one mesh"):
        al.serve.Engine(model, params, one_mesh, num_stages=2, **SIZES)


@pytest.mark.slow
def test_caches_of_all_groups_count() -> None:
    """Of a layout without pins."""
    model, params = model_and_params("gpt")
    options = al.PlanOptions(num_stages=2, memory_budget_bytes=500_000)
    tight = al.plan_shared(
        al.serve.graphs(model, params, **SIZES),
        shared=("0", "1"),
        cluster=al.Cluster.parse("1x2:cpu"),
        donate_argnums=1,
        options=options,
    )
    with al.serve.Engine(model, params, tight, **SIZES) as engine:
        assert engine.generate(prompts()[:2], max_tokens=8) == expected("gpt")[:2]
    with pytest.raises(
        ServeError,
        match=r"needs .* with the cache of one of 4 groups of slots, 64.0 KiB, and 192 KiB.*the budget is 488 KiB",
    ):
        al.serve.Engine(model, params, tight, **SIZES | {"slots": 16})


@pytest.mark.parametrize("name", slow_but({"decode"}, ["decode", "prefill_8"]))
def test_the_cache_is_written_in_place(name: str) -> None:
    """It is there once, as the plan counts it, and the next call finds it where it was."""
    model, params = model_and_params("gpt")
    graphs = al.serve.graphs(model, params, **SIZES)
    options = al.PlanOptions(num_stages=2)
    planned = al.plan_shared(
        graphs, shared=("0", "1"), cluster=al.Cluster.parse("1x2:cpu"), donate_argnums=1, options=options
    )
    fn, shapes = graphs[name]
    step = al.parallelize(fn, plan=planned.plans[name], donate_argnums=1)
    cache = jax.tree.map(lambda x: jax.numpy.ones(x.shape, x.dtype), shapes[1])
    rest = [np.ones(x.shape, x.dtype) for x in shapes[2:]]
    for stage in step.compile(params, cache, *rest).memory():
        assert stage.peak_bytes == pytest.approx(stage.predicted_bytes, rel=0.05)  # the cache is a sixth of it
    _, cache = step(params, cache, *rest)  # from here on it lies on its stages
    before = addresses(cache)
    _, again = step(params, cache, *rest)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache)) and addresses(again) == before
