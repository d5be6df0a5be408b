"""Problems in whole numbers, where a convention's prices are whole: slices break ties, and answers are brought back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from alpa_lite.costs.conversion import TIE
from alpa_lite.costs.model import CostModel
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.known_shape import KnownShape
from alpa_lite.intraop.problem import IntraOpProblem, Solution, scaled
from alpa_lite.intraop.solve import solve
from alpa_lite.intraop.state import LARGE_GAP
from alpa_lite.planner.options import PlanOptions


def solve_in_units(
    problem: IntraOpProblem,
    costs: CostModel,
    options: PlanOptions,
    cutoff: float,
    *,
    proof: bool = True,
    shape: KnownShape | None = None,
    reduced: CostGraph | None = None,
    large_gap: float = LARGE_GAP,
) -> Solution:
    """Solve; where slices are free and prices whole, of equally dear choices the one with the fewest slices.

    Each slice then has the price ``TIE``. All prices are brought to whole numbers, which the solver proves to the
    convention's unit, and the answer is brought back to it. (Where a search is needed, it stops at a proof of the price:
    there may be a plan of that price with fewer slices.)
    """
    scale = scale_of(costs)
    solution = solve(
        scaled(problem, scale),
        time_limit_s=options.time_limit_s,
        seed=options.seed,
        cutoff=cutoff * scale,
        unit=scale,
        proof=proof,
        shape=shape,
        reduced=reduced,
        large_gap=large_gap,
    )
    if scale == 1.0:
        return solution

    def own(value: float) -> float:
        return float(math.floor(value * TIE)) if math.isfinite(value) else value

    # True prices are whole, so the bound without the slices may be rounded up.
    slices = math.fsum(_largest_fraction(edge.costs) for edge in problem.edges)
    bound = solution.lower_bound * TIE - slices
    bound = float(math.ceil(bound)) if math.isfinite(bound) else bound
    trace = tuple(replace(s, objective=own(s.objective), lower_bound=own(s.lower_bound)) for s in solution.trace)
    return replace(solution, objective=own(solution.objective), lower_bound=bound, trace=trace)


def scale_of(costs: CostModel) -> float:
    """By which prices are brought to whole numbers; 1 where that is not done."""
    return 1.0 / TIE if in_ties(costs) else 1.0


def in_ties(costs: CostModel) -> bool:
    """Whether prices are whole but for those of slices."""
    return costs.rules.whole and not costs.slice_price


def _largest_fraction(costs: np.ndarray) -> float:
    finite = costs[np.isfinite(costs)]
    return float((finite - np.floor(finite)).max(initial=0.0))
