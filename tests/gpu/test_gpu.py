"""On one GPU (``pytest -m gpu``): planned steps equal plain jitted ones, and nothing is communicated."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import alpa_lite as al
from examples.registry import EXAMPLES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_one_gpu_equals_plain_jit(name):
    example = EXAMPLES[name]("small")
    state, batch = example.init(jax.random.key(0)), example.batch(0)
    step = al.parallelize(example.grads_step, options=al.PlanOptions(mesh_shape=(1,)))
    assert not step.plan(state, batch).collectives
    assert step.compile(state, batch).audit().ok
    planned, plain = step(state, batch), jax.jit(example.grads_step)(state, batch)
    for a, b in zip(jax.tree.leaves(planned), jax.tree.leaves(plain), strict=True):
        # The two programs may use different matmul algorithms, hence no bit equality.
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-2, atol=1e-3)
