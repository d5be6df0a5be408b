"""Memory prices: the limit at the fullest times becomes a cost per byte (a Lagrangian), and the rest knows no memory.

    bound(prices) = min over choices of cost + sum_t price[t] * (usage[t] - limit)  <=  optimum within the limit

The prices are raised where choices are too large and lowered where they leave room (sub-gradients with Polyak's step).
Most steps are taken on the tied problem, where they cost the same whatever the depth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.fit import Fit
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.repair import improve

_SWEEPS = 2  # per step
_FIRST_SWEEPS = 60  # at prices that are nearly right: the messages have to learn them before the bound says anything
_LOOK, _SLOW = 8, 0.1  # sweeps between looks at the bound; share of the gap that they should close
_CAREFUL = 0.2  # first steps from such prices are this much shorter
_PATIENCE = 4  # steps without a better bound until steps get shorter
_SMALLEST_FACTOR = 0.05
_NEW_TIMES = 3  # per step
_MAX_TIMES = 24


@dataclass(slots=True, kw_only=True, eq=False)
class Prices:
    """Prices per byte at some times.

    Attributes:
        core: what is priced.
        value: price of each known time.
        rows: per known time the bytes of every node's states, and the room.
    """

    core: Core
    value: dict[int, float] = field(default_factory=dict)
    rows: dict[int, tuple[dict[int, Array], int]] = field(default_factory=dict)

    @classmethod
    def of(cls, core: Core, start: Mapping[int, float]) -> Prices:
        """The given prices on this core."""
        assert core.memory is not None
        sizes = [len(c) for c in core.unary]
        return cls(core=core, value=dict(start), rows={t: core.memory.row(t, sizes) for t in start})

    def learn(self, profile: Array, count: int) -> None:
        """Adds the fullest times."""
        memory = self.core.memory
        assert memory is not None
        if len(self.value) >= _MAX_TIMES:
            return
        sizes = [len(c) for c in self.core.unary]
        for t in memory.worst_times(profile, count, set(self.value)):
            self.value[t] = 0.0
            self.rows[t] = memory.row(t, sizes)

    def added(self, unary: Sequence[Array]) -> list[Array]:
        """Node costs with the prices in."""
        priced = list(unary)
        for t, price in self.value.items():
            if price > 0:
                for node, part in self.rows[t][0].items():
                    priced[node] = priced[node] + price * part
        return priced

    @property
    def rent(self) -> float:
        """What the room is worth: it comes off the bound."""
        return math.fsum(price * self.rows[t][1] for t, price in self.value.items())

    def step(self, profile: Array, gap: float) -> None:
        """One sub-gradient step of the length that closes ``gap`` if the bound were linear."""
        memory = self.core.memory
        assert memory is not None
        over = {t: float(int(profile[t]) - memory.limit) for t in self.value}
        moving = {t: g for t, g in over.items() if g > 0 or self.value[t] > 0}
        norm = sum(g * g for g in moving.values())
        if norm > 0:
            for t, g in moving.items():
                self.value[t] = max(0.0, self.value[t] + gap / norm * g)


def price_memory(
    core: Core,
    unary: Sequence[Array],
    costs: Sequence[Array],
    messages: Messages,
    *,
    start: Mapping[int, float],
    num_steps: int,
    wish: Sequence[int],
    offer: Callable[[list[int] | None], float],
    deadline: float,
) -> tuple[float, Prices]:
    """Finds good prices and choices that fit; leaves the messages at the best prices.

    Args:
        core, unary, costs: the core and its costs with finite numbers.
        messages: of the core, already good without prices.
        start: prices to start from.
        num_steps: at most; fewer if the bound stops rising.
        wish: a cheap choice that does not fit.
        offer: takes a choice (or None), returns the cost of the best one that fits so far (inf if none).
        deadline: on the monotonic clock.

    Returns:
        The best bound, with the core's constant, and the prices that gave it.
    """
    assert core.memory is not None
    fit, prices = Fit(core, unary, costs), Prices.of(core, start)
    prices.learn(core.memory.profile(np.asarray(wish)), _NEW_TIMES)
    upper = _fitting(fit, wish, wish, offer)
    first = core.cost(wish)
    best, chosen = -math.inf, dict(prices.value)
    factor, stale = (_CAREFUL, 0) if start else (1.0, 0)
    for count in range(num_steps):
        if time.monotonic() > deadline or factor < _SMALLEST_FACTOR:
            break
        priced = prices.added(unary)
        messages.set_unary(priced)
        bound = _settle(messages, upper, prices, most=_FIRST_SWEEPS if start and not count else _SWEEPS)
        picks = improve(core, priced, costs, messages.pick(), fit.around)
        profile = core.memory.profile(np.asarray(picks))
        if bound > best:
            best, chosen, stale = bound, dict(prices.value), 0
        else:
            stale += 1
            if stale >= _PATIENCE:
                factor, stale = factor / 2, 0
        if count % 3 == 0 or int(profile.max()) <= core.memory.limit:
            upper = _fitting(fit, picks, wish, offer)
        target = upper if math.isfinite(upper) else first + abs(first)
        if target - best <= 1e-9 * abs(target):
            break
        prices.learn(profile, _NEW_TIMES)
        prices.step(profile, factor * max(target - bound, 1e-6 * abs(target)))
    prices.value = dict.fromkeys(prices.value, 0.0) | chosen
    messages.set_unary(prices.added(unary))
    if not start:  # what follows starts from these messages
        _settle(messages, upper, prices, most=_FIRST_SWEEPS)
    return best, prices


def _settle(messages: Messages, upper: float, prices: Prices, *, most: int) -> float:
    """Sweeps until the bound hardly rises, seen every few sweeps; returns it."""
    bound = before = -math.inf
    for count in range(1, most + 1):
        bound = messages.sweep() - prices.rent + prices.core.constant
        if count % _LOOK == 0:
            if bound - before < _SLOW * (upper - bound):
                break
            before = bound
    return bound


def _fitting(fit: Fit, picks: Sequence[int], wish: Sequence[int], offer: Callable[[list[int] | None], float]) -> float:
    squeezed = fit.squeeze(picks)
    return offer(None if squeezed is None else fit.spend(squeezed, wish))
