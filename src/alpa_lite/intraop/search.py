"""The steps of a search on one core, each only where the one before left a gap; ``solve.py`` says which."""

from __future__ import annotations

import math

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.frontier import Frontier
from alpa_lite.intraop.known_shape import KnownShape
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.narrow import is_narrow
from alpa_lite.intraop.prices import price_memory
from alpa_lite.intraop.problem import IntraOpProblem
from alpa_lite.intraop.proof import look_near, prove, prove_narrow, shifted
from alpa_lite.intraop.rest import prove_rest
from alpa_lite.intraop.state import LARGE_GAP, Search, is_small
from alpa_lite.intraop.tie import Tie, tie, tied_core

FEW_NODES = 200  # of a core; copies are treated alike where there are more
_ROUGH_GAP = 1e-2  # for answers without proof
_FEW_COPIES = 0.75  # groups per node above which the tied problem takes as long as the untied one
_PROOF_COPIES = 0.5  # the same where a proof of a small core is wanted; that of a large one needs its incumbent
_TIED_GAP = 5e-4  # for the tied problem, which only gives an incumbent
_EARLY_SWEEPS = 15  # on the tied problem
_TRIED_SWEEPS = 1  # on the untied one, from its messages
_PRICE_STEPS = 60
_UNTIED_PRICE_STEPS = 10  # after those on the tied problem
_FRONTIER_GAP = 5e-3  # from which on a search along the frontier may be complete
_FRONTIER_WORK = 150  # partial choices per node
_BEAM = 100
_BEAM_GAP = 0.1  # above it a beam finds nothing better than what is known
_ANYTHING = 1e300  # a slack that keeps out what is forbidden alone
_LATE = 60  # sweeps after which thin cores are searched along the frontier as well
_HASTE = 0.8  # of what a sweep over thin cores changed, by which messages are moved on
_CLOSE_HASTE = 0.7  # the same over cores, tied or not, of which a close bound is wanted: a third of the sweeps
_GUESS = 0.4  # of what five such sweeps added to the bound, for what it lacks still
_PATIENT = 30  # sweeps before which no choice is looked for in thin cores but by elimination
_QUICK_ENTRIES = 8_000_000  # of the tables of an elimination that takes less time than a search
_NODE_ENTRIES = 6000  # the same per node: sweeps over small cores, and what they leave, take less time still
_NARROW_EDGE = 64  # mean entries of an edge, up to which sweeps and what they leave take less time


def is_wide(core: Core, shape: KnownShape) -> bool:
    """Whether messages are soon better at a core than elimination is at once, and than comparing its states beforehand.

    It has few nodes, so that few of them are copies which are compared once, and edges of few entries.
    """
    few = core.memory is None and 0 < core.num_nodes <= FEW_NODES and _is_thin(core)
    return few and not is_narrow(core.unary, core.left, core.right, core.costs, _most_entries(core), shape.scopes)


def search_core(
    search: Search, problem: IntraOpProblem, seed: int, rel_gap: float, *, proof: bool = True, wide: bool = False
) -> None:
    """An answer and a bound.

    Without ``proof`` a gap of ``_ROUGH_GAP`` will do; what sweeps leave is not closed, but under a limit of memory something
    better is looked for (``look_near``). ``wide``: as ``is_wide`` found.
    """
    core, rel_gap = search.core, rel_gap if proof else max(rel_gap, _ROUGH_GAP)
    if not core.num_nodes:
        search.bound = core.constant
        if core.fits([]):
            search.picks, search.upper = [], core.constant
        else:
            search.proven_infeasible = True
        return
    if core.memory is None and not wide:
        kept = [np.arange(len(c)) for c in core.unary]
        if prove_narrow(search, core, kept, _most_entries(core)):
            return
    tied = tie(core, problem.classes if core.num_nodes > FEW_NODES else None)
    small = is_small(core)
    if (
        not tied.is_trivial
        and len(tied.members) > (_FEW_COPIES if not proof else _PROOF_COPIES if small else 1.0) * core.num_nodes
    ):
        tied = tie(core, None)
    if tied.is_trivial:
        known = search.shape.levels if core.num_nodes <= FEW_NODES else None  # lists of large cores are not kept
        messages = Messages.zero(core, search.unary, search.costs, tied, known)
    else:
        messages = _start_tied(search, tied, proof=proof)
    proven = search.gap <= search.tolerance(rel_gap)  # by the start from the tied problem
    if search.prices is None and not proven:  # with prices, the messages know them already
        _sweep(search, messages, rel_gap, small=small, most=160 if small else 40, beams=proof)
    wanted = search.tolerance(rel_gap if small else search.large_gap)
    if core.memory is not None and search.gap > wanted and not search.too_dear:
        _price_memory(search, messages, _PRICE_STEPS if tied.is_trivial else _UNTIED_PRICE_STEPS)
    if search.gap > search.tolerance(rel_gap) and ((small and proof) or search.picks is None):
        prove(search, messages, seed, rel_gap)
    elif core.memory is not None and small and search.gap > search.tolerance(rel_gap):
        look_near(search, messages, seed)


