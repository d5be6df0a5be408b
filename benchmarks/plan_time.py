"""How long planning takes, and how much memory, beside JAX's own trace + lower + compile of the same step.

Every case runs in a process of its own that does nothing but plan, so that its peak resident set is the planner's.
``plan_time.py`` runs all cases; ``plan_time.py CASE...`` some of them.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import alpa_lite as al
from benchmarks import models
from benchmarks.fresh import answered, child
from benchmarks.report import Row, finish, peak_rss_gb


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one cluster. ``options`` are those of ``al.PlanOptions``; ``target_s`` is the time to reach."""

    model: str
    cluster: str
    target_s: float | None = None
    remat: bool = False
    layers: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "llama3-8b-remat": Case(
        model="llama3-8b", cluster="8x8:h100-sxm", remat=True, options={"mesh_shape": (8, 8)}, target_s=6
    ),
    "llama3-8b-remat-mesh-searched": Case(model="llama3-8b", cluster="8x8:h100-sxm", remat=True, target_s=20),
    "llama3-8b-no-budget": Case(
        model="llama3-8b",
        cluster="8x8:h100-sxm",
        options={"mesh_shape": (8, 8), "memory_budget_bytes": math.inf},
        target_s=6,
    ),
    "llama3-8b-remat-4-layers": Case(
        model="llama3-8b", cluster="8x8:h100-sxm", remat=True, layers=4, options={"mesh_shape": (8, 8)}
    ),
    "gpt2-124m": Case(model="gpt2-124m", cluster="1x8:h100-sxm", target_s=3),
    "gpt-350m": Case(model="gpt-350m", cluster="1x8:h100-sxm"),
    "gpt-1.3b": Case(model="gpt-1.3b", cluster="1x8:h100-sxm"),
}
# One model, deep and shallow: tracing grows with the depth, the rest should hardly (solve_time.py has the solve alone).
DEPTH_PAIR = ("llama3-8b-remat", "llama3-8b-remat-4-layers")


def plan_case(case: Case) -> dict[str, Any]:
    """Plans in this process; a child of ``main``."""
    step = models.make(case.model, layers=case.layers, remat=case.remat)
    cluster = al.Cluster.parse(case.cluster)
    start_s = time.perf_counter()
    plan = al.plan(step.fn, *step.args, cluster=cluster, donate_argnums=(0,), options=al.PlanOptions(**case.options))
    return {
        "seconds": time.perf_counter() - start_s,
        "peak_rss_gb": peak_rss_gb(),
        "gap": plan.gap,
        "mesh": str(plan.stages[0].mesh),
    }


def compile_case(case: Case) -> dict[str, Any]:
    """JAX's own trace + lower + compile on one CPU device; a child of ``main``."""
    jax.config.update("jax_platforms", "cpu")
    step = models.make(case.model, layers=case.layers, remat=case.remat)
    start_s = time.perf_counter()
    jax.jit(step.fn, donate_argnums=(0,)).trace(*step.args).lower().compile()
    return {"seconds": time.perf_counter() - start_s, "peak_rss_gb": peak_rss_gb()}


def measure(name: str) -> tuple[list[Row], dict[str, Any]]:
    """Rows of one case, and the planner's figures."""
    case = CASES[name]
    planned, compiled = child(__file__, "plan", name), child(__file__, "compile", name)
    target = "" if case.target_s is None else f"<= {case.target_s:g} s, <= 1x"
    rows = [
        Row(
            benchmark="plan_time",
            case=f"{name} on {case.cluster}, mesh {planned['mesh']}, gap {planned['gap']:.1%}",
            value=planned["seconds"],
            unit="s",
            against=f"JAX trace + lower + compile: {compiled['seconds']:.1f} s",
            ratio=planned["seconds"] / compiled["seconds"],
            target=target,
        ),
        Row(benchmark="plan_time", case=f"{name} peak RSS", value=planned["peak_rss_gb"], unit="GB", target="<= 2 GB"),
    ]
    return rows, planned


def main() -> None:
    argv = sys.argv[1:]
    verbs = {"plan": lambda name: plan_case(CASES[name]), "compile": lambda name: compile_case(CASES[name])}
    if answered(argv, verbs):
        return
    names = [name for name in argv if name in CASES] or list(CASES)
    rows: list[Row] = []
    figures: dict[str, dict[str, Any]] = {}
    for name in names:
        more, figures[name] = measure(name)
        rows += more
    if all(name in figures for name in DEPTH_PAIR):
        deep, shallow = (figures[name]["seconds"] for name in DEPTH_PAIR)
        case = "all of planning, 32 layers over 4"
        rows.append(Row(benchmark="plan_time", case=case, value=deep, unit="s", ratio=deep / shallow))
    finish(rows, argv)


if __name__ == "__main__":
    main()
