"""The table of stage costs for ``al.interop.slice_stages``: every run of layers x submesh x choice, filled as far as it matters.

In come prices (``stage_prices``), out come arrays. A price that was not solved yet stands as a bound that it cannot be below:

- a single layer: its matmuls at full efficiency on all devices of the submesh, and no fewer seconds times devices than on
  the smaller submeshes where it was solved (more devices exchange more; but not faster, as parts of a host may that is wired in
  pairs); what has no fewer matmuls than the most common layer takes no less time than that one and its further matmuls;
- a run: the sum of its layers, each free to choose alone; they work one after the other. Where no run is composed, its
  memory as if it took none; else what pairs of layers share is counted twice until they are solved;
- a plan at a higher rent: that at the lowest one; its memory as if it took none;
- a run that recomputes: as it is, and the matmuls that it repeats, once one such run has been asked for.

So a slicing of which every stage is solved is the best of the table, whatever the other entries will turn out to be
(``stage_search`` solves what the best slicing touches until that is so).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.interop import admissible_submeshes
from alpa_lite.planner.stage_prices import RENTS, Choice, Kind, RunPrice, RunPrices, Submesh

Array = NDArray[np.float64]
TIME, ONCE, HELD, WORKING, RESIDUAL = range(5)
MEMORY = [HELD, WORKING, RESIDUAL]
SUMMED = [TIME, ONCE, HELD, RESIDUAL]


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of the table: a kind of run on a submesh under a choice; positions of the latter two."""

    kind: Kind
    submesh: int
    choice: int


