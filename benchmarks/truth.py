"""Predicted against published training throughput of GPT on 1 to 64 V100s: ``python -m benchmarks.truth``.

Four plans per number of GPUs (``published.py``): Alpa's stored solution, the best of the Megatron-style grids, one mesh without
stages, and stages of one GPU each. ``--ours`` adds the plan that is searched. One factor per device type is fitted: the share
of the predicted throughput that the published runs reach. Planning uses no device.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import alpa_lite as al
from benchmarks import published
from benchmarks.models import pipelined


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prediction; ``tflops`` per GPU, 0 where no plan fits; ``what`` names the plan."""

    series: str
    num_gpus: int
    tflops: float
    what: str
    plan_s: float


def predicted(num_gpus: int, options: dict[str, Any], pins: dict[str, Any] | None = None) -> tuple[float, str]:
    """TFLOPS per GPU of the best plan under these options, and what it is; 0 and the reason where there is none."""
    config = published.config_of(num_gpus)
    fn, args = pipelined(config)
    step = al.parallelize(fn, donate_argnums=0, pins=pins)
    try:
        plan = al.plan(step, *args, cluster=published.cluster_of(num_gpus), options=al.PlanOptions(**options))
    except al.AlpaLiteError as error:
        return 0.0, str(error).partition(".")[0]
    meshes = ", ".join(str(stage.mesh) for stage in plan.stages[:4])
    what = f"{options['num_microbatches']} microbatches, {len(plan.stages)} stages on {meshes}"
    return published.step_flops(config) / plan.objective / num_gpus / 1e12, what


def candidates(series: str, num_gpus: int) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Options and pins of a series' plans; the best of them counts."""
    config = published.config_of(num_gpus)
    if series == "alpa":
        yield published.stored_options(num_gpus), None
    elif series == "megatron":
        for grid in published.grids(num_gpus):
            yield grid.options(config.num_layers, published.cluster_of(num_gpus)), grid.pins
    elif series == "intra-op only":
        for microbatches in (16, 64, 256):
            yield {"num_microbatches": microbatches, "num_stages": 1}, None
    elif series == "inter-op only":
        for microbatches in (256, 1024):
            yield {"num_microbatches": microbatches, "num_stages": num_gpus}, None
    else:
        yield {"num_microbatches": published.STORED[num_gpus].num_microbatches}, None


def cell(series: str, num_gpus: int) -> Cell:
    start = time.process_time()
    found = [predicted(num_gpus, options, pins) for options, pins in candidates(series, num_gpus)]
    tflops, what = max(found, key=lambda pair: pair[0])
    return Cell(
        series=series, num_gpus=num_gpus, tflops=tflops, what=what, plan_s=round(time.process_time() - start, 1)
    )


def fitted(cells: Sequence[Cell]) -> float:
    """The factor that makes the mean of log(published / predicted) zero."""
    logs = [math.log(published.TFLOPS_PER_GPU[c.series][c.num_gpus] / c.tflops) for c in cells if c.tflops]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def report(cells: Sequence[Cell]) -> str:
    known = [c for c in cells if c.series in published.TFLOPS_PER_GPU]
    factor = fitted(known)
    lines = [
        "| series | GPUs | predicted | x factor | published | error | plan | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors, pairs = [], []
    for c in cells:
        real = published.TFLOPS_PER_GPU.get(c.series, {}).get(c.num_gpus)
        error = ""
        if real is not None and c.tflops:
            errors.append(abs(factor * c.tflops / real - 1))
            pairs.append((factor * c.tflops, real))
            error = f"{factor * c.tflops / real - 1:+.1%}"
        row = (c.series, c.num_gpus, f"{c.tflops:.1f}", f"{factor * c.tflops:.1f}", real or "", error, c.what, c.plan_s)
        lines.append("| " + " | ".join(map(str, row)) + " |")
    if errors:
        lines.append(
            f"\nfitted factor {factor:.3f}, {len(errors)} cells, mean absolute error {np.mean(errors):.1%}, "
            f"rank correlation {rank_correlation(*zip(*pairs, strict=True)):.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    series = [*published.TFLOPS_PER_GPU, "ours"]
    parser.add_argument("--series", nargs="*", default=series, choices=series)
    parser.add_argument("--gpus", nargs="*", type=int, default=list(published.MODELS), choices=list(published.MODELS))
    parser.add_argument("--cells", type=Path, help="JSON lines of cells: those there are kept, new ones are added")
    arguments = parser.parse_args()
    lines = arguments.cells.read_text().splitlines() if arguments.cells and arguments.cells.exists() else []
    cells = [Cell(**json.loads(line)) for line in lines]
    for num_gpus in arguments.gpus:
        for name in arguments.series:
            if any((c.series, c.num_gpus) == (name, num_gpus) for c in cells):
                continue
            cells.append(cell(name, num_gpus))
            if arguments.cells:
                with arguments.cells.open("a") as file:
                    file.write(json.dumps(asdict(cells[-1])) + "\n")
            print(cells[-1], flush=True)
    print(report(cells))


if __name__ == "__main__":
    main()
