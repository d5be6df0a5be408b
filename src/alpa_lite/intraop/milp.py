"""The core as a mixed-integer program for OR-Tools (MathOpt).

Variables: a binary x[i, s] per node and state, and per edge continuous y[r, c] in [0, 1] over classes of equal rows and
equal columns of its matrix (rows and columns are compared after their smallest entries moved to the node costs).

* ``_add_nodes``: sum_s x[i, s] = 1.
* ``_add_edge``: sum_c y[r, c] = sum_{s in r} x[i, s] and the same for columns (the marginal encoding; forbidden pairs
  have no y). With x whole, y is forced to the chosen pair, so it need not be integer.
* ``_add_rows``: memory at chosen times.

The objective is scaled to about 1e5, where HiGHS' tolerances are meant to be.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.problem import Array

# MathOpt takes a fifth of a second to import, and many plans need no MILP.
if TYPE_CHECKING:
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

_SCALE = 1e5
_ERROR = 1e-6  # by which HiGHS' scaled bounds may be too high; 1000 times the largest error seen at ``_precise``
_ROW_SCALE = 1e4  # largest coefficient of a memory row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MilpResult:
    """What the solver says.

    Attributes:
        picks: one state per core node; None without a solution.
        bound: lower bound on the core's objective (with its constant); ``inf`` if infeasible.
        optimal: proven within the tolerance.
        infeasible: proven.
        row_prices: for a relaxation: cost per byte at each time that has a memory row, >= 0.
    """

    picks: list[int] | None
    bound: float
    optimal: bool
    infeasible: bool = False
    row_prices: dict[int, float] = field(default_factory=dict)


def _precise() -> highs_pb2.HighsOptionsProto:
    """HiGHS' tolerances as tight as it takes them: a binary off by the usual 1e-6 hides several units of a whole cost."""
    from ortools.math_opt.solvers import highs_pb2

    names = ("mip_feasibility_tolerance", "primal_feasibility_tolerance", "dual_feasibility_tolerance")
    return highs_pb2.HighsOptionsProto(double_options=dict.fromkeys(names, 1e-9))