def _start_tied(search: Search, tied: Tie, *, proof: bool) -> Messages:
    """An incumbent from the tied problem, memory prices to start from, and messages that start with its."""
    # Where a close bound is wanted, messages go on past a cutoff, which they say nothing about: the untied problem starts closer.
    cutoff = math.inf if search.large_gap < LARGE_GAP else search.cutoff
    inner = Search.of(tied_core(search.core, tied), search.deadline, cutoff, search.unit)
    inner.large_gap = search.large_gap
    messages = Messages.zero(inner.core, inner.unary, inner.costs, tie(inner.core, None))
    if inner.core.memory is None:
        started = _settle_tied(search, tied, inner, messages, beams=proof)
    else:
        _sweep(inner, messages, _TIED_GAP, small=True)
        if not inner.too_dear:
            # No proof here: with memory the copies of the best choice differ, and the untied steps that follow find it.
            _price_memory(inner, messages, _PRICE_STEPS)
            search.prices = inner.prices
        started = Messages.zero(search.core, search.unary, search.costs, tied)
        if search.prices is not None:
            started.start_from(messages)
    start = messages.pick() if inner.picks is None else inner.picks
    spread = [start[g] for g in tied.group]
    search.offer(spread, tied=True)
    search.try_from(spread, tied=True)  # which no longer knows the memory limit
    if inner.wish is not None:
        search.wish = search.improved([inner.wish[g] for g in tied.group])
    return started


def _settle_tied(search: Search, tied: Tie, inner: Search, messages: Messages, *, beams: bool) -> Messages:
    """Sweeps over the tied core; the better start from its messages early on and at the end.

    In the end they fit layers that repeat for ever. How well that suits layers with ends differs from problem to problem.
    """
    best, bound = None, -math.inf
    for most in (_EARLY_SWEEPS, 160):
        _sweep(inner, messages, _TIED_GAP, small=True, most=most, beams=beams)
        started = Messages.zero(search.core, search.unary, search.costs, tied)
        started.start_from(messages)
        value = -math.inf
        for _ in range(_TRIED_SWEEPS):
            value = started.sweep()
        if best is None or value > bound:
            best, bound = started, value
            search.bound = max(search.bound, value + search.core.constant)
        if inner.gap <= _TIED_GAP or inner.out_of_time or inner.too_dear:
            break
    assert best is not None
    return best


def _price_memory(search: Search, messages: Messages, num_steps: int) -> None:
    """Prices on the fullest times, a bound that holds within the limit, and choices that fit."""

    if search.wish is None:
        search.wish = search.improved(messages.pick())

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


def _search_frontier(search: Search, messages: Messages) -> None:
    """A search along the frontier whenever the messages have become much better: for a choice, then for a proof."""
    core, close = search.core, search.gap <= _FRONTIER_GAP
    known = search.picks is not None
    if search.gap > (0.5 if close else 0.25) * search.searched_gap or search.out_of_time:
        return
    if known and search.gap > _BEAM_GAP:
        return
    search.searched_gap = search.gap
    if search.frontier is None:
        search.frontier = Frontier(core)
    left = shifted(core, messages)
    error = 1e-12 * abs(search.upper) if known else 0.0  # of adding up the costs
    slack = (search.upper - left.constant) * (1 + 1e-9) + error if known else _ANYTHING
    work = _FRONTIER_WORK * core.num_nodes if close else 0
    found = search.frontier.search(left, slack, work=work, beam=0 if close else _BEAM)
    if found.picks is not None:
        search.offer(found.picks)
    if found.complete and known:
        search.bound = max(search.bound, search.upper - error)


def _close(search: Search, messages: Messages, count: int) -> None:
    """Better choices and proofs than messages give."""
    thin = _is_thin(search.core)
    if thin and prove_rest(search, messages):
        return
    if not thin or count >= _LATE:
        _search_frontier(search, messages)


def _most_entries(core: Core) -> int:
    """Of the tables of a core that is eliminated at once."""
    quick = core.num_nodes <= FEW_NODES or _is_thin(core)
    return min(_QUICK_ENTRIES, _NODE_ENTRIES * core.num_nodes) if quick else _QUICK_ENTRIES


def _is_thin(core: Core) -> bool:
    return core.num_pairs <= _NARROW_EDGE * len(core.costs)


def _sweep(
    search: Search, messages: Messages, rel_gap: float, *, small: bool, most: int = 160, beams: bool = True
) -> None:
    """Sweeps until the gap is closed or further sweeps do not pay; ``beams``: with searches along the frontier."""
    wanted, every = (rel_gap, 5) if small else (search.large_gap, 4)
    before = -math.inf
    waits = beams and small and search.core.memory is None and search.picks is None and _is_thin(search.core)
    close = search.core.memory is None and search.large_gap < LARGE_GAP
    haste = _HASTE if waits else _CLOSE_HASTE if close else 0.0
    for count in range(1, most + 1):
        if haste and count <= _PATIENT:
            messages.hasten(haste)
        tries = not waits and not count % every and (count >= 3 * every or search.picks is None)
        back = tries and (search.picks is None or count // every % 2 == 1)  # in turn; a first choice either way
        if back:
            messages.forward()
            search.try_from(messages.pick(forward=False))
            value = messages.backward() + search.core.constant
        else:
            value = messages.sweep() + search.core.constant
        search.bound = max(search.bound, value)
        if count % every and not search.out_of_time and not search.too_dear:
            continue
        if waits:
            if prove_rest(search, messages, _GUESS * (value - before)) or search.gap <= search.tolerance(wanted):
                return
            waits = search.picks is None and count < _PATIENT
            if count < most and not search.out_of_time:
                before = value
                continue
        if (tries and not back) or search.picks is None or search.out_of_time:
            search.try_from(messages.pick())
        if beams and small and count > every and search.core.memory is None and search.gap > search.tolerance(wanted):
            _close(search, messages, count)
        if search.gap <= search.tolerance(wanted) or search.out_of_time or search.too_dear:
            return
        if small and count > 40 and value - before < 0.01 * (search.upper - value):
            return
        before = value
