"""The least sum of stage times when no stage may be slower than given limits: the inner half of stage slicing.

In come possible stages (``Cells``) and ``Limits``; out comes the best ``Slicing`` within them, or None. With layers i..
still to place on d devices in s stages (submesh w for the first of them, where transfers depend on it):

    F[0, L, 0] = 0
    F[s, i, d] = min over stages (i, j, m, c) of  cost[i, j, m, c] + transfer[j, m, next] + F[s - 1, j + 1, d - size[m]]
                 whose memory tolerates s - 1 later stages                                           (_count_table)

Alpa's dynamic program (OSDI 2022, section 5.2) has the same recurrence. It is run here on few arcs: the recurrence
without s, with memory only as far as the fewest later stages go, is a lower bound (``sum_bounds``). A walk from the first layer
on takes an arc only if what was spent before it and the bound of what follows are within the sum that can still matter
(``_arcs``): first one just above the bound, where it has an answer, then the limit itself. Nothing is lost, so the result is
exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from alpa_lite.interop.problem import Cells, Floats, Ints, Limits, SliceProblem, numbered, raised, stage_rows
from alpa_lite.interop.sum_bounds import Counted, Grid, best_toll, grid_of, suffix_sums

Stage = tuple[int, int, int, int]

_NEAR = (1e-11, 0.01, 0.05, 0.25)  # shares above the bound at which is looked; the first is more than rounding


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


def best_within(problem: SliceProblem, cells: Cells, limits: Limits) -> Slicing | None:
    """The least sum of times within the limits; ties go to the fewest stages, then to the first in lexicographic order."""
    allowed = (cells.cost_s <= raised(limits.time_s)) & (cells.once_s <= raised(limits.once_s))
    cost_s = np.where(allowed, cells.cost_s, np.inf)
    cells = cells.take(np.flatnonzero((cost_s.min(axis=1) < np.inf)[cells.entry]))
    if not len(cells.first):
        return None
    unit = math.gcd(*set(cells.size.tolist()))
    if problem.num_devices % unit:
        return None
    grid = grid_of(problem, cells, cost_s, limits, unit)
    suffix = suffix_sums(grid, grid.tolerated)
    least_s, most = float(suffix.start[0, :, -1].min()), problem.stage_counts[-1]
    if not least_s <= raised(limits.sum_s) or (suffix.fewest is not None and suffix.fewest[0, :, -1].min() > most):
        return None
    counted = Counted(problem, grid, suffix, 0.0)
    # Few arcs lie on slicings near the bound, and mostly one of these keeps the memory: then no other matters.
    for turn, share in enumerate((*_NEAR, math.inf)):
        if turn == 1 and len(problem.stage_counts) == 1:
            counted = best_toll(counted, limits)
        bound_s = counted.bound_s
        near_s = share * abs(least_s) if share < math.inf else math.inf  # the bound may be 0
        most_s = min(bound_s + near_s, raised(limits.sum_s))
        arcs = _arcs(cells, counted, most_s)
        found = None if arcs is None else _fewest_seconds(problem, cells, cost_s, arcs)
        if arcs is not None and found is not None and found[0] <= most_s:
            return _first_in_order(problem, cells, cost_s, arcs, *found)
        if most_s >= limits.sum_s:
            break
    return None


def _arcs(cells: Cells, counted: Counted, most_s: float) -> _Arcs | None:
    """The stages with the units left before them that can lie on a slicing with a sum within ``most_s``.

    A walk from the first layer on: only from nodes that are reached, and only over arcs that the bound of what follows allows.
    """
    grid, suffix = counted.grid, counted.suffix
    most_s += counted.tolls_s
    layers, columns, units = grid.num_layers, len(grid.sizes), grid.num_units + 1
    reached_s = np.full((layers + 1, grid.width, units), np.inf)  # by what was spent before
    reached_s[0, :, -1] = 0.0
    num_before = np.zeros(reached_s.shape, np.int32) if suffix.later is None else np.full(reached_s.shape, counted.most)
    num_before[0] = 0
    found: list[tuple[Ints, Ints, Ints, Floats]] = []
    for first in range(layers):
        column, left = np.nonzero(np.broadcast_to(reached_s[first] < np.inf, (columns, units)))
        if not len(left):
            continue
        end, own = min(layers, first + grid.reach), column if grid.width > 1 else 0
        so_far = reached_s[first, own, left] + grid.least_s[first, : end - first, column].T
        bound = so_far + suffix.rest[first + 1 : end + 1, column, left]
        fits = (bound <= most_s) & (bound < np.inf)
        if suffix.later is not None and grid.tolerated is not None:
            later = suffix.later[first + 1 : end + 1, column, left]
            fits &= later <= grid.tolerated[first, : end - first, column].T
            fits &= num_before[first, own, left] + later < counted.most
        last, node = np.nonzero(fits)
        column, left, so_far = column[node], left[node], so_far[last, node]
        following, next_column, moved_s = first + 1 + last, np.zeros(len(last), dtype=np.int64), np.zeros(len(last))
        if grid.transfer_s is not None:
            keep, next_column, moved_s = _with_next(grid, following, column, left, so_far, suffix.start, most_s)
            last, column, left, so_far, following = (rows[keep] for rows in (last, column, left, so_far, following))
        head = (following * grid.width + next_column) * units + left - grid.sizes[column]
        np.minimum.at(reached_s.ravel(), head, so_far + moved_s)
        if suffix.later is not None:
            np.minimum.at(num_before.ravel(), head, 1 + num_before[first, column if grid.width > 1 else 0, left])
        tail = (first * grid.width + (column if grid.width > 1 else 0)) * units + left
        found.append((grid.cell[first, last, column], tail, head, moved_s))
    return _linked(grid, *map(np.concatenate, zip(*found, strict=True)))


def _with_next(
    grid: Grid, following: Ints, column: Ints, left: Ints, so_far: Floats, start: Floats, most_s: float
) -> tuple[Ints, Ints, Floats]:
    """Each arc once per column that the next stage may have: rows of the arcs, next column, transfer time."""
    assert grid.transfer_s is not None
    rest, inner = left - grid.sizes[column], following < grid.num_layers
    moved_s = np.zeros((len(left), len(grid.sizes)))
    moved_s[inner] = grid.transfer_s[following[inner] - 1, column[inner]]
    bound = so_far[:, None] + moved_s + np.where(inner[:, None], start[following, :, rest], 0.0)
    fits = (bound <= most_s) & (bound < np.inf)
    fits[~inner, 1:] = False  # after the last stage there is one end
    keep, next_column = np.nonzero(fits)
    return keep, next_column, moved_s[keep, next_column]


def _linked(grid: Grid, cell: Ints, tail: Ints, head: Ints, moved_s: Floats) -> _Arcs | None:
    """Sorts arcs by the node that they leave, and looks up the node that they enter."""
    whole, units = grid.width * (grid.num_units + 1), grid.num_units + 1
    order = np.argsort(tail, kind="stable")
    nodes, starts = np.unique(tail[order], return_index=True)
    roots = np.flatnonzero((nodes < whole) & (nodes % units == units - 1))
    if not len(roots):
        return None
    place = np.minimum(np.searchsorted(nodes, head), len(nodes) - 1)
    entered = np.where(nodes[place] == head, place, len(nodes) + 1)
    entered[head == grid.num_layers * whole] = len(nodes)
    return _Arcs(
        cell=cell[order],
        transfer_s=moved_s[order],
        head=entered[order],
        starts=starts,
        roots=roots,
    )


def _count_table(problem: SliceProblem, cells: Cells, cost_s: Floats, arcs: _Arcs, num_stages: int) -> Floats:
    """F[s, node] of the module text for s up to ``num_stages``; the rows end where nothing is reached any more."""
    table = np.full((num_stages + 1, arcs.end + 2), np.inf)
    table[0, arcs.end] = 0.0
    entries, entry = numbered(cells.entry[arcs.cell], len(cost_s))
    own_s = cost_s[entries]
    tolerated, least_s = np.where(own_s < np.inf, cells.tolerated[entries], num_stages), own_s.min(axis=1)
    least_tolerated = tolerated.min()
    for count in range(1, num_stages + 1):
        if count - 1 > least_tolerated:
            least_s = np.where(tolerated >= count - 1, own_s, np.inf).min(axis=1)
        through = least_s[entry] + arcs.transfer_s + table[count - 1, arcs.head]
        if problem.pinned:
            through[~stage_rows(problem, cells, num_stages - count, num_stages)[arcs.cell]] = np.inf
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
        entry = cells.entry[arcs.cell[rows]]
        step_s = np.where(cells.tolerated[entry] >= later, cost_s[entry], np.inf)
        if problem.pinned:
            allowed = stage_rows(problem, cells, num_stages - 1 - later, num_stages)
            step_s[~allowed[arcs.cell[rows]]] = np.inf
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
    places = [problem.place(stage) for stage in stages]
    times = [float(problem.cost_s[place]) for place in places]
    times += transfers_of(problem, stages)
    once = max(float(problem.once_s[place]) for place in places)
    return Slicing(stages=stages, sum_s=math.fsum(times), largest_s=max(times), once_s=once)


def transfers_of(problem: SliceProblem, stages: tuple[Stage, ...]) -> list[float]:
    """Seconds of the transfer after each stage but the last; empty when no transfers were given."""
    if problem.transfer_s is None:
        return []
    return [float(problem.transfer_s[stage[1], stage[2], following[2]]) for stage, following in pairwise(stages)]
