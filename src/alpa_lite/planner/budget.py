"""The plan on one mesh that keeps the memory budget.

The ILP's memory rows count the tensors as they are made and the copies that are kept: too little where conversions need more
for a moment, too much where XLA never stores a tensor. What counts is the profile of the written-out plan. So

- what fits without the rows is taken first;
- else the ILP's limit is the budget;
- if it finds nothing, or what is dearer than the cheapest plan, or too large when written out: a price on every byte at the
  fullest times (a rent), which rises until a plan fits;
- if still nothing that fits is close to the cheapest plan: limits lowered by what the answers exceed the budget, the first by
  what the nearest of all does; or, if the ILP found nothing at the budget itself, limits raised from the smallest that any choice
  can keep;
- then mixtures of all these plans, under limits between one that fits and one that does not.

Under a limit nothing is proven but where the limit is not a count: proofs took most of the time, up to 20 s each for a step of
six matmuls, and say nothing of what a plan takes when it is written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.profile import PeakReport
from alpa_lite.intraop.problem import IntraOpProblem, Solution, evaluate
from alpa_lite.intraop.solve import minimum_peak
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.planner.realise import Realised

OVER_BUDGET = "over budget"
_ROUNDS = 4  # with the limit lowered, or raised
# How far above the budget the smallest count may lie for a try: this share of the budget, or so many times what the solver
# counts too much of the cheapest plan.
_NEAR, _TIMES = 0.1, 2
_RENTS = (0.03, 0.3, 3.0, 30.0)  # of all bytes of the cheapest plan together, as shares of its price
_MIXED, _AGAIN = 8, 3  # limits of mixtures, and how many of their plans may have been found before
# Nodes of a problem up to which mixtures find more than they take: of Llama-3 8B they took a third of the time.
_MIXED_NODES = 1000
_TIE = 1e-3  # rent of mixtures, as those above: of equally dear ones the leaner is taken
_CLOSE = 0.01  # above the cheapest plan's price, which is close enough


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshResult:
    """The best plan found on one mesh, or why there is none.

    Attributes:
        mesh: the device mesh.
        status: the solver's status; or "over budget" where plans were found and none that fits, which is no proof.
        realised, peak: the plan and its memory; None without a plan.
        objective, lower_bound: in the cost model's unit.
        compute: total compute price; ``op_times`` per op path.
        penalty: total price on replicated state.
        solution: of the ILP.
        problem: the ILP that was solved last.
        limit: bytes that it allowed by the solver's own count; None = without memory.
        seconds: building, solving, writing out.
        unit: of all prices.
        budgeted: what the budget limits, see ``SearchRules``; ``used_bytes`` is how much of it the plan takes.
        restricted: whether a cheaper plan was passed over for its memory.
        fullest: of a plan over the budget, when it takes most memory, in the solver's times; -1 if that is not known.
    """

    mesh: DeviceMesh
    status: str
    objective: float = math.inf
    lower_bound: float = -math.inf
    realised: Realised | None = None
    peak: PeakReport | None = None
    compute: float = 0.0
    penalty: float = 0.0
    op_times: tuple[tuple[str, float], ...] = ()
    solution: Solution | None = None
    problem: IntraOpProblem | None = None
    limit: int | None = None
    seconds: float = 0.0
    unit: str = "s"
    budgeted: str = "peak"
    used_bytes: int = 0
    restricted: bool = False
    fullest: int = -1

    @property
    def peak_profile(self) -> MemoryProfile:
        """Memory of the plan; there must be one."""
        assert self.peak is not None
        return self.peak.profile


Solved = Callable[[int | None, bool], MeshResult]
"""The best plan by the solver's count of memory, under a limit or none; with a proof, or else mostly some percent too dear."""
Rented = Callable[[float, Sequence[MeshResult]], MeshResult]
"""The cheapest plan, without a limit, where every byte costs so much that lies there when one of some plans is fullest."""
Mixed = Callable[[int, Sequence[MeshResult], float], MeshResult]
"""The cheapest plan under a limit and a rent in which every node chooses as in one of some plans."""


