"""Layers written out that index a stack by constants, over rows: the same values; nothing changes where that is not proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite._jax_compat import ClosedJaxpr, evaluate_jaxpr
from alpa_lite.trace.jaxprs import inlined
from alpa_lite.trace.read_rows import read_by_slices
from alpa_lite.trace.written_rows import written_by_rows
from tests.trace.test_indexed_rows import AT, CACHE, LAYERS, PROVEN, SLOTS, Access, W, X


def layers(access: Access, number: Callable[[int], Any] = lambda i: i) -> Any:
    def f(w: Any, stack: Any, x: Any) -> Any:
        for i in range(LAYERS):
            x = jnp.tanh(x @ w[i])
            read, stack = access(stack, number(i), x)
            x = x + jnp.sum(read)
        return x, stack

    return f


def rewritten(f: Any, *args: Any) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    before = read_by_slices(inlined(jax.make_jaxpr(f)(*args)))
    return before, written_by_rows(before)


def passed_on(jaxpr: ClosedJaxpr, whole: Any) -> list[str]:
    """Ops that make an array of the stack's type."""
    return [e.primitive.name for e in jaxpr.jaxpr.eqns for v in e.outvars if v.aval.shape == whole.shape]


def same_values(f: Any, made: ClosedJaxpr, *args: Any) -> None:
    args = tuple(map(jnp.asarray, args))
    found = evaluate_jaxpr(made.jaxpr, made.consts, args)
    for ours, theirs in zip(found, jax.tree.leaves(f(*args)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.medium
@pytest.mark.parametrize("number", [lambda i: i, lambda i: i - LAYERS, jnp.int32, lambda i: LAYERS - 1 - i])
@pytest.mark.parametrize("access", PROVEN)
def test_rows_alone_are_passed_on(access: str, number: Any) -> None:
    f = layers(PROVEN[access], number)
    before, made = rewritten(f, W, CACHE, X)
    assert len(passed_on(before, CACHE)) >= LAYERS and passed_on(made, CACHE) == ["concatenate"]
    same_values(f, made, W, CACHE, X)


def test_a_row_that_is_written_whole_needs_no_scatter() -> None:
    f = layers(PROVEN["whole_row"])
    _, made = rewritten(f, W, CACHE, X)
    assert not any(eqn.primitive.name.startswith("scatter") for eqn in made.jaxpr.eqns)


@pytest.mark.medium
def test_old_versions_and_slices_of_several_rows() -> None:
    def f(stack: Any) -> Any:
        new = stack.at[1].set(2 * stack[3])
        newer = new.at[3].set(new[1] + 1)
        return new, newer, stack[1:3], newer[2:, 1:], newer[0]

    _, made = rewritten(f, CACHE)
    assert passed_on(made, CACHE) == ["concatenate"] * 2
    same_values(f, made, CACHE)


def test_slices_of_no_rows() -> None:
    def f(stack: Any) -> Any:
        new = stack.at[0].set(2 * stack[1]).at[1].set(1)
        none, some, _ = jnp.split(new, [0, 2])
        return new, new[2:2], none, new[1:1, 1:], some

    _, made = rewritten(f, CACHE)
    assert passed_on(made, CACHE) == ["concatenate"]
    same_values(f, made, CACHE)


@pytest.mark.medium
def test_a_stack_made_inside_is_put_together_for_what_reads_all_of_it() -> None:
    """As a prompt's caches are made, and written into a slot of all."""

    def f(w: Any, stack: Any, x: Any, slot: Any) -> Any:
        x, new = layers(PROVEN["scattered"])(w, jnp.zeros(CACHE.shape), x)
        return x, lax.dynamic_update_slice(stack, new, (0, slot, 0, 0))

    stack = np.tile(CACHE, (1, 3, 1, 1))
    _, made = rewritten(f, W, stack, X, 2)
    assert passed_on(made, stack) == ["dynamic_update_slice"]
    assert passed_on(made, CACHE) == ["broadcast_in_dim", "concatenate"]
    same_values(f, made, W, stack, X, 2)


UNPROVEN: dict[str, Any] = {
    "all rows at once": lambda stack, x: stack.at[0].set(1.0).at[:, 1].set(0.0),
    "one row": lambda stack, x: stack.at[0].set(1.0),
    "read between": lambda stack, x: stack.at[0].set(1.0).at[1].set(stack.sum()).at[2].set(0.0).at[3].set(0.0),
    "a number of the batch": lambda stack, x: stack.at[x[0].astype(int)].set(1.0),
    "a row that is not there": lambda stack, x: stack.at[LAYERS].set(1.0, mode="drop"),
    "every other row": lambda stack, x: (stack.at[0].set(1.0)[::2], stack),
    "several rows": lambda stack, x: stack.at[jnp.array([0, 2])].set(1.0),
    "a row of rows": lambda stack, x: stack.at[0].set(1.0)[jnp.array([0, 2])],
    "a sum": lambda stack, x: stack.at[0].set(1.0).sum(),
    "itself": lambda stack, x: lax.dynamic_update_slice(stack, stack[1:2], (0, 0, 0, 0)) + stack,
    "inside of a branch": lambda stack, x: lax.cond(x[0] > 0, lambda s: s.at[0].set(1.0), lambda s: s, stack),
}


@pytest.mark.parametrize("what", UNPROVEN)
def test_what_is_not_proven_stays(what: str) -> None:
    before, made = rewritten(UNPROVEN[what], CACHE, AT.astype(jnp.float32))
    assert made is before


@pytest.mark.medium
def test_two_stacks_of_which_one_is_rows() -> None:
    def f(first: Any, second: Any) -> Any:
        for i in range(LAYERS):
            first = first.at[i].set(second[i])
            second = second.at[i].set(1.0) * 2
        return first, second

    other = CACHE[:, : SLOTS - 1]
    with_other = lambda second: jnp.concatenate([second, second[:, :1]], axis=1)  # noqa: E731
    g = lambda first, second: f(first, with_other(second))  # noqa: E731
    _, made = rewritten(g, CACHE, other)
    assert passed_on(made, CACHE).count("concatenate") == 2  # `first`, and what `second` is made of
    same_values(g, made, CACHE, other)
