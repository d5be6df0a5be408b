"""Models whose cache is one array for all layers, on stages: each stage has the rows of its layers, and writes them in place."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.plan.leaf_rows import split_path
from tests.serve.engines import addresses
from tests.serve.stacked_models import FORMS, LAYERS, Stacked, init_params

PROMPTS = [[1, 2, 3], [5], [7, 8], [1, 2]]
SIZES: dict[str, Any] = {"slots": 4, "max_length": 16, "buckets": (4,)}
QUICK = ("carried",)


@cache
def params() -> Any:
    return init_params(jax.random.key(0))


def planned(form: str, sizes: Any, donated: tuple[int, ...] = (1,)) -> tuple[Any, al.SharedLayout]:
    graphs = al.serve.graphs(Stacked(form), params(), **sizes)
    cluster, options = al.Cluster.parse("1x2:cpu"), al.PlanOptions(num_stages=2)
    return graphs, al.plan_shared(graphs, shared=("0", "1"), cluster=cluster, donate_argnums=donated, options=options)


@pytest.mark.parametrize("form", [f if f == "carried" else pytest.param(f, marks=pytest.mark.slow) for f in FORMS])
@pytest.mark.parametrize(("cluster", "stages"), [("1x8:cpu", 2), pytest.param("1x4:cpu", 4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_where_stages_end_behind_a_scan(form: str, cluster: str, stages: int) -> None:
    """There are more layers to cut into than rows, so that a cut lies behind what the scan makes for the cache."""
    graphs = al.serve.graphs(Stacked(form), params(), **SIZES)
    options = al.PlanOptions(num_stages=stages)
    settings: Any = {"cluster": al.Cluster.parse(cluster), "donate_argnums": 1, "options": options}
    layout = al.plan_shared(graphs, shared=("0", "1"), **settings)
    found = {path: layout.parameter_layout[path][0] for path in layout.parameter_layout if path.startswith("1/key")}
    assert list(found) == [f"1/key[{i}:{i + 1}]" for i in range(LAYERS)]
    assert list(found.values()) == [i * stages // LAYERS for i in range(LAYERS)]
    # Masks and positions are made where they are read; per slot an activation and its length cross.
    decode = layout.plans["decode"].pipeline
    assert decode is not None and sum(t.size_bytes for t in decode.transfers) == (stages - 1) * 4 * (16 + 1) * 4


@cache
def expected() -> Any:
    with al.serve.Engine(Stacked("rows"), params(), **SIZES) as engine:
        return engine.generate(PROMPTS, max_tokens=8)


@pytest.mark.medium
@pytest.mark.parametrize("form", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FORMS])
def test_rows_lie_with_their_layers(form: str) -> None:
    _, layout = planned(form, SIZES)
    stages: dict[str, list[int]] = {}
    for leaf in layout.shared_leaves:
        path, rows = split_path(leaf.path)
        if rows is not None:
            stages.setdefault(path, []).extend([leaf.stage] * (rows[1] - rows[0]))
    whole = (
        () if form in ("written out", "by number") else ("0/blocks/up",)
    )  # there a cut may lie between attention and what follows it
    for path in ("1/key", "1/value", "0/blocks/query", *whole):
        assert stages[path] == [0] * (LAYERS // 2) + [1] * (LAYERS // 2)
    with al.serve.Engine(Stacked(form), params(), layout, **SIZES | {"slots": 8}) as engine:
        assert engine.generate(PROMPTS, max_tokens=8) == expected()


@pytest.mark.parametrize("form", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FORMS])
@pytest.mark.slow
def test_rows_of_a_cache_that_stays_are_copied_on_their_stages(form: str) -> None:
    graphs, layout = planned(form, {"slots": 8, "max_length": 256, "buckets": (8,)}, donated=())
    row = 8 * 256 * 16 * 4
    for name, (fn, shapes) in graphs.items():
        plan = layout.plans[name]
        assert plan.pipeline is not None
        sent = sum(sent.size_bytes for sent in plan.pipeline.transfers)
        assert sent < row or form in ("written out", "by number")  # as below
        step = al.parallelize(fn, plan=plan)
        held = jax.tree.map(lambda x: jax.numpy.ones(x.shape, x.dtype), shapes[1])
        rest = [np.ones(x.shape, x.dtype) for x in shapes[2:]]
        for stage in step.compile(params(), held, *rest).memory():
            assert 0.9 * stage.peak_bytes <= stage.predicted_bytes <= 1.15 * stage.peak_bytes
        for ours, theirs in zip(
            jax.tree.leaves(step(params(), held, *rest)), jax.tree.leaves(fn(params(), held, *rest)), strict=True
        ):
            np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-4, atol=1e-4)
        assert all(np.all(np.asarray(leaf) == 1) for leaf in jax.tree.leaves(held))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_row_of_a_cache_is_sent_and_each_is_counted_as_xla_counts_it(form: str) -> None:
    graphs, layout = planned(form, {"slots": 8, "max_length": 256, "buckets": (8,)})
    row = 8 * 256 * 16 * 4
    for name, (fn, shapes) in graphs.items():
        plan = layout.plans[name]
        assert plan.pipeline is not None
        sent = sum(sent.size_bytes for sent in plan.pipeline.transfers)
        assert sent < row or form in (
            "written out",
            "by number",
        )  # there a cut may lie within a layer, which has its new row already
        step = al.parallelize(fn, plan=plan, donate_argnums=1)
        held = jax.tree.map(lambda x: jax.numpy.ones(x.shape, x.dtype), shapes[1])
        rest = [np.ones(x.shape, x.dtype) for x in shapes[2:]]
        for stage in step.compile(params(), held, *rest).memory():
            assert 0.9 * stage.peak_bytes <= stage.predicted_bytes <= 1.15 * stage.peak_bytes
        _, held = step(params(), held, *rest)
        before = addresses(held)
        _, again = step(params(), held, *rest)
        assert addresses(again) == before
