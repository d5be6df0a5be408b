"""JAX's own jaxprs, before they are flattened: calls inlined, parts evaluated, matmuls found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from alpa_lite._jax_compat import (
    UNSTACK,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    evaluate_jaxpr,
    inner_jaxprs,
    jaxpr_part,
    unstack_by_slices,
)

HEAVY = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
_INLINED = ("jit", "pjit", "closed_call", "core_call", UNSTACK)


def contains(jaxpr: Jaxpr, names: frozenset[str]) -> bool:
    """Whether an op of one of the names is in the jaxpr, or in a function, loop or branch inside it."""
    return any(e.primitive.name in names or any(contains(j, names) for j in inner_jaxprs(e)) for e in jaxpr.eqns)


def is_heavy(eqn: JaxprEqn) -> bool:
    """Whether it is a matmul or a convolution, or has one inside."""
    return eqn.primitive.name in HEAVY or any(contains(j, HEAVY) for j in inner_jaxprs(eqn))


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same without calls of ``jit`` and with slices for ``unstack``; source lines and name scopes stay."""
    if not any(e.primitive.name in _INLINED for e in closed.jaxpr.eqns):
        return closed
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]
    return jax.make_jaxpr(lambda *args: _evaluate_inlined(closed, args))(*structs)


def _evaluate_inlined(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
    start = 0
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name not in _INLINED:
            continue
        run_part(jaxpr, start, i, env)
        if eqn.primitive.name == UNSTACK:
            inner = unstack_by_slices(eqn)
        else:
            inner = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
        inner = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
        scopes = [s for s in (str(eqn.source_info.name_stack), eqn.params.get("name", "")) if s]
        with jax.named_scope("/".join(scopes) or "call"):
            made = _evaluate_inlined(inner, [read(env, a) for a in eqn.invars])
        env.update(zip(eqn.outvars, made, strict=True))
        start = i + 1
    run_part(jaxpr, start, len(jaxpr.eqns), env)
    return [read(env, a) for a in jaxpr.outvars]


def read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def variables(atoms: Sequence[Any]) -> list[Any]:
    return [a for a in atoms if not isinstance(a, Literal)]


def run_part(jaxpr: Jaxpr, start: int, stop: int, env: dict[Any, Any]) -> None:
    """Evaluate the equations ``start`` to ``stop`` in ``env``, and put what they make there."""
    if start == stop:
        return
    part = jaxpr_part(jaxpr, start, stop)
    env.update(zip(part.outvars, evaluate_jaxpr(part, (), [env[v] for v in part.invars]), strict=True))
