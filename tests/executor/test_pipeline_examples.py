"""The examples in two stages whose layers are found: the same step as on one mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from examples.registry import EXAMPLES

TOLERANCE, NEGLIGIBLE = 2e-5, 1e-6  # as for one mesh: relative per leaf, unless the gradient is rounding


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_nnx", "gpt_linen", "moe", "resnet18"])
def test_two_stages_equal_one(name):
    example = EXAMPLES[name](optimizer="sgd")
    state, batch = example.init(jax.random.key(0)), example.batch(0)
    results = []
    for num_stages in (1, 2):
        options = al.PlanOptions(num_stages=num_stages, num_microbatches=4)
        step = al.parallelize(example.grads_step, cluster=al.Cluster.parse("1x8:cpu"), options=options)
        results.append(step(state, batch))
        if num_stages > 1:
            assert len(step.plan(state, batch).stages) == 2
            assert not any(r.unplanned or r.missing for r in step.compile(state, batch).audit())
    (_, grads, _), _ = results
    smallest = NEGLIGIBLE * math.sqrt(math.fsum(np.linalg.norm(g) ** 2 for g in leaves(grads)))
    for got, want in zip(leaves(results[1]), leaves(results[0]), strict=True):
        assert np.linalg.norm(got - want) <= TOLERANCE * max(np.linalg.norm(want), smallest / TOLERANCE)
