"""Which cut of a step into stages is best: prices as far as they matter -> exact slicing -> candidates for exact planning.

The table starts as bounds (``stage_table``). The best slicing is found, what it touches and is not solved yet is solved, and so
on, until all of it is solved: then no cut is better by the formula of ``al.interop.slice_stages``. For other numbers of stages
the table then has a bound, which is the answer to "why one stage or sixteen" where it lies above the best. The formula is
what a schedule takes where it hides all transfers, so cuts are compared by an estimate that knows them (``stage_estimate``),
and the caller plans the best exactly and simulates them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from alpa_lite.errors import SlicingError
from alpa_lite.interop import StageSlicing, slice_stages
from alpa_lite.interop.stage_dp import Stage
from alpa_lite.planner.stage_cut import StageCut
from alpa_lite.planner.stage_estimate import estimate_s
from alpa_lite.planner.stage_moves import Place, moves
from alpa_lite.planner.stage_prices import RunPrices
from alpa_lite.planner.stage_table import Cell, StageTable, round_trip_s
from alpa_lite.schedule import peak_residuals

_MAX_TURNS = 400  # of solving what the best slicing touches
_MAX_TRIES = 8  # cuts near the best by the formula of which entries are solved
_WORTH = 1e-3  # share of the estimate that a cut near another must promise


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCut:
    """The best cut into so many stages.

    Attributes:
        cut: layers, submeshes and logical meshes.
        slicing: its times by the table.
        cells: per stage its entry.
        composed: stages of which the price was composed, not solved.
        estimate_s: seconds of a step by the table, with what the schedule waits for transfers.
        equal: whether it was searched on equal submeshes.
    """

    cut: StageCut
    slicing: StageSlicing
    cells: tuple[Cell, ...]
    composed: tuple[int, ...]
    estimate_s: float
    equal: bool = False

    @property
    def on_equal(self) -> bool:
        """Whether all stages have equal submeshes."""
        return len(set(self.cut.submeshes)) == 1


class StageSearch:
    """Searches one step's stages."""

    def __init__(
        self,
        prices: RunPrices,
        budget: float,
        boundary_bytes: Sequence[float],
        layer_stage: Mapping[int, int] | None = None,
    ) -> None:
        """``budget`` is in bytes per device; ``boundary_bytes`` as in ``StageTable``; ``layer_stage`` are pins."""
        self.prices, self.budget, self.layer_stage = prices, budget, layer_stage
        count = prices.num_microbatches
        assert isinstance(prices.options.schedule, str)
        flying = in_flight_of(prices.options.schedule, prices.num_layers, count)
        self.table = StageTable(prices, budget, flying, boundary_bytes)
        self.boundary_bytes = np.asarray(boundary_bytes, dtype=np.float64)
        self._known: dict[tuple[int | None, int | None], StageSlicing | None] = {}  # of this version of the table
        self._version = self.table.version

    def best_on_equal(self, num_stages: int) -> FoundCut | None:
        """The best cut into stages on equal submeshes; None where devices or memory allow none.

        The formula sees no difference between submeshes that differ in how often they lie on one host.
        """
        size, rest = divmod(self.prices.cluster.num_devices, num_stages)
        if rest or size not in self.table.sizes:
            return None
        found = self.best(num_stages, self.table.sizes.index(size))
        return None if found is None else replace(found, equal=True)

    def best(self, num_stages: int | None = None, submesh: int | None = None) -> FoundCut | None:
        """The best cut by the formula; None where memory or devices allow none.

        Args:
            num_stages: into so many; None into any number.
            submesh: which all stages have, as a position in the table; None for any.
        """
        slicing = self._slice(num_stages, submesh)
        for _ in range(_MAX_TURNS):
            if slicing is None:
                return None
            cells = [self._cell(stage) for stage in slicing.stages]
            missing = self.table.missing(cells)
            if not missing:
                return self._found(slicing, cells)
            before = self._entries(slicing)
            worse = self.table.solve(missing)
            if worse and self._entries(slicing) == before:  # it is still the best
                self._remember(num_stages, submesh, slicing)
            else:
                slicing = self._slice(num_stages, submesh)
        raise AssertionError("the search of stages does not end")

    def _entries(self, slicing: StageSlicing) -> list[tuple[float, float, bool]]:
        """What the table says of the stages of a slicing."""
        table, later = self.table, len(slicing.stages) - 1
        found = []
        for number, (first, last, submesh, choice) in enumerate(slicing.stages):
            entry = table.runs[first, last], submesh, choice
            tolerated = bool(table.tolerated[entry] >= later - number)
            found.append((float(table.cost_s[entry]), float(table.once_s[entry]), tolerated))
        return found

    def near(self, found: FoundCut) -> FoundCut:
        """A cut that is better by the estimate, found by moves from one that is the best by the formula; else that one."""
        tries = _MAX_TRIES
        while True:
            promising = []
            for places in moves([stage[:3] for stage in found.slicing.stages]):
                if (near := self._at(places)) is not None and near.estimate_s < (1 - _WORTH) * found.estimate_s:
                    promising.append((near.estimate_s, places))
            better = None
            for _, places in sorted(promising)[:tries]:
                tries -= 1
                if (better := self._below((1 - _WORTH) * found.estimate_s, places)) is not None:
                    break
            if better is None:
                return found
            found = better

    def _below(self, limit_s: float, places: Sequence[Place]) -> FoundCut | None:
        """The cut with its entries solved, if it then still is estimated to be below a limit."""
        near = self._at(places)
        while near is not None and near.estimate_s < limit_s:
            if not (missing := self.table.missing(near.cells)):
                return near
            self.table.solve(missing)
            near = self._at(places)
        return None

    def _at(self, places: Sequence[Place]) -> FoundCut | None:
        """The cut with the fastest choice of each stage that has room, by the table as it is; None where there is none."""
        table, pins, stages = self.table, self.layer_stage or {}, []
        for number, (first, last, submesh) in enumerate(places):
            if any(pins.get(layer, number) != number for layer in range(first, last + 1)):
                return None
            row = table.runs[first, last]
            has_room = table.tolerated[row, submesh] >= len(places) - 1 - number
            times_s = np.where(has_room, table.cost_s[row, submesh], np.inf)
            choice = int(times_s.argmin())
            if not np.isfinite(times_s[choice]):
                return None
            stages.append((first, last, submesh, choice))
        slicing = self._sliced_so(stages)
        return self._found(slicing, [self._cell(stage) for stage in stages])

    def _sliced_so(self, stages: Sequence[Stage]) -> StageSlicing:
        """Given stages by the formula."""
        table, count = self.table, self.prices.num_microbatches
        entries = [(table.runs[first, last], submesh, choice) for first, last, submesh, choice in stages]
        times_s = tuple(float(table.cost_s[entry]) for entry in entries)
        once_s = tuple(float(table.once_s[entry]) for entry in entries)
        transfers_s = tuple(float(table.transfer_s[a[1], a[2], b[2]]) for a, b in pairwise(stages))
        return StageSlicing(
            objective=math.fsum((*times_s, *transfers_s))
            + (count - 1) * max(*times_s, *transfers_s, 0.0)
            + max(once_s),
            stages=tuple(stages),
            num_devices=tuple(table.sizes[stage[2]] for stage in stages),
            num_microbatches=count,
            times_s=times_s,
            once_s=once_s,
            transfers_s=transfers_s,
        )

    def _cell(self, stage: Stage) -> Cell:
        first, last, submesh, choice = stage
        return Cell(self.prices.kind((first, last)), submesh, choice)

    def bound_s(self, num_stages: int) -> float:
        """What no cut into so many stages is below, by what is solved so far; inf where there is none."""
        slicing = self._slice(num_stages)
        return math.inf if slicing is None else slicing.objective

    def forbid(self, found: FoundCut, stage: int | None = None) -> None:
        """A cut that was planned exactly and has no plan: the stage that did not fit stands so no more; if unknown, none does."""
        for number, cell in enumerate(found.cells):
            if stage is None or stage == number:
                self.table.forbid(cell, len(found.cells) - 1 - number)

    def hope(self) -> None:
        """From now on a stage fits if it would with the least memory of each kind that a rent leaves (``StageTable.hope``)."""
        self.table.hope()

    def _slice(self, num_stages: int | None, submesh: int | None = None) -> StageSlicing | None:
        if self._version != self.table.version or (num_stages, submesh) not in self._known:
            self._remember(num_stages, submesh, self._sliced(num_stages, submesh))
        return self._known[num_stages, submesh]

    def _remember(self, num_stages: int | None, submesh: int | None, slicing: StageSlicing | None) -> None:
        """The best slicing of the table as it is."""
        if self._version != self.table.version:
            self._known.clear()
            self._version = self.table.version
        self._known[num_stages, submesh] = slicing
        if slicing is not None:  # the best of all is also the best of its number
            self._known[len(slicing.stages), submesh] = slicing

    def _sliced(self, num_stages: int | None, submesh: int | None) -> StageSlicing | None:
        table, cost_s = self.table, self.table.cost_s
        if submesh is not None:
            cost_s = np.full_like(table.cost_s, np.inf)
            cost_s[:, submesh] = table.cost_s[:, submesh]
        try:
            return slice_stages(
                cost_s,
                table.tolerated,
                table.sizes,
                self.prices.cluster.num_devices,
                self.prices.num_microbatches,
                once_s=table.once_s,
                transfer_s=table.transfer_s,
                num_stages=num_stages,
                layer_stage=self.layer_stage,
                runs=table.runs,
            )
        except SlicingError:
            return None

    def _found(self, slicing: StageSlicing, cells: Sequence[Cell]) -> FoundCut:
        stages = slicing.stages
        choices = [self.table.choices[m][c] for _, _, m, c in stages]
        cut = StageCut(
            stage_of_layer=tuple(s for s, (first, last, _, _) in enumerate(stages) for _ in range(first, last + 1)),
            submeshes=tuple(self.table.submeshes[m] for _, _, m, _ in stages),
            mesh_shapes=tuple(choice.mesh.shape for choice in choices),
            recomputed=frozenset(n for n, choice in enumerate(choices) if choice.recomputed),
        )
        composed = tuple(n for n, cell in enumerate(cells) if self.prices.composed(cell.kind))
        estimate = self._estimate_s(cut, slicing)
        return FoundCut(cut=cut, slicing=slicing, cells=tuple(cells), composed=composed, estimate_s=estimate)

    def _estimate_s(self, cut: StageCut, slicing: StageSlicing) -> float:
        cluster, count = self.prices.cluster, self.prices.num_microbatches
        placed = [(place.first_host, place.shape) for place in cut.placed(cluster)]
        trips = []
        for stage, ((host, shape), (next_host, next_shape)) in zip(slicing.stages, pairwise(placed), strict=False):
            apart = host != next_host or max(shape[0], next_shape[0]) > 1
            size_bytes = self.boundary_bytes[stage[1]]
            trips.append(float(round_trip_s(cluster, shape, next_shape, size_bytes, apart=apart)))
        flying = self.table.in_flight[: cut.num_stages][::-1].tolist()
        return estimate_s(slicing.times_s, trips, slicing.once_s, flying, count)


def in_flight_of(schedule: str, num_stages: int, num_microbatches: int) -> list[int]:
    """Microbatches in flight in a stage with 0, 1, 2, ... stages after it, the first of its pipeline."""
    found = [peak_residuals(schedule, later + 1, num_microbatches, 0) for later in range(num_stages)]
    assert all(a <= b for a, b in pairwise(found))
    return found


def counts_to_compare(num_layers: int, num_devices: int, best: int) -> list[int]:
    """Numbers of stages for the table of a plan: powers of two, and the best with its neighbours."""
    most = min(num_layers, num_devices)
    powers = [1 << k for k in range(most.bit_length())]
    return sorted({n for n in (*powers, best - 1, best, best + 1) if 1 <= n <= most})