class Encoding:
    """Model arrays of one core; memory rows may be added between solves."""

    def __init__(self, core: Core, *, upper: float = math.inf) -> None:
        self.core = core
        self.times: list[int] = []
        self._first = np.cumsum([0, *map(len, core.unary)])
        self._costs: list[Array] = [c.copy() for c in core.unary]
        self._y_costs: list[Array] = []
        self._num_y = 0
        self._rows: list[Array] = []  # constraint numbers, variable numbers, coefficients
        self._cols: list[Array] = []
        self._vals: list[Array] = []
        self._rhs: list[Array] = []
        self._num_rows = 0
        self._memory: list[tuple[Array, Array, float, float]] = []  # variables, coefficients, room, bytes per unit
        self._sizes = [len(c) for c in core.unary]
        self._add_nodes()
        for a, b, m in zip(core.left, core.right, core.costs, strict=True):
            self._add_edge(a, b, m)
        x_costs = np.concatenate(self._costs) if self._costs else np.zeros(0)
        self.objective = np.concatenate([x_costs, *self._y_costs])
        reference = abs(upper - core.constant) if math.isfinite(upper) else float(np.abs(self.objective).max(initial=0))
        self.scale = _SCALE / reference if reference > 0 else 1.0

    def _append(self, rows: Array, cols: Array, vals: Array, rhs: Array) -> None:
        self._rows.append(rows + self._num_rows)
        self._cols.append(cols)
        self._vals.append(vals)
        self._rhs.append(rhs)
        self._num_rows += len(rhs)

    def _add_nodes(self) -> None:
        total, n = int(self._first[-1]), self.core.num_nodes
        self._append(np.repeat(np.arange(n), self._sizes), np.arange(total), np.ones(total), np.ones(n))

    def _add_edge(self, a: int, b: int, m: Array) -> None:
        # A state without any usable partner (inf throughout) gets no y, so that its row forces it to 0.
        low = np.where(np.isfinite(m.min(1)), m.min(1), 0.0)
        m = m - low[:, None]
        self._costs[a] = self._costs[a] + low
        low = np.where(np.isfinite(m.min(0)), m.min(0), 0.0)
        m = m - low
        self._costs[b] = self._costs[b] + low
        kept_rows, row_of = np.unique(m, axis=0, return_inverse=True)
        kept, col_of = np.unique(kept_rows, axis=1, return_inverse=True)
        r, c = np.nonzero(np.isfinite(kept))
        y = int(self._first[-1]) + self._num_y + np.arange(len(r))
        self._num_y += len(r)
        self._y_costs.append(kept[r, c])
        for node, of, side, count in ((a, row_of, r, kept.shape[0]), (b, col_of, c, kept.shape[1])):
            x = self._first[node] + np.arange(len(of))
            rows, cols = np.concatenate([side, of.ravel()]), np.concatenate([y, x])
            self._append(rows, cols, np.concatenate([np.ones(len(y)), -np.ones(len(x))]), np.zeros(count))

    def add_rows(self, times: list[int]) -> None:
        """Adds memory rows in their largest common unit, so that one unit too much is more than HiGHS' tolerance."""
        memory = self.core.memory
        assert memory is not None
        for time in times:
            row, room = memory.row(time, self._sizes)
            if not row:  # base alone may pass the limit: 0 <= room then says that nothing fits
                self._memory.append((np.zeros(0, dtype=np.int64), np.zeros(0), float(room), 1.0))
                self.times.append(time)
                continue
            cols = np.concatenate([self._first[node] + np.arange(len(part)) for node, part in row.items()])
            sizes = np.concatenate(list(row.values()))
            common = max(1, int(np.gcd.reduce(sizes)))
            unit = common * max(1.0, int(sizes.max()) / common / _ROW_SCALE)
            self._memory.append((cols, sizes / unit, room // common * common / unit, unit))
            self.times.append(time)

    def add_cover(self, time: int, picks: list[int]) -> None:
        """Forbids that all of the largest parts of ``picks`` at one time, which do not fit together, are chosen again.

        For a row that HiGHS takes for kept within its tolerances though it is not.
        """
        memory = self.core.memory
        assert memory is not None
        row, room = memory.row(time, self._sizes)
        cover: list[Array] = []
        for node, part in sorted(row.items(), key=lambda item: -int(item[1][picks[item[0]]])):
            size = int(part[picks[node]])
            cover.append(self._first[node] + np.flatnonzero(part >= size))
            room -= size
            if room < 0:
                break
        cols = np.concatenate(cover)
        self._memory.append((cols, np.ones(len(cols)), float(len(cover) - 1), math.inf))

    def _proto(self, relax: bool) -> model_pb2.ModelProto:
        from ortools.math_opt import model_pb2

        proto = model_pb2.ModelProto()
        num_x, num_vars = int(self._first[-1]), len(self.objective)
        ids = np.arange(num_vars)
        proto.variables.ids.extend(ids.tolist())
        proto.variables.lower_bounds.extend([0.0] * num_vars)
        proto.variables.upper_bounds.extend(np.where(np.isfinite(self.objective), 1.0, 0.0).tolist())
        proto.variables.integers.extend([not relax] * num_x + [False] * (num_vars - num_x))
        scaled = np.where(np.isfinite(self.objective), self.objective, 0.0) * self.scale
        proto.objective.linear_coefficients.ids.extend(ids.tolist())
        proto.objective.linear_coefficients.values.extend(scaled.tolist())
        rhs = np.concatenate(self._rhs)
        lower = [*rhs.tolist(), *([-math.inf] * len(self._memory))]
        upper = [*rhs.tolist(), *(room for _, _, room, _ in self._memory)]
        proto.linear_constraints.ids.extend(range(len(lower)))
        proto.linear_constraints.lower_bounds.extend(lower)
        proto.linear_constraints.upper_bounds.extend(upper)
        extra = [np.full(len(cols), self._num_rows + p) for p, (cols, *_) in enumerate(self._memory)]
        rows = np.concatenate([*self._rows, *extra])
        cols = np.concatenate([*self._cols, *(c for c, *_ in self._memory)])
        vals = np.concatenate([*self._vals, *(v for _, v, *_ in self._memory)])
        order = np.lexsort((cols, rows))
        order = order[vals[order] != 0]
        proto.linear_constraint_matrix.row_ids.extend(rows[order].tolist())
        proto.linear_constraint_matrix.column_ids.extend(cols[order].tolist())
        proto.linear_constraint_matrix.coefficients.extend(vals[order].tolist())
        return proto

    def solve(
        self,
        *,
        time_limit_s: float,
        relax: bool = False,
        rel_gap: float = 1e-9,
        abs_gap: float = 0.0,
        seed: int = 0,
        node_limit: int | None = None,
    ) -> MilpResult:
        """Runs HiGHS on the model with the memory rows added so far."""
        from ortools.math_opt.python import mathopt

        if not self.core.num_nodes:
            return MilpResult(picks=[], bound=self.core.constant, optimal=True)
        model = mathopt.Model.from_model_proto(self._proto(relax))
        params = mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=max(time_limit_s, 0.05)),
            relative_gap_tolerance=None if relax else rel_gap,
            absolute_gap_tolerance=None if relax else abs_gap * self.scale,
            random_seed=seed,
            node_limit=node_limit,
            highs=_precise(),
        )
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=params)
        return self._read(model, result, relax)

    def _read(self, model: mathopt.Model, result: mathopt.SolveResult, relax: bool) -> MilpResult:
        from ortools.math_opt.python import mathopt

        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return MilpResult(picks=None, bound=math.inf, optimal=False, infeasible=True)
        dual = result.termination.objective_bounds.dual_bound
        bound = (dual - _ERROR) / self.scale + self.core.constant if math.isfinite(dual) else -math.inf
        picks = None
        if result.has_primal_feasible_solution():
            x_vars = [model.get_variable(p) for p in range(int(self._first[-1]))]
            values = np.array(result.variable_values(x_vars))
            picks = [int(values[a:b].argmax()) for a, b in zip(self._first, self._first[1:], strict=False)]
        prices = {}
        if relax and self.times and result.has_dual_feasible_solution():
            rows = [(p, unit) for p, (*_, unit) in enumerate(self._memory) if math.isfinite(unit)]
            duals = result.dual_values([model.get_linear_constraint(self._num_rows + p) for p, _ in rows])
            for t, dual, (_, unit) in zip(self.times, duals, rows, strict=True):
                prices[t] = max(0.0, -dual) / self.scale / unit
        optimal = reason == mathopt.TerminationReason.OPTIMAL
        return MilpResult(picks=picks, bound=bound, optimal=optimal, row_prices=prices)
