"""The least sum of stage times when no stage may be slower than given limits: the inner half of stage slicing.

In come possible stages (``Cells``) and ``Limits``; out comes the best ``Slicing`` within them, or None. With layers i..
still to place on d devices in s stages (submesh w for the first of them, where transfers depend on it):

    F[0, L, 0] = 0
    F[s, i, d] = min over stages (i, j, m, c) of  cost[i, j, m, c] + transfer[j, m, next] + F[s - 1, j + 1, d - size[m]]
                 whose memory tolerates s - 1 later stages                                           (_count_table)

Alpa's dynamic program (OSDI 2022, section 5.2) has the same recurrence. It is run here on few arcs: the recurrence
without s, with memory only as far as the fewest later stages go, is a lower bound (``_suffix_sums``). It is taken from both
ends of the pipeline, and an arc stays only if the bound through it is within the sum that can still matter (``_arcs``): first
one just above the bound, where it has an answer, then the limit itself. Nothing is lost, so the result is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.interop.problem import TIE, Cells, Floats, Ints, SliceProblem, stage_rows

Stage = tuple[int, int, int, int]
Counts = NDArray[np.int32]

_NEVER = 1 << 28  # a number of stages that stands for "cannot"
_TOLLS = 10  # that are tried at most
_FLAT = 1e-4  # of the bound: less is not worth a further toll
_NEAR = (1e-11, 0.01, 0.05, 0.25)  # shares above the bound at which is looked; the first is more than rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """No stage or transfer above ``time_s``, no once-per-step cost above ``once_s``, no sum of times above ``sum_s``."""

    time_s: float = math.inf
    once_s: float = math.inf
    sum_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """Stages in order, the sum of their times and transfers, the largest of these, the largest once-per-step cost."""

    stages: tuple[Stage, ...]
    sum_s: float
    largest_s: float
    once_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arcs:
    """One row per (cell, units left, next column), sorted by tail; the last two nodes are the end and nowhere."""

    cell: Ints
    transfer_s: Floats
    head: Ints
    starts: Ints  # first arc of each node
    roots: Ints

    @property
    def end(self) -> int:
        return len(self.starts)


def raised(limit: float) -> float:
    """A limit that also lets through what differs from it by rounding only."""
    return limit * (1 + TIE)


def best_within(problem: SliceProblem, cells: Cells, limits: Limits) -> Slicing | None:
    """The least sum of times within the limits; ties go to the fewest stages, then to the first in lexicographic order."""
    allowed = (cells.cost_s <= raised(limits.time_s)) & (cells.once_s <= raised(limits.once_s))
    cells = cells.take(allowed.any(axis=1))
    cost_s = np.where(allowed[allowed.any(axis=1)], cells.cost_s, np.inf)
    if not len(cells.first):
        return None
    unit = math.gcd(*np.unique(cells.size).tolist())
    if problem.num_devices % unit:
        return None
    grid = _grid(problem, cells, cost_s, limits, unit)
    suffix = _suffix_sums(grid, grid.tolerated)
    least_s, most = float(suffix.start[0, :, -1].min()), problem.stage_counts[-1]
    if not least_s <= raised(limits.sum_s) or (suffix.fewest is not None and suffix.fewest[0, :, -1].min() > most):
        return None
    counted = _Counted(problem, grid, suffix, 0.0)
    # Few arcs lie on slicings near the bound, and mostly one of these keeps the memory: then no other matters.
    for turn, share in enumerate((*_NEAR, math.inf)):
        if turn == 1 and len(problem.stage_counts) == 1:
            counted = _best_toll(counted, limits)
        bound_s = counted.bound_s
        most_s = min(bound_s + share * abs(least_s), raised(limits.sum_s))
        arcs = _arcs(cells, counted, most_s)
        found = None if arcs is None else _fewest_seconds(problem, cells, cost_s, arcs)
        if arcs is not None and found is not None and found[0] <= most_s:
            return _first_in_order(problem, cells, cost_s, arcs, *found)
        if most_s >= limits.sum_s:
            break
    return None


class _Counted:
    """Bounds from both ends of the pipeline, where every stage has a toll beside its time.

    Of a fixed number of stages the tolls are known: they come off the bound. A toll below 0 makes the bound one of slicings with
    more stages, above 0 with fewer.
    """

    def __init__(self, problem: SliceProblem, grid: _Grid, suffix: _Suffix, toll_s: float) -> None:
        self.problem, self.grid, self.suffix, self.toll_s = problem, grid, suffix, toll_s
        self.most = problem.stage_counts[-1]

    @property
    def tolls_s(self) -> float:
        return self.toll_s * self.most if self.toll_s else 0.0

    @property
    def bound_s(self) -> float:
        return float(self.suffix.start[0, :, -1].min()) - self.tolls_s

    @cached_property
    def prefix(self) -> _Suffix:
        """The suffix of the mirrored pipeline; where stages are few it counts, so that few arcs are left."""
        few = self.most < self.problem.num_layers
        return _suffix_sums(_mirrored(self.grid), np.full(self.grid.cell.shape, self.most, np.int32) if few else None)

    def stages_behind(self) -> int:
        """How many stages the slicing has that gives the bound."""
        grid, suffix = self.grid, self.suffix
        first, left, count = 0, grid.num_units, 0
        start_s = suffix.start[0, :, left]
        while True:
            column, count = int(start_s.argmin()), count + 1
            end = min(grid.num_layers, first + grid.reach)
            sums = suffix.rest[first + 1 : end + 1, column, left] + grid.least_s[first, first:end, column]
            if suffix.later is not None and grid.tolerated is not None:
                fits = suffix.later[first + 1 : end + 1, column, left] <= grid.tolerated[first, first:end, column]
                sums = np.where(fits, sums, np.inf)
            first, left = first + 1 + int(sums.argmin()), left - int(grid.sizes[column])
            if first == grid.num_layers:
                return count
            start_s = suffix.start[first, :, left]
            if grid.transfer_s is not None:
                start_s = start_s + grid.transfer_s[first - 1, column]

    def at(self, toll_s: float) -> _Counted:
        grid = replace(self.grid, least_s=self.grid.least_s + (toll_s - self.toll_s))
        return _Counted(self.problem, grid, _suffix_sums(grid, grid.tolerated), toll_s)


def _best_toll(counted: _Counted, limits: Limits) -> _Counted:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Grid:
    """The possible stages as arrays (first layer, last layer, column); columns are the submeshes that occur.

    Attributes:
        least_s: least time over the choices; inf where there is no such stage.
        cell: row of ``Cells``, -1 where there is none.
        tolerated: most later stages over the choices; None where memory is ample and all numbers of stages are allowed, which
            is cheaper.
        submeshes: of the columns.
        sizes: of the columns, in units.
        transfer_s: (layers - 1, columns, columns), or None.
        num_units: devices of the cluster, in units.
        reach: layers of the longest stage.
    """

    least_s: Floats
    cell: Ints
    tolerated: Counts | None
    submeshes: Ints
    sizes: Ints
    transfer_s: Floats | None
    num_units: int
    reach: int

    @property
    def num_layers(self) -> int:
        return len(self.least_s)

    @property
    def width(self) -> int:
        """How many submeshes are told apart before it is known which of them a stage gets."""
        return 1 if self.transfer_s is None else len(self.sizes)


def _grid(problem: SliceProblem, cells: Cells, cost_s: Floats, limits: Limits, unit: int) -> _Grid:
    submeshes, column = np.unique(cells.submesh, return_inverse=True)
    shape = (problem.num_layers, problem.num_layers, len(submeshes))
    least_s, cell = np.full(shape, np.inf), np.full(shape, -1)
    tolerated = np.full(shape, -1, dtype=np.int32)
    where = cells.first, cells.last, column
    least_s[where], cell[where] = cost_s.min(axis=1), np.arange(len(column))
    tolerated[where] = np.where(cost_s < np.inf, cells.tolerated, -1).max(axis=1)
    transfer_s = problem.transfer_s
    if transfer_s is not None:
        transfer_s = transfer_s[:, submeshes][:, :, submeshes]
        transfer_s = np.where(transfer_s <= raised(limits.time_s), transfer_s, np.inf)
    return _Grid(
        least_s=least_s,
        cell=cell,
        tolerated=tolerated if min(tolerated[where].min(), problem.stage_counts[-1]) < problem.num_layers else None,
        submeshes=submeshes,
        sizes=np.array(problem.submesh_sizes)[submeshes] // unit,
        transfer_s=transfer_s,
        num_units=problem.num_devices // unit,
        reach=int((cells.last - cells.first).max()) + 1,
    )


def _mirrored(grid: _Grid) -> _Grid:
    """The same pipeline from its end to its start."""
    moved = grid.transfer_s
    return replace(
        grid,
        least_s=grid.least_s[::-1, ::-1].transpose(1, 0, 2),
        transfer_s=None if moved is None else moved[::-1].transpose(0, 2, 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Suffix:
    """Lower bounds of the ends of a pipeline, by layer, column and units left.

    Attributes:
        start: of the sum from a stage on, which starts with this layer and has this column's submesh.
        rest: of the sum of what follows a stage that ends before this layer, by the units left before that stage.
        after: the same by the units left after it. Without transfers the submesh makes no difference, and its dim has the size 1.
        fewest: stages that can follow, by the units left after it, as far as it is known; ``later`` by those left before it.
    """

    start: Floats
    rest: Floats
    after: Floats
    fewest: Counts | None
    later: Counts | None


def _suffix_sums(grid: _Grid, tolerated: Counts | None) -> _Suffix:
    """Bounds from the end on; with ``tolerated`` counts, which are exact: fewer later stages only help those before, so the
    smallest count of a suffix is all that memory has to know of it."""
    layers, width, units = grid.num_layers, grid.width, grid.num_units + 1
    start = np.full((layers + 1, len(grid.sizes), units), np.inf)
    after = np.full((layers + 1, width, units), np.inf)
    after[layers, :, 0] = 0.0
    rest = np.full(start.shape, np.inf)  # ``after`` by the units left before the stage
    rest[layers] = _shifted(after[layers], grid.sizes, np.inf)
    fewest = later = None
    if tolerated is not None:
        fewest, later = np.full(after.shape, _NEVER, np.int32), np.full(start.shape, _NEVER, np.int32)
        fewest[layers, :, 0] = 0
        later[layers] = _shifted(fewest[layers], grid.sizes, _NEVER)
    for first in range(layers - 1, -1, -1):
        end = min(layers, first + grid.reach)
        moved_s = None if grid.transfer_s is None or first == 0 else grid.transfer_s[first - 1]
        sums = rest[first + 1 : end + 1] + grid.least_s[first, first:end, :, None]
        if tolerated is not None and fewest is not None and later is not None:
            follow = later[first + 1 : end + 1]
            fits = follow <= tolerated[first, first:end, :, None]
            sums = np.where(fits, sums, np.inf)
            counts = np.where(fits, follow + 1, _NEVER).min(axis=0)
            fewest[first] = np.minimum(
                _entered(counts, None if moved_s is None else _NEVER * np.isinf(moved_s)), _NEVER
            )
            later[first] = _shifted(fewest[first], grid.sizes, _NEVER)
        start[first] = sums.min(axis=0)
        after[first] = _entered(start[first], moved_s)
        rest[first] = _shifted(after[first], grid.sizes, np.inf)
    return _Suffix(start=start, rest=rest, after=after, fewest=fewest, later=later)


def _shifted(values: Any, sizes: Ints, missing: Any) -> Any:
    """(column, units): what is left after a stage of the column's size, by what is left before it."""
    units = np.arange(values.shape[1]) - sizes[:, None]
    rows = np.arange(len(sizes))[:, None] if len(values) > 1 else np.zeros((1, 1), dtype=np.int64)
    return np.where(units >= 0, values[rows, np.maximum(units, 0)], missing)


