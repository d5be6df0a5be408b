"""Solves an intra-op problem: presolve, core, and an answer scored on the problem as given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from alpa_lite.intraop.core import Core, extract_core
from alpa_lite.intraop.graph import CostGraph, InfeasibleError
from alpa_lite.intraop.milp import Encoding
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.problem import Array, IntraOpProblem, Solution, evaluate

_ROWS_PER_ROUND = 15


def solve(
    problem: IntraOpProblem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    incumbent: Array | None = None,
    rel_gap: float = 1e-6,
) -> Solution:
    """Finds the cheapest choice within the memory limit."""
    start = time.monotonic()
    deadline = start + time_limit_s
    best: Solution | None = None
    for memory in (False, True):
        graph = CostGraph(problem, memory=memory)
        try:
            presolve(graph)
        except InfeasibleError as error:
            names = tuple(problem.name(i) for i in error.path)
            return _infeasible(f"no strategy of {names[0]} fits its neighbours", names, start)
        core = extract_core(graph)
        picks, bound, rows = _solve_core(core, deadline, seed)
        if picks is None:
            return _infeasible("the memory limit cannot be kept", (), start) if bound == math.inf else _infeasible("", (), start)
        choice = graph.lift(dict(zip(core.nodes, picks, strict=True)))
        score = evaluate(problem, choice)
        gap = max(0.0, (score.objective - bound) / max(abs(score.objective), 1e-300))
        best = Solution(
            choice=choice, objective=score.objective, lower_bound=min(bound, score.objective), gap=gap,
            status="optimal" if gap <= rel_gap else "feasible", time_s=time.monotonic() - start,
            peak_bytes=score.peak_bytes, peak_time=score.peak_time, rows_used=rows,
            core_size=(core.num_nodes, len(core.costs)),
        )
        if problem.usage_limit is None or score.peak_bytes <= problem.usage_limit:
            return best
    assert best is not None
    return best


def _infeasible(message: str, conflict: tuple[str, ...], start: float) -> Solution:
    return Solution(
        choice=np.zeros(0, dtype=np.int64), objective=math.inf, lower_bound=math.inf, gap=math.inf, status="infeasible",
        message=message, conflict=conflict, time_s=time.monotonic() - start,
    )


def _solve_core(core: Core, deadline: float, seed: int) -> tuple[list[int] | None, float, int]:
    encoding = Encoding(core)
    while True:
        result = encoding.solve(time_limit_s=deadline - time.monotonic(), seed=seed)
        if result.picks is None or core.memory is None or core.fits(result.picks):
            return result.picks, result.bound, len(encoding.times)
        profile = core.memory.profile(np.array(result.picks))
        encoding.add_rows(core.memory.worst_times(profile, _ROWS_PER_ROUND, set(encoding.times)))
