"""Measures the devices of this process: matmul rate, memory rate, and alpha-beta of collectives, in a few seconds.

Comes in: JAX's local devices. Goes out: a ``Calibration`` record, and the ``Cluster`` of this process with or without
it.

Everything is measured with all devices at work at once, because that is how a plan runs (virtual CPU devices share
cores, devices of a host share memory and links). Each quantity is one compiled program with a loop inside, which runs
for so many rounds that its dispatch does not matter. The best of the repeats counts, as other work on the machine can only
add time; all quantities are repeated in turn, so that no slow moment falls on every repeat of one.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from alpa_lite.errors import ClusterError, user_line

Round = Callable[[Any], Any]

_ALONG_A_DIM = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much work the measurement does; small on CPU, where a second is a lot of it.

    Attributes:
        matmul: sides of the square matrices of the small and the large matmul.
        tall: rows and columns of the matrix that is multiplied by itself across its rows.
        copy_bytes: size of the large copy, per device.
        collective_bytes: sizes per device, small to large.
        at_once: rounds per iteration of a run's loop. A GPU's loop asks the host after each iteration whether to go on, which
            takes longer than a small op.
        run_s: the least time of a run; its iterations are doubled until they fill it.
        repeats: runs of each.
    """

    matmul: tuple[int, int]
    copy_bytes: int
    collective_bytes: tuple[int, ...]
    tall: tuple[int, int] = (512, 64)
    at_once: int = 1
    run_s: float = 0.02
    repeats: int = 5


# The copy is as large as what all devices together keep in a cache: most tensors of a step on CPU are no larger.
CPU_SIZES = Sizes(matmul=(32, 512), copy_bytes=2**22, collective_bytes=(2**12, 2**18, 2**22))
ACCELERATOR_SIZES = Sizes(matmul=(1024, 8192), copy_bytes=2**30, collective_bytes=(2**14, 2**22, 2**27), at_once=16)


def local_cluster(calibrate: bool = False) -> Cluster:
    """The cluster of this process, or of its ``jax.distributed`` job: ``jax.devices()``, one host per JAX process.

    Args:
        calibrate: measure instead of taking the hardware table's figures; in one process only.

    Raises:
        ClusterError: unknown devices, hosts with different numbers of them, or a job that is to be measured.
    """
    devices = jax.devices()
    if calibrate and jax.process_count() > 1:
        raise ClusterError(
            f"calibrate=True was given in a jax.distributed job of {jax.process_count()} processes. Only the devices of one "
            "process are measured: links between hosts are not, and every process would measure other figures and plan "
            f"otherwise. At {user_line()}. Leave it out, or plan in one process with measured figures, save the plan, and give "
            "every process plan=al.load_plan(file)."
        )
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
    probes = _Probes(devices=devices, sizes=sizes)
    # A matmul of bfloat16 on a CPU is emulated: slow to measure and of no use to know.
    dtypes = {"f32": jnp.float32} if on_cpu else {"f32": jnp.float32, "bf16": jnp.bfloat16}
    matmuls = {name: probes.matmuls(dtype) for name, dtype in dtypes.items()}
    loops, moved_bytes = probes.loops() if on_cpu else probes.copy()
    chain, links = probes.chain()
    across = probes.across() if on_cpu else None
    collectives = probes.collectives()
    probes.repeat()
    fits = {name: _matmul_fit(sizes, small, large) for name, (small, large) in matmuls.items()}
    ramp_s = min(ramp for _, ramp in fits.values())
    fitted = tuple(found.fitted() for found in collectives)
    return Calibration(
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        matmul_flops_per_s=tuple((name, rate) for name, (rate, _) in fits.items()),
        ramp_s=ramp_s,
        memory_bandwidth_bytes_per_s=float(moved_bytes / np.exp(np.mean(np.log([p.round_s for p in loops])))),
        launch_s=chain.round_s / links,
        across_s_per_byte=0.0 if across is None else _across(sizes, across, fits["f32"][0], ramp_s),
        collectives=_alike(fitted) if on_cpu else fitted,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        jax_version=jax.__version__,
    )


