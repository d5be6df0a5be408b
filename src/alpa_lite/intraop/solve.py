"""Solves an intra-op problem: presolve, bounds and incumbents by message passing, proof by MILP.

The answer is scored on the problem as given.

1. Presolve without memory (``presolve.py``); what is left is the *core*.
2. Repeated layers tied (``tie.py``) give an incumbent that costs the same whatever the depth.
3. Message passing on the untied core (``messages.py``) gives the lower bound and further incumbents.
   Cores so narrow that elimination is quick are solved exactly at once (``narrow.py``), instead of 2 to 4.
4. On cores of moderate size the gap excludes states and pairs, and HiGHS closes it (``milp.py``).
5. If the optimum without memory fits the limit, it is the optimum. Else 1-4 again with memory: rows are added lazily in
   the MILP; prices on the fullest times (a Lagrangian, ``prices.py``) give bounds, and choices that fit (``fit.py``).

Work is counted in sweeps, not in seconds, so that equal problems give equal answers; the time limit only cuts it short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.intraop.core import Core, extract_core, finite, restrict
from alpa_lite.intraop.cpsat import solve_whole
from alpa_lite.intraop.graph import CostGraph, InfeasibleError
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.milp import Encoding
from alpa_lite.intraop.narrow import solve_narrow
from alpa_lite.intraop.presolve import presolve
from alpa_lite.intraop.prices import Prices, price_memory
from alpa_lite.intraop.problem import (
    Array,
    IntraOpProblem,
    Solution,
    as_float,
    evaluate,
    greedy_choice,
)
from alpa_lite.intraop.repair import improve
from alpa_lite.intraop.tie import Tie, tie, tied_core
from alpa_lite.plan.records import SearchStep

_ROWS_PER_ROUND = 15
_MILP_PAIRS = 600_000  # edge entries up to which the MILP is asked for a proof; HiGHS takes about 2 KB for each
_EXCLUDE_PAIRS = 4_000_000  # edge entries up to which exclusion may bring a core down to that
_LARGE_GAP = 2e-3  # good enough where a proof is out of reach
_TIED_FROM = 200  # core nodes from which on copies are treated alike
_TIED_GAP = 5e-4  # for the tied problem, which only gives an incumbent
_CLOSE_GAP = 1e-2  # so close, a proof is tried only if it is quick
_GUESSED_GAPS = (2e-3, 8e-3)  # tried in turn, see _guess
_TIED_NODES = 50  # of its branch and bound
_PRICE_STEPS = 60
_UNTIED_PRICE_STEPS = 10  # after those on the tied problem
_QUICK_ENTRIES = 1_000_000  # of the tables of an elimination that takes less time than any sweep
_RESET_SWEEPS = 20  # after memory prices, back to costs without them
_GREEDY_NODES = 20_000  # up to which the trace starts with the greedy choice
_PROOF_PAIRS = 100_000  # edge entries up to which a gap below _LARGE_GAP is worth a proof


@dataclass(slots=True)
class _Search:
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
    wish: list[int] | None = None  # a cheap choice that knows no limit
    prices: Prices | None = None
    rent: float = 0.0  # to be taken off the bound while the messages know the prices
    found: list[SearchStep] = field(default_factory=list)
    unit: float = 1.0

    @classmethod
    def of(cls, core: Core, deadline: float, cutoff: float, unit: float = 1.0) -> _Search:
        unary, costs = finite(core)
        return cls(core, deadline, unary, costs, cutoff=cutoff, unit=unit)

    @property
    def gap(self) -> float:
        return (self.upper - self.bound) / max(abs(self.upper), 1e-300) if self.picks is not None else math.inf

    def tolerance(self, rel_gap: float) -> float:
        """The relative gap that counts as closed."""
        return _tolerance(self.core, self.upper, rel_gap, self.unit) if self.picks is not None else rel_gap

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
        self.offer(improve(self.core, self.unary, self.costs, start), tied=tied)


def _tolerance(core: Core, objective: float, rel_gap: float, unit: float) -> float:
    """The relative gap at which an objective counts as optimal: whole costs leave less than one unit."""
    return min(rel_gap, 0.5 * unit / max(abs(objective), unit)) if core.whole else rel_gap


def solve(
    problem: IntraOpProblem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    incumbent: Array | None = None,
    rel_gap: float = 1e-6,
    cutoff: float = math.inf,
    unit: float = 1.0,
) -> Solution:
    """Finds the cheapest choice within the memory limit.

    Args:
        problem: what is to be solved.
        time_limit_s: the best answer found by then is returned.
        seed: of the MILP solver.
        progress: called with a line of text now and then.
        incumbent: a choice to start from.
        rel_gap: gap at which an answer counts as optimal.
        cutoff: on large problems the search ends once no answer below this is possible (another mesh is better).
        unit: where all costs are whole, how much of a difference matters.

    Returns:
        The answer with its bound; ``status`` is "optimal", "feasible", "infeasible" or "no-solution".
    """
    start = time.monotonic()
    search, choice, floor = None, None, -math.inf
    for memory in (False, True):
        graph = CostGraph(problem, memory=memory)
        try:
            presolve(graph)
        except InfeasibleError as error:
            names = tuple(problem.name(i) for i in error.path)
            return _no_answer("infeasible", f"no strategy of {names[0]} fits its neighbours", start, conflict=names)
        core = extract_core(graph)
        if progress is not None:
            progress(f"core of {core.num_nodes} nodes, {len(core.costs)} edges")
        search = _Search.of(core, start + time_limit_s, cutoff if core.num_pairs > _MILP_PAIRS else math.inf, unit)
        _search(search, problem, seed, rel_gap)
        floor = max(floor, search.bound)
        if search.proven_infeasible:
            message = "the memory limit cannot be kept" if memory else "every choice contains a forbidden combination"
            return _no_answer("infeasible", message, start)
        choice = None if search.picks is None else graph.lift(dict(zip(core.nodes, search.picks, strict=True)))
        if choice is None or _fits(problem, evaluate(problem, choice).peak_bytes):
            break
        if progress is not None:
            progress("the cheapest choice does not fit the memory limit")
    assert search is not None
    return _answer(problem, search, choice, incumbent, floor, start, rel_gap)


def _answer(
    problem: IntraOpProblem,
    search: _Search,
    choice: Array | None,
    incumbent: Array | None,
    floor: float,
    start: float,
    rel_gap: float,
) -> Solution:
    """The cheaper of what was found and what was given, scored on the problem."""
    found = [c for c in (choice, incumbent) if c is not None]
    scored = [(evaluate(problem, c), np.asarray(c, dtype=np.int64)) for c in found]
    scored = [pair for pair in scored if math.isfinite(pair[0].objective) and _fits(problem, pair[0].peak_bytes)]
    if not scored:
        return _no_answer("no-solution", "no choice was found in the time allowed", start, bound=floor)
    score, best = min(scored, key=lambda pair: pair[0].objective)  # of equals the first, which was found here
    bound = min(floor, score.objective)
    gap = max(0.0, (score.objective - bound) / max(abs(score.objective), 1e-300))
    optimal = gap <= _tolerance(search.core, score.objective, rel_gap, search.unit)
    if optimal and search.core.whole:
        bound, gap = score.objective, 0.0  # less than a unit is left, and that is rounding
    return Solution(
        choice=best,
        objective=score.objective,
        lower_bound=bound,
        gap=gap,
        status="optimal" if optimal else "feasible",
        limit_used=_limit_used(search, optimal),
        time_s=time.monotonic() - start,
        peak_bytes=score.peak_bytes,
        peak_time=score.peak_time,
        rows_used=search.rows,
        tied=search.tied and choice is not None and best is scored[0][1],
        core_size=(search.core.num_nodes, len(search.core.costs)),
        trace=_trace(problem, search.found, score.objective, bound, optimal),
    )


def _trace(
    problem: IntraOpProblem, found: list[SearchStep], objective: float, bound: float, optimal: bool
) -> tuple[SearchStep, ...]:
    """The greedy choice, what the search found on its way, and how it ended."""
    steps: list[SearchStep] = []
    if problem.num_nodes <= _GREEDY_NODES:
        score = evaluate(problem, greedy_choice(problem))
        if _fits(problem, score.peak_bytes):
            steps.append(SearchStep(objective=score.objective, lower_bound=-math.inf, found_by="greedy"))
    for step in found:
        if math.isfinite(step.objective) and (not steps or step.objective < steps[-1].objective):
            steps.append(replace(step, lower_bound=min(step.lower_bound, step.objective)))
    end = objective + 1e-9 * abs(objective)  # the core's own sum may differ in the last digits
    steps = [s for s in steps if end < s.objective < math.inf]
    return (*steps, SearchStep(objective=objective, lower_bound=bound, found_by="proof" if optimal else "search"))


def _limit_used(search: _Search, optimal: bool) -> str:
    if optimal:
        return "none"
    return "time" if search.out_of_time else "cutoff" if search.too_dear else "gap"


def _fits(problem: IntraOpProblem, peak_bytes: int) -> bool:
    return problem.usage_limit is None or peak_bytes <= problem.usage_limit


def _no_answer(
    status: str, message: str, start: float, *, conflict: tuple[str, ...] = (), bound: float = math.inf
) -> Solution:
    return Solution(
        choice=np.zeros(0, dtype=np.int64),
        objective=math.inf,
        lower_bound=bound,
        gap=math.inf,
        status=status,
        message=message,
        conflict=conflict,
        limit_used="none" if status == "infeasible" else "time",
        time_s=time.monotonic() - start,
    )


def _search(search: _Search, problem: IntraOpProblem, seed: int, rel_gap: float) -> None:
    core = search.core
    if not core.num_nodes:
        search.bound = core.constant
        if core.fits([]):
            search.picks, search.upper = [], core.constant
        else:
            search.proven_infeasible = True
        return
    if core.memory is None and _prove_narrow(search, core, [np.arange(len(c)) for c in core.unary], _QUICK_ENTRIES):
        return
    tied = tie(core, problem.classes if core.num_nodes > _TIED_FROM else None)
    messages = Messages.zero(core, search.unary, search.costs, tied)
    if not tied.is_trivial:
        inner = _start_tied(search, tied, seed)
        if search.prices is not None:
            messages.start_from(inner)
    small = core.num_pairs <= _MILP_PAIRS
    if search.prices is None:  # else the messages know the prices already
        _sweep(search, messages, rel_gap, small)
    wanted = search.tolerance(rel_gap if small else _LARGE_GAP)
    if core.memory is not None and search.gap > wanted and not search.too_dear:
        _price_memory(search, messages, _PRICE_STEPS if tied.is_trivial else _UNTIED_PRICE_STEPS)
    if search.gap > search.tolerance(rel_gap) and (small or search.picks is None):
        _prove(search, messages, seed, rel_gap)


def _start_tied(search: _Search, tied: Tie, seed: int) -> Messages:
    """An incumbent from the tied problem, memory prices to start from, and its messages."""
    inner = _Search.of(tied_core(search.core, tied), search.deadline, search.cutoff, search.unit)
    messages = Messages.zero(inner.core, inner.unary, inner.costs, tie(inner.core, None))
    _sweep(inner, messages, _TIED_GAP, small=True)
    if inner.core.memory is not None and not inner.too_dear:
        # No proof here: with memory the copies of the best choice differ, and the untied steps that follow find it.
        _price_memory(inner, messages, _PRICE_STEPS)
        search.prices = inner.prices
    elif inner.gap > _TIED_GAP and not inner.too_dear and not _guess(inner, messages, seed):
        _prove(inner, messages, seed, _TIED_GAP, node_limit=_TIED_NODES)
    start = messages.pick() if inner.picks is None else inner.picks
    spread = [start[g] for g in tied.group]
    search.offer(spread, tied=True)
    search.try_from(spread, tied=True)  # which no longer knows the memory limit
    if inner.wish is not None:
        search.wish = improve(search.core, search.unary, search.costs, [inner.wish[g] for g in tied.group])
    return messages


def _price_memory(search: _Search, messages: Messages, num_steps: int) -> None:
    """Prices on the fullest times, a bound that holds within the limit, and choices that fit."""

    if search.wish is None:
        search.wish = improve(search.core, search.unary, search.costs, messages.pick())

    def offer(picks: list[int] | None) -> float:
        if picks is not None:
            search.offer(picks)
        return search.upper

    bound, prices = price_memory(
        search.core,
        search.unary,
        search.costs,
        messages,
        start={} if search.prices is None else search.prices.value,
        num_steps=num_steps,
        wish=search.wish,
        offer=offer,
        deadline=search.deadline,
    )
    search.bound, search.prices, search.rent = max(search.bound, bound), prices, prices.rent


def _sweep(search: _Search, messages: Messages, rel_gap: float, small: bool) -> None:
    """Sweeps until the gap is closed or further sweeps do not pay."""
    most, wanted, every = (160, rel_gap, 5) if small else (40, _LARGE_GAP, 4)
    before = -math.inf
    for count in range(1, most + 1):
        messages.forward()
        value = messages.backward() + search.core.constant
        search.bound = max(search.bound, value)
        if count % every and not search.out_of_time:
            continue
        if count >= 3 * every or search.out_of_time or search.picks is None:
            search.try_from(messages.pick())
        if search.gap <= search.tolerance(wanted) or search.out_of_time or search.too_dear:
            return
        if small and count > 40 and value - before < 0.01 * (search.upper - value):
            return
        before = value


def _prove(search: _Search, messages: Messages, seed: int, rel_gap: float, *, node_limit: int | None = None) -> None:
    """Exclude what no better choice contains, then let the MILP decide on the rest, with memory rows as needed.

    A second round follows a first one without incumbent: its answer excludes more and makes the numbers smaller.
    """
    if search.core.num_pairs > _EXCLUDE_PAIRS:
        return
    times = [] if search.prices is None else [t for t, price in search.prices.value.items() if price > 0]
    while True:
        had_picks = search.picks is not None
        reduced = _reduced(search, messages)
        if reduced is None:
            return
        core, whole, kept = reduced
        if core.memory is None and _prove_narrow(search, core, kept):
            return
        encoding = Encoding(core, upper=search.upper)
        if times:
            encoding.add_rows(times)
        _solve_rows(search, core, kept, encoding, seed, rel_gap, node_limit)
        times = encoding.times
        if node_limit is not None:
            return
        if had_picks or search.picks is None or search.gap <= search.tolerance(rel_gap) or search.out_of_time:
            break
    if search.core.whole and search.picks is not None and search.gap > search.tolerance(rel_gap):
        _prove_whole(search, whole, kept, times, seed)


def _reduced(search: _Search, messages: Messages) -> tuple[Core, Core, list[Array]] | None:
    """(shifted core, core, kept states) without what the gap excludes; None if nothing cheaper or too much is left."""
    gone, pairs = None, {}
    if math.isfinite(search.upper):
        # Exclusion sees the memory prices; the MILP has the rows themselves.
        slack = search.upper - (messages.exact_bound() + search.core.constant - search.rent)
        gone, pairs = messages.excluded(search.core, max(slack, 0.0) * (1 + 1e-9) + 1e-12 * abs(search.upper))
        if any(mask.all() for mask in gone):
            search.bound = search.upper
            return None
    if search.rent:
        search.rent = 0.0
        messages.set_unary(search.unary)
        for _ in range(_RESET_SWEEPS):
            messages.forward()
            messages.backward()
    core, whole = _shifted(search.core, messages), search.core
    kept = [np.arange(len(c)) for c in core.unary]
    if gone is not None:
        core, kept = restrict(core, gone, pairs)
        whole, _ = restrict(whole, gone, pairs)
    most = _PROOF_PAIRS if search.gap <= _CLOSE_GAP else _MILP_PAIRS
    return (core, whole, kept) if core.num_pairs <= most else None


def _guess(search: _Search, messages: Messages, seed: int) -> bool:
    """An incumbent from the few choices that would lie close above the bound; whether one was found.

    Where the bound is better than the choices found so far, what the true gap excludes is too little for the MILP to be
    quick. Guessing a smaller gap proves nothing, but nearly always leaves the best choice inside.
    """
    core = search.core
    bound = messages.exact_bound() + core.constant
    for share in _GUESSED_GAPS:
        if search.gap <= share or search.out_of_time:
            return False
        gone, pairs = messages.excluded(core, share * abs(bound))
        if any(mask.all() for mask in gone):
            continue
        reduced, kept = restrict(_shifted(core, messages), gone, pairs)
        if reduced.num_pairs > _MILP_PAIRS:
            return False
        encoding = Encoding(reduced, upper=bound * (1 + share))
        limit = max(search.deadline - time.monotonic(), 0.0)
        result = encoding.solve(time_limit_s=limit, rel_gap=0.0, abs_gap=0.1 * share * abs(bound), seed=seed)
        if result.picks is not None:
            search.offer([int(k[p]) for k, p in zip(kept, result.picks, strict=True)])
            return True
    return False


def _prove_narrow(search: _Search, core: Core, kept: list[Array], max_entries: float = math.inf) -> bool:
    """Without memory, a core of small width is solved by elimination; False if it is too wide."""
    picks = solve_narrow(core.unary, core.left, core.right, core.costs, max_entries=max_entries)
    if picks is None:
        return False
    chosen = [int(k[p]) for k, p in zip(kept, picks, strict=True)]
    if math.isfinite(search.core.cost(chosen)):
        search.offer(chosen)
    if search.picks is None:
        search.proven_infeasible = True
    else:
        search.bound = search.upper  # what was excluded is not cheaper
    return True


def _solve_rows(
    search: _Search,
    core: Core,
    kept: list[Array],
    encoding: Encoding,
    seed: int,
    rel_gap: float,
    node_limit: int | None,
) -> None:
    """MILP and memory rows in turn, until its choice fits."""
    while True:
        left = search.deadline - time.monotonic()
        if left <= 0:
            return
        result = encoding.solve(time_limit_s=left, abs_gap=_allowed(search, rel_gap), seed=seed, node_limit=node_limit)
        search.rows = len(encoding.times)
        if result.infeasible:
            # The restricted problem holds every choice that is cheaper than the incumbent.
            if search.picks is None:
                search.proven_infeasible = True
            else:
                search.bound = search.upper
            return
        search.bound = max(search.bound, min(result.bound, search.upper))
        if result.picks is None:
            return
        picks = [int(k[p]) for k, p in zip(kept, result.picks, strict=True)]
        if search.core.memory is None or search.core.fits(picks):
            search.offer(picks)
            return
        assert core.memory is not None
        profile = core.memory.profile(np.array(result.picks))
        times = core.memory.worst_times(profile, _ROWS_PER_ROUND, set(encoding.times))
        if times:
            encoding.add_rows(times)
        else:
            encoding.add_cover(int(profile.argmax()), result.picks)


def _prove_whole(search: _Search, core: Core, kept: list[Array], times: list[int], seed: int) -> None:
    """Integers have the last word."""
    assert search.picks is not None
    position = [{int(s): p for p, s in enumerate(k)} for k in kept]
    inside = all(p in found for p, found in zip(search.picks, position, strict=True))
    hint = [found[p] for p, found in zip(search.picks, position, strict=True)] if inside else None
    upper = round(search.upper - core.constant)
    result = solve_whole(core, upper, hint, times, search.deadline, seed)
    if result.picks is not None:
        search.offer([int(k[p]) for k, p in zip(kept, result.picks, strict=True)])
    if result.proven:
        search.bound = search.upper


def _allowed(search: _Search, rel_gap: float) -> float:
    """The absolute gap at which the MILP may stop; 0 without an incumbent."""
    return 0.5 * search.tolerance(rel_gap) * abs(search.upper) if search.picks is not None else 0.0


def _shifted(core: Core, messages: Messages) -> Core:
    """The same core with the bound as its constant and what is left as costs: numbers of the size of the gap.

    The MILP's tolerances are relative to its numbers, so this is what makes proofs to the unit possible.
    """
    nodes = [np.where(np.isfinite(c), r, np.inf) for c, r in zip(core.unary, messages.node_rests(), strict=True)]
    edges = [np.where(np.isfinite(m), messages.edge_rest(e), np.inf) for e, m in enumerate(core.costs)]
    constant = core.constant + sum(float(a.min()) for a in (*nodes, *edges))
    return replace(
        core,
        unary=tuple(a - a.min() for a in nodes),
        costs=tuple(a - a.min() for a in edges),
        constant=constant,
        unary_ids=tuple(range(len(nodes))),
        matrix_ids=tuple(range(len(edges))),
    )


def minimum_peak(problem: IntraOpProblem) -> int:
    """A lower bound on the peak of any choice: at every time each node at its smallest allowed usage.

    Exact when one choice is smallest everywhere, as is usual (split every tensor as far as it goes).
    """
    delta = np.zeros(problem.num_times + 1, dtype=np.int64)
    for usage in problem.usages:
        allowed = usage.size_bytes[np.isfinite(as_float(problem.node_costs[usage.node]))]
        smallest = int(allowed.min()) if len(allowed) else 0
        if usage.lo < usage.hi:
            delta[usage.lo] += smallest
            delta[usage.hi] -= smallest
    profile = np.cumsum(delta[:-1])
    if problem.base_usage is not None:
        profile = profile + problem.base_usage
    return int(profile.max(initial=0))
