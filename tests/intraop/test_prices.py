"""Memory prices and choices that fit: bounds hold, moves keep the books, squeezing ends below the limit."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from alpa_lite.intraop.core import extract_core, finite
from alpa_lite.intraop.fit import Fit
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.prices import price_memory
from alpa_lite.intraop.problem import Edge, IntraOpProblem, Usage
from alpa_lite.intraop.tie import tie


def ring(seed, n=7, k=3):
    """Cheap states are large ones."""
    rng = np.random.default_rng(seed)
    edges = tuple(Edge(u=i, v=(i + 1) % n, costs=rng.random((k, k))) for i in range(n))
    usages = []
    for i in range(n):
        usages.append(Usage(node=i, lo=i, hi=i + 4, size_bytes=np.arange(k) * 10 + 1))
        usages.append(Usage(node=i, lo=i + 2, hi=i + 8, size_bytes=np.arange(k)[::-1] * 3))
    return IntraOpProblem(
        node_costs=tuple(2.0 - np.arange(k) + rng.random(k) for _ in range(n)),
        edges=edges,
        usages=tuple(usages),
        num_times=n + 8,
        usage_limit=70,
    )


def setting(seed, limit):
    core = extract_core(CostGraph(dataclasses.replace(ring(seed), usage_limit=limit), memory=True))
    choices = list(itertools.product(*(range(len(c)) for c in core.unary)))
    best = min((core.cost(p) for p in choices if core.fits(p)), default=math.inf)
    return core, choices, best


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_and_choices_fit(seed):
    core, choices, best = setting(seed, 62)
    unary, costs = finite(core)
    messages = Messages.zero(core, unary, costs, tie(core, None))
    for _ in range(5):
        messages.forward()
        plain = messages.backward() + core.constant
    wish = min(choices, key=core.cost)
    assert not core.fits(wish)
    offered = [math.inf]

    def offer(picks):
        if picks is not None:
            assert core.fits(picks)
            offered.append(core.cost(picks))
        return min(offered)

    bound, prices = price_memory(
        core, unary, costs, messages, start={}, num_steps=40, wish=wish, offer=offer, deadline=math.inf
    )
    assert bound <= best + 1e-9 <= min(offered) + 2e-9
    assert bound > plain  # the limit costs something
    assert min(offered) < 1.5 * best
    # The messages are left at the prices that gave the bound, so exclusion may use them.
    assert messages.exact_bound() + core.constant - prices.rent <= best + 1e-9
    again = messages.exact_bound() + core.constant - prices.rent
    gone, _ = messages.excluded(core, best + 1e-9 - again)
    for picks in choices:
        if core.fits(picks) and core.cost(picks) <= best:
            assert not any(mask[x] for mask, x in zip(gone, picks, strict=True))


def test_moves_keep_the_profile():
    core, _, _ = setting(1, 62)
    fit = Fit(core, *finite(core))
    rng = np.random.default_rng(0)
    picks = [0] * core.num_nodes
    profile = core.memory.profile(np.array(picks))
    for _ in range(60):
        i, state = int(rng.integers(core.num_nodes)), int(rng.integers(3))
        fits_before = core.fits(picks)
        allowed = fit.allows(i, state, picks, profile)
        fit.move(i, state, picks, profile)
        np.testing.assert_array_equal(profile, core.memory.profile(np.array(picks)))
        if fits_before:
            assert allowed == core.fits(picks)


@pytest.mark.parametrize("limit", [45, 62, 90])
def test_squeeze_fits_and_spend_improves(limit):
    core, choices, best = setting(2, limit)
    fit = Fit(core, *finite(core))
    wish = min(choices, key=core.cost)
    squeezed = fit.squeeze(wish)
    assert squeezed is not None
    assert core.fits(squeezed)
    spent = fit.spend(squeezed, wish)
    assert core.fits(spent)
    assert best - 1e-9 <= core.cost(spent) <= core.cost(squeezed) + 1e-9


def test_nothing_to_squeeze_is_said():
    core, _, best = setting(0, 3)
    assert math.isinf(best)
    assert Fit(core, *finite(core)).squeeze([0] * core.num_nodes) is None
