"""Rules as users write them: the notation, beside JAX's own reader of it, and where the caret points."""

from __future__ import annotations

import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from alpa_lite.core.rule_source import suggest
from alpa_lite.core.rule_text import NamedRule, RuleText, parse_rule
from alpa_lite.errors import AlpaLiteError, RuleError


@pytest.mark.parametrize(
    ("text", "kinds", "operands", "results", "want"),
    [
        ("i k, k j -> i j", {"reduction": "k"}, [(8, 4), (4, 6)], [(8, 6)], "([i,j],[j,k])->([i,k]) {i=8,j=4,k=6} reduction={j}"),
        ("... i -> ... i", {}, [(2, 3, 4)], [(2, 3, 4)], "([i,j,k])->([i,j,k]) {i=2,j=3,k=4}"),
        ("... -> ...", {}, [()], [()], "([])->([]) {}"),
        ("(a b) c -> a b c", {"a": 4}, [(32, 5)], [(4, 8, 5)], "([ij,k])->([i,j,k]) {i=4,j=8,k=5}"),
        ("...1 i, ...2 i -> ...1 ...", {}, [], [], None),
        ("i j, -> i j", {}, [(2, 3), ()], [(2, 3)], "([i,j],[])->([i,j]) {i=2,j=3}"),
        ("i j -> i, j", {"need_replication": ("j",)}, [(2, 3)], [(2,), (3,)], "([i,j])->([i],[j]) {i=2,j=3} replicated={j}"),
        ("i j -> j", {"reduction": "i", "reduce_op": "max"}, [(2, 3)], [(3,)],
         "([i,j])->([j]) {i=2,j=3} reduction={i} reduce_op=max"),
        ("i j, j -> i j", {}, [(4, 6), (1,)], [(4, 6)], "([i,j],[1])->([i,j]) {i=4,j=6}"),
    ],
)  # fmt: skip
def test_text_and_shapes_to_rule(text, kinds, operands, results, want):
    if want is None:
        with pytest.raises(RuleError):
            parse_rule(text, **kinds)
        return
    rule = parse_rule(text, **kinds)
    assert str(rule.resolve(operands, results)) == want
    assert RuleText.read(rule.to_text()) == rule
    named = NamedRule(primitive="my_op", rule=rule)
    assert NamedRule.read(named.to_text()) == named


def test_a_factor_on_one_side_only_stays_whole_unless_named_in_reduction():
    rule = parse_rule("... i k, k j -> ... i j").resolve([(8, 4), (4, 6)], [(8, 6)])
    assert "replicated={j}" in str(rule) and "k stands on one side only" in rule.reason
    assert "replicated={i}" in str(parse_rule("-> i").resolve([()], [(4,)]))


CARETS = [
    ("i k, k$ j -> i j", 6, "unexpected character '$'"),
    ("i k, k j - i j", 9, "results come after ->"),
    ("i k, k j", 8, "there is no ->"),
    ("i -> i -> i", 7, "a second ->"),
    ("i .. k -> i", 2, "an ellipsis has three dots"),
    ("i ... -> i", 2, "an ellipsis stands only in front"),
    ("i, 2 -> i", 3, "factor names start with a letter"),
    ("i, (k j -> i j", 3, "this bracket is never closed"),
    ("i, k) j -> i j", 4, "this bracket was never opened"),
    ("(i (k j)) -> i", 3, "a bracket inside of a bracket"),
    ("i (k) -> i", 2, "brackets hold at least two factors"),
    ("i j i -> j", 4, "factor 'i' stands twice in one tensor"),
    ("i (j i) -> j", 5, "factor 'i' stands twice in one tensor"),
]


@pytest.mark.parametrize(("text", "column", "fault"), CARETS)
def test_a_typo_is_pointed_at(text, column, fault):
    with pytest.raises(RuleError) as caught:
        parse_rule(text)
    first, shown, caret, allowed, advice = str(caught.value).splitlines()
    assert isinstance(caught.value, AlpaLiteError)
    assert fault in first and shown == f"  {text}" and caret == f"  {' ' * column}^"
    assert allowed.startswith("  allowed: factor names") and advice.startswith("  next: ")


