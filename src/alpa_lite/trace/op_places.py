"""Puts ops of a function where the ops are that they belong to, so that a cut between two ops cuts nothing needlessly.

A function may cast all its parameters first, and write what it keeps (a cache) last. Cut into layers by the order of ops, the
first layer would read all parameters and the last one write all caches.

- What no matmul needs (a new cache, the mean of some layer's values) stands right behind the ops that it reads.
- What is made of parameters alone (a cast) stands right before its first reader, and so does what a matmul needs of parameters
  and the batch without another matmul before it (``openings.py``). What nobody reads stands right behind the last matmul that
  went into it.
- All else stays in its order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from alpa_lite._jax_compat import ClosedJaxpr, Literal
from alpa_lite.trace.jaxprs import is_heavy, variables
from alpa_lite.trace.openings import openings

_BEFORE, _LAYER, _KEPT = range(3)  # order of ops with one place


def gathered(closed: ClosedJaxpr, batch: Collection[int]) -> ClosedJaxpr:
    """The same function, its ops in such an order; ``batch`` has the positions of inputs that are no parameters."""
    jaxpr = closed.jaxpr
    eqns = list(jaxpr.eqns)
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    heavy = list(map(is_heavy, eqns))
    from_batch = {v for i, v in enumerate(jaxpr.invars) if i in batch}
    of_batch: list[bool] = []
    latest: list[int] = []  # of what is no part of the batch: the last op that stays in its place and that went into it
    for i, eqn in enumerate(eqns):
        given = variables(eqn.invars)
        of_batch.append(any(v in from_batch for v in given))
        if of_batch[-1]:
            from_batch.update(eqn.outvars)
        stays = heavy[i] or bool(eqn.effects)
        latest.append(i if stays else max((latest[maker[v]] for v in given if v in maker), default=-1))
    main = list(heavy)
    needed: set[Any] = set()
    for i in reversed(range(len(eqns))):
        main[i] = heavy[i] or bool(eqns[i].effects) or any(v in needed for v in eqns[i].outvars)
        if main[i]:
            needed.update(variables(eqns[i].invars))
    readers: dict[int, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in variables(eqn.invars):
            if v in maker:
                readers.setdefault(maker[v], []).append(i)
    place: dict[int, tuple[int, int, int]] = {}
    first = openings(jaxpr, batch)
    for i in reversed(range(len(eqns))):
        if main[i]:
            before = i in first
            at = min(place[r][0] for r in readers[i] if main[r]) if before else i
            place[i] = at, _BEFORE if before else _LAYER, i
    for i, eqn in enumerate(eqns):
        if of_batch[i] and not main[i]:
            made = [maker[v] for v in variables(eqn.invars) if v in maker]
            at = max((place[k][:2] if of_batch[k] else (latest[k], _KEPT) for k in made), default=(-1, _KEPT))
            place[i] = at[0], _KEPT if at[1] == _LAYER else at[1], i
    for i in reversed(range(len(eqns))):
        if not of_batch[i] and not heavy[i] and not eqns[i].effects:
            at = min((place[r][0] for r in readers.get(i, ())), default=latest[i])
            place[i] = at, _BEFORE if at > latest[i] else _KEPT, i  # never before what it is made of
    order = sorted(range(len(eqns)), key=lambda i: place[i])
    _check(eqns, order)
    return ClosedJaxpr(jaxpr.replace(eqns=[eqns[i] for i in order]), closed.consts)


def _check(eqns: list[Any], order: list[int]) -> None:
    """Every op stands behind what it reads."""
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    done: set[int] = set()
    for i in order:
        assert all(maker[v] in done for v in eqns[i].invars if not isinstance(v, Literal) and v in maker)
        done.add(i)
