"""Published training throughput of GPT on V100s, and the plans that reached it, as inputs of our planner.

Source: Alpa (OSDI 2022): its artifact's end-to-end results (``osdi22_artifact/results_e2e.tsv``), the solutions stored there and
in its benchmark suite, and its FLOP convention. Testbed: hosts of 8 V100-SXM2-16GB with NVLink, 25 Gb/s between hosts; 1024
tokens, vocabulary 51,200, float16, global batch 1024, every layer recomputed.

Alpa's runs kept, per parameter, 2 bytes of float16 weight, 12 of float32 master copy and moments, and 2 of gradient sum; ours
keep 4, 8 and 4: as much where all of them are split alike. They did not tie the head to the embedding; Megatron-LM does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from benchmarks.models import Config, gpt_config, pipelined

GLOBAL_BATCH = 1024
DEVICE = "v100-sxm2-16gb"
GPUS_PER_HOST = 8
RECOMPUTED = 96  # FLOPs per parameter of a layer and token, times 12 / width^2: forward, backward and forward again
STATE_BYTES = 16  # per parameter: weight, two moments, gradient sum

TFLOPS_PER_GPU: dict[str, dict[int, float]] = {
    "megatron": {1: 47.5, 2: 55.5, 4: 55.9, 8: 50.4, 16: 56.6, 32: 58.2, 64: 57.8},
    "alpa": {1: 45.1, 2: 57.9, 4: 58.2, 8: 61.6, 16: 60.0, 32: 59.9, 64: 57.0},
    "intra-op only": {1: 46.2, 2: 59.5, 4: 58.4, 8: 50.8, 16: 48.4, 32: 35.1, 64: 2.1},
    "inter-op only": {1: 44.2, 2: 57.9, 4: 54.0, 8: 56.6, 16: 59.7, 32: 49.8, 64: 50.5},
}
PEAK_GIB: dict[str, dict[int, float]] = {  # where it was published
    "intra-op only": {1: 11.51, 2: 9.46, 4: 11.04, 8: 12.30, 16: 11.18, 32: 13.76},
    "inter-op only": {1: 11.44, 2: 11.84, 4: 12.17, 8: 8.32, 16: 12.17, 32: 13.00, 64: 13.64},
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan that was run: microbatches, and per stage its layers, submesh and logical mesh (data, model).

    Attributes:
        layers: transformer layers per stage; None: as equal as can be.
        cut_layers: whether stages may also end inside of layers. (Alpa keeps the bytes over cuts small first, so that stages of
            several layers end with a layer.)
        split_batch: whether every activation lies split over the data axis (Alpa's ``force_batch_dim_to_mesh_dim``).
        tensor: whether layers lie as in Megatron-LM: columns over the model axis, then rows, of each pair of matrices,
            activations between layers whole.
        megatron: whether, besides, the head is the embedding, and the optimizer's state lies as its parameter.
        limited: whether the memory is limited; else it is predicted alone, because nothing is left to choose.
    """

    num_microbatches: int
    layers: tuple[int, ...] | None
    submeshes: tuple[tuple[int, int], ...]
    mesh_shapes: tuple[tuple[int, int], ...]
    cut_layers: bool = False
    split_batch: bool = True
    tensor: bool = False
    megatron: bool = False
    limited: bool = True

    def options(self) -> dict[str, Any]:
        """As ``PlanOptions``."""
        return {
            "num_microbatches": self.num_microbatches,
            "submeshes": self.submeshes,
            "stage_layers": self.layers,
            "stage_mesh_shapes": self.mesh_shapes,
            "axis_names": ("data", "model"),
            "remat": "all" if self.cut_layers else "auto",
            "memory_budget_bytes": None if self.limited else float("inf"),
        }

    @property
    def splits_batch(self) -> bool:
        return self.split_batch and any(data > 1 for data, _ in self.mesh_shapes)

    @property
    def pins(self) -> dict[str, Any]:
        found: dict[str, Any] = {"1/*": P("data")} if self.splits_batch else {}
        if self.tensor:
            columns = ("query", "key", "value", "up")
            found |= {f"0/params/layers/*/{name}": P(None, "model") for name in columns}
            found |= {f"0/params/layers/*/{name}_bias": P("model") for name in columns}
            found |= {f"0/params/layers/*/{name}": P("model", None) for name in ("out", "down")}
            found |= {"0/params/embed": P("model", None)}
        return found

    def constrain(self, x: jax.Array, kind: str) -> jax.Array:
        """Holds an activation and its gradient where the run held them."""
        if not (self.splits_batch or self.tensor):
            return x
        rest = (None, "model" if kind == "logits" else None) if self.tensor else (P.UNCONSTRAINED, P.UNCONSTRAINED)
        return held(P("data", *rest))(x)

    def step(self, num_gpus: int, *, tied: bool = False) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        """The training step with the run's pins, and its abstract arguments; ``tied``: also of Alpa's runs."""
        config = replace(config_of(num_gpus), tied=tied or self.megatron)
        boundary = (lambda x: x) if self.cut_layers else al.layer_boundary
        fn, args = pipelined(config, constrain=self.constrain, boundary=boundary, remat=not self.cut_layers)
        like = {"0/opt_state": "0/params"} if self.megatron else None
        return al.parallelize(fn, donate_argnums=0, pins=self.pins, pin_like=like), args


