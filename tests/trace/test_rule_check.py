"""The re-check of rules: right ones pass, wrong ones are refused with what is wrong."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.core.rule_text import parse_rule
from alpa_lite.errors import RuleError
from alpa_lite.trace.tiles import smallest_split
from alpa_lite.trace.user_rules import check_tile_shapes

N = 4  # one size for all dims, so that a wrong rule mostly fits in shape and only its values betray it

# Function, operand ranks, and all that is true of it: the text with its kinds.
OPS = {
    "matmul": (jnp.matmul, (2, 2), "i k, k j -> i j", {"reduction": "k"}),
    "matmul of transposed": (lambda x, w: x @ w.T, (2, 2), "i k, j k -> i j", {"reduction": "k"}),
    "batched matmul": (jnp.matmul, (3, 3), "b i k, b k j -> b i j", {"reduction": "k"}),
    "softmax": (jax.nn.softmax, (2,), "i j -> i l", {}),
    "max": (lambda x: x.max(0), (2,), "i j -> j", {"reduction": "i", "reduce_op": "max"}),
    "min": (lambda x: x.min(-1), (3,), "i j k -> i j", {"reduction": "k", "reduce_op": "min"}),
    "sum and sum of squares": (lambda x: (x.sum(0), (x * x).sum(0)), (2,), "i j -> j, j", {"reduction": "i"}),
    "transpose": (lambda x: x.transpose(2, 0, 1), (3,), "i j k -> k i j", {}),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (2,), "i j -> i l", {}),
    "scaled rows": (lambda x, s: x * s[:, None], (2, 1), "i j, i -> i j", {}),
    "outer product": (jnp.outer, (1, 1), "i, j -> i j", {}),
    "reverse": (lambda x: x[::-1], (2,), "i j -> l j", {}),
}


def structs(ranks):
    return [jax.ShapeDtypeStruct((N,) * rank, jnp.float32) for rank in ranks]


def resolved(name, text, kinds):
    fn, ranks, _, _ = OPS[name]
    args = structs(ranks)
    results = [r.shape for r in jax.tree.leaves(jax.eval_shape(fn, *args))]
    return parse_rule(text, **kinds).resolve([a.shape for a in args], results)


def layouts(rule):
    return {(x.operands, x.results, x.reduce, x.reduce_op) for x in al.rules.enumerate_sharded(rule, 2)}


@pytest.mark.medium
@pytest.mark.parametrize("name", OPS)
def test_right_rules_pass(name):
    fn, ranks, text, kinds = OPS[name]
    assert al.rules.check(fn, text, *structs(ranks), **kinds) == resolved(name, text, kinds)


def wrong_rule(seed):
    """A random op with a random rule that fits in shape and allows a layout which the op does not have."""
    rng = np.random.default_rng(seed)
    while True:
        name = list(OPS)[rng.integers(len(OPS))]
        fn, ranks, text, kinds = OPS[name]
        args = structs(ranks)
        outs = jax.tree.leaves(jax.eval_shape(fn, *args))
        terms = [" ".join(rng.permutation(["a", "b", "c"])[:rank]) for rank in (*ranks, *(o.ndim for o in outs))]
        made = f"{', '.join(terms[: len(ranks)])} -> {', '.join(terms[len(ranks) :])}"
        free = tuple(f for f in "abc" if f not in made.split("->")[1] and f in made)
        chosen = {"reduction": free, "reduce_op": str(rng.choice(["add", "max", "min"]))} if free else {}
        rule = resolved(name, made, chosen)
        if layouts(rule) <= layouts(resolved(name, text, kinds)):
            continue
        try:
            check_tile_shapes(lambda *a, f=fn: jax.tree.leaves(f(*a)), rule, args, outs, name)
        except RuleError:
            continue
        return name, made, chosen


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.medium) for seed in range(5, 20))])
def test_20_seeded_wrong_rules_are_all_rejected(seed):
    """They fit in shape, so it is the values that give them away."""
    name, text, kinds = wrong_rule(seed)
    fn, ranks, _, _ = OPS[name]
    with pytest.raises(RuleError, match=r"differs from the unsharded one|get different values"):
        al.rules.check(fn, text, *structs(ranks), seed=seed, **kinds)


@pytest.mark.medium
def test_the_seeded_wrong_rules_are_of_many_kinds():
    wrong = [wrong_rule(seed) for seed in range(20)]
    assert len({(name, text) for name, text, _ in wrong}) >= 12 and len({name for name, _, _ in wrong}) >= 5


@pytest.mark.parametrize(
    ("name", "text", "kinds", "fault"),
    [
        ("matmul", "i k, k j -> i j", {"reduction": "k", "reduce_op": "max"}, "with j in 2, result 0 differs"),
        ("softmax", "i j -> i j", {}, "with j in 2, result 0 differs from the unsharded one"),
        ("scaled rows", "i j, k -> i j", {}, "with i in 2, the function fails on tiles [[2, 4], [4]]"),
        ("outer product", "i, j -> j i", {}, "with i in 2, on tiles [[2], [4]] it gives results [[2, 4]]"),
    ],
)
def test_the_message_says_what_is_wrong(name, text, kinds, fault):
    fn, ranks, _, _ = OPS[name]
    with pytest.raises(RuleError) as caught:
        al.rules.check(fn, text, *structs(ranks), **kinds)
    message = str(caught.value)
    assert fault in message and "is wrong for" in message and "A factor may be split only if" in message
    assert "let al.rules.probe find the rule" in message


def test_a_result_that_should_be_equal_on_all_devices_is_compared():
    with pytest.raises(RuleError, match="devices that should hold the same tile of a result get different values"):
        al.rules.check(lambda x: (x * 2, x.sum()), "i -> i, ", jax.ShapeDtypeStruct((8,), jnp.float32))


@pytest.mark.medium
def test_minor_factors_are_checked_under_their_major_ones():
    """(a b) -> a b: b is contiguous only where a is split completely."""
    whole = jax.ShapeDtypeStruct((16,), jnp.float32)
    al.rules.check(lambda x: x.reshape(-1, min(4, x.size)), "(a b) -> a b", whole)
    with pytest.raises(RuleError):
        al.rules.check(lambda x: x.reshape(4, -1).T, "(a b) -> a b", whole)


def test_factors_before_a_split_one_are_split_completely_in_every_dim():
    rule = parse_rule("(a b) -> (b a)", a=2).resolve([(8,)], [(8,)])
    assert smallest_split(rule, 0) == smallest_split(rule, 1) == {0: 2, 1: 4}
    plain = parse_rule("(a b) c -> a b c", a=2).resolve([(8, 3)], [(2, 4, 3)])
    assert [smallest_split(plain, f) for f in range(3)] == [{0: 2}, {1: 2, 0: 2}, {2: 3}]
    whole = parse_rule("(a b) -> a b", a=2, need_replication="a").resolve([(8,)], [(2, 4)])
    assert smallest_split(whole, 1) is None
    al.rules.check(
        lambda x: x.reshape(2, -1), "(a b) -> a b", jax.ShapeDtypeStruct((8,), jnp.float32), need_replication="a"
    )


@pytest.mark.medium
def test_integers_are_drawn_from_the_arguments_own_values():
    table = jnp.arange(32.0).reshape(8, 4)
    al.rules.check(lambda t, i: t[i], "v d, n -> n d", table, jnp.array([0, 3, 7, 2]))
    with pytest.raises(RuleError):
        al.rules.check(lambda t, i: t[i], "v d, n -> n d", table, jnp.array([0, 3, 7, 2]), reduction="v")


@pytest.mark.medium
def test_every_pairing_of_dims_of_a_matmul_but_the_right_one_is_refused():
    right = "a b, b c -> a c"
    args = structs((2, 2))
    refused = 0
    for x, w in itertools.product(itertools.permutations("abc", 2), repeat=2):
        text = f"{x[0]} {x[1]}, {w[0]} {w[1]} -> a c"
        kinds = {"reduction": "b"} if "b" in text.split("->")[0] else {}
        if text == right or layouts(resolved("matmul", text, kinds)) <= layouts(
            resolved("matmul", right, {"reduction": "b"})
        ):
            continue
        with pytest.raises(RuleError):
            al.rules.check(jnp.matmul, text, *args, **kinds)
        refused += 1
    assert refused > 20
