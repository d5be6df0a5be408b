"""Which buffers results take: donated state gives its own to its next value; sums of gradients, which the update is the last to
read, give theirs where state is kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al

pytestmark = pytest.mark.medium
WIDTH, NUM_LAYERS, MICROBATCHES = 64, 4, 2
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def loss_fn(params: Any, x: Any) -> Any:
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w)
        x = al.layer_boundary(x) if i < NUM_LAYERS - 1 else x
    return jnp.mean(x**2)


def momentum_step(state: Any, x: Any) -> Any:
    params, speed = state
    loss, grads = al.value_and_grad(loss_fn)(params, x)
    speed = jax.tree.map(lambda s, g: 0.9 * s + g, speed, grads)
    return (jax.tree.map(lambda p, s: p - 0.1 * s, params, speed), speed), loss


def arguments() -> Any:
    keys = jax.random.split(jax.random.key(1), 2 * NUM_LAYERS + 1)
    params, speed = ([jax.random.normal(k, (WIDTH, WIDTH)) * 0.2 for k in some] for some in (keys[1:5], keys[5:]))
    return (params, speed), jax.random.normal(keys[0], (8, WIDTH))


def parallel(cluster: str, **chosen: Any) -> Any:
    options = al.PlanOptions(num_stages=2, num_microbatches=MICROBATCHES)
    return al.parallelize(momentum_step, cluster=al.Cluster.parse(cluster), options=options, **chosen)


def aliased(compiled: Any, name: str) -> list[int]:
    """Per stage, the bytes of arguments whose buffers a program's results take."""
    return [program.memory_analysis().alias_size_in_bytes for n, _, _, program in compiled.programs if n == name]


def test_results_take_the_buffers_of_sums() -> None:
    """Kept state lies beside its next value; of the two new values of a weight, one lies where its gradient was."""
    args, step = arguments(), parallel("1x2:cpu")
    compiled = step.compile(*args)
    assert aliased(compiled, "update 0") == [NUM_LAYERS // 2 * WEIGHT_BYTES] * 2
    for stage in compiled.memory():
        assert stage.program == "update 0"
        assert stage.peak_bytes == pytest.approx(NUM_LAYERS // 2 * 4 * WEIGHT_BYTES, rel=0.1)  # without donation 5
        assert stage.ratio == pytest.approx(1, abs=0.1)
    before = jax.tree.map(np.array, args)
    made = step(*args)
    for given, old in zip(jax.tree.leaves(args), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.asarray(given), old)
    for again, first in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(made), strict=True):
        np.testing.assert_array_equal(np.asarray(again), np.asarray(first))


@pytest.mark.parametrize("cluster", ["1x2:cpu", "1x4:cpu"])
def test_donated_state_is_replaced_without_copies(cluster: str) -> None:
    """All leaves of state have one type and new speeds are made first: each takes the buffer of the old one, not of a weight."""
    step = parallel(cluster, donate_argnums=0)
    compiled = step.compile(*arguments())
    text = [program.as_text() for name, _, _, program in compiled.programs if name == "update 0"]
    assert all("copy(%tiles" not in part for part in text), "an argument is copied"
    for stage, held in enumerate(aliased(compiled, "update 0")):
        inputs = step.plan(*arguments()).stages[stage].inputs
        state = [leaf for leaf in inputs if leaf.value.shape == (WIDTH, WIDTH) and leaf.path.startswith("0/")]
        mesh = step.plan(*arguments()).stages[stage].mesh
        assert held == sum(leaf.spec.local_size_bytes((WIDTH, WIDTH), 4, mesh) for leaf in state) > 0
    assert all(stage.ratio == pytest.approx(1, abs=0.1) for stage in compiled.memory())
