"""Predicted memory against XLA:GPU's, compiled for H100s without one: a few quick cells of the table in docs/memory.md."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from benchmarks.models import gpt_config, pipelined
from examples.registry import EXAMPLES

NO_COMPILER = any(importlib.util.find_spec(module) is None for module in ("jax_cuda12_plugin", "flatbuffers"))
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="XLA:GPU is not installed: pip install 'alpa-lite[aot]'")
MEMORY_BOUNDS = (0.95, 1.10)
# Strict: once the model knows what XLA of JAX 0.12 does there, this mark must go.
BEFORE_JAX_12 = pytest.mark.xfail(
    jax.__version_info__ >= (0, 12), reason="XLA of JAX 0.12 packs its heap closer: 1.17 (docs/memory.md)", strict=True
)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "size", "mesh"),
    [
        ("mlp", "small", (8,)),
        ("lstm", "small", (2, 4)),
        ("mlp", "base", (8,)),
        ("mlp", "base", (2, 4)),
        pytest.param("lstm", "base", (2, 2, 2), marks=BEFORE_JAX_12),
        pytest.param("gpt_linen", "base", (2, 4), marks=pytest.mark.slow),
        pytest.param("gpt_linen", "base", (4, 2), marks=pytest.mark.slow),
    ],
)
def test_memory_and_collectives_are_as_predicted(name: str, size: str, mesh: tuple[int, ...]) -> None:
    example = EXAMPLES[name](size)
    fn, args = example.train_step, example.abstract_args()
    options = al.PlanOptions(mesh_shape=mesh)
    plan = al.plan(fn, *args, cluster=al.Cluster.parse("1x8:h100-sxm"), options=options, donate_argnums=0)
    report = plan.verify(fn, *args)
    assert MEMORY_BOUNDS[0] <= plan.memory.peak / report.target.peak_bytes <= MEMORY_BOUNDS[1]
    assert not report.audit.unplanned and not report.audit.missing
    assert bool(plan.collectives) is (size == "base")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_memory_of_microbatches_with_weights_split_over_both_axes(num_microbatches: int) -> None:
    """Recomputed layers in a loop: gradients pass barriers, and the logits' gradient lies over the logits."""
    fn, args = pipelined(replace(gpt_config(4, 1024, 16), batch_size=64))
    weights = ("layers/*/query", "layers/*/key", "layers/*/value", "layers/*/out", "layers/*/up", "layers/*/down")
    pins = {f"0/params/{name}": P("data", "model") for name in (*weights, "embed", "positions")}
    options = al.PlanOptions(mesh_shape=(2, 4), axis_names=("data", "model"), num_microbatches=num_microbatches)
    cluster = al.Cluster.parse("1x8:h100-sxm")
    plan = al.plan(fn, *args, cluster=cluster, options=options, donate_argnums=0, pins=pins)
    report = plan.verify(fn, *args)
    assert MEMORY_BOUNDS[0] <= report.memory_ratio <= MEMORY_BOUNDS[1]
    assert not report.audit.unplanned and not report.audit.missing