def within_budget(
    solved: Solved, budget: float, rented: Rented | None = None, mixed: Mixed | None = None
) -> MeshResult:
    """The best plan found whose written-out memory keeps to ``budget``, or why there is none.

    Where the cheapest plan does not fit, no bound but its own is claimed: the solver may count too much of a plan that does.

    Args:
        solved, rented, mixed: plan; without the latter two these ways are not gone.
        budget: bytes per device; may be infinite.
    """
    free = solved(None, True)
    if free.peak is None or free.used_bytes <= budget:
        return free
    first = solved(int(budget), free.budgeted == "weights")
    if first.budgeted == "weights" and first.used_bytes <= budget:  # which are counted as they are
        return first
    tried = [] if first.peak is None else [first]
    if rented is not None and not _close(_fitting(tried, budget), free):
        tried += _under_rent(rented, free, budget)
    if first.peak is None and not _fitting(tried, budget):
        return (_above(solved, free, first, budget) if first.budgeted == "peak" else None) or first
    if first.peak is not None and first.used_bytes > budget and not _close(_fitting(tried, budget), free):
        tried += _below(solved, tried, budget)
    if mixed is not None and (fitting := _fitting(tried, budget)) and not _close(fitting, free):
        tried += _mixtures(mixed, [free, *tried], first, budget)
    found = _fitting(tried, budget)
    if not found:
        return replace(first, status=OVER_BUDGET, realised=None, objective=math.inf, lower_bound=-math.inf)
    return as_found(min(found, key=lambda result: result.objective), free.lower_bound)


def _mixtures(mixed: Mixed, tried: Sequence[MeshResult], first: MeshResult, budget: float) -> list[MeshResult]:
    """Plans in which every node chooses as in one of those tried, under limits between one that fits and one that does not.

    An end that stays counts half as much each time, so that the other does not creep.
    """
    assert first.problem is not None
    if first.problem.num_nodes > _MIXED_NODES:
        return []
    best = min(_fitting(tried, budget), key=lambda result: result.objective)
    cheaper = [r for r in tried if r.peak is not None and r.used_bytes > budget and r.objective < best.objective]
    if not cheaper:
        return []
    over = min(cheaper, key=lambda result: result.used_bytes)
    low, high = _counted(first.problem, best), _counted(first.problem, over)
    room, excess = budget - best.used_bytes, over.used_bytes - budget
    rent = _TIE * tried[0].objective / max(1, tried[0].used_bytes)
    found, seen, again = [], {(best.objective, best.used_bytes), (over.objective, over.used_bytes)}, 0
    while again < _AGAIN and len(found) < _MIXED:
        limit = math.floor(low + (high - low) * room / (room + excess))
        if not low < limit < high:
            break
        result = mixed(limit, [*tried, *found], rent)
        if result.peak is None:
            break
        found.append(result)
        again += (result.objective, result.used_bytes) in seen
        seen.add((result.objective, result.used_bytes))
        if result.used_bytes <= budget:
            low, room, excess = limit, budget - result.used_bytes, excess / 2
        else:
            high, room, excess = min(limit, _counted(first.problem, result)), room / 2, result.used_bytes - budget
    return found


def _fitting(tried: Sequence[MeshResult], budget: float) -> list[MeshResult]:
    return [result for result in tried if result.peak is not None and result.used_bytes <= budget]


def _close(found: Sequence[MeshResult], free: MeshResult) -> bool:
    return any(result.objective <= (1 + _CLOSE) * free.objective for result in found)


def _under_rent(rented: Rented, free: MeshResult, budget: float) -> list[MeshResult]:
    """Plans at a rent that rises until one fits, and is then lowered once.

    The rent is charged for what lies there when the plans so far are fullest.
    """
    unit = free.objective / max(1, free.used_bytes)
    tried = [free]
    for number, share in enumerate(_RENTS if unit else ()):  # shares of nothing are no rents
        result = rented(share * unit, tried)
        if result.peak is None:
            break
        tried.append(result)
        if result.used_bytes > budget:
            continue
        if number and not _close([result], free):
            result = rented(math.sqrt(share * _RENTS[number - 1]) * unit, tried)
            tried += [result] if result.peak is not None else []
        break
    return tried[1:]


