"""Reads of rows of which the numbers are known -> slices.

``jnp.take(cache, 3, axis=0)`` is a gather, ``lax.dynamic_index_in_dim(cache, 3, 0)`` a ``dynamic_slice``, a row of
``jnp.split(cache, 4)`` a result of ``split``; ``cache[3]`` is a slice, and only of a slice is it seen which layer's row it
takes. Within bounds all of them read the same, whatever their mode says of other numbers. What is not known, or not within
bounds, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
from jax import lax

from alpa_lite._jax_compat import ClosedJaxpr, JaxprEqn, name_scope_of, user_context
from alpa_lite.trace.jaxprs import read, run_part
from alpa_lite.trace.row_access import Numbers, RowAccess, accessed, makers, row_access, shape_of

_READS = frozenset({"dynamic_slice", "gather"})


def read_by_slices(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function, its reads of known rows as slices; ``closed`` is without calls."""
    jaxpr = closed.jaxpr
    maker = makers(jaxpr)
    numbers = Numbers(dict(zip(jaxpr.constvars, closed.consts, strict=True)))
    found: dict[int, tuple[RowAccess, int] | None] = {}  # number of an op -> as ``_known_read``; None of a split
    for i, eqn in enumerate(jaxpr.eqns):
        numbers.take(eqn)
        if eqn.primitive.name == "split":
            if eqn.params["axis"] == 0 and len(eqn.outvars) > 1:
                found[i] = None
        elif eqn.primitive.name in _READS and (known := _known_read(eqn, numbers, maker)):
            found[i] = known
    if not found:
        return closed

    def run(*args: Any) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        done = 0
        for i, known in found.items():
            run_part(jaxpr, done, i, env)
            eqn = jaxpr.eqns[i]
            given = [read(env, a) for a in eqn.invars]
            with user_context(eqn.source_info.traceback), jax.named_scope(name_scope_of(eqn) or "row"):
                made = _split(eqn, given[0]) if known is None else [_sliced(eqn, given, *known)]
            env.update(zip(eqn.outvars, made, strict=True))
            done = i + 1
        run_part(jaxpr, done, len(jaxpr.eqns), env)
        return [read(env, a) for a in jaxpr.outvars]

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]
    return jax.make_jaxpr(run)(*structs)


def _known_read(eqn: JaxprEqn, numbers: Numbers, maker: Mapping[Any, JaxprEqn]) -> tuple[RowAccess, int] | None:
    """How an op reads rows, and the first of them; None if that is not known, or not all of them are there.

    None, too, if it reads all rows: that chooses none, and may be an op that works row by row (``trace/row_ops.py``).
    """
    shape, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    if not shape or sizes[0] == shape[0]:
        return None
    # Several neighbouring rows are a slice as well; a gather of several may put them anywhere in its result.
    access = RowAccess(eqn.invars[1], 1) if eqn.primitive.name == "dynamic_slice" else row_access(eqn, maker)
    first = None if access is None else numbers.read(access.number)
    if access is None or first is None or first.ndim:
        return None
    return (access, int(first)) if 0 <= first <= shape[0] - sizes[0] else None


def _sliced(eqn: JaxprEqn, given: list[Any], access: RowAccess, first: int) -> Any:
    own = lax.slice_in_dim(given[0], first, first + eqn.params["slice_sizes"][0])
    return accessed(eqn, [own, *given[1:]], access.operand, access.column)


def _split(eqn: JaxprEqn, whole: Any) -> Sequence[Any]:
    return [lax.slice_in_dim(whole, a, b) for a, b in pairwise(accumulate(map(int, eqn.params["sizes"]), initial=0))]
