"""``al.rules.coverage``: which primitives a function uses and where their rules come from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import alpa_lite as al
from examples.registry import EXAMPLES


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows_of(fn, *args):
    return {row.primitive: row for row in al.rules.coverage(fn, *args).rows}


def test_origin_count_and_reason():
    def fn(x, w):
        mask = lax.broadcasted_iota(jnp.int32, (8, 4), 0) > 3
        return jnp.where(mask, jnp.tanh(jnp.tanh(x @ w)), 0.0), jax.pure_callback(lambda a: a, struct(8, 4), x)

    rows = rows_of(fn, struct(8, 4), struct(4, 4))
    assert (rows["tanh"].origin, rows["tanh"].count, rows["tanh"].splittable) == ("shardy", 2, 2)
    assert rows["iota"].origin == "own" and rows["iota"].reason
    assert rows["pure_callback"].splittable == 0 and "callback" in rows["pure_callback"].reason
    assert "pure_callback" in [row.primitive for row in al.rules.coverage(fn, struct(8, 4), struct(4, 4)).replicated]


def test_ops_inside_of_loops_are_counted():
    rows = rows_of(
        lambda c, xs: lax.scan(lambda h, x: (jnp.tanh(h @ x), None), c, xs)[0], struct(8, 8), struct(3, 8, 8)
    )
    assert {"scan", "dot_general", "tanh"} == set(rows)
    assert rows["scan"].splittable == 1


def test_the_table_is_text():
    table = str(al.rules.coverage(lambda x, w: jnp.tanh(x @ w), struct(8, 4), struct(4, 4)))
    head, *lines = table.splitlines()
    assert head.split()[:3] == ["primitive", "ops", "split"]
    assert len(lines) == 2
    assert "dot_general" in lines[0] and "([i,j],[j,k])->([i,k])" in lines[0] and "shardy" in lines[0]
    assert [line.index("shardy") for line in lines] == [head.index("rule from")] * 2


@pytest.mark.medium
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_primitive_of_the_examples_has_a_rule(name):
    example = EXAMPLES[name]("small")
    found = al.rules.coverage(example.train_step, *example.abstract_args())
    assert not [row.primitive for row in found.rows if row.origin == "none"]
    heavy = [
        row
        for row in found.rows
        if row.primitive in ("dot_general", "conv_general_dilated", "add", "mul", "reduce_sum")
    ]
    assert heavy and all(row.splittable for row in heavy)
    for row in found.replicated:  # nothing large stays whole without a word
        assert row.reason or "replicated=" in row.example or "{}" in row.example, row
