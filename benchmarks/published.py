"""Published training throughput of GPT on V100s, and the plans that reached it, as inputs of our planner.

Source: Alpa (OSDI 2022): its artifact's end-to-end results, the solutions stored in its benchmark suite, and its FLOP
convention. Testbed: hosts of 8 V100-SXM2-16GB with NVLink, 25 Gb/s between hosts; 1024 tokens, vocabulary 51,200, float16,
global batch 1024, every layer recomputed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from benchmarks.models import Config, gpt_config

GLOBAL_BATCH = 1024
DEVICE = "v100-sxm2-16gb"
GPUS_PER_HOST = 8
RECOMPUTED = 96  # FLOPs per parameter of a layer and token, times 12 / width^2: forward, backward and forward again

TFLOPS_PER_GPU: dict[str, dict[int, float]] = {
    "megatron": {1: 47.5, 2: 55.5, 4: 55.9, 8: 50.4, 16: 56.6, 32: 58.2, 64: 57.8},
    "alpa": {1: 45.1, 2: 57.9, 4: 58.2, 8: 61.6, 16: 60.0, 32: 59.9, 64: 57.0},
    "intra-op only": {1: 46.2, 2: 59.5, 4: 58.4, 8: 50.8, 16: 48.4, 32: 35.1, 64: 2.1},
    "inter-op only": {1: 44.2, 2: 57.9, 4: 54.0, 8: 56.6, 16: 59.7, 32: 49.8, 64: 50.5},
}
MODELS: dict[int, Config] = {
    1: gpt_config(24, 1024, 16),
    2: gpt_config(24, 1536, 16),
    4: gpt_config(24, 2048, 32),
    8: gpt_config(32, 2560, 32),
    16: gpt_config(32, 4096, 32),
    32: gpt_config(48, 5120, 40),
    64: gpt_config(48, 8192, 64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A solution stored in Alpa's suite: microbatches, and per stage its layers, submesh and logical mesh."""

    num_microbatches: int
    layers: tuple[int, ...]
    submeshes: tuple[tuple[int, int], ...]
    mesh_shapes: tuple[tuple[int, int], ...]


def _equal(num_gpus: int, stages: int, microbatches: int, submesh: tuple[int, int], mesh: tuple[int, int]) -> Stored:
    layers = (MODELS[num_gpus].num_layers // stages,) * stages
    return Stored(
        num_microbatches=microbatches, layers=layers, submeshes=(submesh,) * stages, mesh_shapes=(mesh,) * stages
    )


STORED: dict[int, Stored] = {
    1: _equal(1, 1, 512, (1, 1), (1, 1)),
    2: _equal(2, 2, 128, (1, 1), (1, 1)),
    4: _equal(4, 2, 128, (1, 2), (2, 1)),
    8: Stored(
        num_microbatches=128,
        layers=(8, 8, 16),
        submeshes=((1, 2), (1, 2), (1, 4)),
        mesh_shapes=((2, 1), (2, 1), (4, 1)),
    ),
    16: _equal(16, 2, 64, (1, 8), (2, 4)),
    32: _equal(32, 4, 128, (1, 8), (2, 4)),
    64: _equal(64, 16, 1024, (1, 4), (1, 4)),
}


def config_of(num_gpus: int) -> Config:
    """The GPT that was trained on so many GPUs."""
    return replace(MODELS[num_gpus], batch_size=GLOBAL_BATCH, compute=jnp.float16)


def cluster_of(num_gpus: int) -> al.Cluster:
    hosts = max(1, num_gpus // GPUS_PER_HOST)
    return al.Cluster.parse(f"{hosts}x{min(num_gpus, GPUS_PER_HOST)}:{DEVICE}")


def step_flops(config: Config) -> float:
    """Of a training step, by the suite's convention."""
    tokens, width = config.batch_size * config.seq_len, config.width
    layers = RECOMPUTED * tokens * width**2 * config.num_layers * (1 + config.seq_len / (6 * width))
    return layers + 6 * tokens * width * config.vocab


def stored_options(num_gpus: int) -> dict[str, Any]:
    """Alpa's solution as options of ours; its mesh shapes are (data, operator)."""
    stored = STORED[num_gpus]
    return {
        "num_microbatches": stored.num_microbatches,
        "submeshes": stored.submeshes,
        "stage_layers": stored.layers,
        "stage_mesh_shapes": stored.mesh_shapes,
        "axis_names": ("data", "model"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A (data, tensor, pipeline) grid in the style of Megatron-LM, with microbatches of a size."""

    data: int
    tensor: int
    pipeline: int
    num_microbatches: int

    def options(self, num_layers: int, cluster: al.Cluster) -> dict[str, Any]:
        devices = self.data * self.tensor
        submesh = (1, devices) if devices <= cluster.devices_per_host else (devices // cluster.devices_per_host, 8)
        return {
            "num_microbatches": self.num_microbatches,
            "submeshes": (submesh,) * self.pipeline,
            "stage_layers": (num_layers // self.pipeline,) * self.pipeline,
            "stage_mesh_shapes": ((self.data, self.tensor),) * self.pipeline,
            "axis_names": ("data", "model"),
        }

    @property
    def pins(self) -> dict[str, Any]:
        """Columns, then rows, of each pair of matrices; the batch over the data axis; state lies as its parameter."""
        columns = {f"0/params/layers/*/{name}": P(None, "model") for name in ("query", "key", "value", "up")}
        rows = {f"0/params/layers/*/{name}": P("model", None) for name in ("out", "down")}
        return {**columns, **rows, "0/params/embed": P("model", None), "1/*": P("data")}


def grids(num_gpus: int) -> Iterator[Grid]:
    """Every grid whose parts divide: tensor parallelism inside a host, equal stages, microbatches of 1 to 16 per replica."""
    config = config_of(num_gpus)
    sizes = [2**k for k in range(num_gpus.bit_length())]
    for tensor, pipeline in itertools.product(sizes, sizes):
        data = num_gpus // (tensor * pipeline)
        fits = tensor * pipeline * data == num_gpus and tensor <= GPUS_PER_HOST and config.num_heads % tensor == 0
        if not fits or config.num_layers % pipeline:
            continue
        for examples in (1, 2, 4, 8, 16):
            microbatches = GLOBAL_BATCH // (data * examples)
            if microbatches >= pipeline:
                yield Grid(data=data, tensor=tensor, pipeline=pipeline, num_microbatches=microbatches)
