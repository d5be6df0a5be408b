"""Our plan beside Alpa's stored solution and Megatron-style grids, under our own model: ``python -m benchmarks.never_worse``.

GPT on 1 to 64 V100s as in ``published.py``, with a head that is the embedding everywhere. Ours is what the planner finds when
it is asked for nothing but a number of microbatches: Alpa's and the best grid's. All plans keep the memory budget.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import alpa_lite as al
from benchmarks import published
from benchmarks.models import pipelined
from benchmarks.published import MODELS, Run
from benchmarks.report import keep, kept
from benchmarks.truth import fits, name_of, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds per step; 0 where there is no plan. ``grid`` names the best one, ``seconds`` are of planning, on the CPU."""

    num_gpus: int
    ours_s: float
    ours: str
    alpa_s: float
    grid_s: float
    grid: str
    grids: int
    search_s: float
    given_s: float


def given(num_gpus: int, run: Run) -> float:
    """Seconds per step of a run; 0 if it has no plan within the memory."""
    plan = planned(num_gpus, run, tied=True)
    if isinstance(plan, str) or not fits(num_gpus, plan):
        return 0.0
    return plan.objective


def searched(num_gpus: int, microbatches: Sequence[int]) -> tuple[float, str]:
    """Our best plan, and what it is."""
    fn, args = pipelined(published.config_of(num_gpus))
    best, what = 0.0, "no plan"
    for count in sorted(set(microbatches)):
        options = al.PlanOptions(num_microbatches=count)
        step = al.parallelize(fn, donate_argnums=0)
        try:
            plan = al.plan(step, *args, cluster=published.cluster_of(num_gpus), options=options)
        except al.AlpaLiteError:
            continue
        if not best or plan.objective < best:
            meshes = dict.fromkeys(str(stage.mesh) for stage in plan.stages)
            best, what = plan.objective, f"{count} microbatches, {len(plan.stages)} stages on {', '.join(meshes)}"
    return best, what


def row(num_gpus: int) -> Row:
    start = time.process_time()
    alpa = replace(published.ALPA[num_gpus], tensor=False, limited=True)
    alpa_s = given(num_gpus, alpa)
    found: list[tuple[float, Run]] = []
    for numbers in published.grids(num_gpus):
        run = published.grid(num_gpus, *numbers)
        if seconds := given(num_gpus, run):
            found.append((seconds, run))
    grid_s, grid = min(found, key=lambda pair: pair[0], default=(0.0, None))
    middle = time.process_time()
    counts = [alpa.num_microbatches] + ([] if grid is None else [grid.num_microbatches])
    ours_s, ours = searched(num_gpus, counts)
    return Row(
        num_gpus=num_gpus,
        ours_s=ours_s,
        ours=ours,
        alpa_s=alpa_s,
        grid_s=grid_s,
        grid="" if grid is None else name_of(grid),
        grids=len(found),
        search_s=round(time.process_time() - middle, 1),
        given_s=round(middle - start, 1),
    )


def report(rows: Sequence[Row]) -> str:
    lines = [
        "| GPUs | ours, s | Alpa's, s | best grid, s | ours / better of them | ours | best of the grids that fit | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        known = [seconds for seconds in (r.alpa_s, r.grid_s) if seconds]
        ratio = f"{r.ours_s / min(known):.4f}" if known and r.ours_s else ""
        times = (f"{seconds:.2f}" if seconds else "none" for seconds in (r.ours_s, r.alpa_s, r.grid_s))
        row = (r.num_gpus, *times, ratio, r.ours, f"{r.grid} (of {r.grids})", f"{r.search_s} and {r.given_s}")
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", nargs="*", type=int, default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", type=Path, help="JSON lines of rows: those there are kept, new ones are added")
    arguments = parser.parse_args()
    rows = kept(Row, arguments.rows)
    for num_gpus in arguments.gpus:
        if any(r.num_gpus == num_gpus for r in rows):
            continue
        rows.append(row(num_gpus))
        keep(rows[-1], arguments.rows)
    print(report(rows))


if __name__ == "__main__":
    main()