def _entered(start: Any, transfer: Any) -> Any:
    """By the submesh before, the cheapest next one with the transfer to it, where there is one."""
    if transfer is None:
        return start.min(axis=0)
    return (transfer[:, :, None] + start[None]).min(axis=1)


def _arcs(cells: Cells, counted: _Counted, most_s: float) -> _Arcs | None:
    """The stages with the units left before them that can lie on a slicing with a sum within ``most_s``."""
    grid, suffix, prefix, most = counted.grid, counted.suffix, counted.prefix, counted.most
    most_s += counted.tolls_s
    layers = grid.num_layers
    found_cells, lefts, sums = [], [], []
    for first in range(layers):
        end = min(layers, first + grid.reach)
        so_far = prefix.after[layers - first][None, :, ::-1] + grid.least_s[first, first:end, :, None]
        bound = so_far + suffix.rest[first + 1 : end + 1]
        fits = (bound <= most_s) & (bound < np.inf)
        if suffix.later is not None and grid.tolerated is not None:
            later = suffix.later[first + 1 : end + 1]
            fits &= later <= grid.tolerated[first, first:end, :, None]
            if prefix.fewest is not None:
                fits &= prefix.fewest[layers - first][None, :, ::-1] + later < most
        last, column, left = np.nonzero(fits)
        found_cells.append(grid.cell[first, first + last, column])
        lefts.append(left)
        sums.append(so_far[last, column, left])
    cell, left, so_far = np.concatenate(found_cells), np.concatenate(lefts), np.concatenate(sums)
    next_column = np.zeros(len(cell), dtype=np.int64)
    moved_s = np.zeros(len(cell))
    if grid.transfer_s is not None:
        keep, next_column, moved_s = _with_next(cells, grid, cell, left, so_far, suffix.start, most_s)
        cell, left = cell[keep], left[keep]
    return _linked(cells, grid, cell, left, next_column, moved_s)


