"""Measures the devices of this process: matmul rate, memory rate, and alpha-beta of collectives, in a few seconds.

Comes in: JAX's local devices. Goes out: a ``Calibration`` record, and the ``Cluster`` of this process with or without
it.

Everything is measured with all devices at work at once, because that is how a plan runs (virtual CPU devices share
cores, devices of a host share memory and links). Each quantity is one compiled program with a loop inside, which runs
for so many rounds that its dispatch does not matter. The best of the repeats counts: other work on the machine can only
add time.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.cluster.calibration import Calibration, MeasuredCollective
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.cluster.hardware import device_name_of_kind
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.errors import ClusterError

Round = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much work the measurement does; small on CPU, where a second is a lot of it.

    Attributes:
        matmul: sides of the square matrices of the small and the large matmul.
        copy_bytes: size of the large copy, per device.
        collective_bytes: sizes per device, small to large.
        run_s: the least time of a run; its rounds are doubled until they fill it.
        repeats: runs of each.
    """

    matmul: tuple[int, int]
    copy_bytes: int
    collective_bytes: tuple[int, ...]
    run_s: float = 0.02
    repeats: int = 3


# The copy is as large as what all devices together keep in a cache: most tensors of a step on CPU are no larger.
CPU_SIZES = Sizes(matmul=(128, 512), copy_bytes=2**22, collective_bytes=(2**12, 2**18, 2**22))
ACCELERATOR_SIZES = Sizes(matmul=(1024, 8192), copy_bytes=2**30, collective_bytes=(2**14, 2**22, 2**27), repeats=5)


def local_cluster(calibrate: bool = False) -> Cluster:
    """The cluster of this process: ``jax.devices()``, one host per JAX process.

    Args:
        calibrate: measure instead of taking the hardware table's figures.

    Raises:
        ClusterError: unknown devices, or hosts with different numbers of them.
    """
    devices = jax.devices()
    counts = {sum(d.process_index == host for d in devices) for host in {d.process_index for d in devices}}
    if len(counts) != 1:
        raise ClusterError(
            f"the hosts of this job have {sorted(counts)} devices. Planning needs hosts of equal make, as in "
            f"'2x8:h100-sxm'. The counts are those of jax.devices() by process; start every process with the same "
            f"number of devices, or plan for a part of them with al.Cluster.parse."
        )
    return Cluster.of(
        device_name_of_kind(devices[0].platform, devices[0].device_kind),
        num_hosts=jax.process_count(),
        devices_per_host=counts.pop(),
        calibration=measure() if calibrate else None,
    )


def measure(sizes: Sizes | None = None) -> Calibration:
    """Measures this process's own devices; takes a few seconds."""
    devices = jax.local_devices()
    on_cpu = devices[0].platform == "cpu"
    sizes = sizes or (CPU_SIZES if on_cpu else ACCELERATOR_SIZES)
    # A matmul of bfloat16 on a CPU is emulated: slow to measure and of no use to know.
    dtypes = {"f32": jnp.float32} if on_cpu else {"f32": jnp.float32, "bf16": jnp.bfloat16}
    fits = {name: _matmul_fit(devices, sizes, dtype) for name, dtype in dtypes.items()}
    return Calibration(
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        matmul_flops_per_s=tuple((name, rate) for name, (rate, _) in fits.items()),
        ramp_s=min(ramp for _, ramp in fits.values()),
        memory_bandwidth_bytes_per_s=_loop_rate(devices, sizes) if on_cpu else _copy_rate(devices, sizes),
        launch_s=_launch(devices, sizes),
        collectives=tuple(_collectives(devices, sizes)),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        jax_version=jax.__version__,
    )


def _round_s(mesh: Mesh, one: Round, operand: tuple[int, ...], dtype: Any, sizes: Sizes) -> float:
    """Seconds of one call of ``one`` on every device of ``mesh`` at once; ``operand`` is the shape on one device."""

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P(mesh.axis_names), P()), out_specs=P(mesh.axis_names), check_vma=False
    )
    def run(x: jax.Array, rounds: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, rounds, lambda _, value: one(value), x[0])[None]

    sharding = NamedSharding(mesh, P(mesh.axis_names))
    x = jax.jit(partial(jnp.zeros, (mesh.size, *operand), dtype), out_shardings=sharding)()
    run(x, np.int32(1)).block_until_ready()  # compiles
    rounds = 1
    while (best := _run_s(run, x, rounds)) < sizes.run_s:
        rounds = max(2 * rounds, int(1.2 * rounds * sizes.run_s / best))
    return min([best, *(_run_s(run, x, rounds) for _ in range(sizes.repeats - 1))]) / rounds


def _run_s(run: Callable[[jax.Array, np.int32], jax.Array], x: jax.Array, rounds: int) -> float:
    start = time.perf_counter()
    run(x, np.int32(rounds)).block_until_ready()
    return time.perf_counter() - start


