"""Reads of rows by numbers that are known, as slices: the same values; nothing changes where that is not proven."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite._jax_compat import ClosedJaxpr, evaluate_jaxpr
from alpa_lite.trace.jaxprs import inlined
from alpa_lite.trace.read_rows import read_by_slices
from tests.trace.cases import floats

STACK = floats(4, 3, 2)
ROWS = len(STACK)
READS: dict[str, Any] = {
    "take": lambda stack, i: jnp.take(stack, i, axis=0),
    "take from behind": lambda stack, i: jnp.take(stack, i - ROWS, axis=0),
    "take, clipped": lambda stack, i: jnp.take(stack, i, axis=0, mode="clip"),
    "take in a call": lambda stack, i: jax.jit(lambda s, i: jnp.take(s, i, axis=0))(stack, i),
    "dynamic_index_in_dim": lambda stack, i: lax.dynamic_index_in_dim(stack, i, 0, keepdims=False),
    "dynamic_slice_in_dim": lambda stack, i: lax.dynamic_slice_in_dim(stack, i, 1),
    "an array's number": lambda stack, i: stack[jnp.int32(i)],
    "a vector's number": lambda stack, i: stack[jnp.arange(ROWS)[i]],
    "split": lambda stack, i: jnp.split(stack, ROWS)[i],
    "unequal split": lambda stack, i: jnp.split(stack, [i])[1],
    "several rows": lambda stack, i: lax.dynamic_slice_in_dim(stack, min(i, ROWS - 2), 2),
}


def rewritten(f: Any) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    before = inlined(jax.make_jaxpr(f)(STACK))
    return before, read_by_slices(before)


def readers(closed: ClosedJaxpr) -> set[str]:
    """Ops that read the stack."""
    return {e.primitive.name for e in closed.jaxpr.eqns if closed.jaxpr.invars[0] in e.invars}


def same_values(f: Any, made: ClosedJaxpr) -> None:
    found = evaluate_jaxpr(made.jaxpr, made.consts, [jnp.asarray(STACK)])
    for ours, theirs in zip(found, jax.tree.leaves(f(jnp.asarray(STACK))), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.medium
@pytest.mark.parametrize("what", READS)
def test_a_known_row_is_a_slice(what: str) -> None:
    for i in range(ROWS):
        f = lambda stack, i=i: READS[what](stack, i)  # noqa: E731
        before, made = rewritten(f)
        assert readers(before) != {"slice"} and readers(made) == {"slice"}
        assert not any(e.primitive.name in ("gather", "dynamic_slice", "split") for e in made.jaxpr.eqns)
        same_values(f, made)


PARTS: dict[str, Any] = {
    "at a place that is computed": lambda stack, at: lax.dynamic_slice(stack, (1, at, 0), (1, 2, 2)),
    "at a place that is not there": lambda stack, at: lax.dynamic_slice(stack, (1, at + 9, 0), (1, 2, 2)),
    "entries of slots": lambda stack, at: stack[1, jnp.arange(3), at],
    "entries that are not there": lambda stack, at: stack.at[1, jnp.arange(3), at + 9].get(mode="fill"),
    "one entry": lambda stack, at: jnp.take(stack, 1, axis=0)[at],
}


@pytest.mark.medium
@pytest.mark.parametrize("what", PARTS)
def test_a_part_of_a_known_row(what: str) -> None:
    f = lambda stack: PARTS[what](stack, (stack[0, 0, 0] > 9).astype(int))  # noqa: E731
    before, made = rewritten(f)
    assert readers(before) != {"slice"} and readers(made) == {"slice"}
    same_values(f, made)


UNPROVEN: dict[str, Any] = {
    "a row that is computed": lambda stack: jnp.take(stack, (stack[0, 0, 0] > 0).astype(int), axis=0),
    "a row that is not there": lambda stack: jnp.take(stack, ROWS, axis=0),
    "a row before the first": lambda stack: lax.dynamic_slice_in_dim(stack + 0, jnp.int32(-9), 1),
    "rows of which one is not there": lambda stack: lax.dynamic_slice_in_dim(stack, ROWS - 1, 2),
    "two rows": lambda stack: stack[jnp.array([2, 0])],
    "another dim": lambda stack: (jnp.take(stack, 1, axis=1), jnp.split(stack, 3, axis=1)),
    "all rows": lambda stack: (lax.dynamic_slice_in_dim(stack, 1, 2, axis=1), jnp.split(stack, 1)),
    "a scalar": lambda stack: lax.dynamic_slice_p.bind(jnp.sum(stack), slice_sizes=()),
    "a row for each": lambda stack: jax.vmap(lambda row: jnp.take(row, 1, axis=0))(stack),
}


@pytest.mark.parametrize("what", UNPROVEN)
def test_what_is_not_proven_stays(what: str) -> None:
    before, made = rewritten(UNPROVEN[what])
    assert made is before
