"""Solves an intra-op problem: presolve, bounds and incumbents by message passing, proof by MILP.

The answer is scored on the problem as given.

1. Presolve without memory (``presolve.py``); what is left is the *core*. States are not compared in small cores that go to 3.
2. Repeated layers tied (``tie.py``) give an incumbent that costs the same whatever the depth, and messages to start from.
3. Message passing on the untied core (``messages.py``) gives the lower bound; where that is good, a search along a frontier
   (``frontier.py``) gives incumbents and proofs.
   Cores so narrow that elimination is quick are solved exactly at once (``narrow.py``), instead of 2 to 4; others with few
   states a node once what the gap leaves of them is narrow (``rest.py``).
4. On cores of moderate size the gap excludes states and pairs, and HiGHS closes it (``milp.py``).
5. If the optimum without memory fits the limit, it is the optimum. Else 1-4 again with memory: rows are added lazily in
   the MILP; prices on the fullest times (a Lagrangian, ``prices.py``) give bounds, and choices that fit (``fit.py``).

Work is counted in sweeps, not in seconds, so that equal problems give equal answers; the time limit only cuts it short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from alpa_lite.intraop.core import Core, extract_core
from alpa_lite.intraop.graph import CostGraph, InfeasibleError
from alpa_lite.intraop.known_shape import KnownShape
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.problem import (
    Array,
    IntraOpProblem,
    Solution,
    as_float,
    evaluate,
    greedy_choice,
)
from alpa_lite.intraop.search import FEW_NODES, is_wide, search_core
from alpa_lite.intraop.state import LARGE_GAP, Search, is_small, tolerance_of
from alpa_lite.plan.records import SearchStep

_GREEDY_NODES = 20_000  # up to which the greedy choice is made


def solve(
    problem: IntraOpProblem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    incumbent: Array | None = None,
    rel_gap: float = 1e-6,
    cutoff: float = math.inf,
    unit: float = 1.0,
    proof: bool = True,
    shape: KnownShape | None = None,
    reduced: CostGraph | None = None,
    large_gap: float = LARGE_GAP,
) -> Solution:
    """Finds the cheapest choice within the memory limit.

    Args:
        problem: what is to be solved.
        time_limit_s: the best answer found by then is returned.
        seed: of the MILP solver.
        progress: called with a line of text now and then.
        incumbent: a choice to start from.
        rel_gap: gap at which an answer counts as optimal.
        cutoff: on large problems the search ends once no answer below this is possible (another mesh is better).
        unit: where all costs are whole, how much of a difference matters.
        proof: whether a gap that sweeps leave is closed; without, the answer may be "feasible" and some percent too dear.
        shape: what problems solved before have found that may be found again; it is changed.
        reduced: the graph of this problem, without memory, after ``reduce_nodes``; it is changed.
        large_gap: gap at which sweeps over a core end that is too large for a proof.

    Returns:
        The answer with its bound; ``status`` is "optimal", "feasible", "infeasible" or "no-solution".
    """
    start = time.monotonic()
    if problem.usage_limit is not None and not _fits(problem, minimum_peak(problem)):
        return _no_answer("infeasible", "the memory limit cannot be kept", start)
    if all(len(costs) == 1 for costs in problem.node_costs) and (only := _only_choice(problem, start)) is not None:
        return only
    search, choice, floor = None, None, -math.inf
    shape = shape or KnownShape()
    for memory in (False, True):
        graph = CostGraph(problem, memory=memory) if memory or reduced is None else reduced
        looked_at: list[Core] = []
        enough = None if memory else partial(_is_wide, shape=shape, looked_at=looked_at)
        try:
            wide = presolve(graph, enough, reduced=graph is reduced)
        except InfeasibleError as error:
            names = tuple(problem.name(i) for i in error.path)
            return _no_answer("infeasible", f"no strategy of {names[0]} fits its neighbours", start, conflict=names)
        core = looked_at[0] if wide else extract_core(graph)
        if progress is not None:
            progress(f"core of {core.num_nodes} nodes, {len(core.costs)} edges")
        search = Search.of(core, start + time_limit_s, math.inf if is_small(core) else cutoff, unit)
        search.shape, search.large_gap = shape, large_gap
        search_core(search, problem, seed, rel_gap, proof=proof, wide=wide)
        floor = max(floor, search.bound)
        if search.proven_infeasible:
            message = "the memory limit cannot be kept" if memory else "every choice contains a forbidden combination"
            return _no_answer("infeasible", message, start)
        choice = None if search.picks is None else graph.lift(dict(zip(core.nodes, search.picks, strict=True)))
        if choice is None or problem.usage_limit is None or _fits(problem, evaluate(problem, choice).peak_bytes):
            break
        if progress is not None:
            progress("the cheapest choice does not fit the memory limit")
    assert search is not None
    return _answer(problem, search, choice, incumbent, floor, start, rel_gap)


def _is_wide(graph: CostGraph, shape: KnownShape, looked_at: list[Core]) -> bool:
    """``looked_at``: where the core goes, if it is small enough."""
    if len(graph.alive()) <= FEW_NODES:
        looked_at.append(extract_core(graph))
    return bool(looked_at) and is_wide(looked_at[0], shape)


def _only_choice(problem: IntraOpProblem, start: float) -> Solution | None:
    """The answer where no node has a choice, as on one device; None if it is forbidden, which presolve explains."""
    choice = np.zeros(problem.num_nodes, dtype=np.int64)
    score = evaluate(problem, choice)
    if not math.isfinite(score.objective):
        return None
    return Solution(
        choice=choice,
        objective=score.objective,
        lower_bound=score.objective,
        gap=0.0,
        status="optimal",
        time_s=time.monotonic() - start,
        peak_bytes=score.peak_bytes,
        peak_time=score.peak_time,
        trace=(SearchStep(objective=score.objective, lower_bound=score.objective, found_by="proof"),),
    )


def _answer(
    problem: IntraOpProblem,
    search: Search,
    choice: Array | None,
    incumbent: Array | None,
    floor: float,
    start: float,
    rel_gap: float,
) -> Solution:
    """The cheaper of what was found and what was given, scored on the problem."""
    found = [c for c in (choice, incumbent) if c is not None]
    scored = [(evaluate(problem, c), np.asarray(c, dtype=np.int64)) for c in found]
    scored = [pair for pair in scored if math.isfinite(pair[0].objective) and _fits(problem, pair[0].peak_bytes)]
    if not scored:
        return _no_answer("no-solution", "no choice was found in the time allowed", start, bound=floor)
    score, best = min(scored, key=lambda pair: pair[0].objective)  # of equals the first, which was found here
    bound = min(floor, score.objective)
    gap = max(0.0, (score.objective - bound) / max(abs(score.objective), 1e-300))
    optimal = gap <= tolerance_of(search.core, score.objective, rel_gap, search.unit)
    if optimal and search.core.whole:
        bound, gap = score.objective, 0.0  # less than a unit is left, and that is rounding
    return Solution(
        choice=best,
        objective=score.objective,
        lower_bound=bound,
        gap=gap,
        status="optimal" if optimal else "feasible",
        limit_used=_limit_used(search, optimal),
        time_s=time.monotonic() - start,
        peak_bytes=score.peak_bytes,
        peak_time=score.peak_time,
        rows_used=search.rows,
        tied=search.tied and choice is not None and best is scored[0][1],
        core_size=(search.core.num_nodes, len(search.core.costs)),
        trace=_trace(search.found, score.objective, bound, optimal),
    )


def _trace(found: list[SearchStep], objective: float, bound: float, optimal: bool) -> tuple[SearchStep, ...]:
    """What the search found on its way, and how it ended."""
    steps: list[SearchStep] = []
    for step in found:
        if math.isfinite(step.objective) and (not steps or step.objective < steps[-1].objective):
            steps.append(replace(step, lower_bound=min(step.lower_bound, step.objective)))
    steps = [s for s in steps if _end(objective) < s.objective]
    return (*steps, SearchStep(objective=objective, lower_bound=bound, found_by="proof" if optimal else "search"))


def _end(objective: float) -> float:
    return objective + 1e-9 * abs(objective)  # the core's own sum may differ in the last digits


def greedy_step(problem: IntraOpProblem, solution: Solution) -> SearchStep | None:
    """What deciding node by node costs, to stand before the trace; None if it is forbidden, too large, or no dearer."""
    if problem.num_nodes > _GREEDY_NODES:
        return None
    score = evaluate(problem, greedy_choice(problem))
    if not _fits(problem, score.peak_bytes) or not _end(solution.objective) < score.objective < math.inf:
        return None
    return SearchStep(objective=score.objective, lower_bound=-math.inf, found_by="greedy")


def _limit_used(search: Search, optimal: bool) -> str:
    if optimal:
        return "none"
    return "time" if search.out_of_time else "cutoff" if search.too_dear else "gap"


def _fits(problem: IntraOpProblem, peak_bytes: int) -> bool:
    return problem.usage_limit is None or peak_bytes <= problem.usage_limit


def _no_answer(
    status: str, message: str, start: float, *, conflict: tuple[str, ...] = (), bound: float = math.inf
) -> Solution:
    return Solution(
        choice=np.zeros(0, dtype=np.int64),
        objective=math.inf,
        lower_bound=bound,
        gap=math.inf,
        status=status,
        message=message,
        conflict=conflict,
        limit_used="none" if status == "infeasible" else "time",
        time_s=time.monotonic() - start,
    )


def minimum_peak(problem: IntraOpProblem) -> int:
    """A lower bound on the peak of any choice: at every time each node at its smallest allowed usage.

    Exact when one choice is smallest everywhere, as is usual (split every tensor as far as it goes).
    """
    delta = np.zeros(problem.num_times + 1, dtype=np.int64)
    for usage in problem.usages:
        allowed = usage.size_bytes[np.isfinite(as_float(problem.node_costs[usage.node]))]
        smallest = int(allowed.min()) if len(allowed) else 0
        if usage.lo < usage.hi:
            delta[usage.lo] += smallest
            delta[usage.hi] -= smallest
    profile = np.cumsum(delta[:-1])
    if problem.base_usage is not None:
        profile = profile + problem.base_usage
    return int(profile.max(initial=0))
