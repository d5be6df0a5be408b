"""The models of the published discussions, in plain JAX on abstract arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Params = Any


def tensor(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def linear_shapes(fan_in: int, fan_out: int) -> Params:
    return {"weight": tensor(fan_in, fan_out), "bias": tensor(fan_out)}


def linear(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["weight"] + params["bias"]


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """slapo's example: two Linears around a gelu."""
    with jax.named_scope("fc1"):
        h = linear(params["fc1"], x)
    with jax.named_scope("gelu"):
        h = jax.nn.gelu(h, approximate=False)
    with jax.named_scope("fc2"):
        return linear(params["fc2"], h)


def mlp_args(seq_len: int = 1024, width: int = 1024, batch_size: int = 8) -> tuple[Params, Any]:
    shapes = {"fc1": linear_shapes(width, 4 * width), "fc2": linear_shapes(4 * width, width)}
    return shapes, tensor(batch_size, seq_len, width)


def chain(params: Sequence[Params], x: jax.Array) -> jax.Array:
    """Any number of Linears with relus between them."""
    for index, layer in enumerate(params):
        x = linear(layer, jax.nn.relu(x) if index else x)
    return x


def layer_norm(params: Params, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]


def attention(params: Params, x: jax.Array, num_heads: int, *, causal: bool) -> jax.Array:
    batch_size, seq_len, width = x.shape

    def heads(name: str) -> jax.Array:
        split = linear(params[name], x).reshape(batch_size, seq_len, num_heads, width // num_heads)
        return split.transpose(0, 2, 1, 3)

    scores = heads("query") @ heads("key").transpose(0, 1, 3, 2) / (width // num_heads) ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((seq_len, seq_len), dtype=bool)), scores, -1e9)
    mixed = jax.nn.softmax(scores, axis=-1) @ heads("value")
    return linear(params["out"], mixed.transpose(0, 2, 1, 3).reshape(x.shape))


def bert_layer(params: Params, x: jax.Array) -> jax.Array:
    """Norms after the residual sums; 16 heads as in BERT-large."""
    x = layer_norm(params["norm1"], x + attention(params, x, 16, causal=False))
    hidden = jax.nn.gelu(linear(params["up"], x), approximate=False)
    return layer_norm(params["norm2"], x + linear(params["down"], hidden))


def gpt_layer(params: Params, x: jax.Array) -> jax.Array:
    """Norms before attention and MLP, and a causal mask; 16 heads as in GPT-Neo-1.3B."""
    x = x + attention(params, layer_norm(params["norm1"], x), 16, causal=True)
    return x + linear(params["down"], jax.nn.gelu(linear(params["up"], layer_norm(params["norm2"], x))))


def layer_args(seq_len: int, width: int) -> tuple[Params, Any]:
    shapes = {name: linear_shapes(width, width) for name in ("query", "key", "value", "out")}
    shapes |= {"up": linear_shapes(width, 4 * width), "down": linear_shapes(4 * width, width)}
    shapes |= {name: {"scale": tensor(width), "bias": tensor(width)} for name in ("norm1", "norm2")}
    return shapes, tensor(8, seq_len, width)


# ResNet-18 with batch norms folded into a scale and a bias: (channels, stride of the first block).
_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


def resnet18_shapes() -> Params:
    """11,689,512 parameters, 44.6 MiB: those of the published model without its running statistics."""

    def conv(size: int, fan_in: int, fan_out: int) -> Params:
        return {"kernel": tensor(size, size, fan_in, fan_out), "scale": tensor(fan_out), "bias": tensor(fan_out)}

    shapes = {"stem": conv(7, 3, 64)}
    fan_in = 64
    for stage, (channels, stride) in enumerate(_STAGES):
        for block in range(2):
            shapes[f"{stage}.{block}.a"] = conv(3, fan_in, channels)
            shapes[f"{stage}.{block}.b"] = conv(3, channels, channels)
            if block == 0 and stride == 2:
                shapes[f"{stage}.{block}.skip"] = conv(1, fan_in, channels)
            fan_in = channels
    return shapes | {"head": linear_shapes(512, 1000)}


def resnet18(params: Params, images: jax.Array) -> jax.Array:
    """Inference; images are (batch, height, width, 3)."""

    def conv(name: str, x: jax.Array, stride: int) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, params[name]["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y * params[name]["scale"] + params[name]["bias"]

    x = jax.nn.relu(conv("stem", images, 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, (_, stage_stride) in enumerate(_STAGES):
        for block in range(2):
            name, stride = f"{stage}.{block}", stage_stride if block == 0 else 1
            y = conv(f"{name}.b", jax.nn.relu(conv(f"{name}.a", x, stride)), 1)
            x = jax.nn.relu(y + (conv(f"{name}.skip", x, stride) if f"{name}.skip" in params else x))
    return linear(params["head"], jnp.mean(x, axis=(1, 2)))


def random_like(shapes: Params, seed: int = 0) -> Params:
    """Values of unit variance per fan-in, so that outputs stay near one."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        fan_in = leaf.size // leaf.shape[-1] if leaf.ndim > 1 else 1
        return jax.random.normal(key, leaf.shape, leaf.dtype) / fan_in**0.5

    return jax.tree.unflatten(structure, [draw(k, leaf) for k, leaf in zip(keys, leaves, strict=True)])


Model = Callable[[Params, jax.Array], jax.Array]
