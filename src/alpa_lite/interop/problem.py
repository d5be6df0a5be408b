"""What stage slicing is asked: a checked table of stage costs, and the same table as a list of possible stages."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alpa_lite.errors import SlicingError
from alpa_lite.numeric import positive

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Two sums of seconds that differ by less than this share are a tie: the order of additions must not decide.
TIE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SliceProblem:
    """The arguments of ``slice_stages`` after their checks; axes of the tables are (run, submesh, choice)."""

    runs: Ints  # (first, last) -> run
    cost_s: Floats
    tolerated: Ints
    once_s: Floats
    transfer_s: Floats | None  # (layers - 1, submeshes, submeshes)
    submesh_sizes: tuple[int, ...]
    num_devices: int
    num_microbatches: int
    stage_counts: tuple[int, ...]  # the numbers of stages that are allowed, ascending
    layer_stage: tuple[tuple[int, int], ...]  # (layer, stage), ascending
    stage_submeshes: tuple[int | None, ...]  # empty, or one entry per stage

    @property
    def num_layers(self) -> int:
        return len(self.runs)

    def place(self, stage: tuple[int, int, int, int]) -> tuple[int, int, int]:
        """Where the tables say what (first layer, last layer, submesh, choice) costs."""
        first, last, submesh, choice = stage
        return int(self.runs[first, last]), submesh, choice

    @property
    def pinned(self) -> bool:
        return bool(self.layer_stage or self.stage_submeshes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """No stage or transfer above ``time_s``, no once-per-step cost above ``once_s``, no sum of times above ``sum_s``."""

    time_s: float = math.inf
    once_s: float = math.inf
    sum_s: float = math.inf


def raised(limit: float) -> float:
    """A limit that also lets through what differs from it by rounding only."""
    return limit * (1 + TIE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """Possible stages, one row each, sorted by (first, submesh, last), and what they cost: (entry, choice) -> number.

    Equal runs share an entry, so that what is asked of entries is asked once.
    """

    first: Ints
    last: Ints
    submesh: Ints
    size: Ints
    entry: Ints
    cost_s: Floats
    tolerated: Ints
    once_s: Floats

    def take(self, rows: Any) -> Cells:
        own = {name: getattr(self, name)[rows] for name in ("first", "last", "submesh", "size", "entry")}
        return replace(self, **own)


def cells_of(problem: SliceProblem) -> Cells:
    """The stages that can occur at all: finite, within the devices, with memory for the stages that must follow."""
    layers = problem.num_layers
    sizes = np.array(problem.submesh_sizes, dtype=np.int64)
    first, submesh, last = np.meshgrid(np.arange(layers), np.arange(len(sizes)), np.arange(layers), indexing="ij")
    first, submesh, last = (axis.ravel() for axis in (first, submesh, last))
    possible = (first <= last) & np.isin(sizes[submesh], _usable_sizes(problem))
    fewest, most = problem.stage_counts[0], problem.stage_counts[-1]
    possible &= (last - first <= layers - fewest) & (1 + (first > 0) + (last < layers - 1) <= most)
    for layer, stage in problem.layer_stage:
        for other, other_stage in problem.layer_stage:
            if stage == other_stage:  # all layers of a pinned stage lie in it, and no stage holds layers of two
                possible &= ((first <= layer) & (layer <= last)) == ((first <= other) & (other <= last))
            else:
                possible &= ~((first <= layer) & (layer <= last) & (first <= other) & (other <= last))
    first, submesh, last = first[possible], submesh[possible], last[possible]
    inner = last < layers - 1  # a stage that does not end the pipeline has at least one after it
    shape = (2, len(problem.cost_s), len(sizes))
    entries, entry = numbered(
        np.ravel_multi_index((inner, problem.runs[first, last], submesh), shape), math.prod(shape)
    )
    needed, run, of_entry = np.unravel_index(entries, shape)
    tolerated, once_s = problem.tolerated[run, of_entry], problem.once_s[run, of_entry]
    cost_s = np.where((tolerated >= needed[:, None]) & np.isfinite(once_s), problem.cost_s[run, of_entry], np.inf)
    cells = Cells(
        first=first,
        last=last,
        submesh=submesh,
        size=sizes[submesh],
        entry=entry,
        cost_s=cost_s,
        tolerated=tolerated,
        once_s=once_s,
    )
    return cells.take((cost_s.min(axis=1) < np.inf)[entry])


def numbered(values: Ints, end: int) -> tuple[Ints, Ints]:
    """The different values, ascending, and where each is among them; they are below ``end``, so that none is sorted."""
    occurs = np.zeros(end, dtype=bool)
    occurs[values] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[values]


def _usable_sizes(problem: SliceProblem) -> list[int]:
    """Sizes that are part of some list of submeshes with all devices, one for each of an allowed number of stages."""
    sizes = sorted({size for size in problem.submesh_sizes if size <= problem.num_devices})
    sums, found = 1, set[int]()  # bit n of ``sums``: so many submeshes can have n devices
    for count in range(1, problem.stage_counts[-1] + 1):
        if count >= problem.stage_counts[0]:
            found |= {size for size in sizes if sums >> (problem.num_devices - size) & 1}
        if len(found) == len(sizes):
            break
        sums = functools.reduce(operator.or_, (sums << size for size in sizes), 0)
        sums &= (1 << problem.num_devices + 1) - 1
    return sorted(found)


def stage_rows(problem: SliceProblem, cells: Cells, stage: int, num_stages: int) -> NDArray[np.bool_]:
    """Which cells may be the given stage (from 0) of so many, by the pins."""
    allowed = np.ones(len(cells.first), dtype=bool)
    for layer, pinned_stage in problem.layer_stage:
        inside = (cells.first <= layer) & (layer <= cells.last)
        allowed &= inside == (pinned_stage == stage)
    if problem.stage_submeshes and (wanted := problem.stage_submeshes[stage]) is not None:
        allowed &= cells.submesh == wanted
    return allowed


def check_problem(
    cost_s: ArrayLike,
    tolerated_later_stages: ArrayLike,
    submesh_sizes: Sequence[int],
    num_devices: int,
    num_microbatches: int,
    *,
    once_s: ArrayLike | None,
    transfer_s: ArrayLike | None,
    num_stages: int | None,
    layer_stage: Mapping[int, int] | None,
    stage_submeshes: Sequence[int | None] | None,
    runs: ArrayLike | None = None,
) -> SliceProblem:
    """Checks all arguments of ``slice_stages`` (``SlicingError``)."""
    cost = _table("cost_s", cost_s)
    layout = "layers, layers" if runs is None else "runs"
    if cost.ndim != 3 + (runs is None) or (runs is None and cost.shape[0] != cost.shape[1]) or 0 in cost.shape:
        where = "i, j" if runs is None else "runs[i, j]"
        raise SlicingError(
            f"cost_s has the shape {cost.shape}. It must be ({layout}, submeshes, choices), none of them 0. It was "
            f"given to slice_stages; put the seconds of layers i..j on submesh m with choice c at cost_s[{where}, m, c]."
        )
    numbers = _runs(runs, len(cost))
    layers = len(numbers)
    sizes = _sizes(submesh_sizes, cost.shape[-2], num_devices)
    _positive("num_microbatches", num_microbatches)
    once = np.zeros(cost.shape) if once_s is None else _table("once_s", once_s)
    _same_shape("once_s", once, cost.shape)
    transfer = None
    if transfer_s is not None:
        transfer = _table("transfer_s", transfer_s)
        _same_shape("transfer_s", transfer, (layers - 1, len(sizes), len(sizes)))
    submeshes = _stage_submeshes(stage_submeshes, sizes, num_devices, num_stages)
    counts = _stage_counts(len(submeshes) or num_stages, layers)
    by_run = (-1, *cost.shape[-2:])
    return SliceProblem(
        runs=numbers,
        cost_s=cost.reshape(by_run),
        tolerated=_tolerated(tolerated_later_stages, cost.shape).reshape(by_run),
        once_s=once.reshape(by_run),
        transfer_s=transfer,
        submesh_sizes=sizes,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        stage_counts=counts,
        layer_stage=_layer_stage(layer_stage or {}, layers, counts),
        stage_submeshes=submeshes,
    )


def _runs(runs: ArrayLike | None, count: int) -> Ints:
    """(first, last) -> run; without runs every pair of the ``count`` layers is one."""
    if runs is None:
        return np.arange(count * count).reshape(count, count)
    numbers = np.asarray(runs)
    if numbers.ndim != 2 or len(numbers) != numbers.shape[1] or not len(numbers) or numbers.dtype.kind not in "iu":
        raise SlicingError(
            f"runs has the shape {numbers.shape} and the type {numbers.dtype}. It must hold whole numbers and be (layers, "
            f"layers), not 0. It was given to slice_stages; put the number of the run of layers i..j at runs[i, j]."
        )
    used = numbers[np.triu_indices(len(numbers))]
    if used.min() < 0 or used.max() >= count:
        raise SlicingError(
            f"runs holds numbers from {used.min()} to {used.max()}. They must be from 0 to {count - 1}, as cost_s has {count} "
            f"runs. Both were given to slice_stages; number the runs by their rows in cost_s."
        )
    return numbers


def _positive(name: str, value: int) -> None:
    if positive(value) is None:
        raise SlicingError(
            f"{name} is {value!r}. It must be a whole number of at least 1. It was given to slice_stages; correct it there."
        )


def _table(name: str, values: ArrayLike) -> Floats:
    table = np.asarray(values, dtype=np.float64)
    bad = np.argwhere(np.isnan(table) | (table < 0))
    if len(bad):
        where = tuple(int(index) for index in bad[0])
        raise SlicingError(
            f"{name}{list(where)} is {table[where]}. Seconds must be 0 or more, and inf where it cannot be done. It is one "
            f"of {len(bad)} such entries of {name}, given to slice_stages; write inf instead of NaN."
        )
    return table


def _same_shape(name: str, table: NDArray[Any], shape: tuple[int, ...]) -> None:
    if table.shape != shape:
        raise SlicingError(
            f"{name} has the shape {table.shape}. It must be {shape}, as cost_s has it. It was given to slice_stages; "
            f"index it by the same layers, submeshes and choices."
        )


def _tolerated(values: ArrayLike, shape: tuple[int, ...]) -> Ints:
    tolerated = np.asarray(values)
    _same_shape("tolerated_later_stages", tolerated, shape)
    if np.isnan(tolerated).any() or (np.isfinite(tolerated) & (tolerated != np.floor(tolerated))).any():
        raise SlicingError(
            "tolerated_later_stages holds a NaN or a fraction. Its entries must be whole numbers: how many later stages "
            "the memory tolerates, negative for none at all. It was given to slice_stages; round it down."
        )
    return np.clip(tolerated, -1, 2**20).astype(np.int64)


def _sizes(submesh_sizes: Sequence[int], num_submeshes: int, num_devices: int) -> tuple[int, ...]:
    _positive("num_devices", num_devices)
    for size in submesh_sizes:
        _positive("a size in submesh_sizes", size)
    sizes = tuple(int(size) for size in submesh_sizes)
    if len(sizes) != num_submeshes:
        raise SlicingError(
            f"submesh_sizes has {len(sizes)} entries, {sizes}, and cost_s has {num_submeshes} submeshes. There must be one "
            f"size per submesh index. Both were given to slice_stages; give the sizes in the order of cost_s[:, :, m]."
        )
    sums = 1  # bit n: n devices can be added up
    for size in set(sizes):
        step = size
        while step <= num_devices:  # one more, two more, four more, ...
            sums |= sums << step
            step *= 2
    sums &= (1 << num_devices + 1) - 1
    if not sums >> num_devices:
        raise SlicingError(
            f"no submeshes of {sorted(set(sizes))} devices add up to {num_devices} devices. The stages use all devices. "
            f"Both were given to slice_stages; add a submesh size, or plan for {sums.bit_length() - 1} devices."
        )
    return sizes


def _stage_counts(num_stages: int | None, num_layers: int) -> tuple[int, ...]:
    if num_stages is None:
        return tuple(range(1, num_layers + 1))
    _positive("num_stages", num_stages)
    if num_stages > num_layers:
        raise SlicingError(
            f"{num_stages} stages were asked for {num_layers} layers. Each stage has at least one layer. The number was "
            f"given to slice_stages as num_stages or by stage_submeshes; ask for at most {num_layers}, or for more layers."
        )
    return (int(num_stages),)


def _stage_submeshes(
    wanted: Sequence[int | None] | None, sizes: tuple[int, ...], num_devices: int, num_stages: int | None
) -> tuple[int | None, ...]:
    submeshes = tuple(wanted or ())
    for stage, submesh in enumerate(submeshes):
        if submesh is not None and not 0 <= submesh < len(sizes):
            raise SlicingError(
                f"stage_submeshes puts stage {stage} on submesh {submesh}. A submesh is an index from 0 to {len(sizes) - 1} "
                f"into submesh_sizes {sizes}. It was given to slice_stages; give the index, not the number of devices."
            )
    if not submeshes:
        return ()
    if num_stages is not None and num_stages != len(submeshes):
        raise SlicingError(
            f"stage_submeshes has {len(submeshes)} entries and num_stages is {num_stages}. They must agree. Both were given "
            f"to slice_stages; leave num_stages out."
        )
    used = sum(sizes[submesh] for submesh in submeshes if submesh is not None)
    whole = None not in submeshes
    if used > num_devices or (whole and used < num_devices):
        raise SlicingError(
            f"the submeshes of stage_submeshes {submeshes} have {used} devices, the cluster has {num_devices}. The stages "
            f"use all devices once. They were given to slice_stages; sizes by index are {sizes}."
        )
    return submeshes


def _layer_stage(pins: Mapping[int, int], num_layers: int, counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    ordered = tuple(sorted((int(layer), int(stage)) for layer, stage in pins.items()))
    for layer, stage in ordered:
        if not (0 <= layer < num_layers and stage >= 0):
            raise SlicingError(
                f"layer_stage pins layer {layer} to stage {stage}. Layers are 0 to {num_layers - 1}, stages count from 0. "
                f"It was given to slice_stages; correct the pin."
            )
    # Ends of the pipeline are pins too: nothing before layer 0, and with a fixed count the last layer ends the last stage.
    chain = [(-1, -1, "the start"), *((layer, stage, f"layer {layer} (stage {stage})") for layer, stage in ordered)]
    if len(counts) == 1:
        chain.append((num_layers, counts[0], f"the end of {counts[0]} stages"))
    for (layer, stage, name), (later, later_stage, later_name) in pairwise(chain):
        ends = layer < 0 or later == num_layers
        if later_stage < stage + ends or later_stage - stage > later - layer:
            raise SlicingError(
                f"the stage pins of {name} and {later_name} clash. Layers run through the stages in order, one stage at a "
                f"time, and each stage has at least one layer. Both come from layer_stage of slice_stages; drop one of "
                f"them or move it to another stage."
            )
    return ordered
