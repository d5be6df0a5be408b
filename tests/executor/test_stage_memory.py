"""The predicted peak of every stage against XLA's figures of its programs, with the buffers that lie beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from examples.registry import EXAMPLES

WITHIN = 0.10
CASES = [
    ("gpt_linen", 2, "1f1b"),
    ("gpt_linen", 2, "gpipe"),
    ("gpt_linen", 4, "1f1b"),
    ("llama_nnx", 2, "1f1b"),
    ("llama_nnx", 2, "gpipe"),
    ("llama_nnx", 4, "1f1b"),
    ("moe", 2, "1f1b"),
    ("moe", 2, "gpipe"),
    ("moe", 4, "1f1b"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_stages", "schedule"), CASES)
def test_predicted_peaks_are_those_of_xla(name: str, num_stages: int, schedule: str) -> None:
    example = EXAMPLES[name]()
    options = al.PlanOptions(num_stages=num_stages, schedule=schedule, num_microbatches=4)
    cluster = al.Cluster.parse("1x8:cpu")
    step = al.parallelize(example.train_step, cluster=cluster, options=options, donate_argnums=0)
    found = step.compile(*example.abstract_args()).memory()
    assert [m.stage for m in found] == list(range(num_stages))
    assert all(m.peak_bytes == m.held_bytes + m.own_bytes for m in found)
    assert all(abs(m.ratio - 1) <= WITHIN for m in found), [(m.ratio, m.program) for m in found]


def two_layers(weights: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    hidden = al.layer_boundary(jnp.tanh(batch @ weights["first"]))
    return jnp.mean((hidden @ weights["second"]) ** 2)


def train_step(weights: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    loss, grads = al.value_and_grad(two_layers)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def test_what_stages_sent_each_other_is_gone_when_the_update_runs() -> None:
    """With more microbatches of one size only the batch grows, and its copy in slices, on the stage that reads it."""
    weights = {
        "first": jax.ShapeDtypeStruct((16, 256), jnp.float32),
        "second": jax.ShapeDtypeStruct((256, 16), jnp.float32),
    }
    peaks, batch_bytes = [], []
    for count in (4, 64):
        batch = jax.ShapeDtypeStruct((64 * count, 16), jnp.float32)
        options = al.PlanOptions(num_stages=2, num_microbatches=count)
        step = al.parallelize(train_step, donate_argnums=0)
        plan = al.plan(step, weights, batch, cluster=al.Cluster.parse("1x2:cpu"), options=options)
        peaks.append([stage.memory.peak for stage in plan.stages])
        batch_bytes.append(4 * batch.size)
    assert peaks[1][0] - peaks[0][0] == 2 * (batch_bytes[1] - batch_bytes[0])
    assert peaks[1][1] == peaks[0][1]
