"""Our plan beside Alpa's stored solution and Megatron-style grids, under our own model: ``python -m benchmarks.never_worse``.

GPT on 1 to 64 V100s as in ``published.py``, with a head that is the embedding everywhere. Ours is what the planner finds when
it is asked for nothing but a number of microbatches: Alpa's, and that of every grid that is below what was found so far.
All plans keep the memory budget.

Every grid is planned, none is left out by an estimate: first its cheapest plan, whatever memory it takes. Where that does
not fit, a plan of the grid that does costs no less, so it is looked for only where the cheapest one is below ours.
"""

from __future__ import annotations

import argparse
import math
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
    """Seconds per step; for given plans 0 and for ours inf where there is none. ``grid`` names the best one.

    The cheapest plans of ``fitting`` of ``grids`` grids fit the memory; ``again`` others were planned again within it.
    ``search_s`` and ``given_s`` are CPU seconds of planning ours and the given ones.
    """

    num_gpus: int
    ours_s: float
    ours: str
    alpa_s: float
    grid_s: float
    grid: str
    grids: int
    fitting: int
    again: int
    search_s: float
    given_s: float


def within_memory(num_gpus: int, run: Run) -> float:
    """Seconds per step of a run; 0 if no plan within the memory was found."""
    plan = planned(num_gpus, replace(run, limited=True), tied=True)
    return 0.0 if isinstance(plan, str) or not fits(num_gpus, plan) else plan.objective


def cheapest(num_gpus: int, run: Run) -> tuple[float, bool]:
    """Seconds per step of a run's cheapest plan, and whether it fits the memory; inf if it has none."""
    plan = planned(num_gpus, replace(run, limited=False), tied=True)
    return (math.inf, False) if isinstance(plan, str) else (plan.objective, fits(num_gpus, plan))


def searched(num_gpus: int, microbatches: int) -> tuple[float, str]:
    """Seconds per step of our plan, and what it is; inf if there is none."""
    fn, args = pipelined(published.config_of(num_gpus))
    step, options = al.parallelize(fn, donate_argnums=0), al.PlanOptions(num_microbatches=microbatches)
    try:
        plan = al.plan(step, *args, cluster=published.cluster_of(num_gpus), options=options)
    except al.AlpaLiteError:
        return math.inf, "no plan"
    meshes = dict.fromkeys(str(stage.mesh) for stage in plan.stages)
    return plan.objective, f"{microbatches} microbatches, {len(plan.stages)} stages on {', '.join(meshes)}"


def row(num_gpus: int) -> Row:
    start = time.process_time()
    alpa = replace(published.ALPA[num_gpus], tensor=False)
    alpa_s = within_memory(num_gpus, alpa)
    given_s = time.process_time() - start
    ours_s, ours = searched(num_gpus, alpa.num_microbatches)
    search_s = time.process_time() - start - given_s
    fitting: list[tuple[float, Run]] = []
    others: list[tuple[float, Run]] = []
    for numbers in published.grids(num_gpus):
        run = published.grid(num_gpus, *numbers)
        seconds, fit = cheapest(num_gpus, run)
        (fitting if fit else others).append((seconds, run))
    given_s, num_fitting = time.process_time() - start - search_s, len(fitting)
    known = {alpa.num_microbatches}
    for seconds, run in sorted([*fitting, *others], key=lambda pair: pair[0]):
        if run.num_microbatches not in known and seconds < ours_s:
            known.add(run.num_microbatches)
            found_s, found = searched(num_gpus, run.num_microbatches)
            if found_s < ours_s:
                ours_s, ours = found_s, found
    search_s = time.process_time() - start - given_s
    again = [run for seconds, run in others if seconds < ours_s]
    fitting += [(seconds, run) for run in again if (seconds := within_memory(num_gpus, run))]
    grid_s, grid = min(fitting, key=lambda pair: pair[0], default=(0.0, None))
    return Row(
        num_gpus=num_gpus,
        ours_s=ours_s,
        ours=ours,
        alpa_s=alpa_s,
        grid_s=grid_s,
        grid="" if grid is None else name_of(grid),
        grids=num_fitting + len(others),
        fitting=num_fitting,
        again=len(again),
        search_s=round(search_s, 1),
        given_s=round(time.process_time() - start - search_s, 1),
    )


def report(rows: Sequence[Row]) -> str:
    lines = [
        "| GPUs | ours, s | Alpa's, s | best grid, s | ours / better of them | ours | best grid within the memory | "
        "grids: cheapest plan fits, planned again, all | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        known = [seconds for seconds in (r.alpa_s, r.grid_s) if seconds]
        ratio = f"{r.ours_s / min(known):.4f}" if known else ""
        times = (f"{seconds:.2f}" if 0 < seconds < math.inf else "none" for seconds in (r.ours_s, r.alpa_s, r.grid_s))
        row = (r.num_gpus, *times, ratio, r.ours, r.grid, f"{r.fitting}, {r.again}, {r.grids}")
        row = (*row, f"{r.search_s} and {r.given_s}")
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
