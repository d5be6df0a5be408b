"""Closed jaxpr -> FlatJaxpr: calls inlined, dead code dropped, control flow kept as ops with bodies.

Inlined: ``jit``, ``custom_jvp_call``, ``custom_vjp_call``, ``closed_call`` and ``remat`` (a differentiated remat puts an
``optimization_barrier`` on its inputs, as JAX's own lowering does, so that XLA does not undo the recomputation); ``unstack``, as
slices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from alpa_lite._jax_compat import (
    UNSTACK,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    name_scope_of,
    source_of,
    unstack_by_slices,
)

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "custom_lin": "bwd",
}
_REMATS = ("remat2", "checkpoint", "remat")


@dataclass(slots=True)
class FlatOp:
    """One equation after inlining: ``inputs`` are value ids or ``Literal``.

    ``outputs`` are value ids, -1 when nothing uses the result; ``all_outputs`` keeps the ids, for their types. ``like``: another
    op of the same equation, of a function that is called several times.
    """

    primitive: Any
    params: dict[str, Any]
    inputs: list[Any]
    outputs: list[int]
    source: str
    scope: str
    bodies: list[FlatJaxpr] = field(default_factory=list)
    has_effects: bool = False
    all_outputs: tuple[int, ...] = ()
    traceback: Any = None
    like: FlatOp | None = field(default=None, init=False, repr=False, compare=False)
    _settings: tuple[Any, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.all_outputs = tuple(self.outputs)

    @property
    def settings(self) -> tuple[Any, ...]:
        """The parameters as a key; none of an op with bodies, which say the same. ``params`` must not change any more."""
        if self.bodies:
            return ()
        if self._settings is None and self.like is not None:
            self._settings = self.like.settings
        elif self._settings is None:
            self._settings = tuple((k, _setting(v)) for k, v in self.params.items() if k != "group")
        return self._settings

    def renumbered(self, params: dict[str, Any], inputs: list[Any], all_outputs: list[int]) -> FlatOp:
        """The same op on other values; ``params`` may differ in its ``group`` alone."""
        outputs = [new if old >= 0 else -1 for new, old in zip(all_outputs, self.outputs, strict=True)]
        fresh = FlatOp(self.primitive, params, inputs, outputs, self.source, self.scope, self.bodies, self.has_effects)
        fresh.all_outputs, fresh.traceback = tuple(all_outputs), self.traceback
        fresh._settings = self.settings or None
        return fresh

    @property
    def name(self) -> str:
        return self.primitive.name


def _setting(value: Any) -> Any:
    if value is None or isinstance(value, int | str | bool | float):
        return value
    if isinstance(value, tuple) and all(isinstance(v, int | str | bool) for v in value):
        return value
    return re.sub(r"0x[0-9a-f]+", "", str(value))


@dataclass(slots=True)
class FlatJaxpr:
    """A jaxpr without calls. ``avals[i]`` is the abstract value of value i; ``constants`` maps value ids to arrays."""

    avals: list[Any]
    ops: list[FlatOp]
    inputs: list[int]
    outputs: list[Any]
    constants: dict[int, Any]


def flatten(closed: ClosedJaxpr, *, keep_boundaries: bool = False) -> FlatJaxpr:
    """Inline and simplify; see the module docstring. Layer boundaries and pins to stages are dropped unless they are kept."""
    builder = _Builder(keep_boundaries)
    flat = builder.run(closed.jaxpr, closed.consts)
    drop_dead(flat)
    return flat


class _Builder:
    """Holds the growing value list of one flat jaxpr."""

    def __init__(self, keep_boundaries: bool) -> None:
        self.keep_boundaries = keep_boundaries
        self.avals: list[Any] = []
        self.ops: list[FlatOp] = []
        self.constants: dict[int, Any] = {}
        self.known: dict[int, tuple[str, str, FlatOp | None]] = {}  # of equations: a function may be called many times

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def run(self, jaxpr: Jaxpr, consts: Any) -> FlatJaxpr:
        env: dict[Var, Any] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.new(var.aval)
            self.constants[env[var]] = const
        inputs = []
        for var in jaxpr.invars:
            env[var] = self.new(var.aval)
            inputs.append(env[var])
        outputs = self.inline(jaxpr, env, "", "")
        return FlatJaxpr(self.avals, self.ops, inputs, outputs, self.constants)

    def inline(self, jaxpr: Jaxpr, env: dict[Var, Any], scope: str, source: str) -> list[Any]:
        """Append the equations of ``jaxpr`` under ``env``; returns what its outvars are (ids or literals)."""

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(a) for a in eqn.invars]
            line, own, first = self.known.get(id(eqn)) or (source_of(eqn), name_scope_of(eqn), None)
            inner_scope = f"{scope}/{own}" if scope and own else scope or own
            name = eqn.primitive.name
            if name in _CALLS or name == UNSTACK:
                results = self.call(eqn, inputs, inner_scope, source)
            elif name == "optimization_barrier":
                results = self.barrier(inputs, eqn, inner_scope)
            elif name == "layer_boundary":
                results = self.boundary(inputs, eqn, inner_scope) if self.keep_boundaries else inputs
            elif name == "pin_stage" and not self.keep_boundaries:
                results = inputs
            elif name == "custom_linear_solve":
                results = self.linear_solve(eqn, inputs, inner_scope, source)
            else:
                results = [self.new(v.aval) for v in eqn.outvars]
                op = FlatOp(eqn.primitive, eqn.params, inputs, results, line or source, inner_scope)
                op.traceback, op.like = eqn.source_info.traceback, first
                self.known[id(eqn)] = line, own, first or op
                op.bodies = [flatten(body, keep_boundaries=self.keep_boundaries) for body in _bodies(eqn)]
                op.has_effects = bool(eqn.effects)  # prints and callbacks, also those inside of bodies
                self.ops.append(op)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def call(self, eqn: JaxprEqn, inputs: list[Any], scope: str, source: str) -> list[Any]:
        inner = unstack_by_slices(eqn) if eqn.primitive.name == UNSTACK else eqn.params[_CALLS[eqn.primitive.name]]
        jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
        if eqn.primitive.name in _REMATS and eqn.params["differentiated"] and eqn.params["prevent_cse"]:
            inputs = self.barrier(inputs, eqn, scope)
        env: dict[Var, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.new(var.aval)
            self.constants[env[var]] = const
        label = eqn.params.get("name", "")
        inner_scope = f"{scope}/{label}" if scope and label else scope or label
        return self.inline(jaxpr, env, inner_scope, source_of(eqn) or source)

    def linear_solve(self, eqn: JaxprEqn, inputs: list[Any], scope: str, source: str) -> list[Any]:
        """Only the solver itself is left to do: derivatives have been taken by now."""
        lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        first = lengths.matvec + lengths.vecmat
        operands = inputs[first : first + lengths.solve] + inputs[sum(lengths) :]
        env: dict[Var, Any] = dict(zip(solve.jaxpr.invars, operands, strict=True))
        for var, const in zip(solve.jaxpr.constvars, solve.consts, strict=True):
            env[var] = self.new(var.aval)
            self.constants[env[var]] = const
        return self.inline(solve.jaxpr, env, scope, source_of(eqn) or source)

    def barrier(self, inputs: list[Any], eqn: JaxprEqn, scope: str) -> list[Any]:
        from jax.lax import optimization_barrier_p

        real = list(dict.fromkeys(i for i in inputs if not isinstance(i, Literal)))
        renamed = {i: self.new(self.avals[i]) for i in real}
        group = tuple(renamed.values())
        # One op per tensor, so that each has its own layout; ``group`` lets lowering emit the one joint barrier.
        for old, fresh in renamed.items():
            self.ops.append(FlatOp(optimization_barrier_p, {"group": group}, [old], [fresh], source_of(eqn), scope))
        return [i if isinstance(i, Literal) else renamed[i] for i in inputs]

    def boundary(self, inputs: list[Any], eqn: JaxprEqn, scope: str) -> list[Any]:
        """One op per tensor; those of one boundary share its ``group``."""
        results = [self.new(v.aval) for v in eqn.outvars]
        for old, fresh in zip(inputs, results, strict=True):
            params = {"group": results[0], "backward": eqn.params["backward"]}
            self.ops.append(FlatOp(eqn.primitive, params, [old], [fresh], source_of(eqn), scope))
        return results


def _bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    name = eqn.primitive.name
    if name == "scan":
        return [eqn.params["jaxpr"]]
    if name == "while":
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    if name == "cond":
        return list(eqn.params["branches"])
    return []


def drop_dead(flat: FlatJaxpr) -> None:
    """Remove ops that no output needs; unused results become -1."""
    live = {o for o in flat.outputs if not isinstance(o, Literal)}
    kept = []
    for op in reversed(flat.ops):
        if not op.has_effects and not any(o in live for o in op.outputs):
            continue
        op.outputs = [o if o in live else -1 for o in op.outputs]
        live.update(i for i in op.inputs if not isinstance(i, Literal))
        kept.append(op)
    flat.ops = kept[::-1]
    flat.constants = {i: c for i, c in flat.constants.items() if i in live}
