"""The steps of a search on one core, each only where the one before left a gap; ``solve.py`` says which."""

from __future__ import annotations

import math

import numpy as np

from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.prices import price_memory
from alpa_lite.intraop.problem import IntraOpProblem
from alpa_lite.intraop.proof import guess, prove, prove_narrow
from alpa_lite.intraop.repair import improve
from alpa_lite.intraop.state import Search, is_small
from alpa_lite.intraop.tie import Tie, tie, tied_core

_LARGE_GAP = 2e-3  # good enough where a proof is out of reach
_TIED_FROM = 200  # core nodes from which on copies are treated alike
_TIED_GAP = 5e-4  # for the tied problem, which only gives an incumbent
_TIED_NODES = 50  # of its branch and bound
_PRICE_STEPS = 60
_UNTIED_PRICE_STEPS = 10  # after those on the tied problem
_QUICK_ENTRIES = 1_000_000  # of the tables of an elimination that takes less time than any sweep


def search_core(search: Search, problem: IntraOpProblem, seed: int, rel_gap: float) -> None:
    core = search.core
    if not core.num_nodes:
        search.bound = core.constant
        if core.fits([]):
            search.picks, search.upper = [], core.constant
        else:
            search.proven_infeasible = True
        return
    if core.memory is None and prove_narrow(search, core, [np.arange(len(c)) for c in core.unary], _QUICK_ENTRIES):
        return
    tied = tie(core, problem.classes if core.num_nodes > _TIED_FROM else None)
    messages = Messages.zero(core, search.unary, search.costs, tied)
    if not tied.is_trivial:
        inner = _start_tied(search, tied, seed)
        if search.prices is not None:
            messages.start_from(inner)
    small = is_small(core)
    if search.prices is None:  # else the messages know the prices already
        _sweep(search, messages, rel_gap, small)
    wanted = search.tolerance(rel_gap if small else _LARGE_GAP)
    if core.memory is not None and search.gap > wanted and not search.too_dear:
        _price_memory(search, messages, _PRICE_STEPS if tied.is_trivial else _UNTIED_PRICE_STEPS)
    if search.gap > search.tolerance(rel_gap) and (small or search.picks is None):
        prove(search, messages, seed, rel_gap)


def _start_tied(search: Search, tied: Tie, seed: int) -> Messages:
    """An incumbent from the tied problem, memory prices to start from, and its messages."""
    inner = Search.of(tied_core(search.core, tied), search.deadline, search.cutoff, search.unit)
    messages = Messages.zero(inner.core, inner.unary, inner.costs, tie(inner.core, None))
    _sweep(inner, messages, _TIED_GAP, small=True)
    if inner.core.memory is not None and not inner.too_dear:
        # No proof here: with memory the copies of the best choice differ, and the untied steps that follow find it.
        _price_memory(inner, messages, _PRICE_STEPS)
        search.prices = inner.prices
    elif inner.gap > _TIED_GAP and not inner.too_dear and not guess(inner, messages, seed):
        prove(inner, messages, seed, _TIED_GAP, node_limit=_TIED_NODES)
    start = messages.pick() if inner.picks is None else inner.picks
    spread = [start[g] for g in tied.group]
    search.offer(spread, tied=True)
    search.try_from(spread, tied=True)  # which no longer knows the memory limit
    if inner.wish is not None:
        search.wish = improve(search.core, search.unary, search.costs, [inner.wish[g] for g in tied.group])
    return messages


def _price_memory(search: Search, messages: Messages, num_steps: int) -> None:
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


def _sweep(search: Search, messages: Messages, rel_gap: float, small: bool) -> None:
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
