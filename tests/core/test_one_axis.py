"""The layouts of a rule on one mesh axis."""

from __future__ import annotations

import pytest

from alpa_lite.core.one_axis import enumerate_sharded
from alpa_lite.core.rule_text import parse_rule

MATMUL = parse_rule("i k, k j -> i j", reduction="k").resolve([(32, 64), (64, 32)], [(32, 32)])


def test_matmul_has_five_layouts():
    assert [str(layout) for layout in enumerate_sharded(MATMUL, 4)] == [
        "R, R -> R",
        "S0, R -> S0",
        "S1, S0 -> R all-reduce(add)",
        "S1, S0 -> S0 reduce-scatter(add)",
        "R, S1 -> S1",
    ]


def test_one_shard_gives_the_trivial_rule():
    (only,) = enumerate_sharded(MATMUL, 1)
    assert only.is_trivial and str(only) == "R, R -> R"


@pytest.mark.parametrize(
    ("text", "kinds", "operands", "results", "shards", "want"),
    [
        ("i -> i", {}, [(6,)], [(6,)], 4, ["R -> R"]),  # does not divide
        ("(a b) -> (a b)", {"a": 4}, [(32,)], [(32,)], 4, ["R -> R", "S0 -> S0"]),  # b alone is not contiguous
        ("(a b) -> (a b)", {"a": 1}, [(32,)], [(32,)], 4, ["R -> R", "S0 -> S0"]),
        ("i j -> j", {"reduction": "i", "reduce_op": "max"}, [(8, 8)], [(8,)], 4,
         ["R -> R", "S0 -> R all-reduce(max)", "S1 -> S0"]),
        ("i j -> j", {"reduction": "i"}, [(8, 3)], [(3,)], 4, ["R -> R", "S0 -> R all-reduce(add)"]),
        ("i j -> i, i j", {"need_replication": "j"}, [(8, 8)], [(8,), (8, 8)], 2, ["R -> R, R", "S0 -> S0, S0"]),
    ],
)  # fmt: skip
def test_layouts(text, kinds, operands, results, shards, want):
    rule = parse_rule(text, **kinds).resolve(operands, results)
    assert [str(layout) for layout in enumerate_sharded(rule, shards)] == want