def _line(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("all",))


def _matmul_fit(devices: list[jax.Device], sizes: Sizes, dtype: Any) -> tuple[float, float]:
    """Rate and ramp of ``time = ramp + FLOPs / rate`` through a small and a large square matmul."""
    times = []
    for side in sizes.matmul:
        times.append(_round_s(_line(devices), lambda x: jnp.matmul(x, x), (side, side), dtype, sizes))
    small, large = (2.0 * side**3 for side in sizes.matmul)
    # Where the small one runs at a better rate (it fits a cache), there is no ramp to see.
    rate = max((large - small) / max(times[1] - times[0], 1e-9), large / times[1])
    rate = min(rate, 1.5 * large / times[1])
    return rate, max(times[0] - small / rate, 0.0)


def _copy_rate(devices: list[jax.Device], sizes: Sizes) -> float:
    """Bytes per second of reading and writing a large array."""
    count = sizes.copy_bytes // 4
    seconds = _round_s(_line(devices), lambda x: x + 1, (count,), jnp.float32, sizes)
    return 2 * sizes.copy_bytes / seconds


def _loop_rate(devices: list[jax.Device], sizes: Sizes) -> float:
    """Bytes per second of elementwise loops on a CPU, where arithmetic and not memory limits most of them.

    The geometric mean over a copy, an activation (tanh) and an optimizer's update (Adam: three tensors read and written).
    """
    count = sizes.copy_bytes // 4

    def adam(x: jax.Array) -> jax.Array:
        value, first, second = x
        first, second = 0.9 * first + 0.1 * value, 0.99 * second + 0.01 * value * value
        return jnp.stack([value - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second])

    def seconds(loop: Round, *shape: int) -> float:
        return _round_s(_line(devices), loop, shape, jnp.float32, sizes)

    times = [seconds(lambda x: x + 1, count), seconds(jnp.tanh, count), seconds(adam, 3, count // 3)]
    return float(2 * sizes.copy_bytes / np.exp(np.mean(np.log(times))))


def _launch(devices: list[jax.Device], sizes: Sizes) -> float:
    """The least time of an op among others: a chain of tiny products, each with a loop behind it that cannot join it."""
    links = 32

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(links):
            x = jnp.tanh(x @ x)
        return x

    return _round_s(_line(devices), chain, (8, 8), jnp.float32, sizes) / (2 * links)


def _collectives(devices: list[jax.Device], sizes: Sizes) -> list[MeasuredCollective]:
    """Every kind over groups of all, of half, ... and of two devices, all groups at work at once."""
    found = []
    group = len(devices)
    while group > 1:
        mesh = Mesh(np.array(devices).reshape(-1, group), ("outer", "group"))
        for kind in CollectiveKind:
            points = []
            for size in sizes.collective_bytes:
                count = size // 4 // group * group  # every device's part is equal
                seconds = _round_s(mesh, _collective_round(kind, group), (count,), jnp.float32, sizes)
                points.append((4.0 * count, seconds))
            alpha, beta = fit_line(points)
            found.append(MeasuredCollective(kind=kind, num_devices=group, alpha_s=alpha, beta_s_per_byte=beta))
        group = group // 2 if group % 2 == 0 else 1
    return found


def _collective_round(kind: CollectiveKind, group: int) -> Round:
    """One collective whose larger side has the operand's shape, and so has its result.

    What that adds (a slice before an all-gather, an update in place after a reduce-scatter) is 1/group of the bytes.
    """

    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x[: x.shape[0] // group], "group", tiled=True)

    def scatter(x: jax.Array) -> jax.Array:
        part = jax.lax.psum_scatter(x, "group", tiled=True)
        return jax.lax.dynamic_update_slice(x, part, (0,))

    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "group", [(i, (i + 1) % group) for i in range(group)])

    rounds: dict[CollectiveKind, Round] = {
        CollectiveKind.ALL_GATHER: gather,
        CollectiveKind.ALL_REDUCE: lambda x: jax.lax.psum(x, "group"),
        CollectiveKind.REDUCE_SCATTER: scatter,
        CollectiveKind.ALL_TO_ALL: lambda x: jax.lax.all_to_all(x, "group", 0, 0, tiled=True),
        CollectiveKind.COLLECTIVE_PERMUTE: permute,
    }
    return rounds[kind]


def fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Alpha and beta >= 0 of ``time = alpha + beta * size`` with the least sum of squared *relative* errors.

    Relative, because a microsecond matters to a small collective and not to a large one.
    """
    size, seconds = np.array(points).T
    columns = np.stack([1 / seconds, size / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
    if alpha <= 0:  # the best line through the origin
        alpha, beta = 0.0, float((size / seconds).sum() / ((size / seconds) ** 2).sum())
    elif beta <= 0:
        alpha, beta = float((1 / seconds).sum() / (1 / seconds**2).sum()), 0.0
    return float(alpha), float(beta)
