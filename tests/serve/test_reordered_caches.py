"""Decode graphs that put the slots of a cache in another order, or copy some, before or behind their layers (beam search, a
prompt that several answers share): on stages each reorders the rows of its layers itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.plan.leaf_rows import split_path
from tests.serve.stacked_models import FORMS, LAYERS, WIDTH, Stacked, init_params

SLOTS, LENGTH = 4, 256
ROW_BYTES = SLOTS * LENGTH * WIDTH * 4
OPTIONS: dict[str, Any] = {
    "cluster": al.Cluster.parse("1x2:cpu"),
    "options": al.PlanOptions(num_stages=2),
    "donate_argnums": 1,
}


def reordered(cache: Any, order: jax.Array) -> Any:
    """As beams go on: slot i is what slot ``order[i]`` was."""
    return {name: leaf[order] if name == "length" else leaf[:, order] for name, leaf in cache.items()}


def shared(cache: Any, order: jax.Array) -> Any:
    """The first 8 places of a slot in all others."""

    def copied(leaf: jax.Array) -> jax.Array:
        first = jax.lax.dynamic_index_in_dim(leaf, order[0], 1)[:, :, :8]
        return leaf.at[:, :, :8].set(first)

    return {name: leaf if name == "length" else copied(leaf) for name, leaf in cache.items()}


def graph(form: str, change: Callable[[Any, jax.Array], Any], behind: bool) -> Callable[..., Any]:
    model = Stacked(form)

    def step(params: Any, cache: Any, tokens: jax.Array, order: jax.Array) -> Any:
        logits, cache = model.decode(params, cache if behind else change(cache, order), tokens)
        return logits, change(cache, order) if behind else cache

    return step


def filled(form: str) -> Any:
    cache = Stacked(form).init_cache(SLOTS, LENGTH)
    rows = {name: jax.random.normal(jax.random.key(1), cache[name].shape) for name in ("key", "value")}
    return {**rows, "length": jnp.arange(SLOTS, dtype=jnp.int32) + 3}


def row_stages(layout: al.SharedLayout) -> list[int]:
    """Of each layer's keys."""
    spans = [(split_path(path)[1], stage) for path, (stage, *_) in layout.parameter_layout.items() if "1/key" in path]
    return [stage for rows, stage in spans if rows is not None for _ in range(*rows)]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("form", "change", "behind"), [("rows", reordered, False), ("by number", shared, False), ("rows", reordered, True)]
)
def test_no_cache_is_sent(form: str, change: Callable[..., Any], behind: bool) -> None:
    args = init_params(jax.random.key(0)), filled(form), jnp.arange(SLOTS), jnp.arange(SLOTS)
    plan = al.plan(graph(form, change, behind), *args, **OPTIONS)
    assert plan.pipeline is not None
    assert sum(sent.size_bytes for sent in plan.pipeline.transfers) < ROW_BYTES


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("change", [reordered, shared])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_stages_reorder_their_rows(form: str, change: Callable[..., Any], behind: bool) -> None:
    params, tokens, order = init_params(jax.random.key(0)), jnp.arange(SLOTS), jnp.array([2, 0, 0, 3])
    step = graph(form, change, behind)
    decode = Stacked(form).decode
    args = params, filled(form), tokens
    layout = al.plan_shared({"step": (step, (*args, order)), "decode": (decode, args)}, shared=("0", "1"), **OPTIONS)
    stages = row_stages(layout)
    assert len(stages) == LAYERS and stages == sorted(stages) and {*stages} == {0, 1}
    plan = layout.plans["step"]
    assert plan.pipeline is not None
    assert sum(sent.size_bytes for sent in plan.pipeline.transfers) < ROW_BYTES
    made = al.parallelize(step, plan=plan, donate_argnums=1)
    expected = jax.jit(step)
    ours, theirs = filled(form), filled(form)
    for _ in range(2):
        logits, ours = made(params, ours, tokens, order)
        wanted, theirs = expected(params, theirs, tokens, order)
        np.testing.assert_allclose(np.asarray(logits), wanted, rtol=1e-4, atol=1e-4)
    for ours_leaf, theirs_leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(ours_leaf), theirs_leaf, rtol=1e-4, atol=1e-4)