class StageTable:
    """Arrays (kind of run, submesh, choice); see the module text.

    Attributes:
        kinds: of the runs of layers, with their rows.
        runs: (first layer, last layer) -> row.
        submeshes: admissible shapes (hosts, devices per host), by size.
        choices: per submesh.
        cost_s, once_s, tolerated: as ``slice_stages`` takes them.
        transfer_s: (layers - 1, submeshes, submeshes).
        version: rises whenever entries are written.
        hopeful: whether a stage is taken to fit where it would with the least that any rent leaves of each kind of memory.
    """

    def __init__(
        self, prices: RunPrices, budget: float, in_flight: Sequence[int], boundary_bytes: Sequence[float]
    ) -> None:
        """
        Args:
            prices: of runs.
            budget: bytes per device.
            in_flight: microbatches in flight in a stage with 0, 1, 2, ... stages after it, rising.
            boundary_bytes: per boundary between layers, what crosses it for one microbatch, there and back.
        """
        self.prices, self.budget = prices, budget
        self.in_flight = np.asarray(in_flight)
        cluster = prices.cluster
        self.submeshes = admissible_submeshes(cluster.num_hosts, cluster.devices_per_host)
        self.choices = tuple(prices.choices(submesh) for submesh in self.submeshes)
        self.width = max(map(len, self.choices), default=1)
        count = prices.num_layers
        self.kinds: dict[Kind, int] = {}
        self.runs = np.zeros((count, count), dtype=np.int64)
        for i in range(count):
            for j in range(i, count):
                self.runs[i, j] = self.kinds.setdefault(prices.kind((i, j)), len(self.kinds))
        shape = (len(self.kinds), len(self.submeshes), self.width)
        self.cost_s, self.once_s = np.full(shape, np.inf), np.zeros(shape)
        self.tolerated = np.full(shape, -1, dtype=np.int64)
        self.transfer_s = _transfers(cluster, self.submeshes, boundary_bytes)
        self.known: dict[Kind, Array] = {}
        self.forbidden: dict[Cell, int] = {}
        self.repeats_known = False  # what recomputation repeats, which takes another cut of the step
        self.hopeful = False
        # Of single layers, and of pairs of equal ones what these cost more together.
        self.summands: dict[Kind, Array] = {}
        self.version = 0
        prices.prepare({(c,) for c in prices.runs.classes})
        self.refresh(self.kinds)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each submesh."""
        return tuple(hosts * devices for hosts, devices in self.submeshes)

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """What has to be solved next for the cells to be no bounds; empty when they are none.

        First the layer that occurs most often, on all logical meshes of the submesh: it decides most. Then the other layers, then
        longer runs, each for what is asked alone.
        """
        common = (Counter(self.prices.runs.classes).most_common(1)[0][0],)
        open_meshes: list[Cell] = []
        singles, longer = [], []
        for cell in cells:
            meshes = self.num_meshes(cell.submesh)
            kinds = [(c,) for c in dict.fromkeys(cell.kind)]
            if common in kinds:
                open_meshes += [Cell(common, cell.submesh, c) for c in {*range(meshes), cell.choice}]
            singles += [Cell(kind, cell.submesh, cell.choice) for kind in kinds]
            longer += [Cell(kind, cell.submesh, cell.choice) for kind in self.prices.parts_of(cell.kind)]
        for group in (open_meshes, singles, longer):
            if found := [cell for cell in dict.fromkeys(group) if not self._is_solved(cell)]:
                return found
        return []

    def num_meshes(self, submesh: int) -> int:
        """Logical meshes of a submesh: so many choices have one rent, and recompute alike."""
        return len(self.choices[submesh]) // self.num_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks of choices that differ in their logical meshes alone: rents, then rents of plans that recompute."""
        return len(RENTS) * (2 if self.prices.recomputes else 1)

    def solve(self, cells: Sequence[Cell]) -> bool:
        """Solve entries, and whatever of the table they are part of; returns whether entries became worse alone.

        Where the first ones are asked for that recompute, their bounds are raised and nothing is solved yet.
        """
        kinds: dict[bool, list[Kind]] = {False: [], True: []}
        for cell in cells:
            kinds[self._choice(cell).recomputed].append(cell.kind)
        if kinds[True] and not self.repeats_known:
            self.repeats_known = True
            self.prices.prepare({(c,) for c in self.prices.runs.classes}, recomputed=True)
            self.summands.clear()
            return self.refresh(self.kinds)
        for recomputed, wanted in kinds.items():
            self.prices.prepare(wanted, recomputed)
        for cell in cells:
            price = self.prices.price(cell.kind, self.submeshes[cell.submesh], self._choice(cell))
            rows = self.known.setdefault(cell.kind, np.full((len(self.submeshes), self.width, 5), np.nan))
            rows[cell.submesh, cell.choice] = _row(price)
        touched = {cell.kind for cell in cells}
        self.summands.clear()
        return self.refresh([k for k in self.kinds if touched & {k, *self.prices.parts_of(k), *((c,) for c in k)}])

    def _choice(self, cell: Cell) -> Choice:
        return self.choices[cell.submesh][cell.choice]

    def forbid(self, cell: Cell, later: int) -> None:
        """What was planned and did not fit with so many stages after it does not tolerate them, whatever its rent."""
        for choice in self._at_all_rents(cell.submesh, cell.choice):
            same = Cell(cell.kind, cell.submesh, choice)
            self.forbidden[same] = min(later - 1, self.forbidden.get(same, later))
        self.refresh([cell.kind])

    def _at_all_rents(self, submesh: int, choice: int) -> range:
        """The choices that differ from one in their rent alone: planned whole they are one."""
        meshes = self.num_meshes(submesh)
        of_one = meshes * len(RENTS)
        first = choice // of_one * of_one + choice % meshes
        return range(first, first + of_one, meshes)

    def hope(self) -> None:
        """Nothing fits by the few rents of the table; planned whole, a stage is fitted with many more."""
        self.hopeful = True
        self.refresh(self.kinds)

    def refresh(self, kinds: Iterable[Kind]) -> bool:
        """Write the entries of some kinds of runs anew; returns whether none became better."""
        self.version += 1
        worse = True
        for kind in kinds:
            values, row = self._values(kind), self.kinds[kind]
            tolerated = self._tolerated(values)
            for cell, most in self.forbidden.items():
                if cell.kind == kind:
                    tolerated[cell.submesh, cell.choice] = min(most, tolerated[cell.submesh, cell.choice])
            worse &= bool(
                (values[..., TIME] >= self.cost_s[row]).all()
                and (values[..., ONCE] >= self.once_s[row]).all()
                and (tolerated <= self.tolerated[row]).all()
            )
            self.cost_s[row] = values[..., TIME]
            self.once_s[row] = values[..., ONCE]
            self.tolerated[row] = tolerated
        return worse

    def _values(self, kind: Kind) -> Array:
        """(submesh, choice, number) of a run: solved, composed, or bounded."""
        counts = Counter(kind)
        bound = sum((count * self._single(c) for c, count in counts.items()), start=self._nothing())
        bound[..., WORKING] = np.max([self._single(c)[..., WORKING] for c in counts], axis=0)
        if not self.prices.composed(kind):
            if len(kind) == 1:
                return bound
            for m in range(len(self.choices)):  # a run may save at a rent what its layers, each alone, cannot
                for block, base in self._blocks(m):
                    bound[m, block, :2] = np.minimum(bound[m, block, :2], bound[m, base, :2])
            if self.prices.all_solved:
                bound[..., MEMORY] = 0.0  # layers that are planned together may be leaner than each alone
            return np.where(np.isnan(known := self._known(kind)), bound, known)
        # The sum of single layers, and for equal neighbours what they cost more together.
        for pair, count in Counter(pair for pair in pairwise(kind) if pair[0] == pair[1]).items():
            bound[..., SUMMED] += count * self._more(pair)
        bound = np.where(np.isnan(bound), np.inf, bound)
        bound[..., 1:] = np.maximum(bound[..., 1:], 0.0)
        return bound

    def _blocks(self, submesh: int) -> list[tuple[slice, slice]]:
        """Blocks of choices, each with the one that it cannot be cheaper than: the lowest rent, which keeps what it makes."""
        meshes = self.num_meshes(submesh)
        slices = [slice(n * meshes, (n + 1) * meshes) for n in range(self.num_blocks)]
        bases = [slices[0 if n == len(RENTS) else n - n % len(RENTS)] for n in range(self.num_blocks)]
        return list(zip(slices, bases, strict=True))[1:]

    def _known(self, kind: Kind) -> Array:
        found = self.known.get(kind)
        return np.full((len(self.submeshes), self.width, 5), np.nan) if found is None else found

    def _nothing(self) -> Array:
        """Zeros; inf where a submesh has no such choice."""
        found = np.zeros((len(self.submeshes), self.width, 5))
        for m, choices in enumerate(self.choices):
            found[m, len(choices) :] = np.inf
        return found

    def _single(self, layer_class: int) -> Array:
        if (layer_class,) not in self.summands:
            self.summands[layer_class,] = self._bounded(layer_class)
        return self.summands[layer_class,]

    def _more(self, pair: Kind) -> Array:
        """(submesh, choice, number that is summed) of two equal neighbours beyond each alone; 0 where it is not known."""
        if pair not in self.summands:
            together, alone = self._known(pair), 2 * self._single(pair[0])
            with np.errstate(invalid="ignore"):
                more = together[..., SUMMED] - alone[..., SUMMED]
                # Of two that are held by one, one works at a time.
                more[..., SUMMED.index(HELD)] += together[..., WORKING] - alone[..., WORKING] / 2
            for m in range(len(self.choices)):
                for block, base in self._blocks(m):
                    more[m, block, :2] = np.where(np.isnan(more[m, block, :2]), more[m, base, :2], more[m, block, :2])
            self.summands[pair] = np.where(np.isnan(more), 0.0, more)
        return self.summands[pair]

    def _bounded(self, layer_class: int) -> Array:
        """(submesh, choice, number) of a single layer."""
        whole_s = least_s = self.prices.least_time_s(layer_class)  # of all devices together
        again_s = self.prices.least_time_s(layer_class, True) - whole_s if self.repeats_known else 0.0
        known, bound = self._known((layer_class,)), self._nothing()
        for m, choices in enumerate(self.choices):
            meshes = self.num_meshes(m)
            times = known[m, :meshes, TIME]
            bound[m, : len(choices), TIME] = least_s / self.sizes[m]
            bounding = bounds_larger(self.prices.cluster, self.sizes[m])
            if bounding and not np.isnan(times).any() and np.isfinite(times).any():
                least_s = max(least_s, float(times.min()) * self.sizes[m])
            like_s = self._like_common(layer_class, whole_s, m)
            bound[m, :meshes, TIME] = np.fmax(bound[m, :meshes, TIME], like_s)
            bound[m, :meshes] = np.where(np.isnan(known[m, :meshes]), bound[m, :meshes], known[m, :meshes])
            for number, (block, base) in enumerate(self._blocks(m), start=1):
                bound[m, block, :2] = bound[m, base, :2]
                if number == len(RENTS):
                    bound[m, block, TIME] += max(0.0, again_s) / self.sizes[m]
                bound[m, block] = np.where(np.isnan(known[m, block]), bound[m, block], known[m, block])
        return bound

    def _like_common(self, layer_class: int, whole_s: float, submesh: int) -> Array:
        """Per logical mesh the least time of a layer by that of the most common one and what it has more, or less, of matmuls."""
        common = Counter(self.prices.runs.classes).most_common(1)[0][0]
        common_s = self.prices.least_time_s(common)
        times = self._known((common,))[submesh, : self.num_meshes(submesh), TIME]
        if layer_class == common or not common_s:
            return np.zeros(len(times))
        more_s = max(0.0, whole_s - common_s) / self.sizes[submesh]
        return np.where(np.isfinite(times), min(1.0, whole_s / common_s) * times + more_s, 0.0)

    def _is_solved(self, cell: Cell) -> bool:
        return not np.isnan(self._known(cell.kind)[cell.submesh, cell.choice, TIME])

    def _tolerated(self, values: Array) -> NDArray[np.int64]:
        with np.errstate(
            divide="ignore", invalid="ignore"
        ):  # the budget may be infinite, as is what an entry that is none takes
            if self.hopeful:
                values = self._leanest(values)
            left = self.budget - values[..., HELD] - values[..., WORKING]
            more = np.where(values[..., RESIDUAL] > 0, np.floor(left / values[..., RESIDUAL]), np.inf)
        most = np.where(left >= 0, 1 + more, 0)
        return np.searchsorted(self.in_flight, most, side="right") - 1

    def _leanest(self, values: Array) -> Array:
        """Each kind of memory as little as at any rent."""
        found = values.copy()
        for m, choices in enumerate(self.choices):
            for choice in range(len(choices)):
                found[m, choice, MEMORY] = values[m, self._at_all_rents(m, choice)][:, MEMORY].min(axis=0)
        return found


