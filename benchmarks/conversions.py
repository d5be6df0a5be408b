"""Conversions between specs: how long they take to plan, and to run beside XLA's own for the same pair.

XLA's own is the identity (for partial sums, their sum) jitted with the wanted sharding. Prices are those of the hardware
table. One pair per class runs, all in turn, round by round; ``--all`` lists every ratio.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.priced import PricedConversion, price_conversion
from alpa_lite.executor.calibrate import local_cluster
from alpa_lite.executor.local import local_mesh
from alpa_lite.lowering.hlo import collectives_in
from alpa_lite.lowering.reshard import conversion_function, stacked_spec
from benchmarks.conversion_pairs import Pair, one_per_class
from benchmarks.report import Row, finish, interleaved_medians_s
from examples.example import use_virtual_devices

SHAPE = (512, 512)  # 1 MiB of float32
MESHES = ((8,), (2, 4), (2, 2, 2))
NUM_ROUNDS = 25
NUM_LOOKUPS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One conversion, compiled both ways; ``rematerialises``: XLA gathers the whole tensor although nobody wants it whole."""

    conversion: PricedConversion
    ours: Callable[[], Any]
    xla: Callable[[], Any]
    rematerialises: bool


def device_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh(shape=shape, axis_names=("x", "y", "z")[: len(shape)])


def planning_rows() -> list[Row]:
    mesh, shape = device_mesh((2, 2)), (64, 64, 64)
    costs = cost_model("roofline", Cluster.parse("1x4:h100-sxm"), mesh)
    cold_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        made = Conversions(mesh=mesh, costs=costs)
        specs = [s for s in made.space(3).specs if not s.unreduced]
        pairs = [(before, after) for before in specs for after in specs]
        for before, after in pairs:
            made.steps(before, after, shape, 4)
            made.time_s(before, after, shape, 4)
        cold_s.append(time.perf_counter() - start_s)
    before, after = pairs[-2]
    start_s = time.perf_counter()
    for _ in range(NUM_LOOKUPS):
        made.steps(before, after, shape, 4)
    warm_s = (time.perf_counter() - start_s) / NUM_LOOKUPS
    case = f"plan {len(pairs)} pairs of rank 3 on (2, 2)"
    return [
        Row(benchmark="conversions", case=f"{case}, cold", value=min(cold_s) * 1e3, unit="ms", target="<= 50 ms"),
        Row(benchmark="conversions", case="lookup, warm", value=warm_s * 1e6, unit="us", target="<= 2 us"),
    ]


def compile_case(made: Conversions, pair: Pair) -> Case:
    before, after = pair
    mesh = local_mesh(made.mesh)
    conversion = price_conversion(made, before, after, SHAPE, "float32", 4)
    stacked = (made.mesh.axes_size(before.unreduced),) if before.unreduced else ()
    x, other = (  # one each: the second to read a tensor would find it in the cache
        jax.device_put(jnp.ones((*stacked, *SHAPE)), NamedSharding(mesh, stacked_spec(before))) for _ in range(2)
    )
    wanted = NamedSharding(mesh, stacked_spec(after))
    ours = jax.jit(conversion_function(conversion, mesh)).lower(x).compile()
    xla = jax.jit(lambda x: x.sum(0) if before.unreduced else x, out_shardings=wanted).lower(x).compile()
    whole = 4 * SHAPE[0] * SHAPE[1]
    gathers_all = any(c.kind == "all-gather" and c.size_bytes >= whole for c in collectives_in(xla.as_text()))
    return Case(
        conversion=conversion,
        ours=lambda: ours(x),
        xla=lambda: xla(other),
        rematerialises=gathers_all and not after.is_replicated,
    )


def cases(shape: tuple[int, ...], cluster: Cluster) -> list[Case]:
    mesh = device_mesh(shape)
    made = Conversions(mesh=mesh, costs=cost_model("roofline", cluster, mesh))
    pairs = [(b, a) for b, a in one_per_class(mesh, len(SHAPE)) if b != a and not a.unreduced]
    if len(shape) > 2:
        pairs = [(b, a) for b, a in pairs if not b.unreduced]  # the other meshes show partial sums
    return [compile_case(made, pair) for pair in pairs]


def main() -> None:
    use_virtual_devices(8)
    rows = planning_rows()
    cluster = local_cluster()
    measured: list[tuple[Case, float, float]] = []
    for shape in MESHES:
        found = cases(shape, cluster)
        runs = {f"{i} {way}": getattr(c, way) for i, c in enumerate(found) for way in ("ours", "xla")}
        times_s = interleaved_medians_s(runs, num_rounds=NUM_ROUNDS)
        here = [(c, times_s[f"{i} ours"], times_s[f"{i} xla"]) for i, c in enumerate(found)]
        rows.append(ratio_row(f"{len(here)} classes on {shape}", here, "<= 1.05x"))
        measured += here
    rows.append(ratio_row(f"all {len(measured)} classes", measured, "<= 1.05x"))
    rematerialised = [m for m in measured if m[0].rematerialises]
    rows.append(ratio_row(f"{len(rematerialised)} classes that XLA rematerialises", rematerialised, "< 1x"))
    if "--all" in sys.argv:
        for case, ours_s, xla_s in sorted(measured, key=lambda m: -m[1] / m[2]):
            c = case.conversion
            steps = " ".join(f"{s.name}:{','.join(s.step.axes)}" for s in c.steps)
            print(f"{ours_s / xla_s:5.2f}x  {ours_s * 1e6:6.0f} us  {c.mesh.shape} {c.before} -> {c.after}  {steps}")
    finish(rows, sys.argv[1:])


def ratio_row(case: str, measured: list[tuple[Case, float, float]], target: str) -> Row:
    """Median time and median ratio, and how many of the ratios are above 1.05."""
    ratios = [ours_s / xla_s for _, ours_s, xla_s in measured]
    slower = sum(ratio > 1.05 for ratio in ratios)
    return Row(
        benchmark="conversions",
        case=f"run {case}, {slower} above 1.05x",
        value=statistics.median(ours_s for _, ours_s, _ in measured) * 1e6,
        unit="us",
        against="XLA's own",
        ratio=statistics.median(ratios),
        target=target,
    )


if __name__ == "__main__":
    main()
