"""Interned arrays and memoised operations on them, the reason why presolve of repeated layers is cheap.

A program of 32 equal layers has thousands of nodes but few distinct cost arrays. Arrays are known by small integers;
equal contents get equal numbers, and every operation is remembered by the numbers of its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from alpa_lite.intraop.problem import Array

_COMPARED_BYTES = (
    65536  # arrays up to this size are told by their bytes, larger ones, which are not kept twice, by a digest
)
_JOINED_AT_ONCE = 1 << 18  # sums that are formed together; more at a time leave the cache
SUM_ERROR = 1e-15  # of an entry of a sum, over the largest entry: a few roundings; exact for whole numbers
_SPLIT_AT_ONCE = (
    256  # entries of matrices of which many are looked at together; calls for larger ones take less than sums
)
_DOMINANCE_CAP = 4_000_000  # largest k*k*l for which pairwise differences of rows are formed


# Without the methods around them: most arrays here are small.
_all, _any = np.logical_and.reduce, np.logical_or.reduce


class PartError(Exception):
    """What was asked holds of some problems only (``in_step.py``); ``groups`` are places of problems that agree."""

    def __init__(self, groups: list[list[int]]) -> None:
        super().__init__(groups)
        self.groups = groups


class Tables:
    """Interned vectors and matrices (costs, index lists, usages alike).

    ``joins``, ``transposes`` and ``picks`` are what is known of ``join``, ``transpose`` and ``pick``, for those who ask so often
    that calls take longer than answers. ``stacks`` is what is computed with: ``arrays``, or the arrays of several problems
    (``in_step.py``), of which ``arrays`` are the first one's.
    """

    axis = 0  # of ``stacks``, which counts states

    __slots__ = (
        "_by_content",
        "_by_id",
        "_closed",
        "_functions",
        "_keep",
        "_looked_at",
        "_margins",
        "_memo",
        "_open",
        "_parts",
        "_sums",
        "_taken",
        "arrays",
        "joins",
        "loose",
        "open",
        "picks",
        "stacks",
        "transposes",
        "whole",
    )

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.stacks = self.arrays
        self._by_content: dict[tuple[object, ...], int] = {}
        self._by_id: dict[int, int] = {}
        self._keep: list[Array] = []  # ids of arrays stay valid only while the arrays live
        self._memo: dict[tuple[Hashable, ...], int] = {}
        self._open: dict[int, bool] = {}
        self._closed: set[int] = set()
        self._looked_at = 0
        # What is asked for most is remembered by the arrays' numbers alone.
        self._parts: dict[int, tuple[int, int] | None] = {}
        self._functions: dict[int, int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self.joins: dict[tuple[int, int, int], int] = {}
        self.picks: dict[tuple[int, tuple[int, ...]], int] = {}
        self.transposes: dict[int, int] = {}
        self._taken: dict[tuple[int, int], tuple[int, int]] = {}
        self._margins: dict[int, Array] = {}
        # Numbers of arrays of which nothing is to be done, so that a set comparison tells it of all edges of a node.
        self.open: set[int] = set()  # ``is_open``
        self.whole: set[int] = set()  # matrices without ``split``
        self.loose: set[int] = set()  # matrices whose transpose is no ``function``

    def intern(self, array: Array) -> int:
        """The number of an array's content."""
        key = content(array)
        number = self._by_content.get(key)
        if number is None:
            number = self._by_content[key] = len(self.arrays)
            self.arrays.append(np.ascontiguousarray(array))
        return number

    @property
    def knows_content(self) -> bool:
        """Whether equal arrays have one number."""
        return bool(self._by_content) or not self.arrays

    def numbered(self) -> tuple[Tables, list[int]]:
        """The same arrays where equal ones have one number, and which each has: the smallest, of the one that was there first.

        What is remembered of operations is left behind, as it may name the others.
        """
        found = Tables()
        found.arrays += self.arrays
        known = found._by_content
        numbers = [known.setdefault(content(array), number) for number, array in enumerate(found.arrays)]
        found.open, found.whole, found.loose = set(self.open), set(self.whole), set(self.loose)
        found._closed, found._looked_at = set(self._closed), self._looked_at
        return found, numbers

    def intern_object(self, array: Array, convert: Callable[[Array], Array]) -> int:
        """As ``intern(convert(array))``, remembered by object identity."""
        number = self._by_id.get(id(array))
        if number is None:
            number = self._by_id[id(array)] = self.intern(convert(array))
            self._keep.append(array)
        return number

    def _remember(self, key: tuple[Hashable, ...], make: Callable[[], Array]) -> int:
        number = self._memo.get(key)
        if number is None:
            number = self._memo[key] = self.intern(make())
        return number

    def transpose(self, m: int) -> int:
        number = self.transposes.get(m)
        if number is None:
            number = self.transposes[m] = self.intern(self.stacks[m].swapaxes(-1, -2))
            self.transposes[number] = m
        return number

    def add(self, a: int, b: int) -> int:
        """Sum of two arrays of one shape."""
        number = self._sums.get((a, b))
        if number is None:
            number = self._sums[a, b] = self.intern(self.stacks[a] + self.stacks[b])
        return number

    def take(self, a: int, index: int) -> int:
        """Rows (or entries) ``index`` of an array."""
        return self._remember(("take", a, index), lambda: self.stacks[a].take(self.arrays[index], axis=self.axis))

    def take_both(self, m: int, index: int) -> tuple[int, int]:
        """Rows ``index`` of a matrix, and the transpose of that."""
        pair = self._taken.get((m, index))
        if pair is None:
            number = self.take(m, index)
            pair = self._taken[m, index] = number, self.transpose(number)
        return pair

    def excess(self, a: int) -> tuple[int, int]:
        """(smallest entry, number of the array less that entry); the number is -1 if all entries are equal."""
        key = ("excess", a)
        number = self._memo.get(key)
        if number is None:
            low = self._memo["low", a] = int(self.arrays[a].min())
            rest = self.arrays[a] - low
            number = self._memo[key] = self.intern(rest) if rest.any() else -1
        return self._memo["low", a], number

    def row(self, m: int, i: int) -> int:
        return self._remember(("row", m, i), lambda: self.arrays[m][i])

    def is_open(self, a: int) -> bool:
        """Whether every state has a finite cost (of a vector), or some finite entry in its row (of a matrix)."""
        if a in self.open:
            return True
        found = self._open.get(a)
        if found is None:
            array = self.arrays[a]
            found = bool(array.size) and bool(np.maximum.reduce(array, axis=None) < math.inf)
            if not found:
                finite = np.isfinite(array)
                found = bool(_all(finite, axis=None)) or (finite.ndim == 2 and bool(_all(_any(finite, axis=1))))
            self._open[a] = found
            if found:
                self.open.add(a)
        return found

    def closed(self) -> set[int]:
        """The numbers of all arrays that are not ``is_open``, few if any."""
        new = range(self._looked_at, len(self.arrays))
        self._looked_at = len(self.arrays)
        costs = [n for n in new if self.arrays[n].dtype.char == "d" and self.arrays[n].size]
        if costs:
            self._look_at(np.array(costs))
        self._closed.update(n for n in new if n not in self.open and not self.is_open(n))
        return self._closed

    def _look_at(self, numbers: Array) -> None:
        """Tells of most costs that nothing is to be done of them, of all at once."""
        arrays = [self.arrays[n] for n in numbers.tolist()]
        flat = np.frombuffer(b"".join([self.stacks[n] for n in numbers.tolist()]))  # all are contiguous
        each, holds = self.problems(len(arrays))
        sizes = each(np.array([a.size for a in arrays]))
        rows = each(np.array(list(map(len, arrays))))  # of a vector, its entries
        first, first_row, width = np.cumsum(sizes) - sizes, np.cumsum(rows) - rows, sizes // rows
        row_starts = np.repeat(first - first_row * width, rows) + np.arange(int(rows.sum())) * np.repeat(width, rows)
        least = np.minimum.reduceat(flat, row_starts)
        self.open.update(numbers[holds(np.maximum.reduceat(least, first_row) < math.inf)].tolist())
        top = np.maximum.reduceat(flat, first)
        matrix = each(np.array([a.ndim == 2 for a in arrays]))
        self.loose.update(numbers[holds(matrix & (top < math.inf) & (rows > 1))].tolist())
        largest = np.maximum(top, -np.minimum.reduceat(least, first_row))
        last = first + sizes - 1
        with np.errstate(invalid="ignore"):
            far = np.abs(flat[last] - flat[last - width + 1] - (flat[first + width - 1] - flat[first]))
            may_be_sum = matrix & np.isfinite(largest) & (far <= SUM_ERROR * largest)  # by its corners
        is_none = matrix & ~may_be_sum
        some = np.flatnonzero(may_be_sum & (sizes <= _SPLIT_AT_ONCE))
        if len(some):
            is_none[some] = _no_sums(flat, first[some], sizes[some], width[some], largest[some])
        self.whole.update(numbers[holds(is_none)].tolist())

    def problems(self, count: int) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """What repeats something of so many arrays for all problems, and what says of which arrays a mask over that holds."""
        return _same, _same

    def usable(self, v: int, matrices: tuple[int, ...]) -> int:
        """Index list of the states with a finite cost and a finite entry in every matrix; -1 if that is all of them."""
        key = ("usable", v, matrices)
        number = self._memo.get(key)
        if number is None:
            keep = np.isfinite(self.arrays[v])
            for m in matrices:
                keep &= self.arrays[
                    self._remember(("support", m), lambda m=m: np.asarray(np.isfinite(self.arrays[m]).any(1)))
                ]
            number = self._memo[key] = -1 if keep.all() else self.intern(np.flatnonzero(keep))
        return number

    def function(self, m: int) -> int:
        """Index list f if row x allows column f[x] only; -1 if some row allows several columns."""
        number = self._functions.get(m)
        if number is None:
            costs = self.arrays[m]
            number = -1
            if costs.shape[1] == 1 or costs.item(0) == math.inf or costs.item(1) == math.inf:  # else row 0 allows two
                finite = np.isfinite(costs)
                if np.count_nonzero(finite[0]) == 1 and (finite.sum(1) == 1).all():
                    number = self.intern(finite.argmax(1))
            self._functions[m] = number
        return number

    def follow(self, v: int, m: int, source: int, f: int) -> int:
        """Costs ``v + m[x, f(x)] + source[f(x)]`` of a node that takes over the one it determines."""

        def make() -> Array:
            to = self.arrays[f]
            return self.stacks[v] + self.stacks[m][..., np.arange(len(to)), to] + self.stacks[source][..., to]

        return self._remember(("follow", v, m, source, f), make)

    def split(self, m: int) -> tuple[int, int] | None:
        """(a, b) with ``m[x, y] = a[x] + b[y]``, or None."""
        if m not in self._parts:
            a, b = _split(self.arrays[m])
            self._parts[m] = None if a is None or b is None else (self.intern(a), self.intern(b))
            if a is None:
                self.whole.add(m)
        return self._parts[m]

    def fold(self, v: int, m: int) -> int:
        """``min_x v[x] + m[x, y]`` for all y."""
        return self._remember(("fold", v, m), lambda: (self.stacks[v][..., None] + self.stacks[m]).min(-2))

    def join(self, v: int, m: int, n: int) -> int:
        """``min_x m[x, y] + v[x] + n[x, z]`` for all y, z."""
        number = self.joins.get((v, m, n))
        if number is None:
            joined = min_plus(self.stacks[m] + self.stacks[v][..., None], self.stacks[n])
            number = self.joins[v, m, n] = self.intern(joined)
        return number

    def least(self, v: int) -> Any:
        """The smallest cost."""
        return float(self.arrays[v].min())

    def pick(self, v: int, rows: tuple[int, ...]) -> int:
        """Lowest index that minimises ``v[x] + sum m[x, y]`` over the given m, y, m, y and so on."""
        number = self.picks.get((v, rows))
        if number is None:
            total = self.arrays[v]
            for place in range(0, len(rows), 2):
                total = total + self.arrays[rows[place]][:, rows[place + 1]]
            number = self.picks[v, rows] = int(total.argmin())
        return number

    def undominated(self, v: int, matrices: tuple[int, ...], usages: tuple[int, ...]) -> int:
        """Index list of the states that no other beats whatever the neighbours choose; -1 if that is all of them."""
        key = ("undominated", v, matrices, usages)
        number = self._memo.get(key)
        if number is None:
            keep = self._undominated(v, matrices, usages)
            number = self._memo[key] = -1 if keep.all() else self.intern(np.flatnonzero(keep))
        return number

    def _undominated(self, v: int, matrices: tuple[int, ...], usages: tuple[int, ...]) -> Array:
        costs = self.arrays[v]
        k = len(costs)
        if k == 1 or any(k * self.arrays[m].size > _DOMINANCE_CAP for m in matrices):
            return np.ones(k, dtype=bool)
        worse = costs[:, None] - costs[None, :]  # worse[s, t] > 0: s costs more than t in any case
        for m in matrices:
            margins = self._margins.get(m)
            if margins is None:
                margins = self._margins[m] = _row_margins(self.arrays[m])
            worse = worse + margins
        others, lower_index = _masks(k)
        beaten = (worse >= 0) & others
        if not _any(beaten, axis=None):
            return np.ones(k, dtype=bool)
        for u in usages:
            size = self.arrays[u]
            beaten &= size[:, None] >= size[None, :]
        beaten &= ~beaten.T | lower_index  # of equals the lowest index stays
        kept: Array = np.asarray(~beaten.any(1))
        return kept


