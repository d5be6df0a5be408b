"""What a pipeline takes by the times of its stages alone, before any of them is planned whole.

The formula of ``al.interop.slice_stages`` lets the slowest stage or transfer set the pace. A schedule that limits microbatches in
flight is slower where transfers take time: with w_k in flight in stage k, stage a starts its (n + w_a)-th forward pass after
its n-th backward pass, which has been to stage b and back, while stage b does w_b - 1 others in between. So microbatches are

    max over a <= b of (sum of t_a..t_b + transfers there and back inside) / (w_a - w_b + 1)

apart: the largest ratio of a cycle of waits. With a = b it is the slowest stage. Under "1f1b" w_a - w_b is b - a: in a long chain
of equal stages each transfer costs its whole time in every microbatch, there and back.

What a stage does once per step it does after its last backward pass, while that microbatch goes back through the stages before
it: so much of it is hidden. A backward pass is taken to be two thirds of a stage's time, as it has twice as many products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_BACKWARD = 2 / 3


def estimate_s(
    times_s: Sequence[float],
    round_trips_s: Sequence[float],
    once_s: Sequence[float],
    in_flight: Sequence[int],
    num_microbatches: int,
) -> float:
    """Seconds of a step.

    Args:
        times_s: per stage, forward and backward pass of one microbatch.
        round_trips_s: per boundary between stages, one microbatch there and back.
        once_s: per stage, what it does once per step.
        in_flight: per stage, microbatches in flight at most; falling.
        num_microbatches: of a step.
    """
    apart = max(*times_s, *(trip / 2 for trip in round_trips_s), 0.0)
    for a in range(len(times_s)):
        if in_flight[a] >= num_microbatches:
            continue  # nothing waits for the first microbatch to come back
        cycle = times_s[a]
        for b in range(a + 1, len(times_s)):
            cycle += round_trips_s[b - 1] + times_s[b]
            apart = max(apart, cycle / (in_flight[a] - in_flight[b] + 1))
    hidden_s, exposed_s = 0.0, 0.0
    for stage, once in enumerate(once_s):
        exposed_s = max(exposed_s, once - hidden_s)
        hidden_s += times_s[stage] * _BACKWARD + (round_trips_s[stage] / 2 if stage < len(round_trips_s) else 0.0)
    return math.fsum((*times_s, *round_trips_s)) + (num_microbatches - 1) * apart + exposed_s
