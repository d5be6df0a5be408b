"""Every example on one device: it learns, its two steps agree, and its batches repeat."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from examples.corpus import load_corpus, text_batch
from examples.registry import EXAMPLES
from tests.compiling import QUICK_COMPILE
from tests.marks import slow_but

NAMES = sorted(EXAMPLES)
_SLOW = [pytest.mark.medium, pytest.mark.slow]
# All but one take seconds to compile.
_MARKS = {"mlp": [], "gpt_linen": _SLOW, "moe": _SLOW, "resnet18": _SLOW}
COMPILED = [pytest.param(name, marks=_MARKS.get(name, [pytest.mark.medium])) for name in NAMES]


@cache
def metrics_of_six_steps(name: str) -> list[dict[str, Any]]:
    """On one batch; compiled once for all tests that read them."""
    example = EXAMPLES[name]()
    step = jax.jit(example.train_step, compiler_options=QUICK_COMPILE)
    state, batch = example.init(jax.random.key(0)), example.batch(0)
    found = []
    for _ in range(6):
        state, metrics = step(state, batch)
        found.append(metrics)
    return found


@pytest.mark.medium
@pytest.mark.parametrize("name", COMPILED)
def test_loss_falls_on_one_batch(name: str) -> None:
    losses = [float(metrics["loss"]) for metrics in metrics_of_six_steps(name)]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.97 * losses[0], losses


@pytest.mark.parametrize("name", slow_but(("gpt_linen", "lstm"), NAMES))
@pytest.mark.medium
def test_grads_step_is_the_train_step_opened_up(name: str) -> None:
    example = EXAMPLES[name](optimizer="sgd")
    state, batch = example.init(jax.random.key(1)), example.batch(1)
    metrics, grads, params = jax.jit(example.grads_step, compiler_options=QUICK_COMPILE)(state, batch)
    _, step_metrics = jax.jit(example.train_step, compiler_options=QUICK_COMPILE)(state, batch)
    np.testing.assert_allclose(metrics["loss"], step_metrics["loss"], rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert any(float(abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_every_leaf_is_an_array_and_the_state_keeps_its_shapes(name: str) -> None:
    example = EXAMPLES[name]()
    state, batch = example.abstract_args()
    after, _ = jax.eval_shape(example.train_step, state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)
    ]
    assert all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in jax.tree.leaves(example.batch(0)))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_batch(name: str) -> None:
    example = EXAMPLES[name]()
    first, again, other = (jax.tree.leaves(example.batch(seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.medium
def test_routing_names_two_different_experts_per_token() -> None:
    routing = np.asarray(metrics_of_six_steps("moe")[0]["routing"])
    assert routing.shape == (2, 16, 32, 2)
    assert (routing[..., 0] != routing[..., 1]).all()
    assert set(np.unique(routing)) <= set(range(8))


def test_targets_are_the_inputs_one_place_later() -> None:
    batch = text_batch(0, batch_size=4, seq_len=16)
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert load_corpus().size > 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_unknown_optimizer_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"'sgd'"):
        EXAMPLES[name](optimizer="lion")