def _with_next(
    cells: Cells, grid: _Grid, cell: Ints, left: Ints, so_far: Floats, start: Floats, most_s: float
) -> tuple[Ints, Ints, Floats]:
    """Each arc once per column that the next stage may have: rows of the arcs, next column, transfer time."""
    assert grid.transfer_s is not None
    column = np.searchsorted(grid.submeshes, cells.submesh[cell])
    following, rest = cells.last[cell] + 1, left - grid.sizes[column]
    moved_s = np.zeros((len(cell), len(grid.sizes)))
    inner = following < grid.num_layers
    moved_s[inner] = grid.transfer_s[cells.last[cell[inner]], column[inner]]
    bound = so_far[:, None] + moved_s + np.where(inner[:, None], start[following, :, rest], 0.0)
    fits = (bound <= most_s) & (bound < np.inf)
    fits[~inner, 1:] = False  # after the last stage there is one end
    keep, next_column = np.nonzero(fits)
    return keep, next_column, moved_s[keep, next_column]


def _linked(cells: Cells, grid: _Grid, cell: Ints, left: Ints, next_column: Ints, moved_s: Floats) -> _Arcs | None:
    """Sorts arcs by the node that they leave, and looks up the node that they enter."""
    layers, width, devices = grid.num_layers, grid.width, grid.num_units + 1
    column = np.searchsorted(grid.submeshes, cells.submesh[cell])
    own = column if width > 1 else 0
    tail = (cells.first[cell] * width + own) * devices + left
    head = ((cells.last[cell] + 1) * width + next_column) * devices + left - grid.sizes[column]
    order = np.argsort(tail, kind="stable")
    nodes, starts = np.unique(tail[order], return_index=True)
    roots = np.flatnonzero((nodes < width * devices) & (nodes % devices == devices - 1))
    if not len(roots):
        return None
    place = np.minimum(np.searchsorted(nodes, head), len(nodes) - 1)
    entered = np.where(nodes[place] == head, place, len(nodes) + 1)
    entered[head == layers * width * devices] = len(nodes)
    return _Arcs(
        cell=cell[order],
        transfer_s=moved_s[order],
        head=entered[order],
        starts=starts,
        roots=roots,
    )


