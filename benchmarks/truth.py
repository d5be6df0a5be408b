"""Predicted against published training throughput of GPT on 1 to 64 V100s: ``python -m benchmarks.truth``.

Four plans per number of GPUs (``published.py``): Alpa's stored solution, Megatron-LM's grid, one mesh without stages, and stages
of one GPU each. One factor per device type is fitted: the share of the predicted throughput that the published runs reach.
Planning uses no device. Memory is a column: beside the predicted peak the published one, where there is one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import numpy as np

import alpa_lite as al
from benchmarks import published
from benchmarks.published import Run
from benchmarks.report import keep, kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prediction; ``tflops`` per GPU, 0 where no plan fits; ``what`` names the plan; ``peak_gib`` per GPU."""

    series: str
    num_gpus: int
    tflops: float
    what: str
    peak_gib: float
    plan_s: float


def planned(num_gpus: int, run: Run, *, tied: bool = False) -> al.Plan | str:
    """The plan of a run, or why there is none; ``tied`` as in ``Run.step``."""
    step, args = run.step(num_gpus, tied=tied)
    try:
        return al.plan(step, *args, cluster=published.cluster_of(num_gpus), options=al.PlanOptions(**run.options()))
    except al.AlpaLiteError as error:
        return str(error).partition(". ")[0]


def tflops_per_gpu(num_gpus: int, plan: al.Plan) -> float:
    return published.step_flops(published.config_of(num_gpus)) / plan.objective / num_gpus / 1e12


def peak_gib(plan: al.Plan) -> float:
    return max(stage.memory.peak for stage in plan.stages) / 2**30


def name_of(run: Run) -> str:
    """Microbatches, and stages on meshes (data, model)."""
    meshes = dict.fromkeys(run.mesh_shapes)
    shapes = " and ".join(f"{data}x{model}" for data, model in meshes)
    return f"{run.num_microbatches} microbatches, {len(run.submeshes)} stages on {shapes}"


def cell(series: str, num_gpus: int) -> Cell:
    """The best of a series' runs."""
    start = time.process_time()
    best = Cell(series=series, num_gpus=num_gpus, tflops=0.0, what="", peak_gib=0.0, plan_s=0.0)
    for run in published.runs(series, num_gpus):
        plan = planned(num_gpus, run)
        if series == "megatron" and not isinstance(plan, str) and not fits(num_gpus, plan):
            known = num_gpus in published.MEGATRON
            plan = planned(num_gpus, replace(run, limited=True)) if known else "no grid's cheapest plan fits"
        if better(num_gpus, plan, best):
            best = replace(best, tflops=tflops_per_gpu(num_gpus, plan), what=name_of(run), peak_gib=peak_gib(plan))
        elif isinstance(plan, str) and not best.tflops:
            best = replace(best, what=plan)
    return replace(best, plan_s=round(time.process_time() - start, 1))


def better(num_gpus: int, plan: al.Plan | str, best: Cell) -> TypeGuard[al.Plan]:
    return not isinstance(plan, str) and tflops_per_gpu(num_gpus, plan) > best.tflops


def fits(num_gpus: int, plan: al.Plan) -> bool:
    """Whether the peak is within what plans are given by default."""
    return peak_gib(plan) * 2**30 <= 0.9 * published.cluster_of(num_gpus).device.memory_bytes


def fitted(cells: Sequence[Cell]) -> float:
    """The factor that makes the mean of log(published / predicted) zero."""
    logs = [math.log(published.TFLOPS_PER_GPU[c.series][c.num_gpus] / c.tflops) for c in cells if c.tflops]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; equal values share the mean of their ranks."""
    ranks = []
    for values in map(np.asarray, (a, b)):
        below = (values[:, None] > values[None, :]).sum(axis=1)
        ranks.append(below + ((values[:, None] == values[None, :]).sum(axis=1) - 1) / 2)
    return float(np.corrcoef(*ranks)[0, 1])


def report(cells: Sequence[Cell]) -> str:
    known = [c for c in cells if c.series in published.TFLOPS_PER_GPU]
    factor = fitted(known)
    lines = [
        "| series | GPUs | predicted | x factor | published | error | peak GiB | published | plan | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors, pairs = [], []
    for c in cells:
        real = published.TFLOPS_PER_GPU.get(c.series, {}).get(c.num_gpus)
        error = ""
        if real is not None and c.tflops:
            errors.append(abs(factor * c.tflops / real - 1))
            pairs.append((factor * c.tflops, real))
            error = f"{factor * c.tflops / real - 1:+.1%}"
        memory = published.PEAK_GIB.get(c.series, {}).get(c.num_gpus, "")
        row = (c.series, c.num_gpus, f"{c.tflops:.1f}", f"{factor * c.tflops:.1f}", real or "", error)
        row = (*row, f"{c.peak_gib:.1f}", memory, c.what, c.plan_s)
        lines.append("| " + " | ".join(map(str, row)) + " |")
    if errors:
        lines.append(
            f"\nfitted factor {factor:.3f}, {len(errors)} cells, mean absolute error {np.mean(errors):.1%}, "
            f"rank correlation {rank_correlation(*zip(*pairs, strict=True)):.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    series = list(published.TFLOPS_PER_GPU)
    parser.add_argument("--series", nargs="*", default=series, choices=series)
    parser.add_argument("--gpus", nargs="*", type=int, default=list(published.MODELS), choices=list(published.MODELS))
    parser.add_argument("--cells", type=Path, help="JSON lines of cells: those there are kept, new ones are added")
    arguments = parser.parse_args()
    cells = kept(Cell, arguments.cells)
    for num_gpus in arguments.gpus:
        for name in arguments.series:
            if any((c.series, c.num_gpus) == (name, num_gpus) for c in cells):
                continue
            cells.append(cell(name, num_gpus))
            keep(cells[-1], arguments.cells)
    print(report(cells))


if __name__ == "__main__":
    main()