def bounds_larger(cluster: Cluster, num_devices: int) -> bool:
    """Whether devices of larger submeshes of a cluster exchange no faster than those of one with so many devices.

    Where devices are wired in pairs they may, as a part of a host has fewer links per device than the whole.
    """
    return num_devices == 1 or num_devices >= cluster.devices_per_host or not cluster.inside.wiring


def _row(price: RunPrice | None) -> Sequence[float]:
    if price is None:
        return (np.inf, 0.0, 0.0, 0.0, 0.0)
    return (price.time_s, price.once_s, price.held_bytes, price.working_bytes, price.residual_bytes)


def _transfers(cluster: Cluster, submeshes: Sequence[Submesh], boundary_bytes: Sequence[float]) -> Array:
    """Seconds from submesh to submesh over each boundary, there and back, as ``planner.pipeline`` counts them.

    Parts that fit into one host together are taken to lie in one.
    """
    count = len(submeshes)
    found = np.zeros((len(boundary_bytes), count, count))
    size_bytes = np.asarray(boundary_bytes, dtype=np.float64)
    for a, first in enumerate(submeshes):
        for b, second in enumerate(submeshes):
            apart = first[0] * first[1] + second[0] * second[1] > cluster.devices_per_host
            found[:, a, b] = round_trip_s(cluster, first, second, size_bytes, apart=apart)
    return found


def round_trip_s(cluster: Cluster, first: Submesh, second: Submesh, size_bytes: Array, *, apart: bool) -> Array:
    """Seconds to send one microbatch from submesh to submesh and back.

    Args:
        cluster, first, second: of two parts of the cluster, their shapes.
        size_bytes: there and back together.
        apart: whether the parts lie on several hosts.
    """
    lanes = min(first[0] * first[1], second[0] * second[1])
    link = cluster.between if apart else cluster.inside
    if apart and link.per_host:
        lanes = min(first[0], second[0])
    return 2 * (link.setup_s + link.latency_s) + size_bytes / (lanes * link.single_bytes_per_s)