def _same(array: Array) -> Array:
    return array


def _no_sums(flat: Array, first: Array, sizes: Array, width: Array, largest: Array) -> Array:
    """Mask of the small matrices, whose corners are like those of a sum, that are none; with the sums of ``_split``."""
    starts = np.cumsum(sizes) - sizes
    begin = np.repeat(first, sizes)
    place = np.arange(len(begin)) - np.repeat(starts, sizes) + begin
    column = (place - begin) % np.repeat(width, sizes)
    error = np.abs(flat[place] - flat[place - column] - (flat[begin + column] - flat[begin]))
    return np.asarray(np.maximum.reduceat(error, starts) > SUM_ERROR * largest)


def content(array: Array) -> tuple[object, ...]:
    """What tells arrays apart."""
    if array.nbytes <= _COMPARED_BYTES:
        return array.shape, array.dtype.char, array.tobytes()
    return array.shape, array.dtype.char, blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()


def min_plus(a: Array, b: Array) -> Array:
    """``min_x a[..., x, y] + b[..., x, z]``; with x first, whole tables are compared at once."""
    width, step = a.shape[-1], max(1, _JOINED_AT_ONCE // b.size)
    if width <= step:
        return np.asarray(np.minimum.reduce(a[..., None] + b[..., None, :], axis=-3))
    return np.concatenate([min_plus(a[..., p : p + step], b) for p in range(0, width, step)], axis=-2)


@lru_cache(maxsize=64)
def _masks(k: int) -> tuple[Array, Array]:
    """bool[k, k]: which two states differ, and where the second has the lower number."""
    numbers = np.arange(k)
    return numbers[:, None] != numbers[None, :], numbers[None, :] < numbers[:, None]


def _row_margins(m: Array) -> Array:
    """``min_y m[s, y] - m[t, y]``; a forbidden entry of s never counts in its favour, so its inf - inf is nan."""
    columns = np.ascontiguousarray(m.T)  # first, so that rows of rows are compared at once
    least = np.minimum if _all(np.isfinite(columns), axis=None) else np.fmin
    return np.asarray(least.reduce(columns[:, :, None] - columns[:, None, :], axis=0))


def _split(m: Array) -> tuple[Array | None, Array | None]:
    largest = max(float(np.maximum.reduce(m, axis=None)), -float(np.minimum.reduce(m, axis=None)))
    if not math.isfinite(largest):
        return None, None
    a, b = m[:, 0], m[0] - m[0, 0]
    error = np.abs(m - a[:, None] - b)
    if error.max() > SUM_ERROR * largest:
        return None, None
    return a, b
