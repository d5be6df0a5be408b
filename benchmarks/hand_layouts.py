"""The layouts that an expert would write by hand, for GPT, mixture of experts and ResNet on 8 devices.

Four for each: data parallel, FSDP (parameters and optimizer state split, gathered where used), tensor parallel
(Megatron's column-then-row split; experts split for the mixture of experts; channels for the ResNet) and 2-D (data
parallel on x, tensor parallel on y). Each is a dictionary of pins, path to ``PartitionSpec``, for every argument leaf,
and as such both a plain ``jax.jit(in_shardings=...)`` and an ``al.plan(pins=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

PyTree = Any
P = jax.sharding.PartitionSpec

NUM_DEVICES = 8
DATA_AXIS, MODEL_AXIS = "x", "y"
FSDP_SMALLEST = 1024  # leaves with fewer elements stay whole: gathering them costs more than they weigh

# Splits of the parameters along the model axis, by the end of their path; what no rule names is replicated.
# Optimizer moments have the paths of their parameters at the end, and follow them.
TENSOR_RULES: dict[str, dict[str, P]] = {
    "gpt_linen": {
        "*/tokens/embedding": P(MODEL_AXIS, None),
        "*/query/kernel": P(None, MODEL_AXIS),
        "*/key/kernel": P(None, MODEL_AXIS),
        "*/value/kernel": P(None, MODEL_AXIS),
        "*/query/bias": P(MODEL_AXIS),
        "*/key/bias": P(MODEL_AXIS),
        "*/value/bias": P(MODEL_AXIS),
        "*/attention/out/kernel": P(MODEL_AXIS, None),
        "*/up/kernel": P(None, MODEL_AXIS),
        "*/up/bias": P(MODEL_AXIS),
        "*/down/kernel": P(MODEL_AXIS, None),
        "*/head/kernel": P(None, MODEL_AXIS),
    },
    "moe": {
        "*/embed": P(MODEL_AXIS, None),
        "*/attention/query": P(None, MODEL_AXIS, None),
        "*/attention/key": P(None, MODEL_AXIS, None),
        "*/attention/value": P(None, MODEL_AXIS, None),
        "*/attention/out": P(MODEL_AXIS, None, None),
        "*/experts/up": P(MODEL_AXIS, None, None),
        "*/experts/down": P(MODEL_AXIS, None, None),
        "*/head": P(None, MODEL_AXIS),
    },
    "resnet18": {
        "*/conv1": P(None, None, None, MODEL_AXIS),
        "*/block*/norm1/*": P(MODEL_AXIS),
        "*/conv2": P(None, None, MODEL_AXIS, None),
        "*/head/kernel": P(None, MODEL_AXIS),
        "*/head/bias": P(MODEL_AXIS),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One hand-written layout.

    Attributes:
        name: "data", "fsdp", "tensor" or "2d".
        mesh_shape, axis_names: its mesh of 8 devices.
        pins: path to ``PartitionSpec``, for every leaf of ``(state, batch)``.
    """

    name: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    pins: Mapping[str, P]

    def shardings(self, args: PyTree, devices: list[jax.Device]) -> PyTree:
        """The pins as a pytree of ``NamedSharding`` shaped like ``args``."""
        mesh = Mesh(np.asarray(devices).reshape(self.mesh_shape), self.axis_names)
        return jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, self.pins[text(path)]), args)

    def jit(self, fn: Callable[..., PyTree], args: PyTree, devices: list[jax.Device]) -> Callable[..., PyTree]:
        """``fn(state, batch) -> (state, metrics)`` compiled by JAX alone in this layout; donates the state."""
        state, batch = self.shardings(args, devices)
        return jax.jit(fn, in_shardings=(state, batch), out_shardings=(state, None), donate_argnums=(0,))


def text(path: tuple[Any, ...]) -> str:
    """A pin key, e.g. "0/params/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_batch(path: str) -> bool:
    return path.startswith("1/")


def tensor_spec(rules: Mapping[str, P], path: str) -> P:
    return next((spec for pattern, spec in rules.items() if fnmatchcase(path, pattern)), P())


def fsdp_spec(leaf: jax.ShapeDtypeStruct) -> P:
    """Splits the largest dim that 8 divides."""
    dims = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % NUM_DEVICES == 0]
    if leaf.size < FSDP_SMALLEST or not dims:
        return P()
    largest = max(dims, key=lambda dim: leaf.shape[dim])
    return P(*(DATA_AXIS if dim == largest else None for dim in range(leaf.ndim)))


def hand_layouts(name: str, args: PyTree) -> tuple[Layout, ...]:
    """The four layouts of the example ``name`` for its abstract arguments ``(state, batch)``."""
    rules = TENSOR_RULES[name]
    leaves = {text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(args)}

    def layout(name: str, mesh: dict[str, int], spec: Callable[[str, Any], P], batch: P) -> Layout:
        pins = {path: batch if is_batch(path) else spec(path, leaf) for path, leaf in leaves.items()}
        return Layout(name=name, mesh_shape=tuple(mesh.values()), axis_names=tuple(mesh), pins=pins)

    def tensor(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        del leaf
        return tensor_spec(rules, path)

    half, rest = 2, NUM_DEVICES // 2
    return (
        layout("data", {DATA_AXIS: NUM_DEVICES}, lambda *_: P(), P(DATA_AXIS)),
        layout("fsdp", {DATA_AXIS: NUM_DEVICES}, lambda _, leaf: fsdp_spec(leaf), P(DATA_AXIS)),
        layout("tensor", {MODEL_AXIS: NUM_DEVICES}, tensor, P()),
        layout("2d", {DATA_AXIS: half, MODEL_AXIS: rest}, tensor, P(DATA_AXIS)),
    )
