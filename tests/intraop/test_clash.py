"""Irreducible clashes against brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.intraop.clash import minimal_clash


def brute_force(members, feasible):
    """All irreducible infeasible subsets."""
    found = []
    for size in range(len(members) + 1):
        for subset in combinations(members, size):
            drops = [subset[:i] + subset[i + 1 :] for i in range(len(subset))]
            if not feasible(subset) and all(feasible(drop) for drop in drops):
                found.append(subset)
    return found


@pytest.mark.medium
@settings(max_examples=200)
@given(st.lists(st.frozensets(st.integers(0, 7), max_size=4), min_size=1, max_size=5), st.permutations(range(8)))
def test_is_one_of_the_irreducible_sets(conflicts, members):
    """Feasible means that no conflict is contained: every monotone test has this form."""

    def feasible(chosen):
        return not any(conflict <= set(chosen) for conflict in conflicts)

    assert minimal_clash(members, feasible) in brute_force(members, feasible)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 9), max_size=9), st.integers(0, 30))
def test_budgets_with_equal_members(sizes, budget):
    members = list(enumerate(sizes))

    def feasible(chosen):
        return sum(size for _, size in chosen) <= budget

    if feasible(members):
        with pytest.raises(ValueError, match=f"no clash to explain: all {len(members)} demands hold together"):
            minimal_clash(members, feasible)
    else:
        assert minimal_clash(members, feasible) in brute_force(members, feasible)


def test_nothing_can_hold():
    assert minimal_clash("abc", lambda chosen: False) == ()


def test_few_tests_for_few_culprits():
    calls = []

    def feasible(chosen):
        calls.append(chosen)
        return not {17, 200} <= set(chosen)

    assert minimal_clash(range(256), feasible) == (17, 200)
    assert len(calls) <= 2 * 2 * 8 + 4


def test_early_members_are_preferred():
    assert minimal_clash((0, 1, 2, 3), lambda chosen: len(chosen) < 2) == (0, 1)