def _least_choice(problem: SliceProblem, cells: Cells, cost_s: Floats, later: int, num_stages: int) -> Floats:
    """Per cell and choice the time as the stage with so many after it: inf where memory or a pin says no."""
    allowed = np.where(cells.tolerated >= later, cost_s, np.inf)
    if problem.pinned:
        allowed[~stage_rows(problem, cells, num_stages - 1 - later, num_stages)] = np.inf
    return allowed


def _count_table(problem: SliceProblem, cells: Cells, cost_s: Floats, arcs: _Arcs, num_stages: int) -> Floats:
    """F[s, node] of the module text for s up to ``num_stages``; the rows end where nothing is reached any more."""
    table = np.full((num_stages + 1, arcs.end + 2), np.inf)
    table[0, arcs.end] = 0.0
    least_tolerated, least_s = cells.tolerated.min(), cost_s.min(axis=1)
    for count in range(1, num_stages + 1):
        if problem.pinned or count - 1 > least_tolerated:
            least_s = _least_choice(problem, cells, cost_s, count - 1, num_stages).min(axis=1)
        through = least_s[arcs.cell] + arcs.transfer_s + table[count - 1, arcs.head]
        np.minimum.reduceat(through, arcs.starts, out=table[count, : arcs.end])
        if not (table[count, : arcs.end] < np.inf).any():
            break
    return table


