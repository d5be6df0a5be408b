"""Lower bounds of the sum of stage times from a stage to the end, and the toll per stage that makes them tight.

In come possible stages as arrays (``Grid``), out come bounds (``Counted``). The recurrence of ``stage_dp`` without the
number of stages, with memory only as far as the fewest later stages go, is run over whole arrays, layer by layer
(``suffix_sums``). Where the number of stages is fixed, a toll on every stage, a Lagrangian, makes the bound one of slicings
with about so many (``best_toll``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.interop.problem import Cells, Floats, Ints, Limits, SliceProblem, numbered, raised

Counts = NDArray[np.int32]

_NEVER = 1 << 28  # a number of stages that stands for "cannot"
_TOLLS = 10  # that are tried at most
_FLAT = 1e-4  # of the bound: less is not worth a further toll


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """The possible stages as arrays (first layer, further layers, column); columns are the submeshes that occur.

    Attributes:
        least_s: least time over the choices; inf where there is no such stage.
        cell: row of ``Cells``, -1 where there is none.
        tolerated: most later stages over the choices; None where memory is ample and all numbers of stages are allowed, which
            is cheaper.
        submeshes: of the columns.
        sizes: of the columns, in units.
        transfer_s: (layers - 1, columns, columns), or None.
        num_units: devices of the cluster, in units.
    """

    least_s: Floats
    cell: Ints
    tolerated: Counts | None
    submeshes: Ints
    sizes: Ints
    transfer_s: Floats | None
    num_units: int

    @property
    def num_layers(self) -> int:
        return len(self.least_s)

    @property
    def reach(self) -> int:
        """Layers of the longest stage."""
        return self.least_s.shape[1]

    @property
    def width(self) -> int:
        """How many submeshes are told apart before it is known which of them a stage gets."""
        return 1 if self.transfer_s is None else len(self.sizes)


def grid_of(problem: SliceProblem, cells: Cells, cost_s: Floats, limits: Limits, unit: int) -> Grid:
    """``cost_s``: of the entries of the cells, inf where it is above the limits."""
    submeshes, column = numbered(cells.submesh, len(problem.submesh_sizes))
    further = cells.last - cells.first
    shape = (problem.num_layers, int(further.max()) + 1, len(submeshes))
    least_s, cell = np.full(shape, np.inf), np.full(shape, -1)
    tolerated = np.full(shape, -1, dtype=np.int32)
    where = cells.first, further, column
    least_s[where], cell[where] = cost_s.min(axis=1)[cells.entry], np.arange(len(column))
    tolerated[where] = np.where(cost_s < np.inf, cells.tolerated, -1).max(axis=1)[cells.entry]
    transfer_s = problem.transfer_s
    if transfer_s is not None:
        transfer_s = transfer_s[:, submeshes][:, :, submeshes]
        transfer_s = np.where(transfer_s <= raised(limits.time_s), transfer_s, np.inf)
    # No stage has more after it than there are other layers.
    counted = min(1 + tolerated[where].min(), problem.stage_counts[-1]) < problem.num_layers
    return Grid(
        least_s=least_s,
        cell=cell,
        tolerated=tolerated if counted else None,
        submeshes=submeshes,
        sizes=np.array(problem.submesh_sizes)[submeshes] // unit,
        transfer_s=transfer_s,
        num_units=problem.num_devices // unit,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Suffix:
    """Lower bounds of the ends of a pipeline, by layer, column and units left.

    Attributes:
        start: of the sum from a stage on, which starts with this layer and has this column's submesh.
        rest: of the sum of what follows a stage that ends before this layer, by the units left before that stage.
        fewest: stages that can follow, by the units left after it, as far as it is known; ``later`` by those left before it.
            Without transfers the submesh makes no difference, and the dim of ``fewest`` has the size 1.
    """

    start: Floats
    rest: Floats
    fewest: Counts | None
    later: Counts | None


def suffix_sums(grid: Grid, tolerated: Counts | None, known: Suffix | None = None) -> Suffix:
    """Bounds from the end on; with ``tolerated`` counts, which are exact: fewer later stages only help those before, so the
    smallest count of a suffix is all that memory has to know of it. Counts are taken from ``known``, of the same stages at other
    times."""
    layers, width, units = grid.num_layers, grid.width, grid.num_units + 1
    start = np.full((layers + 1, len(grid.sizes), units), np.inf)
    places = _places_left(grid)
    padded, after = _padded(layers + 1, width, units, np.inf)
    after[layers, :, 0] = 0.0
    rest = np.full(start.shape, np.inf)  # ``after`` by the units left before the stage
    np.take(padded[layers], places, out=rest[layers], mode="clip")  # no place is out of range; "raise" would copy
    padded_fewest = fewest = later = None
    none, limited, barred = _counting(grid, tolerated)
    if tolerated is not None:
        padded_fewest, fewest = _padded(layers + 1, width, units, _NEVER)
        fewest[layers, :, 0] = 0
        if known is None:
            later = np.full(start.shape, _NEVER, np.int32)
            np.take(padded_fewest[layers], places, out=later[layers], mode="clip")
        else:
            fewest, later = known.fewest, known.later
    for first in range(layers - 1, -1, -1):
        end = min(layers, first + grid.reach)
        moved_s = None if grid.transfer_s is None or first == 0 else grid.transfer_s[first - 1]
        sums = rest[first + 1 : end + 1] + grid.least_s[first, : end - first, :, None]
        if tolerated is not None and fewest is not None and later is not None and padded_fewest is not None:
            follow = later[first + 1 : end + 1]
            over = follow > tolerated[first, : end - first, :, None] if limited[first] else False
            if limited[first]:
                np.copyto(sums, np.inf, where=over)
            if known is None:
                counts = follow + none[first, : end - first, :, None]
                np.copyto(counts, _NEVER, where=over)
                least = np.minimum(counts.min(axis=0) + 1, _NEVER)
                entered = _entered(least, None if moved_s is None or barred is None else barred[first - 1])
                np.minimum(entered, _NEVER, out=fewest[first])
                np.take(padded_fewest[first], places, out=later[first], mode="clip")
        start[first] = sums.min(axis=0)
        after[first] = _entered(start[first], moved_s)
        np.take(padded[first], places, out=rest[first], mode="clip")
    return Suffix(start=start, rest=rest, fewest=fewest, later=later)


def _counting(grid: Grid, tolerated: Counts | None) -> tuple[Counts, list[bool], Counts | None]:
    """What is added to counts where there is no such stage; whether some stage from a layer on tolerates fewer than may follow;
    what is added where there is no transfer, if there is one without."""
    if tolerated is None:
        return np.zeros((0, 0, 0), np.int32), [], None
    most_later = grid.num_layers - 1 - np.arange(grid.num_layers)[:, None, None]
    fewer = (tolerated >= 0) & (tolerated < most_later)
    limited = [bool(of_layer.any()) for of_layer in fewer]
    barred = None
    if grid.transfer_s is not None and np.isinf(grid.transfer_s).any():
        barred = np.where(np.isinf(grid.transfer_s), _NEVER, 0).astype(np.int32)
    return np.where(tolerated < 0, _NEVER, 0).astype(np.int32), limited, barred


def _padded(layers: int, width: int, units: int, missing: float) -> tuple[Any, Any]:
    """(layer, numbers) with one more number, ``missing``, at the end of each; and the others as (layer, column, units)."""
    padded = np.full((layers, width * units + 1), missing, dtype=np.int32 if isinstance(missing, int) else np.float64)
    return padded, padded[:, :-1].reshape(layers, width, units)


def _places_left(grid: Grid) -> Ints:
    """(column, units left before a stage of the column's size) -> where in ``_padded`` what is left after it stands."""
    units = np.arange(grid.num_units + 1) - grid.sizes[:, None]
    columns = np.arange(len(grid.sizes))[:, None] if grid.width > 1 else 0
    return np.where(units >= 0, columns * (grid.num_units + 1) + units, grid.width * (grid.num_units + 1))


def _entered(start: Any, transfer: Any) -> Any:
    """By the submesh before, the cheapest next one with the transfer to it, where there is one."""
    if transfer is None:
        return start.min(axis=0)
    return (transfer[:, :, None] + start[None]).min(axis=1)


class Counted:
    """Bounds to the end of the pipeline, where every stage has a toll beside its time.

    Of a fixed number of stages the tolls are known: they come off the bound. A toll below 0 makes the bound one of slicings with
    more stages, above 0 with fewer.
    """

    def __init__(self, problem: SliceProblem, grid: Grid, suffix: Suffix, toll_s: float) -> None:
        self.problem, self.grid, self.suffix, self.toll_s = problem, grid, suffix, toll_s
        self.most = problem.stage_counts[-1]

    @property
    def tolls_s(self) -> float:
        return self.toll_s * self.most if self.toll_s else 0.0

    @property
    def bound_s(self) -> float:
        return float(self.suffix.start[0, :, -1].min()) - self.tolls_s

    def stages_behind(self) -> int:
        """How many stages the slicing has that gives the bound."""
        grid, suffix = self.grid, self.suffix
        first, left, count = 0, grid.num_units, 0
        start_s = suffix.start[0, :, left]
        while True:
            column, count = int(start_s.argmin()), count + 1
            end = min(grid.num_layers, first + grid.reach)
            sums = suffix.rest[first + 1 : end + 1, column, left] + grid.least_s[first, : end - first, column]
            if suffix.later is not None and grid.tolerated is not None:
                fits = suffix.later[first + 1 : end + 1, column, left] <= grid.tolerated[first, : end - first, column]
                sums = np.where(fits, sums, np.inf)
            first, left = first + 1 + int(sums.argmin()), left - int(grid.sizes[column])
            if first == grid.num_layers:
                return count
            start_s = suffix.start[first, :, left]
            if grid.transfer_s is not None:
                start_s = start_s + grid.transfer_s[first - 1, column]

    def at(self, toll_s: float) -> Counted:
        grid = replace(self.grid, least_s=self.grid.least_s + (toll_s - self.toll_s))
        return Counted(self.problem, grid, suffix_sums(grid, grid.tolerated, self.suffix), toll_s)


def best_toll(counted: Counted, limits: Limits) -> Counted:
    """The highest bound for a fixed number of stages, of those tried.

    The bound is concave in the toll, and its slope is by how many stages the slicing behind it has too many: where the tangents
    from both sides meet is the next toll to try (cutting planes).
    """
    best, low, high = counted, None, None  # low: too many stages, the toll must rise; high: too few
    now, step_s = counted, abs(counted.bound_s) / counted.most or 1.0
    for _ in range(_TOLLS):
        slope = now.stages_behind() - counted.most
        best = max(best, now, key=lambda one: one.bound_s)
        if slope == 0 or best.bound_s > raised(limits.sum_s):
            break
        if slope > 0:
            low = now, slope
        else:
            high = now, slope
        if low is None or high is None:
            toll_s = now.toll_s + math.copysign(step_s, slope)
            step_s *= 4
        else:
            (left, rises), (right, falls) = low, high
            toll_s = (right.bound_s - left.bound_s + rises * left.toll_s - falls * right.toll_s) / (rises - falls)
            top_s = left.bound_s + rises * (toll_s - left.toll_s)
            if not left.toll_s < toll_s < right.toll_s or top_s <= best.bound_s + _FLAT * abs(top_s):
                break
        now = counted.at(toll_s)
    return max(best, now, key=lambda one: one.bound_s)
