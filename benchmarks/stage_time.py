"""How long the whole two-level plan takes: tracing, the search of stages, the plans of the chosen stages; and its memory.

Layers are unrolled and recomputed (``models.pipelined``). Every case runs in a process of its own that does nothing but plan.
``stage_time.py`` runs all cases; ``stage_time.py CASE...`` some of them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import alpa_lite as al
from benchmarks import models
from benchmarks.fresh import answered, child
from benchmarks.report import Row, finish, peak_rss_gb


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one cluster; ``target_s`` and ``target_gb`` are the time and the memory to reach on two cores."""

    model: str
    cluster: str
    num_microbatches: int
    target_s: float
    target_gb: float = 4.0


CASES: dict[str, Case] = {
    "gpt-39b": Case(model="gpt-39b", cluster="8x8:v100-sxm2-16gb", num_microbatches=1024, target_s=30),
    "llama3-8b": Case(model="llama3-8b", cluster="8x8:h100-sxm", num_microbatches=16, target_s=15),
    "llama3-405b": Case(model="llama3-405b", cluster="2048x8:h100-sxm", num_microbatches=64, target_s=60),
}


def plan_case(case: Case) -> dict[str, Any]:
    """Plans in this process; a child of ``main``."""
    step, args = models.pipelined(models.MODELS[case.model])
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    options = al.PlanOptions(num_microbatches=case.num_microbatches)
    plan = al.plan(step, *args, cluster=al.Cluster.parse(case.cluster), donate_argnums=(0,), options=options)
    return {
        "seconds": time.perf_counter() - start_s,
        "cpu_seconds": time.process_time() - start_cpu_s,
        "peak_rss_gb": peak_rss_gb(),
        "stages": len(plan.stages),
        "objective": plan.objective,
    }


def measure(name: str) -> list[Row]:
    case, found = CASES[name], child(__file__, "plan", name)
    what = f"{name} on {case.cluster}: {found['stages']} stages, {found['objective']:.3g} s per step"
    target = f"<= {case.target_s:g} s"
    return [
        Row(benchmark="stage_time", case=what, value=found["seconds"], unit="s", target=target),
        Row(benchmark="stage_time", case=f"{name} CPU time", value=found["cpu_seconds"], unit="s"),
        Row(
            benchmark="stage_time",
            case=f"{name} peak RSS",
            value=found["peak_rss_gb"],
            unit="GB",
            target=f"<= {case.target_gb:g} GB",
        ),
    ]


def main() -> None:
    argv = sys.argv[1:]
    if answered(argv, {"plan": lambda name: plan_case(CASES[name])}):
        return
    names = [name for name in argv if name in CASES] or list(CASES)
    finish([row for name in names for row in measure(name)], argv)


if __name__ == "__main__":
    main()
