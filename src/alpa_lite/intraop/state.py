"""The state of a search on one core: the best choice so far, and what is proven."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from alpa_lite.intraop.core import Core, finite
from alpa_lite.intraop.frontier import Frontier
from alpa_lite.intraop.known_shape import KnownShape
from alpa_lite.intraop.prices import Prices
from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.repair import Neighbours, improve, neighbours
from alpa_lite.plan.records import SearchStep

LARGE_GAP = 1.5e-3  # good enough where a proof is out of reach
_MILP_PAIRS = 600_000  # edge entries up to which the MILP is asked for a proof; HiGHS takes about 2 KB for each


@dataclass(slots=True)
class Search:
    """The state of one search on one core."""

    core: Core
    deadline: float
    unary: list[Array]
    costs: tuple[Array, ...]
    picks: list[int] | None = None
    upper: float = math.inf
    bound: float = -math.inf
    proven_infeasible: bool = False
    tied: bool = False
    rows: int = 0
    cutoff: float = math.inf
    large_gap: float = LARGE_GAP
    wish: list[int] | None = None  # a cheap choice that knows no limit
    prices: Prices | None = None
    rent: float = 0.0  # to be taken off the bound while the messages know the prices
    found: list[SearchStep] = field(default_factory=list)
    unit: float = 1.0
    frontier: Frontier | None = None  # made when it is first searched
    searched_gap: float = math.inf  # when that was done last
    rest_gap: float = math.inf  # when it was looked at last what the gap leaves
    rest_pairs: float = math.inf  # entries of the edges in that when it was eliminated last, without success
    around: Neighbours | None = None  # of the core, found when they are first needed
    shape: KnownShape = field(default_factory=KnownShape)

    @classmethod
    def of(cls, core: Core, deadline: float, cutoff: float, unit: float = 1.0) -> Search:
        unary, costs = finite(core)
        return cls(core, deadline, unary, costs, cutoff=cutoff, unit=unit)

    @property
    def gap(self) -> float:
        return (self.upper - self.bound) / max(abs(self.upper), 1e-300) if self.picks is not None else math.inf

    def tolerance(self, rel_gap: float) -> float:
        """The relative gap that counts as closed."""
        return tolerance_of(self.core, self.upper, rel_gap, self.unit) if self.picks is not None else rel_gap

    @property
    def too_dear(self) -> bool:
        """Whether there is an answer and no better one can be cheap enough to matter."""
        return self.picks is not None and self.bound > self.cutoff

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline

    def offer(self, picks: list[int], *, tied: bool = False) -> None:
        """Take a choice if it is allowed, fits and is cheaper."""
        cost = self.core.cost(picks)
        if cost < self.upper and self.core.fits(picks):
            self.picks, self.upper, self.tied = list(picks), cost, tied
            self.found.append(SearchStep(objective=cost, lower_bound=self.bound, found_by="search"))

    def try_from(self, start: list[int], *, tied: bool = False) -> None:
        self.offer(self.improved(start), tied=tied)

    def improved(self, start: list[int]) -> list[int]:
        """What changes of single nodes make of a choice, memory aside."""
        if self.around is None:
            self.around = neighbours(self.core)
        return improve(self.core, self.unary, self.costs, start, self.around)


def is_small(core: Core) -> bool:
    """Whether a MILP of the core can be solved."""
    return core.num_pairs <= _MILP_PAIRS


def tolerance_of(core: Core, objective: float, rel_gap: float, unit: float) -> float:
    """The relative gap at which an objective counts as optimal: whole costs leave less than one unit."""
    return min(rel_gap, 0.5 * unit / max(abs(objective), unit)) if core.whole else rel_gap
