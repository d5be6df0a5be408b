"""Bucket advice against brute force, and its messages."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import AlpaLiteError
from alpa_lite.serve.buckets import propose_buckets, smallest_bucket


def cost_of(buckets: tuple[int, ...], lengths: list[int], fixed: float, per_token: float) -> float:
    """As in the module's docstring, request by request."""
    padding = sum(min(b for b in buckets if b >= length) - length for length in lengths)
    return padding + sum(fixed + per_token * b for b in buckets)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=10),
    st.integers(1, 3),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([0.0, 3.0, 25.0]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 0.02, 0.3]),
)
def test_no_set_of_sizes_is_cheaper(
    lengths: list[int], k: int, multiple: int, fixed: float, per_token: float, share: float
) -> None:
    """``share``: of the memory that a program keeps, which costs that share of all tokens."""
    prices = {"program_tokens": fixed, "program_tokens_per_token": per_token}
    found = propose_buckets(lengths, k, multiple=multiple, **prices, program_bytes=share * 16e9, memory_bytes=16e9)
    fixed += share * sum(lengths)
    # All sizes up to the first that holds every request, whether such a length occurs or not.
    sizes = range(multiple, -(-max(lengths) // multiple) * multiple + 1, multiple)
    every = [c for n in range(1, k + 1) for c in combinations(sizes, n) if c[-1] >= max(lengths)]
    cheapest = min(cost_of(c, lengths, fixed, per_token) for c in every)
    assert found.cost == pytest.approx(cheapest)
    assert cost_of(found.buckets, lengths, fixed, per_token) == pytest.approx(found.cost)
    assert len(found.buckets) <= k and all(b % multiple == 0 for b in found.buckets)
    assert sum(found.requests) == len(lengths) and found.num_tokens == sum(lengths)
    assert sum(found.padded_tokens) == cost_of(found.buckets, lengths, 0, 0)


def test_the_smallest_bucket_that_holds_a_prompt() -> None:
    buckets = (16, 64, 256)
    assert [smallest_bucket(buckets, n) for n in (1, 16, 17, 64, 256, 257)] == [16, 16, 64, 64, 256, None]


def test_as_many_buckets_as_lengths_waste_nothing() -> None:
    assert propose_buckets([5, 9, 9, 30], k=8).buckets == (5, 9, 30)
    assert propose_buckets([5, 9, 9, 30], k=8).waste == 0


def test_advice_is_the_same_for_an_hour_and_for_a_day() -> None:
    """Shares of memory and of work, which do not depend on how many requests were looked at, nor on units."""
    lengths = [12, 15, 100, 900, 1000]
    buckets = [
        propose_buckets(many, 3, program_bytes=share * memory, memory_bytes=memory).buckets
        for share in (0.0, 0.05, 0.1, 2.0)
        for many, memory in ((lengths, 80e9), (lengths * 24, 80e9), (lengths, 16.0))
    ]
    assert buckets == [(15, 100, 1000)] * 6 + [(100, 1000)] * 3 + [(1000,)] * 3
    assert propose_buckets(lengths, 3, program_bytes=1e9, memory_bytes=80e9).cost == pytest.approx(103 + 3 * 2027 / 80)


def test_more_buckets_waste_less() -> None:
    lengths = np.random.default_rng(0).integers(1, 2049, 20_000).tolist()
    found = propose_buckets(lengths, 4, multiple=16)
    assert found.buckets[-1] == 2048 and found.waste < propose_buckets(lengths, 3, multiple=16).waste < 0.3


def test_it_prints_what_each_bucket_wastes() -> None:
    assert str(propose_buckets([12, 15, 100, 900, 1000], k=3)) == (
        "  bucket  requests  padded tokens   waste\n"
        "      15         2              3   10.0%\n"
        "     100         1              0    0.0%\n"
        "    1000         2            100    5.0%\n"
        "     all         5            103    4.8%\n"
        "one bucket of 1000 would waste 59.5%\n"
    )


def test_long_lengths_are_rounded_exactly() -> None:
    given = [2**40, 2**40 - 1, 1]
    found = propose_buckets(given, 2)
    assert found.buckets == (1, 2**40) and found.padded_tokens == (0, 1) and found.num_tokens == sum(given)
    rounded = propose_buckets(given, 1, multiple=2**40 - 1)
    assert rounded.buckets == (2 * (2**40 - 1),)
    assert rounded.padded_tokens == (3 * 2 * (2**40 - 1) - sum(given),)


def test_numbers_of_numpy_are_numbers() -> None:
    found = propose_buckets(np.array([3, 5]), np.int64(2), multiple=np.int32(4), program_tokens=np.float32(1))
    assert found == propose_buckets([3, 5], 2, multiple=4, program_tokens=1)
    assert {type(x) for x in (*found.buckets, *found.requests, *found.padded_tokens, found.num_tokens)} == {int}


@pytest.mark.parametrize(
    ("lengths", "settings", "match"),
    [
        ([], {"k": 1}, "no lengths were given"),
        ([3, 0], {"k": 1}, r"the length 0 was given; a length is a whole number from 1 to 2\*\*40"),
        ([2**40 + 1], {"k": 1}, "the length 1099511627777 was given"),
        ([True], {"k": 1}, "the length True was given"),
        (None, {"k": 1}, "lengths=None was given; it must be a list of whole numbers from 1"),
        (5, {"k": 1}, "lengths=5 was given"),
        ("12", {"k": 1}, "lengths='12' was given"),
        ([3, 2.5], {"k": 1}, r"the length 2\.5 was given"),
        ([3], {"k": 0}, "k=0 was given; it must be a whole number from 1"),
        ([3], {"k": 1, "multiple": 0}, "multiple=0 was given"),
        ([3, 5], {"k": 2, "multiple": 2**62}, r"multiple=4611686018427387904 was given; .* from 1 to 2\*\*40"),
        ([3], {"k": 1, "program_tokens": "a"}, r"program_tokens='a' and .* must be numbers from 0"),
        (
            [3],
            {"k": 1, "program_bytes": "a"},
            r"program_bytes='a' and memory_bytes=None were given; the first must be a num",
        ),
        ([3], {"k": 1, "program_tokens": -1.0}, r"program_tokens=-1\.0 and .* must be numbers from 0.*test_buckets"),
        (
            [3],
            {"k": 1, "program_bytes": 5e7},
            r"program_bytes=50000000\.0 and memory_bytes=None were given; .*both must be given.*test_buckets.*e\.g\. program_b",
        ),
        (
            [3],
            {"k": 1, "memory_bytes": 8e9},
            r"program_bytes=None and memory_bytes=8000000000\.0 were given; .*both must be given",
        ),
        (
            [3],
            {"k": 1, "program_bytes": -1, "memory_bytes": 8e9},
            r"program_bytes=-1 .*the first must be a number from 0",
        ),
        (
            [3],
            {"k": 1, "program_bytes": 5e7, "memory_bytes": 0},
            r"memory_bytes=0 were given; .*the second one above 0",
        ),
        ([3], {"k": 1, "memory_bytes": float("inf")}, r"memory_bytes=inf were given"),
    ],
)
def test_bad_input_is_refused(lengths: Any, settings: dict, match: str) -> None:
    with pytest.raises(AlpaLiteError, match=match):
        propose_buckets(lengths, **settings)
