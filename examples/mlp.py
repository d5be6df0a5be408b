"""A multilayer perceptron as a bare pytree: no framework, no optimizer library, the state is the list of layers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from examples.example import Example, PyTree, train, use_virtual_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    widths: tuple[int, ...]
    batch_size: int
    learning_rate: float = 0.1


CONFIGS = {
    "small": Config(widths=(32, 128, 128, 16), batch_size=64),
    "base": Config(widths=(1024, 4096, 4096, 1024), batch_size=256),
}


def make(size: str = "small", dtype: jnp.dtype = jnp.float32, optimizer: str = "sgd") -> Example:
    """The MLP of one size, trained by plain SGD; ``optimizer="sgd"`` is the only choice."""
    if optimizer != "sgd":
        raise ValueError(f"mlp is trained with 'sgd', not {optimizer!r}")
    config = CONFIGS[size]

    def init(key: jax.Array) -> PyTree:
        layers = []
        for fan_in, fan_out in zip(config.widths[:-1], config.widths[1:], strict=True):
            key, subkey = jax.random.split(key)
            kernel = jax.random.normal(subkey, (fan_in, fan_out), dtype) * jnp.asarray((2 / fan_in) ** 0.5, dtype)
            layers.append({"w": kernel, "b": jnp.zeros((fan_out,), dtype)})
        return layers

    def loss_fn(layers: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        for index, layer in enumerate(layers):
            x = x @ layer["w"] + layer["b"]
            if index < len(layers) - 1:
                x = jax.nn.gelu(x)
        return jnp.mean(jnp.square(x - y)).astype(jnp.float32)

    def train_step(layers: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(layers, batch["x"], batch["y"])
        layers = jax.tree.map(lambda p, g: p - config.learning_rate * g, layers, grads)
        return layers, {"loss": loss}

    def grads_step(layers: PyTree, batch: PyTree) -> tuple[dict[str, jax.Array], PyTree, PyTree]:
        loss, grads = jax.value_and_grad(loss_fn)(layers, batch["x"], batch["y"])
        return {"loss": loss}, grads, jax.tree.map(lambda p, g: p - config.learning_rate * g, layers, grads)

    def batch(seed: int) -> PyTree:
        """Points of a fixed smooth function of the inputs."""
        x = np.random.default_rng(seed).standard_normal((config.batch_size, config.widths[0]), dtype=np.float32)
        teacher = np.random.default_rng(0).standard_normal((config.widths[0], config.widths[-1]), dtype=np.float32)
        y = np.sin(x @ teacher / config.widths[0] ** 0.5)
        return {"x": jnp.asarray(x, dtype), "y": jnp.asarray(y, dtype)}

    return Example(name="mlp", init=init, train_step=train_step, grads_step=grads_step, batch=batch)


def target() -> al.PlanTarget:
    """For ``alpa-lite plan examples/mlp.py:target``."""
    return make().target()


def main() -> None:
    use_virtual_devices()
    example = make()
    train(al.parallelize(example.train_step, donate_argnums=(0,)), example)


if __name__ == "__main__":
    main()
