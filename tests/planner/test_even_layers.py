"""How even layers of a function must be, with a gradient and without."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.planner.even_layers import EVEN, UNEVEN, even_layers


def loads(flops: list[int], cuts: tuple[int, ...]) -> list[int]:
    return [sum(flops[a:b]) for a, b in itertools.pairwise((0, *cuts, len(flops)))]


# Three layers of attention and what follows it; between these much is sent, between layers little.
FLOPS = [4, 6] * 3
BYTES = [100, 10, 100, 10, 100]


def test_a_layer_is_left_whole_unless_every_microbatch_waits_for_the_largest():
    assert even_layers(FLOPS, BYTES, 2, forward=False) == (3,)  # 14 and 16 FLOPs
    cuts = even_layers(FLOPS, BYTES, 2, forward=True)
    assert cuts in ((2,), (4,)) and max(loads(FLOPS, cuts)) == 20


@pytest.mark.parametrize(("between", "cut"), [(40, (2,)), (60, (3,))])
def test_what_does_not_halve_the_bytes_is_not_worth_it(between, cut):
    assert even_layers(FLOPS, [100, between, 100, 100, 100], 2, forward=True) == cut


@pytest.mark.medium
@given(st.data())
def test_never_more_bytes_nor_larger_than_allowed(data):
    ops = data.draw(st.integers(2, 9))
    layers = data.draw(st.integers(1, min(ops, 4)))
    flops = data.draw(st.lists(st.integers(1, 9), min_size=ops, max_size=ops))
    sizes = data.draw(st.lists(st.integers(1, 99), min_size=ops - 1, max_size=ops - 1))
    even, cuts = (even_layers(flops, sizes, layers, forward=forward) for forward in (False, True))
    sent = [sum(sizes[c - 1] for c in own) for own in (even, cuts)]
    assert cuts == even or 2 * sent[1] <= sent[0]
    every = itertools.combinations(range(1, ops), layers - 1)
    least = min(max(loads(flops, own)) for own in every)
    for own, tolerance in ((even, EVEN), (cuts, UNEVEN)):
        assert max(loads(flops, own)) <= max(least, (1 + tolerance) * np.mean(loads(flops, own))) + 1e-9