@dataclass(eq=False, slots=True)
class _Probe:
    """One compiled program whose loop is run for so many iterations; ``round_s`` is the best time of a round so far."""

    run: Callable[[jax.Array, np.int32], jax.Array]
    operand: Callable[[], jax.Array]  # made for each run, so that few of them are in memory
    at_once: int = 1  # rounds per iteration
    iterations: int = 1
    round_s: float = math.inf

    def fill(self, run_s: float) -> None:
        """Compiles, and finds how many iterations take at least so long."""
        self.run(self.operand(), np.int32(1)).block_until_ready()
        while (seconds := self.repeat()) < run_s:
            self.iterations = max(2 * self.iterations, int(1.2 * self.iterations * run_s / seconds))
            self.round_s = math.inf  # dispatch was too much of it

    def repeat(self) -> float:
        """Seconds of one more run."""
        operand = self.operand().block_until_ready()
        start = time.perf_counter()
        self.run(operand, np.int32(self.iterations)).block_until_ready()
        seconds = time.perf_counter() - start
        self.round_s = min(self.round_s, seconds / (self.iterations * self.at_once))
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A collective over groups of one size: (bytes, what measures them)."""

    kind: CollectiveKind
    num_devices: int
    inner: bool
    points: list[tuple[float, _Probe]]

    def fitted(self) -> MeasuredCollective:
        alpha, beta = fit_line([(size, probe.round_s) for size, probe in self.points])
        return MeasuredCollective(
            kind=self.kind, num_devices=self.num_devices, alpha_s=alpha, beta_s_per_byte=beta, inner=self.inner
        )


@dataclass(kw_only=True)
class _Probes:
    """All that is measured; each method adds something and says what it added."""

    devices: list[jax.Device]
    sizes: Sizes
    made: list[_Probe] = field(default_factory=list)

    def repeat(self) -> None:
        """Runs all of them in turn, as often as ``sizes`` says."""
        for probe in self.made:
            probe.fill(self.sizes.run_s)
        for _ in range(self.sizes.repeats - 1):
            for probe in self.made:
                probe.repeat()

    def add(self, one: Round, operand: tuple[int, ...], dtype: Any = jnp.float32, group: int | None = None) -> _Probe:
        """``one``, on every device at once, in groups of so many (all); ``operand`` is the shape on one device."""

        def several(value: Any) -> Any:
            for _ in range(self.sizes.at_once - 1):
                value = jax.lax.optimization_barrier(one(value))  # or several copies became one kernel
            return one(value)

        devices = np.array(self.devices).reshape(-1, group or len(self.devices))
        mesh = Mesh(devices, ("outer", "group"))

        @partial(jax.jit, donate_argnums=0)  # no fresh memory in the time that is measured
        @partial(
            jax.shard_map, mesh=mesh, in_specs=(P(mesh.axis_names), P()), out_specs=P(mesh.axis_names), check_vma=False
        )
        def run(x: jax.Array, iterations: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, iterations, lambda _, value: several(value), x[0])[None]

        sharding = NamedSharding(mesh, P(mesh.axis_names))
        zeros = jax.jit(partial(jnp.zeros, (mesh.size, *operand), dtype), out_shardings=sharding)
        self.made.append(_Probe(run, zeros, self.sizes.at_once))
        return self.made[-1]

    def matmuls(self, dtype: Any) -> tuple[_Probe, _Probe]:
        """A small and a large square matmul."""
        small, large = (self.add(lambda x: jnp.matmul(x, x), (side, side), dtype) for side in self.sizes.matmul)
        return small, large

    def copy(self) -> tuple[list[_Probe], int]:
        """Reading and writing a large array, and the bytes that this moves."""
        return [self.add(lambda x: x + 1, (self.sizes.copy_bytes // 4,))], 2 * self.sizes.copy_bytes

    def loops(self) -> tuple[list[_Probe], int]:
        """Elementwise loops on a CPU, where arithmetic and not memory limits most of them, and the bytes that each moves.

        A copy, an activation (tanh) and an optimizer's update (Adam: three tensors read and written).
        """
        count = self.sizes.copy_bytes // 4

        def adam(x: jax.Array) -> jax.Array:
            value, first, second = x
            first, second = 0.9 * first + 0.1 * value, 0.99 * second + 0.01 * value * value
            return jnp.stack([value - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second])

        copy, moved_bytes = self.copy()
        return [*copy, self.add(jnp.tanh, (count,)), self.add(adam, (3, count // 3))], moved_bytes

    def chain(self) -> tuple[_Probe, int]:
        """Ops among others at their least: tiny products, each with a loop behind it that cannot join it; how many ops."""
        links = 32

        def chain(x: jax.Array) -> jax.Array:
            for _ in range(links):
                x = jnp.tanh(x @ x)
            return x

        return self.add(chain, (8, 8)), 2 * links

    def across(self) -> _Probe:
        """A product that reads its first operand across its rows, as gradients of weights do; XLA:CPU has a slow loop for it."""
        return self.add(lambda x: jax.lax.dynamic_update_slice(x, jnp.matmul(x.T, x), (0, 0)), self.sizes.tall)

    def collectives(self) -> list[_Measured]:
        """Every kind over groups of all, of half, ... and of two devices, all groups at work at once."""
        found = []
        group = len(self.devices)
        while group > 1:
            for kind, inner in itertools.product(CollectiveKind, (False, True)):
                if inner and kind not in _ALONG_A_DIM:
                    continue
                points = []
                for size in self.sizes.collective_bytes[inner:]:  # copying shows in larger ones
                    shape = _square(size // 4, group) if inner else (size // 4 // group * group,)
                    one = _collective_round(kind, group, int(inner))
                    points.append((4.0 * math.prod(shape), self.add(one, shape, group=group)))
                found.append(_Measured(kind=kind, num_devices=group, inner=inner, points=points))
            group = group // 2 if group % 2 == 0 else 1
        return found


def _matmul_fit(sizes: Sizes, *probes: _Probe) -> tuple[float, float]:
    """Rate and ramp of ``time = ramp + FLOPs / rate`` through a small and a large square matmul."""
    times = [probe.round_s for probe in probes]
    small, large = (2.0 * side**3 for side in sizes.matmul)
    # Where the small one runs at a better rate (it fits a cache), there is no ramp to see.
    rate = max((large - small) / max(times[1] - times[0], 1e-9), large / times[1])
    rate = min(rate, 1.5 * large / times[1])
    return rate, max(times[0] - small / rate, 0.0)


def _across(sizes: Sizes, probe: _Probe, flops_per_s: float, ramp_s: float) -> float:
    """Seconds per byte of the first operand that reading it across its rows adds to the FLOPs of the product."""
    rows, columns = sizes.tall
    return max(probe.round_s - ramp_s - 2.0 * rows * columns**2 / flops_per_s, 0.0) / (4.0 * rows * columns)


def _alike(collectives: tuple[MeasuredCollective, ...]) -> tuple[MeasuredCollective, ...]:
    """The same with one alpha for all kinds of a group size, the median: on CPU it is the time in which a group of threads meet.

    That differs more from one compiled program to the next than between kinds. Permutes, for which all devices meet, and
    what is copied along an inner dim keep their own.
    """

    def meets(measured: MeasuredCollective) -> bool:
        return not measured.inner and measured.kind is not CollectiveKind.COLLECTIVE_PERMUTE

    sizes = {measured.num_devices for measured in collectives}
    alpha_s = {n: statistics.median(m.alpha_s for m in collectives if m.num_devices == n and meets(m)) for n in sizes}
    return tuple(replace(m, alpha_s=alpha_s[m.num_devices]) if meets(m) else m for m in collectives)


def _square(count: int, group: int) -> tuple[int, int]:
    """A matrix of about so many elements, of which every device of a group can have an equal part of either dim."""
    side = max(math.isqrt(count) // group, 1) * group
    return side, side


def _collective_round(kind: CollectiveKind, group: int, dim: int) -> Round:
    """One collective along a dim whose larger side has the operand's shape, and so has its result.

    What that adds (a slice before an all-gather, an update in place after a reduce-scatter) is 1/group of the bytes.
    """

    def gather(x: jax.Array) -> jax.Array:
        part = jax.lax.slice_in_dim(x, 0, x.shape[dim] // group, axis=dim)
        return jax.lax.all_gather(part, "group", axis=dim, tiled=True)

    def scatter(x: jax.Array) -> jax.Array:
        part = jax.lax.psum_scatter(x, "group", scatter_dimension=dim, tiled=True)
        return jax.lax.dynamic_update_slice(x, part, (0,) * x.ndim)

    def exchange(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, "group", dim, 0, tiled=True).reshape(x.shape)

    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "group", [(i, (i + 1) % group) for i in range(group)])

    rounds: dict[CollectiveKind, Round] = {
        CollectiveKind.ALL_GATHER: gather,
        CollectiveKind.ALL_REDUCE: lambda x: jax.lax.psum(x, "group"),
        CollectiveKind.REDUCE_SCATTER: scatter,
        CollectiveKind.ALL_TO_ALL: exchange,
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
