"""Proof in integers: a small core with whole costs as a CP-SAT model, where a floating-point MILP cannot tell one unit.

The model is that of ``milp.py``: one Boolean per state, one per allowed pair of an edge, marginals joined; memory rows
are exact and added lazily.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alpa_lite.intraop.core import Core

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_ROWS_PER_ROUND = 15
_WORK = 20.0  # deterministic time, about seconds, after which the proof is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerResult:
    """``picks`` is None if nothing cheaper than the hint was found; ``proven`` if the search was complete."""

    picks: list[int] | None
    bound: int
    proven: bool


def solve_whole(
    core: Core, upper: int, hint: Sequence[int] | None, times: Sequence[int], deadline: float, seed: int
) -> IntegerResult:
    """The cheapest choice that costs less than ``upper`` (without the core's constant), or a proof that there is none.

    Args:
        core: whole costs, inf for what is forbidden.
        upper: cost of the incumbent.
        hint: the incumbent, if it is a choice of this core.
        times: memory rows to start with.
    """
    from ortools.sat.python import cp_model  # brings pandas along: most of a second that few problems are worth

    model = cp_model.CpModel()
    xs = [[model.new_bool_var("") if np.isfinite(v) else None for v in c] for c in core.unary]
    terms: list[tuple[cp_model.IntVar, int]] = []
    for costs, row in zip(core.unary, xs, strict=True):
        model.add_exactly_one([x for x in row if x is not None])
        terms += [(x, round(float(v))) for x, v in zip(row, costs, strict=True) if x is not None and v]
    for a, b, matrix in zip(core.left, core.right, core.costs, strict=True):
        terms += _edge(model, xs[a], xs[b], matrix)
    cost = sum(weight * x for x, weight in terms)
    model.add(cost <= upper - 1)
    model.minimize(cost)
    sizes = [len(c) for c in core.unary]
    known: set[int] = set()
    new = list(times)
    if hint is not None:
        for row, p in zip(xs, hint, strict=True):
            for s, x in enumerate(row):
                if x is not None:
                    model.add_hint(x, s == p)
    while True:
        for t in new:
            known.add(t)
            assert core.memory is not None
            row, room = core.memory.row(t, sizes)
            parts = [int(v) * x for n, part in row.items() for v, x in zip(part, xs[n], strict=True) if x is not None]
            model.add(sum(parts) <= int(room))
        solver = cp_model.CpSolver()
        solver.parameters.random_seed = seed
        # One worker is deterministic. Interleaved ones are too, but OR-Tools 9.15 ends the process on some models with
        # "Check failed: heuristics.fixed_search != nullptr".
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = _WORK
        solver.parameters.max_time_in_seconds = max(0.1, deadline - time.monotonic())
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return IntegerResult(picks=None, bound=upper, proven=True)
        bound = int(solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return IntegerResult(picks=None, bound=bound, proven=False)
        picks = [next(s for s, x in enumerate(r) if x is not None and solver.value(x)) for r in xs]
        if core.memory is None or core.fits(picks):
            return IntegerResult(picks=picks, bound=bound, proven=status == cp_model.OPTIMAL)
        new = core.memory.worst_times(core.memory.profile(np.array(picks)), _ROWS_PER_ROUND, known)


def _edge(model: cp_model.CpModel, left: list, right: list, matrix: np.ndarray) -> list[tuple[cp_model.IntVar, int]]:
    """Booleans for the allowed pairs of one edge, tied to the states of its ends."""
    by_row: list[list[cp_model.IntVar]] = [[] for _ in left]
    by_col: list[list[cp_model.IntVar]] = [[] for _ in right]
    terms = []
    for r, c in zip(*np.nonzero(np.isfinite(matrix)), strict=True):
        if left[r] is None or right[c] is None:
            continue
        y = model.new_bool_var("")
        by_row[r].append(y)
        by_col[c].append(y)
        if matrix[r, c]:
            terms.append((y, round(float(matrix[r, c]))))
    for states, sums in ((left, by_row), (right, by_col)):
        for x, ys in zip(states, sums, strict=True):
            if x is not None:
                model.add(sum(ys) == x) if ys else model.add(x == 0)
    return terms
