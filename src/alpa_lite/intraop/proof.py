"""Proofs: what the gap leaves of a core is eliminated, or decided by a MILP with memory rows as needed."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from alpa_lite.intraop.core import Core, restrict
from alpa_lite.intraop.cpsat import solve_whole
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.milp import Encoding
from alpa_lite.intraop.narrow import solve_narrow
from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.state import Search, is_small

_ROWS_PER_ROUND = 15
_EXCLUDE_PAIRS = 4_000_000  # edge entries up to which exclusion may bring a core down to that
_CLOSE_GAP = 1e-2  # so close, a proof is tried only if it is quick
_NEAR = 0.1  # of the gap, for what is looked at without a proof
_RESET_SWEEPS = 20  # after memory prices, back to costs without them
_PROOF_PAIRS = 100_000  # edge entries up to which a gap below _CLOSE_GAP is worth a proof


def prove(search: Search, messages: Messages, seed: int, rel_gap: float, *, node_limit: int | None = None) -> None:
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
        if core.memory is None and prove_narrow(search, core, kept):
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


def look_near(search: Search, messages: Messages, seed: int) -> None:
    """A better choice within the memory limit from the MILP, of what costs little by the messages; proves nothing.

    The whole gap leaves most states where memory binds, and a proof takes a hundred times as long.
    """
    times = [] if search.prices is None else [t for t, price in search.prices.value.items() if price > 0]
    reduced = _reduced(search, messages, _NEAR)
    if reduced is None:
        return
    core, _, kept = reduced
    encoding = Encoding(core, upper=search.upper)
    if times:
        encoding.add_rows(times)
    _solve_rows(search, core, kept, encoding, seed, _CLOSE_GAP, None, claims=False)


def _reduced(search: Search, messages: Messages, share: float = 1.0) -> tuple[Core, Core, list[Array]] | None:
    """(shifted core, core, kept states) without what the gap excludes; None if nothing cheaper or too much is left.

    ``share``: of the gap; below 1 something cheaper may be excluded too.
    """
    gone, pairs = None, {}
    if math.isfinite(search.upper):
        # Exclusion sees the memory prices; the MILP has the rows themselves.
        slack = search.upper - (messages.exact_bound() + search.core.constant - search.rent)
        slack = share * max(slack, 0.0) * (1 + 1e-9) + 1e-12 * abs(search.upper)
        gone, pairs = messages.excluded(search.core, slack)
        if any(mask.all() for mask in gone):
            search.bound = search.upper if share >= 1 else search.bound
            return None
    if search.rent:
        search.rent = 0.0
        messages.set_unary(search.unary)
        for _ in range(_RESET_SWEEPS):
            messages.sweep()
    core, whole = shifted(search.core, messages), search.core
    kept = [np.arange(len(c)) for c in core.unary]
    if gone is not None:
        core, kept = restrict(core, gone, pairs)
        whole, _ = restrict(whole, gone, pairs)
    quick = core.num_pairs <= _PROOF_PAIRS if search.gap <= _CLOSE_GAP else is_small(core)
    return (core, whole, kept) if quick else None


def prove_narrow(search: Search, core: Core, kept: list[Array], max_entries: float = math.inf) -> bool:
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
    search: Search,
    core: Core,
    kept: list[Array],
    encoding: Encoding,
    seed: int,
    rel_gap: float,
    node_limit: int | None,
    *,
    claims: bool = True,
) -> None:
    """MILP and memory rows in turn, until its choice fits; ``claims``: whether what the core lacks is not cheaper."""
    while True:
        left = search.deadline - time.monotonic()
        if left <= 0:
            return
        result = encoding.solve(time_limit_s=left, abs_gap=_allowed(search, rel_gap), seed=seed, node_limit=node_limit)
        search.rows = len(encoding.times)
        if result.infeasible:
            # The restricted problem holds every choice that is cheaper than the incumbent.
            if claims and search.picks is None:
                search.proven_infeasible = True
            elif claims:
                search.bound = search.upper
            return
        if claims:
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


def _prove_whole(search: Search, core: Core, kept: list[Array], times: list[int], seed: int) -> None:
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


def _allowed(search: Search, rel_gap: float) -> float:
    """The absolute gap at which the MILP may stop; 0 without an incumbent."""
    return 0.5 * search.tolerance(rel_gap) * abs(search.upper) if search.picks is not None else 0.0


def shifted(core: Core, messages: Messages) -> Core:
    """The same core with the bound as its constant and what is left as costs: numbers of the size of the gap.

    The MILP's tolerances are relative to its numbers, so this is what makes proofs to the unit possible.
    """
    nodes = [np.where(np.isfinite(c), r, np.inf) for c, r in zip(core.unary, messages.node_rests(), strict=True)]
    blocked = {number: ~np.isfinite(m) for number, m in zip(core.matrix_ids, core.costs, strict=True)}
    blocked = {number: mask for number, mask in blocked.items() if mask.any()}
    rests = zip(core.matrix_ids, messages.edge_rests(), strict=True)
    edges = [np.where(blocked[number], np.inf, rest) if number in blocked else rest for number, rest in rests]
    constant = core.constant + sum(float(a.min()) for a in (*nodes, *edges))
    return replace(
        core,
        unary=tuple(a - a.min() for a in nodes),
        costs=tuple(a - a.min() for a in edges),
        constant=constant,
        unary_ids=tuple(range(len(nodes))),
        matrix_ids=tuple(range(len(edges))),
    )
