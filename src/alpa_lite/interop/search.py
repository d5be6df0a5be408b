"""The outer half of stage slicing: which limits on the slowest stage and on the once-per-step cost are best.

In comes a ``SliceProblem``, out comes the exact minimum over all slicings of

    sum of times + (microbatches - 1) * slowest time + largest once-per-step cost.

With h(T, U) the least sum when no time is above T and no once-per-step cost above U (``best_within``), this is the
minimum of h(T, U) + (microbatches - 1) T + U over the values T and U of the table. h never rises with T or U, so a box of
values is worth at least h(its upper corner) + (microbatches - 1) T + U at its lower corner: boxes are taken by this bound,
evaluated at the upper corner and split, until no bound is below the best answer. Alpa walks over T upwards and skips
values closer than 1e-6; here nothing is skipped.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from alpa_lite.interop.problem import Cells, Floats, Limits, SliceProblem, cells_of, raised
from alpa_lite.interop.stage_dp import Slicing, best_within


@dataclass(frozen=True, slots=True, order=True)
class _Box:
    """Index ranges, inclusive, into the values of T and U; ``sum_s`` is a lower bound of h on it."""

    bound_s: float
    sum_s: float
    low_t: int
    high_t: int
    low_u: int
    high_u: int


class _Search:
    """The best answer so far, all answers that tie with it, and the boxes that may hold a better one."""

    def __init__(self, problem: SliceProblem) -> None:
        self.problem = problem
        self.cells = cells_of(problem)
        self.times, self.onces = _values(problem, self.cells)
        self.weight = problem.num_microbatches - 1
        self.best_s = float("inf")
        self.found: list[Slicing] = []
        self.boxes: list[_Box] = []

    def value(self, slicing: Slicing) -> float:
        return slicing.sum_s + self.weight * slicing.largest_s + slicing.once_s

    def run(self) -> Slicing | None:
        low = self.first_answer()
        if low is None:
            return None
        if self.weight:
            self._push(0.0, low, len(self.times) - 1, 0, len(self.onces) - 1)
        else:  # the slowest stage has no price: one range that holds all times
            self._push(0.0, 0, len(self.times) - 1, 0, len(self.onces) - 1)
        while self.boxes and self.boxes[0].bound_s <= raised(self.best_s):
            self._visit(heapq.heappop(self.boxes))
        ties = [slicing for slicing in self.found if self.value(slicing) <= raised(self.best_s)]
        return min(ties, key=lambda slicing: (len(slicing.stages), slicing.stages))

    def first_answer(self) -> int | None:
        """Raises T by steps until a slicing exists, for a first answer; returns the first T that is not excluded."""
        if not len(self.times):
            return None
        index, low = _least_bottleneck(self.problem, self.cells, self.times), 0
        while True:
            slicing = best_within(self.problem, self.cells, Limits(time_s=float(self.times[index])))
            if slicing is not None:
                self._keep(slicing)
                return low
            low = index + 1
            if low == len(self.times):
                return None
            index = max(low, int(np.searchsorted(self.times, 1.3 * self.times[index], side="right")) - 1)

    def _keep(self, slicing: Slicing) -> None:
        self.best_s = min(self.best_s, self.value(slicing))
        self.found.append(slicing)

    def _push(self, sum_s: float, low_t: int, high_t: int, low_u: int, high_u: int) -> None:
        if low_t > high_t or low_u > high_u:
            return
        slowest_s = float(self.times[low_t])
        least_sum_s = max(sum_s, slowest_s) if self.weight else sum_s
        bound_s = least_sum_s + self.weight * slowest_s + float(self.onces[low_u])
        if bound_s <= raised(self.best_s):
            heapq.heappush(self.boxes, _Box(bound_s, sum_s, low_t, high_t, low_u, high_u))

    def _visit(self, box: _Box) -> None:
        """Evaluates a box at its upper corner, and pushes the parts of it that may still be better."""
        left_s = raised(self.best_s) - float(self.onces[box.low_u])
        highest_s = min(left_s / (self.weight + 1), (left_s - box.sum_s) / self.weight if self.weight else np.inf)
        high_t = min(box.high_t, max(box.low_t, int(np.searchsorted(self.times, raised(highest_s), side="right")) - 1))
        slowest_s = float(self.times[box.low_t]) if self.weight else 0.0
        limits = Limits(
            time_s=float(self.times[high_t]),
            once_s=float(self.onces[box.high_u]),
            sum_s=left_s - self.weight * slowest_s,
        )
        slicing = best_within(self.problem, self.cells, limits)
        if slicing is None:
            return
        self._keep(slicing)
        at_t = int(np.searchsorted(self.times, slicing.largest_s))
        at_u = int(np.searchsorted(self.onces, slicing.once_s))
        # Above this answer in both T and U nothing is better: h is the same there. Two ranges remain.
        if self.weight:
            middle_s = (self.times[box.low_t] + slicing.largest_s) / 2
            middle = min(max(box.low_t, int(np.searchsorted(self.times, middle_s))), at_t - 1)
            self._push(slicing.sum_s, box.low_t, middle, box.low_u, box.high_u)
            self._push(slicing.sum_s, middle + 1, at_t - 1, box.low_u, box.high_u)
            box = _Box(0.0, 0.0, max(at_t, box.low_t), high_t, box.low_u, box.high_u)
        middle_s = (self.onces[box.low_u] + slicing.once_s) / 2
        middle = min(max(box.low_u, int(np.searchsorted(self.onces, middle_s))), at_u - 1)
        self._push(slicing.sum_s, box.low_t, high_t, box.low_u, middle)
        self._push(slicing.sum_s, box.low_t, high_t, middle + 1, at_u - 1)


def search(problem: SliceProblem) -> Slicing | None:
    """The best slicing, or None where no slicing exists."""
    return _Search(problem).run()


def exists(problem: SliceProblem) -> bool:
    """Whether there is any slicing."""
    return _Search(problem).first_answer() is not None


def _values(problem: SliceProblem, cells: Cells) -> tuple[Floats, Floats]:
    """The distinct times that may be the slowest, and the distinct once-per-step costs that may be the largest.

    Of values that are equal but for rounding the largest: a limit at one of them admits all.
    """
    possible = np.isfinite(cells.cost_s)
    times = cells.cost_s[possible]
    if problem.transfer_s is not None:
        times = np.append(times, problem.transfer_s[np.isfinite(problem.transfer_s)])
    return _distinct(times), _distinct(cells.once_s[possible])


def _distinct(values: Floats) -> Floats:
    values = np.unique(values)
    return values[np.append(values[1:] > raised(1.0) * values[:-1], np.ones(min(1, len(values)), dtype=bool))]


def _least_bottleneck(problem: SliceProblem, cells: Cells, times: Floats) -> int:
    """Index of a time that some stage must reach.

    Each layer lies in a stage that is no faster than its fastest. And the slowest stage is no faster than the mean over the
    devices, which is at least what all layers take in seconds times devices, each run on the submesh where that is least.
    """
    least_s = np.full((problem.num_layers, problem.num_layers), np.inf)
    np.minimum.at(least_s, (cells.first, cells.last), cells.cost_s.min(axis=1)[cells.entry])
    from_earlier = np.minimum.accumulate(least_s, axis=0)
    floor_s = np.minimum.accumulate(from_earlier[:, ::-1], axis=1)[:, ::-1].diagonal().max()
    shared_s = np.full(least_s.shape, np.inf)
    seconds = cells.cost_s.min(axis=1)[cells.entry] * cells.size
    np.minimum.at(shared_s, (cells.first, cells.last), seconds)
    from_layer = np.zeros(problem.num_layers + 1)
    for first in range(problem.num_layers - 1, -1, -1):
        from_layer[first] = (shared_s[first, first:] + from_layer[first + 1 :]).min()
    mean_s = from_layer[0] / problem.num_devices * (1 - 1e-9)  # less than rounding may have added
    return min(int(np.searchsorted(times, max(floor_s, mean_s))), len(times) - 1)
