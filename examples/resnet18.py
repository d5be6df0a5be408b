"""ResNet-18 with batch norm in plain JAX; the running statistics are part of the state.

Images are (batch, height, width, channel), kernels (height, width, in, out).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_lite as al
from examples.example import Example, PyTree, train, use_virtual_devices

EPSILON = 1e-5
STATISTICS_DECAY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """``image_size >= 64`` selects ImageNet's stem (7x7, stride 2, max pool), a smaller one a 3x3 stem."""

    width: int
    num_classes: int
    image_size: int
    batch_size: int
    learning_rate: float = 0.05


CONFIGS = {
    "small": Config(width=16, num_classes=16, image_size=16, batch_size=32),
    "base": Config(width=64, num_classes=16, image_size=32, batch_size=64),
    "imagenet": Config(width=64, num_classes=1000, image_size=224, batch_size=32),
}


def conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(x: jax.Array, params: PyTree, statistics: PyTree) -> tuple[jax.Array, PyTree]:
    """Normalizes over batch and space in training mode and returns the moved running statistics."""
    mean = jnp.mean(x, axis=(0, 1, 2))
    variance = jnp.mean(jnp.square(x - mean), axis=(0, 1, 2))
    normed = (x - mean) * jax.lax.rsqrt(variance + EPSILON)
    observed = {"mean": mean, "variance": variance}
    moved = jax.tree.map(lambda old, new: STATISTICS_DECAY * old + (1 - STATISTICS_DECAY) * new, statistics, observed)
    return normed * params["scale"] + params["bias"], moved


def block(x: jax.Array, params: PyTree, statistics: PyTree, stride: int) -> tuple[jax.Array, PyTree]:
    """Two 3x3 convolutions beside a residual, which a 1x1 convolution projects where the shape changes."""
    moved = {}
    y, moved["norm1"] = batch_norm(conv(x, params["conv1"], stride), params["norm1"], statistics["norm1"])
    y = conv(jax.nn.relu(y), params["conv2"], 1)
    y, moved["norm2"] = batch_norm(y, params["norm2"], statistics["norm2"])
    if "project" in params:
        x = conv(x, params["project"], stride)
        x, moved["norm3"] = batch_norm(x, params["norm3"], statistics["norm3"])
    return jax.nn.relu(x + y), moved


def block_shapes(config: Config) -> list[tuple[int, int, int]]:
    """(in channels, out channels, stride) of the eight blocks."""
    shapes = []
    channels = config.width
    for stage in range(4):
        out = config.width * 2**stage
        shapes += [(channels, out, 1 if stage == 0 else 2), (out, out, 1)]
        channels = out
    return shapes


def forward(params: PyTree, statistics: PyTree, images: jax.Array) -> tuple[jax.Array, PyTree]:
    """Images to logits, and the moved running statistics."""
    moved = {}
    large = params["stem"].shape[0] == 7
    x = conv(images, params["stem"], 2 if large else 1)
    x, moved["stem_norm"] = batch_norm(x, params["stem_norm"], statistics["stem_norm"])
    x = jax.nn.relu(x)
    if large:
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for index in range(8):
        name = f"block{index}"
        stride = 2 if index in (2, 4, 6) else 1
        x, moved[name] = block(x, params[name], statistics[name], stride)
    return jnp.mean(x, axis=(1, 2)) @ params["head"]["kernel"] + params["head"]["bias"], moved


def init_norm(channels: int) -> tuple[PyTree, PyTree]:
    """(parameters, running statistics) of one batch norm."""
    params = {"scale": jnp.ones((channels,)), "bias": jnp.zeros((channels,))}
    return params, {"mean": jnp.zeros((channels,)), "variance": jnp.ones((channels,))}


def init_model(config: Config, key: jax.Array) -> tuple[PyTree, PyTree]:
    """(parameters, running statistics) of the whole network."""
    keys = iter(jax.random.split(key, 32))

    def kernel(size: int, fan_in: int, fan_out: int) -> jax.Array:
        scale = (2 / (size * size * fan_in)) ** 0.5
        return scale * jax.random.normal(next(keys), (size, size, fan_in, fan_out))

    params: PyTree = {"stem": kernel(7 if config.image_size >= 64 else 3, 3, config.width)}
    statistics: PyTree = {}
    params["stem_norm"], statistics["stem_norm"] = init_norm(config.width)
    for index, (fan_in, fan_out, stride) in enumerate(block_shapes(config)):
        name = f"block{index}"
        params[name] = {"conv1": kernel(3, fan_in, fan_out), "conv2": kernel(3, fan_out, fan_out)}
        statistics[name] = {}
        norms = ["norm1", "norm2"]
        if stride != 1 or fan_in != fan_out:
            params[name]["project"] = kernel(1, fan_in, fan_out)
            norms.append("norm3")
        for norm in norms:
            params[name][norm], statistics[name][norm] = init_norm(fan_out)
    width = 8 * config.width
    head = 0.01 * jax.random.normal(next(keys), (width, config.num_classes))
    params["head"] = {"kernel": head, "bias": jnp.zeros((config.num_classes,))}
    return params, statistics


def make(size: str = "small", dtype: jnp.dtype = jnp.float32, optimizer: str = "sgd") -> Example:
    """The ResNet of one size, trained by SGD with momentum; ``optimizer="sgd"`` is the only choice."""
    if optimizer != "sgd":
        raise ValueError(f"resnet18 is trained with 'sgd', not {optimizer!r}")
    config = CONFIGS[size]
    tx = optax.sgd(config.learning_rate, momentum=0.9)

    def init(key: jax.Array) -> PyTree:
        params, statistics = init_model(config, key)
        return {"params": params, "statistics": statistics, "opt_state": tx.init(params)}

    def loss_fn(params: PyTree, statistics: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        logits, moved = forward(params, statistics, batch["images"].astype(dtype))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["labels"])
        return losses.mean(), moved

    def update(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array, PyTree]:
        gradient = al.value_and_grad(loss_fn, has_aux=True, batch_argnums=2)
        (loss, statistics), grads = gradient(state["params"], state["statistics"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "statistics": statistics, "opt_state": opt_state}, loss, grads

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        state, loss, _ = update(state, batch)
        return state, {"loss": loss}

    def grads_step(state: PyTree, batch: PyTree) -> tuple[dict[str, jax.Array], PyTree, PyTree]:
        state, loss, grads = update(state, batch)
        return {"loss": loss}, grads, state["params"]

    def batch(seed: int) -> PyTree:
        """Noisy images of stripes whose direction and spacing are the class."""
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, config.num_classes, size=config.batch_size).astype(np.int32)
        angle = np.pi * labels / config.num_classes
        grid = np.linspace(-1, 1, config.image_size)
        along = np.cos(angle)[:, None, None] * grid[:, None] + np.sin(angle)[:, None, None] * grid[None, :]
        stripes = np.sin((4 + labels[:, None, None] % 4) * along)[..., None]
        noise = rng.standard_normal((config.batch_size, config.image_size, config.image_size, 3))
        return {"images": (stripes + 0.3 * noise).astype(np.float32), "labels": labels}

    return Example(name="resnet18", init=init, train_step=train_step, grads_step=grads_step, batch=batch)


def target() -> al.PlanTarget:
    """For ``alpa-lite plan examples/resnet18.py:target``."""
    return make().target()


def main() -> None:
    use_virtual_devices()
    example = make()
    train(al.parallelize(example.train_step, donate_argnums=(0,)), example)


if __name__ == "__main__":
    main()