def _below(solved: Solved, tried: Sequence[MeshResult], budget: float) -> list[MeshResult]:
    """Plans by limits below the budget, up to the first that fits.

    Of the plans tried, the first is by the budget as the limit. Limits start from the nearest that does not fit, then from the
    one of which the solver counts most: what it counts less of is not always less.
    """
    problem = tried[0].problem
    assert problem is not None
    over = [(result, _counted(problem, result)) for result in tried if result.used_bytes > budget]
    nearest, most = min(over, key=lambda pair: pair[0].used_bytes), max(over, key=lambda pair: pair[1])
    low, found = 0, []
    for result, counted in (nearest, most) if most[1] > nearest[1] else (nearest,):
        high, excess = min(int(budget), counted), max(1, math.ceil(result.used_bytes - budget))
        limit = high - excess if not low else (low + high) // 2
        for _ in range(_ROUNDS - 1):
            if not low < limit < high:
                break
            found.append(solved(limit, False))
            if found[-1].peak is None:
                low = limit  # too low; between it and what the last answer counts there may be one
                limit = (low + high) // 2
            elif found[-1].used_bytes <= budget:
                return found
            else:  # the next answer must need less than this one, by the solver's own count
                high = min(limit, _counted(problem, found[-1]))
                excess = max(1, math.ceil(found[-1].used_bytes - budget))
                limit = high - excess if not low else (low + high) // 2
    return found


def _counted(problem: IntraOpProblem, result: MeshResult) -> int:
    """The peak of a plan by the solver's own count."""
    assert result.solution is not None
    return evaluate(problem, result.solution.choice).peak_bytes


def _above(solved: Solved, free: MeshResult, refused: MeshResult, budget: float) -> MeshResult | None:
    """The best plan found that fits, by limits between the budget and what the plan without a limit takes.

    Up to ``low`` the solver finds nothing, or something that fits; what it finds at ``high`` is over the budget. Where even
    the smallest count is far above the budget, nothing is tried. Where time ran out, ``refused`` is no proof any more.
    """
    assert free.solution is not None and refused.problem is not None
    low = max(int(budget), minimum_peak(refused.problem) - 1)
    high = evaluate(refused.problem, free.solution.choice).peak_bytes
    if low - budget > max(_NEAR * budget, _TIMES * (high - free.used_bytes)):
        return None
    limit, best, cut_short = low + 1, None, False
    for _ in range(_ROUNDS):
        if not low < limit < high:
            break
        result = solved(limit, False)
        if result.peak is None or result.solution is None:
            low, limit = limit, (limit + high) // 2
            cut_short |= result.status != "infeasible"
            continue
        counted, excess = result.solution.peak_bytes, math.ceil(result.used_bytes - budget)
        if excess > 0:
            high = counted
            limit = (low + high) // 2
        else:
            best = result if best is None or result.objective < best.objective else best
            low = limit
            limit = min(high - 1, max(low + 1, counted - excess))
    if best is None:
        return replace(refused, status=OVER_BUDGET) if cut_short else None
    return as_found(best, free.lower_bound)


def as_found(result: MeshResult, bound: float) -> MeshResult:
    """A plan of which no proof holds but the bound of the problem without memory."""
    assert result.solution is not None
    if result.objective <= bound:
        return replace(result, status="optimal", lower_bound=result.objective)
    *earlier, end = (replace(s, lower_bound=min(s.lower_bound, bound)) for s in result.solution.trace)
    trace = (*earlier, replace(end, found_by="search"))
    ended = "time" if result.solution.limit_used == "time" else "gap"
    solution = replace(result.solution, status="feasible", lower_bound=bound, trace=trace, limit_used=ended)
    return replace(result, status="feasible", lower_bound=bound, solution=solution)
