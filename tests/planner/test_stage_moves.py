"""Slicings near another one are slicings of the same step on the same devices."""

from __future__ import annotations

import random

import pytest

from alpa_lite.planner.stage_moves import moves


def random_stages(rng: random.Random) -> list[tuple[int, int, int]]:
    first, found = 0, []
    for _ in range(rng.randint(1, 5)):
        last = first + rng.randint(1, 3) - 1
        found.append((first, last, rng.randint(0, 2)))
        first = last + 1
    return found


@pytest.mark.parametrize("seed", range(8))
def test_layers_and_submeshes_are_the_same_ones(seed):
    stages = random_stages(random.Random(seed))
    near = list(moves(stages))
    assert len(set(near)) == len(near) and tuple(stages) not in near
    for found in near:
        assert [layer for first, last, _ in found for layer in range(first, last + 1)] == list(range(stages[-1][1] + 1))
        assert sorted(m for _, _, m in found) == sorted(m for _, _, m in stages)
        assert all(first <= last for first, last, _ in found)


def test_those_of_two_stages():
    assert set(moves([(0, 1, 7), (2, 2, 9)])) == {
        ((0, 0, 9), (1, 2, 7)),  # turned round
        ((0, 1, 9), (2, 2, 7)),
        ((0, 0, 7), (1, 2, 9)),
    }
    assert list(moves([(0, 3, 1)])) == []
