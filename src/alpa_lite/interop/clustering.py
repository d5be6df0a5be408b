"""Layer clustering: a sequence of ops is cut into layers of like weight where few bytes cross.

In come FLOPs per op and bytes per cut, out come the cuts. Among all ways to cut n ops into k layers that

- hold every forced cut and no forbidden one (bytes = inf), and
- have no layer above the cap: (1 + tolerance) times the mean, or the least possible when that is more (``_least_load``),

the answer has the fewest bytes over all cuts, then the smallest largest layer, then early cuts (the last cut decides first):

    W[1, p] = 0,   W[l, p] = min over q of W[l - 1, q] + bytes[q],   q < p a cut, no forced cut between, load(q, p) <= cap

(``_fewest_bytes``). The admissible q of a p are a window whose ends rise with p, so a row is a range minimum in
O(n log n), and the whole O(k n log n). It follows Alpa's layer construction (OSDI 2022, section 5.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alpa_lite.errors import SlicingError
from alpa_lite.interop.problem import TIE, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerClusters:
    """``cuts`` are indices of the ops that start layers 1, 2, ...; loads are FLOPs, ``cut_bytes`` the sum over the cuts."""

    cuts: tuple[int, ...]
    num_ops: int
    loads: tuple[float, ...]
    cut_bytes: float
    load_cap: float

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """First and last op (inclusive) of each layer."""
        edges = (0, *self.cuts, self.num_ops)
        return tuple((start, end - 1) for start, end in pairwise(edges))

    def __str__(self) -> str:
        mean = sum(self.loads) / len(self.loads)
        lines = [
            f"{len(self.loads)} layers of {self.num_ops} ops; {self.cut_bytes:.6g} bytes cross the cuts",
            f"{'layer':>5}  {'ops':>13}  {'FLOPs':>10}  {'of mean':>7}",
        ]
        for index, ((first, last), load) in enumerate(zip(self.layers, self.loads, strict=True)):
            share = f"{load / mean:.1%}" if mean else "-"
            lines.append(f"{index:>5}  {f'{first}-{last}':>13}  {load:>10.4g}  {share:>7}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ops:
    """Prefix sums of FLOPs, and by position 0..n the bytes of a cut there and the last forced cut before it."""

    prefix: Floats
    cut_bytes: Floats
    last_forced: Ints
    num_layers: int


def cluster_layers(
    flops: ArrayLike,
    cut_bytes: ArrayLike,
    num_layers: int,
    *,
    tolerance: float = 0.1,
    forced_cuts: Sequence[int] = (),
) -> LayerClusters:
    """Cuts a sequence of ops into layers; the formulation is the text of this module.

    Args:
        flops: (ops,) FLOPs of each op.
        cut_bytes: (ops - 1,) bytes that cross the cut between op p and op p + 1; inf forbids the cut.
        num_layers: layers to make.
        tolerance: share by which the largest layer may exceed the mean; 0 balances as well as possible.
        forced_cuts: indices of ops that must start a layer (user-given boundaries).

    Returns:
        The cuts. Ties go to the smallest largest layer, then to early cuts, the last cut first.

    Raises:
        SlicingError: an argument is malformed, or so many layers cannot be made of these cuts.

    Example:
        >>> cluster_layers([4, 1, 1, 4], [9, 2, 9], 2).cuts
        (2,)
    """
    ops = _checked(flops, cut_bytes, num_layers, tolerance, forced_cuts)
    least = _least_load(ops)
    cap = max((1 + tolerance) * float(ops.prefix[-1]) / num_layers, least)
    fewest, cuts = _fewest_bytes(ops, cap)
    low, high = least * (1 - 2 * TIE), _largest(ops, cuts)
    while low < (middle := (low + high) / 2) < high:  # fewest bytes at last: the smallest cap that still allows them
        other, other_cuts = _fewest_bytes(ops, middle)
        if other <= fewest * (1 + TIE):
            cuts, high = other_cuts, min(middle, _largest(ops, other_cuts))
        else:
            low = middle
        if high - low <= TIE * high:
            break
    edges = [0, *cuts, len(ops.prefix) - 1]
    return LayerClusters(
        cuts=tuple(cuts),
        num_ops=len(ops.prefix) - 1,
        loads=tuple(np.diff(ops.prefix[edges]).tolist()),
        cut_bytes=float(ops.cut_bytes[list(cuts)].sum()),
        load_cap=cap,
    )


def _largest(ops: _Ops, cuts: Sequence[int]) -> float:
    return float(np.diff(ops.prefix[[0, *cuts, len(ops.prefix) - 1]]).max())


def _window_starts(ops: _Ops, cap: float) -> Ints:
    """For each end p of a layer the first start within the cap and not before the last forced cut."""
    slack = TIE * float(ops.prefix[-1])  # differences of prefix sums are exact to rounding of the whole
    starts = np.searchsorted(ops.prefix, ops.prefix - cap - slack, side="left")
    return np.maximum(starts, ops.last_forced)


def _least_load(ops: _Ops) -> float:
    """The smallest possible load of the largest layer. More layers never raise it, so it needs at most ``num_layers``."""
    low, high = 0.0, float(ops.prefix[-1])
    while low < (middle := (low + high) / 2) < high:
        if _fewest_layers(ops, middle) <= ops.num_layers:
            high = middle
        else:
            low = middle
        if high - low <= TIE * high:
            break
    return high


def _fewest_layers(ops: _Ops, cap: float) -> int:
    """Layers that a cap needs: from each cut on to the last allowed one within reach."""
    size = len(ops.prefix) - 1
    starts = _window_starts(ops, cap)
    possible = np.flatnonzero(np.isfinite(ops.cut_bytes))  # all cuts and the end
    position, count = 0, 0
    while position < size:
        reach = int(np.searchsorted(starts, position, side="right")) - 1  # last end whose window holds `position`
        earlier = possible[: np.searchsorted(possible, reach, side="right")]
        following = int(earlier[-1]) if len(earlier) else position
        if following <= position:
            return size + 1
        position, count = following, count + 1
    return count


def _fewest_bytes(ops: _Ops, cap: float) -> tuple[float, list[int]]:
    """W of the module text, and early cuts that reach it; (inf, []) where the cap is too small."""
    size = len(ops.prefix) - 1
    low = _window_starts(ops, cap)
    high = np.arange(size + 1) - 1
    rows = [np.full(size + 1, np.inf)]
    rows[0][0] = 0.0
    for _ in range(ops.num_layers):
        rows.append(_range_minimum(rows[-1], low, high) + ops.cut_bytes)
    fewest = float(rows[-1][size])
    if not np.isfinite(fewest):
        return fewest, []
    return fewest, _earliest(ops, low, fewest, rows)


def _earliest(ops: _Ops, low: Ints, fewest: float, rows: list[Floats]) -> list[int]:
    """Walks the rows from the end; of starts that keep the bytes, it takes the first."""
    cuts: list[int] = []
    end = len(ops.prefix) - 1
    for count in range(ops.num_layers - 1, 0, -1):
        window = rows[count][low[end] : end]
        end = int(low[end]) + int(np.flatnonzero(window <= window.min() + TIE * fewest)[0])
        cuts.append(end)
    return cuts[::-1]


def _range_minimum(values: Floats, low: Ints, high: Ints) -> Floats:
    """min of ``values[low..high]`` (inclusive) for each pair, inf for an empty range; by a table of doubling widths."""
    levels = [values]
    width = 1
    while 2 * width <= len(values):
        last = levels[-1]
        levels.append(np.minimum(last[:-width], last[width:]))
        width *= 2
    padded = np.full((len(levels), len(values)), np.inf)
    for level, row in enumerate(levels):
        padded[level, : len(row)] = row
    length = np.maximum(high - low + 1, 1)
    level = np.frexp(length)[1] - 1  # floor of the binary logarithm
    left = padded[level, np.minimum(low, len(values) - 1)]
    right = padded[level, np.maximum(high - (1 << level) + 1, 0)]
    return np.where(high >= low, np.minimum(left, right), np.inf)


def _checked(
    flops: ArrayLike, cut_bytes: ArrayLike, num_layers: int, tolerance: float, forced_cuts: Sequence[int]
) -> _Ops:
    """Checks all arguments of ``cluster_layers`` (``SlicingError``)."""
    loads = _numbers("flops", flops)
    size = len(loads)
    crossing = _numbers("cut_bytes", cut_bytes)
    if len(crossing) != size - 1 or not np.isfinite(loads).all():
        raise SlicingError(
            f"flops has {size} entries and cut_bytes has {len(crossing)}. There must be one cut fewer than ops, and the "
            f"FLOPs must be finite. Both were given to cluster_layers; cut_bytes[p] lies between op p and op p + 1."
        )
    possible = int(np.isfinite(crossing).sum()) + 1
    if not 1 <= num_layers <= possible:
        raise SlicingError(
            f"{num_layers} layers were asked of {size} ops with {possible - 1} allowed cuts. There can be 1 to {possible} "
            f"layers. The number was given to cluster_layers; ask for fewer layers, or allow more cuts."
        )
    if not (np.isfinite(tolerance) and tolerance >= 0):
        raise SlicingError(
            f"tolerance is {tolerance}. It must be 0 or more, 0.1 for layers of at most 1.1 times the mean. It was given to "
            f"cluster_layers; correct it there."
        )
    forced = sorted(set(forced_cuts))
    for cut in forced:
        if not 1 <= cut <= size - 1 or not np.isfinite(crossing[cut - 1]):
            raise SlicingError(
                f"forced_cuts holds {cut}. A forced cut is the index of an op that starts a layer, from 1 to {size - 1}, and "
                f"its cut_bytes must be finite. It was given to cluster_layers; move the boundary."
            )
    if len(forced) > num_layers - 1:
        raise SlicingError(
            f"{len(forced)} forced cuts make at least {len(forced) + 1} layers, and {num_layers} were asked for. There must "
            f"be no more forced cuts than cuts. Both were given to cluster_layers; ask for more layers or drop boundaries."
        )
    marks = np.zeros(size + 1, dtype=np.int64)
    marks[forced] = forced
    return _Ops(
        prefix=np.concatenate([[0.0], np.cumsum(loads)]),
        cut_bytes=np.concatenate([[np.inf], crossing, [0.0]]),
        last_forced=np.concatenate([[0], np.maximum.accumulate(marks)[:-1]]),
        num_layers=int(num_layers),
    )


def _numbers(name: str, values: ArrayLike) -> NDArray[np.float64]:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or np.isnan(numbers).any() or (numbers < 0).any():
        raise SlicingError(
            f"{name} has the shape {numbers.shape} or holds a NaN or a negative number. It must be one row of numbers that "
            f"are 0 or more. It was given to cluster_layers; correct it there."
        )
    return numbers