@pytest.mark.parametrize(
    ("text", "kinds", "fault"),
    [
        ("i k, k j -> i j", {"reduction": "i"}, "factor 'i' is named in reduction but stands in a result"),
        ("i k, k j -> i j", {"reduction": "x"}, "there is no factor 'x' in it (its factors: 'i', 'k', 'j')"),
        ("i k, k j -> i j", {"reduction": "k", "need_replication": "k"}, "factor 'k' has two kinds"),
        ("i k, k j -> i j", {"reduction": "k", "reduce_op": "mul"}, "choose one of add, max, min"),
        ("i k, k j -> i j", {"reduction_factors": 1}, "the keyword is 'reduction' here"),
        ("(a b) -> a b", {"a": 0}, "the size a=0"),
    ],
)
def test_keywords_are_checked(text, kinds, fault):
    with pytest.raises(RuleError) as caught:
        parse_rule(text, **kinds)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kinds", "operands", "results", "column", "fault"),
    [
        ("i k, k j -> i j", {}, [(4, 5), (6, 7)], [(4, 7)], 5, "a dim of size 6 cannot have the factors k=5"),
        ("i k, k j -> i j", {}, [(4, 5)], [(4, 7)], 5, "it has 2 operands, the op has 1"),
        ("i k -> i k", {}, [(4, 5)], [(4, 5), ()], 7, "it has 1 results, the op has 2"),
        ("i k -> i k", {}, [(3, 4, 5)], [(3, 4, 5)], 0, "this tensor has 2 dims here and 3 in the op"),
        ("... i, ... -> ...", {}, [(3, 4), ()], [(3,)], 7, "stands for 0 dims here and for 1 before"),
        ("(a b) -> c", {}, [(8,)], [(8,)], 0, "the sizes of a, b are unknown"),
        ("(a b) -> a c", {"a": 3}, [(8,)], [(3, 8)], 0, "cannot have the factors a=3 b=?"),
    ],
)
def test_shapes_that_do_not_fit_are_pointed_at(text, kinds, operands, results, column, fault):
    with pytest.raises(RuleError) as caught:
        parse_rule(text, **kinds).resolve(operands, results, where="kernel at step.py:3")
    lines = str(caught.value).splitlines()
    assert fault in lines[0] and lines[2] == f"  {' ' * column}^" and "kernel at step.py:3" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["i k, k j -> i j", "... i k, k j -> ... i j", "(a b) j -> a b j", "->", "i,->i", "...1 i, ...2 i -> ...1 i", "a_1 c -> a_1"],
)  # fmt: skip
def test_jax_reads_what_we_read(text):
    parse_rule(text)
    custom_partitioning(lambda x: x).def_partition(partition=lambda *a: None, sharding_rule=text)


@pytest.mark.parametrize("text", [t for t, _, _ in CARETS if "i j i" not in t and "(j i)" not in t])
def test_jax_refuses_what_we_refuse(text):
    with pytest.raises(ValueError):
        custom_partitioning(lambda x: x).def_partition(partition=lambda *a: None, sharding_rule=text)


@pytest.mark.parametrize(
    ("text", "kinds", "operands", "results", "line"),
    [
        ("i k, k j -> i j", {"reduction": "k"}, [(8, 4), (4, 6)], [(8, 6)], '"i j, j k -> i k", reduction="j"'),
        ("i -> ", {"reduction": "i", "reduce_op": "min"}, [(8,)], [()], '"i -> ", reduction="i", reduce_op="min"'),
        ("(a b) -> (b a)", {"a": 2}, [(8,)], [(8,)], '"(i j) -> (j i)", i=2, j=4'),
        ("a b -> a b", {"need_replication": "b"}, [(8, 4)], [(8, 4)], '"i j -> i j", need_replication="j"'),
        ("a b -> a b", {}, [(8, 1)], [(8, 1)], '"i one0 -> i one1"'),
    ],
)
def test_a_rule_is_suggested_as_source(text, kinds, operands, results, line):
    rule = parse_rule(text, **kinds).resolve(operands, results)
    made = suggest(rule)
    assert made == f"@al.register_rule({line})"
    again = eval(f"parse_rule({line})", {"parse_rule": parse_rule}).resolve(operands, results)
    assert str(again) == str(rule)


def test_under_vmap_the_new_dim_leads_the_mapped_tensors():
    rule = parse_rule("... i k, k j -> ... i j", reduction="k").batched((True, False))
    assert str(rule.resolve([(3, 8, 4), (4, 6)], [(3, 8, 6)])) == (
        "([i,j,k],[k,l])->([i,j,l]) {i=3,j=8,k=4,l=6} reduction={k}"
    )
    twice = rule.batched((True, True)).resolve([(2, 3, 8, 4), (2, 4, 6)], [(2, 3, 8, 6)])
    assert str(twice) == "([i,j,k,l],[i,l,m])->([i,j,k,m]) {i=2,j=3,k=8,l=4,m=6} reduction={l}"
