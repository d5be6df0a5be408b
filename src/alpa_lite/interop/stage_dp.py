"""The least sum of stage times when no stage may be slower than given limits: the inner half of stage slicing.

In come possible stages (``Cells``) and ``Limits``; out comes the best ``Slicing`` within them, or None. With layers i..
still to place on d devices in s stages (submesh w for the first of them, where transfers depend on it):

    F[0, L, 0] = 0
    F[s, i, d] = min over stages (i, j, m, c) of  cost[i, j, m, c] + transfer[j, m, next] + F[s - 1, j + 1, d - size[m]]
                 whose memory tolerates s - 1 later stages                                           (_count_table)

Alpa's dynamic program (OSDI 2022, section 5.2) has the same recurrence. It is run here on few arcs: the recurrence
without s, with memory only as far as the fewest later stages go, is a lower bound (``_suffix_sums``). It is taken from both
ends of the pipeline, and an arc stays only if the bound through it is within the sum that can still matter (``_arcs``).
Nothing is lost, so the result is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from alpa_lite.interop.problem import TIE, Cells, Floats, Ints, SliceProblem, stage_rows

Stage = tuple[int, int, int, int]

_NEVER = 1 << 30  # a number of stages that stands for "cannot"


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
    """One row per (cell, devices left, next submesh), sorted by tail; the last two nodes are the end and nowhere."""

    cell: Ints
    transfer_s: Floats
    head: Ints
    next_submesh: Ints
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
    transfer_s = problem.transfer_s
    if transfer_s is not None:
        transfer_s = np.where(transfer_s <= raised(limits.time_s), transfer_s, np.inf)
    arcs = _arcs(problem, cells, cost_s, transfer_s, unit, raised(limits.sum_s))
    if arcs is None:
        return None
    found = _fewest_seconds(problem, cells, cost_s, arcs)
    if found is None or found[0] > raised(limits.sum_s):
        return None
    return _first_in_order(problem, cells, cost_s, arcs, *found)


def _suffix_sums(
    cells: Cells,
    least_s: Floats,
    transfer_s: Floats | None,
    shape: tuple[int, int, int],
    unit: int,
    tolerated: Ints | None = None,
) -> tuple[Floats, Floats, Ints]:
    """Lower bounds, by layer, submesh and devices left: of all from a stage on, and of all after a stage.

    The third result is the fewest stages that can follow, exactly, for cells that tolerate so many (None = any number):
    fewer later stages only help those before, so the smallest count of a suffix is all that memory has to know of it.
    Without transfers the submesh makes no difference, and its dim has the size 1.
    """
    layers, width, devices = shape
    start = np.full((layers + 1, width, devices), np.inf)
    after = np.full((layers + 1, width, devices), np.inf)
    fewest_start = np.full(start.shape, _NEVER)
    fewest = np.full(start.shape, _NEVER)
    after[layers, :, 0] = 0.0
    fewest[layers, :, 0] = 0
    order = np.lexsort((cells.submesh, -cells.first))
    bounds = np.flatnonzero(np.diff(cells.first[order] * (cells.submesh.max() + 1) + cells.submesh[order])) + 1
    groups = np.split(order, bounds)
    done = layers
    for group in groups:
        first, submesh, size = (int(axis[group[0]]) for axis in (cells.first, cells.submesh, cells.size // unit))
        while done > first:  # every stage that starts at `done` or later has been seen
            _leave(start, after, transfer_s, done)
            _leave(fewest_start, fewest, None if transfer_s is None else _NEVER * np.isinf(transfer_s), done)
            done -= 1
        w = submesh if width > 1 else 0
        rest = after[cells.last[group] + 1, w, : devices - size] + least_s[group, None]
        if tolerated is not None:
            later = fewest[cells.last[group] + 1, w, : devices - size]
            fits = later <= tolerated[group, None]
            rest = np.where(fits, rest, np.inf)
            counts = fewest_start[first, w, size:]
            np.minimum(counts, np.where(fits, later + 1, _NEVER).min(axis=0), out=counts)
        np.minimum(start[first, w, size:], rest.min(axis=0), out=start[first, w, size:])
    for layer in range(done, -1, -1):
        _leave(start, after, transfer_s, layer)
    return start, after, fewest


def _leave(start: Any, after: Any, transfer: Any, layer: int) -> None:
    """Fills ``after`` at one layer: the cheapest next submesh, with the transfer to it."""
    if layer == len(after) - 1:
        return
    if transfer is None:
        after[layer] = start[layer]
    elif layer > 0:
        after[layer] = (transfer[layer - 1][:, :, None] + start[layer][None]).min(axis=1)
    else:
        after[layer] = start[layer].min(axis=0)


def _mirrored(cells: Cells, transfer_s: Floats | None, layers: int) -> tuple[Cells, Floats | None]:
    """The same pipeline from its end to its start."""
    turned = Cells(
        first=layers - 1 - cells.last,
        last=layers - 1 - cells.first,
        submesh=cells.submesh,
        size=cells.size,
        cost_s=cells.cost_s,
        tolerated=cells.tolerated,
        once_s=cells.once_s,
    )
    return turned, None if transfer_s is None else transfer_s[::-1].transpose(0, 2, 1)


def _arcs(
    problem: SliceProblem, cells: Cells, cost_s: Floats, transfer_s: Floats | None, unit: int, most_s: float
) -> _Arcs | None:
    """The stages with the devices left before them that can lie on a slicing with a sum within ``most_s``."""
    layers, devices = problem.num_layers, problem.num_devices // unit + 1
    width = 1 if transfer_s is None else len(problem.submesh_sizes)
    shape = (layers, width, devices)
    least_s = cost_s.min(axis=1)
    tolerated = np.where(cost_s < np.inf, cells.tolerated, -1).max(axis=1)
    scarce = tolerated if tolerated.min() < layers else None  # the common case of ample memory is cheaper
    start, after, fewest = _suffix_sums(cells, least_s, transfer_s, shape, unit, scarce)
    if not after[0].min(axis=0)[-1] <= most_s:
        return None
    turned, turned_transfer = _mirrored(cells, transfer_s, layers)
    before = _suffix_sums(turned, least_s, turned_transfer, shape, unit)[1]
    rows, lefts, sums = [], [], []
    bounds = np.flatnonzero(np.diff(cells.first * len(problem.submesh_sizes) + cells.submesh)) + 1
    for group in np.split(np.arange(len(cells.first)), bounds):
        first, submesh, size = (int(axis[group[0]]) for axis in (cells.first, cells.submesh, cells.size // unit))
        w = submesh if width > 1 else 0
        so_far = before[layers - first, w, : devices - size][::-1] + least_s[group, None]
        bound = so_far + after[cells.last[group] + 1, w, : devices - size]
        fits = (bound <= most_s) & (bound < np.inf)
        if scarce is not None:
            fits &= fewest[cells.last[group] + 1, w, : devices - size] <= scarce[group, None]
        row, left = np.nonzero(fits)
        rows.append(group[row])
        lefts.append(left + size)
        sums.append(so_far[row, left])
    cell, left, so_far = np.concatenate(rows), np.concatenate(lefts), np.concatenate(sums)
    next_submesh = np.zeros(len(cell), dtype=np.int64)
    moved_s = np.zeros(len(cell))
    if transfer_s is not None:
        keep, next_submesh, moved_s = _with_next(cells, cell, left, so_far, transfer_s, start, unit, most_s)
        cell, left = cell[keep], left[keep]
    return _linked(cells, cell, left, next_submesh, moved_s, shape, unit)


def _with_next(
    cells: Cells, cell: Ints, left: Ints, so_far: Floats, transfer_s: Floats, start: Floats, unit: int, most_s: float
) -> tuple[Ints, Ints, Floats]:
    """Each arc once per submesh that the next stage may have: rows of the arcs, next submesh, transfer time."""
    layers = len(start) - 1
    following, rest = cells.last[cell] + 1, left - cells.size[cell] // unit
    moved_s = np.zeros((len(cell), transfer_s.shape[1]))
    inner = following < layers
    moved_s[inner] = transfer_s[cells.last[cell[inner]], cells.submesh[cell[inner]]]
    bound = so_far[:, None] + moved_s + np.where(inner[:, None], start[following, :, rest], 0.0)
    fits = (bound <= most_s) & (bound < np.inf)
    fits[~inner, 1:] = False  # after the last stage there is one end
    keep, next_submesh = np.nonzero(fits)
    return keep, next_submesh, moved_s[keep, next_submesh]


def _linked(
    cells: Cells,
    cell: Ints,
    left: Ints,
    next_submesh: Ints,
    moved_s: Floats,
    shape: tuple[int, int, int],
    unit: int,
) -> _Arcs | None:
    """Sorts arcs by the node that they leave, and looks up the node that they enter."""
    layers, width, devices = shape
    own = cells.submesh[cell] if width > 1 else 0
    tail = (cells.first[cell] * width + own) * devices + left
    head = ((cells.last[cell] + 1) * width + next_submesh) * devices + left - cells.size[cell] // unit
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
        next_submesh=next_submesh[order],
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