def held(spec: P) -> Callable[[jax.Array], jax.Array]:
    """``al.pin`` of a value and of its gradient."""

    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return al.pin(x, spec)

    f.defvjp(lambda x: (al.pin(x, spec), None), lambda _, g: (al.pin(g, spec),))
    return f


def equal(
    num_gpus: int, stages: int, microbatches: int, submesh: tuple[int, int], mesh: tuple[int, int], **given: Any
) -> Run:
    """Stages with equal parts of the layers, each on a submesh and a logical mesh of these shapes."""
    layers = (MODELS[num_gpus].num_layers // stages,) * stages
    given = {"layers": layers} | given
    return Run(num_microbatches=microbatches, submeshes=(submesh,) * stages, mesh_shapes=(mesh,) * stages, **given)


ALPA: dict[int, Run] = {
    1: equal(1, 1, 64, (1, 1), (1, 1)),
    2: equal(2, 2, 128, (1, 1), (1, 1)),
    4: equal(4, 2, 128, (1, 2), (2, 1)),
    8: Run(
        num_microbatches=128,
        layers=(8, 8, 16),
        submeshes=((1, 2), (1, 2), (1, 4)),
        mesh_shapes=((2, 1), (2, 1), (4, 1)),
    ),
    16: equal(16, 2, 64, (1, 8), (2, 4)),
    32: equal(32, 4, 128, (1, 8), (2, 4)),
    64: equal(64, 16, 1024, (1, 4), (1, 4)),
}
INTRA_ONLY: dict[int, Run] = {  # the last two were run with a part of the batch, in microbatches of this size
    1: equal(1, 1, 64, (1, 1), (1, 1)),
    2: equal(2, 1, 64, (1, 2), (2, 1)),
    4: equal(4, 1, 64, (1, 4), (4, 1)),
    8: equal(8, 1, 32, (1, 8), (4, 2)),
    16: equal(16, 1, 64, (2, 8), (2, 8)),
    32: equal(32, 1, 128, (4, 8), (4, 8), tensor=True, limited=False),
    64: equal(64, 1, 512, (8, 8), (2, 32), tensor=True, limited=False),
}
MEGATRON: dict[int, tuple[int, int, int, int]] = {  # (data, tensor, pipeline, microbatches), where it was published
    1: (1, 1, 1, 64),
    4: (2, 1, 2, 128),
    8: (1, 1, 8, 128),
    16: (1, 2, 8, 256),
    32: (1, 4, 8, 256),
}


def grid(num_gpus: int, data: int, tensor: int, pipeline: int, microbatches: int) -> Run:
    """A grid in the style of Megatron-LM: tensor parallelism inside, then data, then pipeline parallelism."""
    devices = data * tensor
    submesh = (1, devices) if devices <= GPUS_PER_HOST else (devices // GPUS_PER_HOST, GPUS_PER_HOST)
    return equal(num_gpus, pipeline, microbatches, submesh, (data, tensor), tensor=True, megatron=True, limited=False)


def grids(num_gpus: int) -> Iterator[tuple[int, int, int, int]]:
    """(data, tensor, pipeline, microbatches) of every grid whose parts divide and whose state alone fits the memory.

    Tensor parallelism stays inside a host, stages are equal, microbatches have 1 to 8 examples per replica.
    """
    config, cluster = config_of(num_gpus), cluster_of(num_gpus)
    layer_bytes = STATE_BYTES * 12 * config.width**2 * config.num_layers
    sizes = [2**k for k in range(num_gpus.bit_length())]
    for tensor, pipeline in itertools.product(sizes, sizes):
        data = num_gpus // (tensor * pipeline)
        divides = (
            tensor * pipeline * data == num_gpus and not config.num_heads % tensor and not config.num_layers % pipeline
        )
        if not divides or tensor > GPUS_PER_HOST or layer_bytes / (tensor * pipeline) > cluster.device.memory_bytes:
            continue
        for examples in (1, 2, 4, 8):
            microbatches = GLOBAL_BATCH // (data * examples)
            if microbatches >= pipeline:
                yield data, tensor, pipeline, microbatches


def runs(series: str, num_gpus: int) -> Iterator[Run]:
    """The runs of a series; where several were made, or it is not known which, the best counts."""
    if series == "alpa":
        yield ALPA[num_gpus]
    elif series == "intra-op only":
        yield INTRA_ONLY[num_gpus]
    elif series == "inter-op only":
        layers = MODELS[num_gpus].num_layers
        cut = {"layers": None, "cut_layers": layers < num_gpus} if layers % num_gpus else {}
        for microbatches in (128, 256) if num_gpus <= 16 else (256, 1024):
            yield equal(num_gpus, num_gpus, microbatches, (1, 1), (1, 1), limited=num_gpus < 64, **cut)
    else:
        known = [MEGATRON[num_gpus]] if num_gpus in MEGATRON else grids(num_gpus)
        for numbers in known:
            yield grid(num_gpus, *numbers)