def _fewest_seconds(
    problem: SliceProblem, cells: Cells, cost_s: Floats, arcs: _Arcs
) -> tuple[float, int, Floats] | None:
    """The least sum over the allowed numbers of stages, the fewest stages that reach it, and the table for these."""
    most = problem.stage_counts[-1]
    table = None if problem.pinned else _count_table(problem, cells, cost_s, arcs, most)
    best: tuple[float, int, Floats] | None = None
    for count in problem.stage_counts:
        own = _count_table(problem, cells, cost_s, arcs, count) if table is None else table
        sum_s = float(own[count, arcs.roots].min())
        if sum_s < np.inf and (best is None or raised(sum_s) < best[0]):
            best = sum_s, count, own
    return best


def _first_in_order(
    problem: SliceProblem, cells: Cells, cost_s: Floats, arcs: _Arcs, sum_s: float, num_stages: int, table: Floats
) -> Slicing:
    """Walks the table from the first stage; of all steps that keep the sum, it takes the first (last layer, m, c)."""
    ends = np.append(arcs.starts[1:], len(arcs.cell))
    frontier = [(int(root), 0.0) for root in arcs.roots]  # several nodes only while the next submesh is open
    stages: list[Stage] = []
    for later in range(num_stages - 1, -1, -1):
        rows = np.concatenate([np.arange(arcs.starts[node], ends[node]) for node, _ in frontier])
        so_far = np.concatenate([np.full(ends[node] - arcs.starts[node], spent) for node, spent in frontier])
        step_s = _least_choice(problem, cells, cost_s, later, num_stages)[arcs.cell[rows]]
        total_s = (so_far + arcs.transfer_s[rows] + table[later, arcs.head[rows]])[:, None] + step_s
        row, choice = np.nonzero(total_s <= raised(sum_s))
        keys = (choice, cells.submesh[arcs.cell[rows[row]]], cells.last[arcs.cell[rows[row]]])
        best = np.lexsort(keys)[0]
        cell, taken = arcs.cell[rows[row[best]]], int(choice[best])
        stages.append((int(cells.first[cell]), int(cells.last[cell]), int(cells.submesh[cell]), taken))
        same = row[(arcs.cell[rows[row]] == cell) & (choice == taken)]
        spent_s = so_far[same] + step_s[same, taken] + arcs.transfer_s[rows[same]]
        frontier = list(zip(arcs.head[rows[same]].tolist(), spent_s.tolist(), strict=True))
    return _measured(problem, tuple(stages))


def _measured(problem: SliceProblem, stages: tuple[Stage, ...]) -> Slicing:
    times = [float(problem.cost_s[stage]) for stage in stages]
    times += transfers_of(problem, stages)
    once = max(float(problem.once_s[stage]) for stage in stages)
    return Slicing(stages=stages, sum_s=math.fsum(times), largest_s=max(times), once_s=once)


def transfers_of(problem: SliceProblem, stages: tuple[Stage, ...]) -> list[float]:
    """Seconds of the transfer after each stage but the last; empty when no transfers were given."""
    if problem.transfer_s is None:
        return []
    return [float(problem.transfer_s[stage[1], stage[2], following[2]]) for stage, following in pairwise(stages)]
