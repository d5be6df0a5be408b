"""Scans that index stacks by layer, over rows: the same values, and nothing changed where that is not proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite._jax_compat import evaluate_jaxpr
from alpa_lite.trace.indexed_rows import indexed_by_rows
from alpa_lite.trace.jaxprs import inlined
from tests.marks import slow_but
from tests.trace.cases import floats

LAYERS, SLOTS, LENGTH, WIDTH = 4, 3, 6, 2
CACHE, W, X, AT = (
    floats(LAYERS, SLOTS, LENGTH, WIDTH),
    floats(LAYERS, WIDTH, WIDTH),
    floats(SLOTS, WIDTH),
    jnp.array([0, 5, 2]),
)

Access = Callable[[Any, Any, Any], tuple[Any, Any]]  # stack, layer, new value of all slots -> row, stack


def sliced(stack: Any, i: Any, new: Any) -> tuple[Any, Any]:
    row = stack[i].at[:, 1].set(new)
    return row, lax.dynamic_update_index_in_dim(stack, row, i, 0)


def part(stack: Any, i: Any, new: Any) -> tuple[Any, Any]:
    """A part of the row is updated, and another part of the new one is read."""
    stack = lax.dynamic_update_slice(stack, new[None, :, None], (i, 0, AT[1], 0))
    return lax.dynamic_slice(stack, (i, 0, 2, 0), (1, SLOTS, LENGTH - 2, WIDTH))[0], stack


def scattered(stack: Any, i: Any, new: Any) -> tuple[Any, Any]:
    stack = stack.at[i, jnp.arange(SLOTS), AT].set(new)
    return stack[i, :, AT], stack


def whole_row(stack: Any, i: Any, new: Any) -> tuple[Any, Any]:
    return stack[i], stack.at[i].set(stack[i] + new[:, None])


def added(stack: Any, i: Any, new: Any) -> tuple[Any, Any]:
    stack = stack.at[i, jnp.arange(SLOTS), AT].add(new).at[i].multiply(0.5).at[i, :, 0].max(0.1)
    return stack[i], stack


def taken(stack: Any, i: Any, new: Any) -> tuple[Any, Any]:
    row = jnp.take(stack, i, axis=0) + new[:, None]
    return row, stack.at[i].set(row)


def called(stack: Any, i: Any, new: Any) -> tuple[Any, Any]:
    return jax.jit(sliced)(stack, i, new)


PROVEN: dict[str, Access] = {f.__name__: f for f in (sliced, part, scattered, whole_row, added, taken, called)}


def scan(access: Access, number: Callable[[Any], Any] = lambda i: i, *, reverse: bool = False, also: Any = None) -> Any:
    def f(w: Any, stack: Any, x: Any) -> Any:
        def layer(state: Any, row: Any) -> Any:
            x, stack = state
            w, i = row
            x = jnp.tanh(x @ w)
            read, stack = access(stack, number(i), x)
            return (x + jnp.sum(read), stack), also and also(stack)

        return lax.scan(layer, (x, stack), (w, jnp.arange(LAYERS)), reverse=reverse)

    return f


def counted(access: Access, first: int = 0, step: int = 1) -> Any:
    """Parameters and caches by the number of the layer, which is carried."""

    def f(w: Any, stack: Any, x: Any) -> Any:
        def layer(state: Any, _: None) -> Any:
            i, x, stack = state
            x = jnp.tanh(x @ w[i])
            read, stack = access(stack, i, x)
            return (i + step, x + jnp.sum(read), stack), None

        return lax.scan(layer, (first, x, stack), None, length=LAYERS)

    return f


def rewritten(f: Any) -> tuple[Any, Any]:
    closed = inlined(jax.make_jaxpr(f)(W, CACHE, X))
    found = indexed_by_rows(closed)
    want = evaluate_jaxpr(closed.jaxpr, closed.consts, [W, CACHE, X])
    got = evaluate_jaxpr(found.jaxpr, found.consts, [W, CACHE, X])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    return closed, found


def carried_stacks(closed: Any) -> list[Any]:
    """Types with a dim for layers that the scan carries, or reads whole."""
    (eqn,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    return [v.aval for v in eqn.params["jaxpr"].jaxpr.invars if v.aval.ndim > 1 and v.aval.shape[0] == LAYERS]


@pytest.mark.medium
@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("form", slow_but(["scan"], ["scan", "reverse", "counted"]))
def test_every_layer_has_its_row(name: str, form: str) -> None:
    access = PROVEN[name]
    f = counted(access) if form == "counted" else scan(access, reverse=form == "reverse")
    closed, found = rewritten(f)
    assert carried_stacks(closed) and not carried_stacks(found)


def test_a_loop_that_counts_down() -> None:
    def f(w: Any, stack: Any, x: Any) -> Any:
        def layer(state: Any, w: Any) -> Any:
            i, x, stack = state
            x = jnp.tanh(x @ w)
            row, stack = sliced(stack, i, x)
            return (i - 1, x + jnp.sum(row), stack), None

        return lax.scan(layer, (LAYERS - 1, x, stack), w, reverse=True)

    assert not carried_stacks(rewritten(f)[1])


UNPROVEN = {
    "another row": scan(sliced, lambda i: (i + 1) % LAYERS),
    "one row": scan(sliced, lambda i: 0 * i),
    "a neighbour is read": scan(lambda s, i, new: (s[jnp.maximum(i - 1, 0)], sliced(s, i, new)[1])),
    "all rows are read": scan(lambda s, i, new: (s, sliced(s, i, new)[1])),
    "all rows are given back": scan(sliced, also=lambda stack: stack),
    "all rows are changed": scan(lambda s, i, new: (s[i], 2 * s)),
    "two rows": scan(lambda s, i, new: (lax.dynamic_slice_in_dim(s, i, 2), sliced(s, i, new)[1])),
    "by a number that is computed": scan(lambda s, i, new: sliced(s, (new[0, 0] > 0).astype(int), new)),
    "two rows gathered": scan(
        lambda s, i, new: (jax.vmap(lambda j: lax.dynamic_slice(s, (i, j, 0, 0), (2, 1, 6, 2)))(AT % SLOTS), s)
    ),
    "rows by slot": scan(lambda s, i, new: (s[i], s.at[jnp.arange(SLOTS), jnp.arange(SLOTS), AT].set(new))),
    "another row by slot": scan(
        lambda s, i, new: (s[i], s.at[jnp.stack([i, 0 * i, i]), jnp.arange(SLOTS), AT].set(new))
    ),
    "a small type": scan(lambda s, i, new: sliced(s, (i * 64).astype(jnp.int8) // 64, new)),
    "counted from 1": counted(sliced, first=1),
    "counted by 2": counted(sliced, step=2),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", UNPROVEN)
def test_what_is_not_proven_stays(name: str) -> None:
    _, found = rewritten(UNPROVEN[name])
    assert CACHE.shape in [aval.shape for aval in carried_stacks(found)]


def test_numbers_of_a_layer_beside_vectors_of_a_layer() -> None:
    """Of as many entries as there are layers, or not."""

    def read(stack: Any, i: Any, new: Any) -> Any:
        at = jnp.where(i > 1, jnp.arange(LAYERS), jnp.arange(LAYERS)[::-1])
        at = jnp.where(i > 2, at, jnp.arange(LAYERS)) + jnp.where(i > 1, jnp.arange(8), jnp.arange(8) + 1)[0]
        return stack[i] * at.sum(), sliced(stack, i, new)[1]

    assert not carried_stacks(rewritten(scan(read))[1])
    vector = scan(lambda s, i, new: (s[jnp.arange(LAYERS)], sliced(s, i, new)[1]))
    assert CACHE.shape in [aval.shape for aval in carried_stacks(rewritten(vector)[1])]
