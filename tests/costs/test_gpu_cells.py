"""Predicted memory against XLA:GPU's, compiled for H100s without one: a few quick cells of the table in docs/memory.md."""

from __future__ import annotations

import importlib.util

import pytest

import alpa_lite as al
from examples.registry import EXAMPLES

NO_COMPILER = any(importlib.util.find_spec(module) is None for module in ("jax_cuda12_plugin", "flatbuffers"))
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="XLA:GPU is not installed: pip install 'alpa-lite[aot]'")
MEMORY_BOUNDS = (0.95, 1.10)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "size", "mesh"),
    [("mlp", "small", (8,)), ("lstm", "small", (2, 4)), ("mlp", "base", (2, 4)), ("lstm", "base", (2, 2, 2))],
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
