"""All examples on all meshes: numbers equal the unsharded run, what is compiled is what is planned, memory as predicted.

The MLP on one mesh is quick; ``-m slow`` runs the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.executor.local import CompiledStep
from alpa_lite.lowering.audit import AuditReport
from examples.registry import EXAMPLES

MESHES = ((8,), (2, 4), (2, 2, 2))
QUICK = ("mlp", (2, 2, 2))
TOLERANCE = 2e-5
NEGLIGIBLE = 1e-6  # of the global gradient norm: such a leaf is rounding, and compared in absolute terms
MEMORY_BOUNDS = (0.95, 1.10)


@dataclass(frozen=True)
class Run:
    """One example on one mesh beside its unsharded run; leaves by path."""

    plan: al.Plan
    compiled: CompiledStep
    report: AuditReport
    sharded: dict[str, np.ndarray]
    single: dict[str, np.ndarray]
    gradient_norm: float


def leaves(tree: Any) -> dict[str, np.ndarray]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in found}


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


@cache
def run(name: str, mesh_shape: tuple[int, ...]) -> Run:
    example = EXAMPLES[name](optimizer="sgd")
    state, batch = example.init(jax.random.key(0)), example.batch(0)
    reference = jax.jit(example.grads_step)(state, batch)
    step = al.parallelize(
        example.grads_step,
        cluster=al.Cluster.parse("1x8:cpu"),
        options=al.PlanOptions(mesh_shape=mesh_shape, time_limit_s=60),
    )
    compiled = step.compile(state, batch)
    return Run(
        plan=step.plan(state, batch),
        compiled=compiled,
        report=compiled.audit(),
        sharded=leaves(step(state, batch)),
        single=leaves(reference),
        gradient_norm=math.sqrt(math.fsum(norm(x) ** 2 for x in leaves(reference[1]).values())),
    )


def marks(name: str, mesh: tuple[int, ...]) -> list[pytest.MarkDecorator]:
    return [] if (name, mesh) == QUICK else [pytest.mark.slow]  # the others compile for long


CELLS = [
    pytest.param(name, mesh, id=f"{name}-{'x'.join(map(str, mesh))}", marks=marks(name, mesh))
    for name in EXAMPLES
    for mesh in MESHES
]


@pytest.mark.medium
@pytest.mark.parametrize(("name", "mesh_shape"), CELLS)
def test_loss_gradients_and_parameters_equal_the_unsharded_run(name: str, mesh_shape: tuple[int, ...]) -> None:
    done = run(name, mesh_shape)
    assert done.gradient_norm > 0
    assert done.sharded.keys() == done.single.keys()
    errors = {}
    for path, expected in done.single.items():
        got = done.sharded[path]
        if np.issubdtype(expected.dtype, np.integer):  # the experts of every token
            assert np.array_equal(got, expected), path
            continue
        own = norm(expected)
        scale = done.gradient_norm if own <= NEGLIGIBLE * done.gradient_norm else own
        errors[path] = norm(got.astype(np.float64) - expected.astype(np.float64)) / scale
    worst = max(errors, key=lambda path: errors[path])
    print(f"{name} on {mesh_shape}: {len(errors)} leaves, worst {errors[worst]:.1e} at {worst}")
    assert errors[worst] <= TOLERANCE, (worst, errors[worst])
    assert ("0/routing" in done.single) == (name == "moe")


@pytest.mark.medium
@pytest.mark.parametrize(("name", "mesh_shape"), CELLS)
def test_every_collective_is_planned_and_every_planned_one_found(name: str, mesh_shape: tuple[int, ...]) -> None:
    done = run(name, mesh_shape)
    totals: Counter[str] = Counter()
    for collective in done.plan.collectives:
        totals[collective.kind.value] += collective.size_bytes * collective.count
    print(f"{name} on {mesh_shape}: bytes planned per kind {dict(totals)}\n{done.report}")
    assert len(done.plan.collectives) >= 1
    assert done.report.ok
    assert not done.report.unplanned
    assert not done.report.missing


@pytest.mark.medium
@pytest.mark.parametrize(("name", "mesh_shape"), CELLS)
def test_memory_is_as_predicted(name: str, mesh_shape: tuple[int, ...]) -> None:
    done = run(name, mesh_shape)
    ratio = done.plan.memory.peak / done.compiled.peak_bytes()
    print(f"{name} on {mesh_shape}: predicted / actual {ratio:.3f}")
    assert MEMORY_BOUNDS[0] <= ratio <= MEMORY_BOUNDS[1]
