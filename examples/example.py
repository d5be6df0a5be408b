"""What every example offers, and the loop that trains one.

An example is a plain JAX program: it knows neither meshes nor shardings. alpa_lite enters only where a step is wrapped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

import alpa_lite as al

PyTree = Any
NUM_DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model with its training step. All functions are pure and take and return pytrees of arrays.

    Attributes:
        name: as in the registry.
        init: ``init(key) -> state``.
        train_step: ``train_step(state, batch) -> (state, metrics)``; ``metrics["loss"]`` is a float32 scalar.
        grads_step: ``grads_step(state, batch) -> (metrics, grads, new_params)``, the same update, opened up.
        batch: ``batch(seed) -> batch``; the same seed gives the same batch.
    """

    name: str
    init: Callable[[jax.Array], PyTree]
    train_step: Callable[[PyTree, PyTree], tuple[PyTree, dict[str, jax.Array]]]
    grads_step: Callable[[PyTree, PyTree], tuple[dict[str, jax.Array], PyTree, PyTree]]
    batch: Callable[[int], PyTree]

    def abstract_args(self) -> tuple[PyTree, PyTree]:
        """Shapes of ``(state, batch)``; nothing is computed."""
        return jax.eval_shape(self.init, jax.random.key(0)), jax.eval_shape(lambda: self.batch(0))

    def target(self) -> al.PlanTarget:
        """The training step as the command line takes it, e.g. ``alpa-lite plan examples/mlp.py:target``."""
        return al.PlanTarget(self.train_step, self.abstract_args(), init=self.init, data=self.batch)


def make_optimizer(name: str, learning_rate: float) -> optax.GradientTransformation:
    """``"adamw"`` or ``"sgd"`` (for comparing runs: Adam turns the rounding of a zero gradient into a full step)."""
    if name == "adamw":
        return optax.adamw(learning_rate)
    if name == "sgd":
        return optax.sgd(learning_rate)
    raise ValueError(f"unknown optimizer {name!r}; allowed: 'adamw', 'sgd'")


def use_virtual_devices(num_devices: int = NUM_DEVICES) -> None:
    """Gives this process ``num_devices`` CPU devices. Call before JAX is used for the first time."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def train(step: Any, example: Example, *, num_steps: int = 10) -> list[float]:
    """Trains ``num_steps`` steps with a parallelized ``step``; prints the plan, then the loss of every step."""
    print(step.plan(*example.abstract_args()))
    state = step.init(example.init, jax.random.key(0))
    losses = []
    start_s = time.perf_counter()
    for index in range(num_steps):
        state, metrics = step(state, example.batch(index))
        losses.append(float(metrics["loss"]))
        print(f"{example.name} step {index:3d}  loss {losses[-1]:.4f}  {time.perf_counter() - start_s:6.1f} s")
    return losses
