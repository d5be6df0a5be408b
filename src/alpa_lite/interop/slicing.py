"""Stage slicing: layers to stages on submeshes, exactly, from a plain table of stage costs.

A pipeline of stages with times t_1..t_p, run over B microbatches by a synchronous schedule, takes (GPipe) or takes at most
(1F1B; equal stages reach it), when backward takes the same multiple of forward in all stages,

    objective = sum_k t_k + (B - 1) max_k t_k + max_k u_k

t_k is forward plus backward of one microbatch: one microbatch runs through all stages and the slowest stage works off the
others. A transfer between two stages, where given, is one more element of the pipeline: it joins the sum and the
maximum. u_k is what a stage does once per step (gradient synchronisation, update). Stages do it beside each other, each after
its own last backward. The first stage ends last, so its u is wholly exposed; later stages end earlier, so part of their u is
hidden. max_k u_k is exact when no u_k is above u_1, and otherwise an upper bound of what the simulator finds.

The minimum is taken over all numbers of stages, cuts, submeshes and choices with

- every layer in one stage, and the devices of the submeshes adding up to all devices,
- memory: a stage with s stages after it needs ``tolerated_later_stages >= s``,
- pins: layers to stages, stages to submeshes, a fixed number of stages.

``problem`` checks the arguments, ``search`` is the outer half (maxima), ``stage_dp`` the inner half (sum). The form follows
Alpa (OSDI 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike

from alpa_lite.errors import SlicingError
from alpa_lite.interop.problem import SliceProblem, cells_of, check_problem
from alpa_lite.interop.search import exists, search
from alpa_lite.interop.stage_dp import Slicing, Stage, transfers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSlicing:
    """The best slicing. Times are seconds; tuples go by stage, ``transfers_s`` by boundary (empty when none were given).

    Attributes:
        objective: seconds of one step, as in the module text.
        stages: (first layer, last layer, submesh index, choice) per stage, in order.
        num_devices: devices of each stage.
    """

    objective: float
    stages: tuple[Stage, ...]
    num_devices: tuple[int, ...]
    num_microbatches: int
    times_s: tuple[float, ...]
    once_s: tuple[float, ...]
    transfers_s: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def slowest_s(self) -> float:
        """Time of the slowest stage or transfer: what the pipeline delivers one microbatch per."""
        return max(*self.times_s, *self.transfers_s, 0.0)

    @property
    def bubble_share(self) -> float:
        """Share of all device time of the step in which devices wait: for other stages, or for slower ones."""
        busy_s = sum(
            devices * (self.num_microbatches * time_s + once_s)
            for devices, time_s, once_s in zip(self.num_devices, self.times_s, self.once_s, strict=True)
        )
        whole_s = sum(self.num_devices) * self.objective
        return 1.0 - busy_s / whole_s if whole_s else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.num_stages} stage{'s' * (self.num_stages > 1)} on {sum(self.num_devices)} devices, "
            f"{self.num_microbatches} microbatches: {self.objective:.6g} s per step, bubble {self.bubble_share:.1%}",
            f"{'stage':>5}  {'layers':>9}  {'devices':>7}  {'choice':>6}  {'time (s)':>10}  {'once (s)':>10}",
        ]
        for index, (first, last, _, choice) in enumerate(self.stages):
            slowest = "  slowest" if self.times_s[index] == self.slowest_s else ""
            lines.append(
                f"{index:>5}  {f'{first}-{last}':>9}  {self.num_devices[index]:>7}  {choice:>6}  "
                f"{self.times_s[index]:>10.4g}  {self.once_s[index]:>10.4g}{slowest}"
            )
            if index < len(self.transfers_s):
                slowest = "  slowest" if self.transfers_s[index] == self.slowest_s else ""
                lines.append(f"{'':>5}  {'transfer':>9}  {'':>7}  {'':>6}  {self.transfers_s[index]:>10.4g}{slowest}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCountTable:
    """The best slicing for each number of stages, None where there is none: why this number and not another."""

    slicings: tuple[tuple[int, StageSlicing | None], ...]

    @property
    def best(self) -> StageSlicing | None:
        """The best of all; fewer stages win ties."""
        given = [slicing for _, slicing in self.slicings if slicing is not None]
        return min(given, key=lambda slicing: slicing.objective, default=None)

    def __str__(self) -> str:
        lines = [f"{'stages':>6}  {'step (s)':>10}  {'over best':>9}  {'slowest (s)':>11}  {'bubble':>6}"]
        for missing, group in groupby(self.slicings, key=lambda row: row[1] is None):
            if missing:
                counts = [count for count, _ in group]
                named = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
                lines.append(f"{named:>6}  none fits the devices, the memory and the pins")
                continue
            lines += [self._line(count, slicing) for count, slicing in group if slicing is not None]
        return "\n".join(lines) + "\n"

    def _line(self, count: int, slicing: StageSlicing) -> str:
        best = self.best
        over = slicing.objective / best.objective - 1 if best and best.objective else 0.0
        chosen = "  chosen" if slicing is best else ""
        return (
            f"{count:>6}  {slicing.objective:>10.4g}  {over:>9.1%}  {slicing.slowest_s:>11.4g}  "
            f"{slicing.bubble_share:>6.1%}{chosen}"
        )


def slice_stages(
    cost_s: ArrayLike,
    tolerated_later_stages: ArrayLike,
    submesh_sizes: Sequence[int] = (1, 2, 4, 8),
    num_devices: int = 8,
    num_microbatches: int = 64,
    *,
    once_s: ArrayLike | None = None,
    transfer_s: ArrayLike | None = None,
    num_stages: int | None = None,
    layer_stage: Mapping[int, int] | None = None,
    stage_submeshes: Sequence[int | None] | None = None,
    runs: ArrayLike | None = None,
) -> StageSlicing:
    """The exact best split of layers into stages on submeshes; the formulation is the text of this module.

    Args:
        cost_s: seconds (layers, layers, submeshes, choices): ``cost_s[i, j, m, c]`` is forward and backward of one
            microbatch through layers i..j (inclusive) on submesh index m with choice c; inf = cannot. Entries with i > j
            are not read as stages.
        tolerated_later_stages: whole numbers, same shape: how many stages may follow that stage before its memory is full.
        submesh_sizes: devices of each submesh index.
        num_devices: devices of the cluster; the stages use all.
        num_microbatches: microbatches of a step.
        once_s: seconds, same shape as ``cost_s``: what the stage does once per step.
        transfer_s: seconds (layers - 1, submeshes, submeshes): ``transfer_s[j, m, n]`` moves one microbatch over the boundary
            after layer j, there and back, from submesh index m to n; inf = cannot.
        num_stages: the number of stages, when it is fixed; 1 is no pipeline.
        layer_stage: pins, layer to stage (from 0).
        stage_submeshes: submesh index per stage (None = free); fixes the number of stages.
        runs: whole numbers (layers, layers), where many runs of layers cost the same: ``runs[i, j]`` numbers layers i..j, and
            the tables are (runs, submeshes, choices) then: ``cost_s[runs[i, j], m, c]``.

    Returns:
        The best slicing. Ties go to the fewest stages, then to the lexicographically first stages; sums and maxima that
        differ by a share of 1e-12 or less count as equal, so that the order of additions does not decide.

    Raises:
        SlicingError: an argument is malformed, pins contradict each other, or no slicing exists.

    Example:
        >>> cost_s = np.full((2, 2, 2, 1), 1.0)
        >>> cost_s[0, 1, 1] = 1.5
        >>> slice_stages(cost_s, np.ones_like(cost_s), (1, 2), num_devices=2, num_microbatches=4).stages
        ((0, 0, 0, 0), (1, 1, 0, 0))
    """
    problem = check_problem(
        cost_s,
        tolerated_later_stages,
        submesh_sizes,
        num_devices,
        num_microbatches,
        once_s=once_s,
        transfer_s=transfer_s,
        num_stages=num_stages,
        layer_stage=layer_stage,
        stage_submeshes=stage_submeshes,
        runs=runs,
    )
    found = search(problem)
    if found is None:
        raise SlicingError(_why_none(problem))
    return _result(problem, found)


def compare_stage_counts(
    cost_s: ArrayLike,
    tolerated_later_stages: ArrayLike,
    submesh_sizes: Sequence[int] = (1, 2, 4, 8),
    num_devices: int = 8,
    num_microbatches: int = 64,
    *,
    counts: Iterable[int] | None = None,
    once_s: ArrayLike | None = None,
    transfer_s: ArrayLike | None = None,
    layer_stage: Mapping[int, int] | None = None,
) -> StageCountTable:
    """The best slicing for each number of stages in ``counts`` (default: 1 to layers), each exact; arguments as above.

    Raises:
        SlicingError: as ``slice_stages``; a number of stages for which nothing exists is no error but None.
    """
    tables = (cost_s, tolerated_later_stages, submesh_sizes, num_devices, num_microbatches)
    problem = check_problem(
        *tables,
        once_s=once_s,
        transfer_s=transfer_s,
        num_stages=None,
        layer_stage=layer_stage,
        stage_submeshes=None,
    )
    slicings: list[tuple[int, StageSlicing | None]] = []
    for count in sorted(set(problem.stage_counts if counts is None else counts)):
        try:
            slicing = slice_stages(
                *tables, once_s=once_s, transfer_s=transfer_s, num_stages=count, layer_stage=layer_stage
            )
        except SlicingError:  # the arguments are sound, so it is this number that does not fit
            slicing = None
        slicings.append((count, slicing))
    return StageCountTable(slicings=tuple(slicings))


def _why_none(problem: SliceProblem) -> str:
    """Names what has to be given up for a slicing to exist: the table itself, memory, or the pins."""
    cells = cells_of(replace(problem, layer_stage=(), stage_counts=tuple(range(1, problem.num_layers + 1))))
    for layer in range(problem.num_layers):
        if not ((cells.first <= layer) & (layer <= cells.last)).any():
            return (
                f"no stage can hold layer {layer}: every cost_s[i, j, m, c] with i <= {layer} <= j is inf, on a submesh of "
                f"more than {problem.num_devices} devices, or has too small a tolerated_later_stages. Each layer needs "
                f"a stage. The tables were given to slice_stages; allow rematerialisation, larger submeshes or a larger "
                f"memory budget."
            )
    free = replace(problem, layer_stage=(), stage_submeshes=(), stage_counts=tuple(range(1, problem.num_layers + 1)))
    asked = f"{_counts_text(problem)} on {problem.num_devices} devices"
    if exists(free):
        return (
            f"no slicing into {asked} keeps the pins. Without layer_stage {dict(problem.layer_stage)}, stage_submeshes "
            f"{problem.stage_submeshes} and a fixed num_stages one exists. They were given to slice_stages; drop one."
        )
    if exists(replace(free, tolerated=np.full_like(free.tolerated, problem.num_layers))):
        return (
            f"no slicing into {asked} fits the memory. A stage with s stages after it needs tolerated_later_stages >= s. "
            f"The table was given to slice_stages; without it slicings exist, so allow rematerialisation, use smaller "
            f"microbatches, or a larger memory budget."
        )
    return (
        f"no slicing into {asked} exists: stages with finite cost_s, on submeshes of {problem.submesh_sizes} devices, do "
        f"not cover all layers and use all devices at once. Both must hold. The table was given to slice_stages; price more "
        f"stages or add a submesh size."
    )


def _counts_text(problem: SliceProblem) -> str:
    counts = problem.stage_counts
    return f"{counts[0]} to {counts[-1]} stages" if len(counts) > 1 else f"{counts[0]} stage{'s' * (counts[0] > 1)}"


def _result(problem: SliceProblem, found: Slicing) -> StageSlicing:
    return StageSlicing(
        objective=found.sum_s + (problem.num_microbatches - 1) * found.largest_s + found.once_s,
        stages=found.stages,
        num_devices=tuple(problem.submesh_sizes[stage[2]] for stage in found.stages),
        num_microbatches=problem.num_microbatches,
        times_s=tuple(float(problem.cost_s[problem.place(stage)]) for stage in found.stages),
        once_s=tuple(float(problem.once_s[problem.place(stage)]) for stage in found.stages),
        transfers_s=tuple(transfers_of(problem, found.stages)),
    )
