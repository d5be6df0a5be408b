"""Scans that index a stack by the number of their iteration -> scans over the rows of that stack.

A scan over layers may carry the caches of all layers, of which each iteration reads and writes its own row, or take such a row
of an array that it reads as a whole. Cut between two layers as it is, the whole stack would go from one stage to the next. Given
to the scan row by row, with new rows stacked up again, it is the same function, as no iteration touches what belongs to another.
Where that is not proven the scan stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from alpa_lite._jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, name_scope_of, scan_layout, user_context
from alpa_lite.trace.jaxprs import inlined, read, run_part, variables
from alpa_lite.trace.row_access import Numbers, accessed, is_write, makers, row_access, shape_of


def indexed_by_rows(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function, its scans as far as that is proven over rows; ``closed`` is without calls."""
    known = Numbers(dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)))
    found: dict[int, _Scan] = {}
    for i, eqn in enumerate(closed.jaxpr.eqns):
        known.take(eqn)
        if eqn.primitive.name == "scan":
            scan = _Scan.of(eqn, known)
            if scan.stacks:
                found[i] = scan
    if not found:
        return closed
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]

    def run(*args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        done = 0
        for i, scan in found.items():
            run_part(jaxpr, done, i, env)
            eqn = jaxpr.eqns[i]
            with user_context(eqn.source_info.traceback), jax.named_scope(name_scope_of(eqn) or "layers"):
                env.update(zip(eqn.outvars, scan.run([read(env, a) for a in eqn.invars]), strict=True))
            done = i + 1
        run_part(jaxpr, done, len(jaxpr.eqns), env)
        return [read(env, a) for a in jaxpr.outvars]

    return jax.make_jaxpr(run)(*structs)


@dataclass(slots=True)
class _Scan:
    """A scan, and which of its constants and carries are stacks that it goes through row by row.

    Attributes:
        eqn, body: the scan, and its body without calls.
        stacks: positions among the scan's operands.
        accesses: number of an op of the body -> position of its operand that has the row's number, and, where that is one of
            several columns of an array, the column.
    """

    eqn: JaxprEqn
    body: ClosedJaxpr
    stacks: list[int] = field(default_factory=list)
    accesses: dict[int, tuple[int, int | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, eqn: JaxprEqn, outer: Numbers) -> _Scan:
        scan = cls(eqn, inlined(eqn.params["jaxpr"]))
        numbers = scan.numbers(outer)
        for position in range(sum(scan_layout(eqn.params))):
            scan.take(position, numbers)
        return scan

    @property
    def jaxpr(self) -> Jaxpr:
        return self.body.jaxpr

    @property
    def num_consts(self) -> int:
        return scan_layout(self.eqn.params)[0]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    def numbers(self, outer: Numbers) -> Numbers:
        """Of the body: rows of known arrays, counters, and what is made of them."""
        consts, carries = scan_layout(self.eqn.params)
        found = Numbers({}, of_body=True)
        for k, (var, atom) in enumerate(zip(self.jaxpr.invars, self.eqn.invars, strict=True)):
            number = outer.read(atom)
            if number is None or (k < consts and number.ndim):
                continue
            if not consts <= k < consts + carries:
                found.found[var] = number
            elif not number.ndim and (step := self._step(k)) is not None:
                times = np.arange(self.length)[:: -1 if self.eqn.params["reverse"] else 1]
                found.found[var] = (number + step * times).astype(number.dtype)
        for eqn in self.jaxpr.eqns:
            found.take(eqn)
        return found

    def _step(self, position: int) -> int | None:
        """By how much a carry is raised each time."""
        var, out = self.jaxpr.invars[position], self.jaxpr.outvars[position - self.num_consts]
        for eqn in self.jaxpr.eqns:
            if out in eqn.outvars and eqn.primitive.name in ("add", "sub"):
                first, second = eqn.invars
                if eqn.primitive.name == "add" and isinstance(first, Literal):
                    first, second = second, first
                if first is var and isinstance(second, Literal):
                    return int(second.val) if eqn.primitive.name == "add" else -int(second.val)
        return None

    def take(self, position: int, numbers: Numbers) -> None:
        """Makes an operand a stack, if all that is done with it is to read and write the row of the iteration."""
        var, carried = self.jaxpr.invars[position], position >= self.num_consts
        if shape_of(var)[:1] != (self.length,) or len(shape_of(var)) < 2:
            return
        versions, accesses = {var}, {}
        maker = makers(self.jaxpr)
        for i, eqn in enumerate(self.jaxpr.eqns):
            if not any(v in versions for v in variables(eqn.invars)):
                continue
            access = self._access(eqn, numbers, maker)
            others = [v for v in variables(eqn.invars[1:]) if v in versions]
            if access is None or others or eqn.invars[0] not in versions:
                return
            if is_write(eqn):
                versions.update(eqn.outvars)
            accesses[i] = access
        own = self.jaxpr.outvars[position - self.num_consts] if carried else None
        elsewhere = [v for k, v in enumerate(self.jaxpr.outvars) if k != position - self.num_consts or not carried]
        if accesses and (not carried or own in versions) and not any(v in versions for v in variables(elsewhere)):
            self.stacks.append(position)
            self.accesses |= accesses

    def _access(self, eqn: JaxprEqn, numbers: Numbers, maker: Mapping[Any, JaxprEqn]) -> tuple[int, int | None] | None:
        found = row_access(eqn, maker)
        if found is None:
            return None
        number = numbers.read(found.number)
        own = number is not None and number.ndim == 1 and np.array_equal(number, np.arange(self.length))
        return (found.operand, found.column) if own else None

    def run(self, given: Sequence[Any]) -> list[Any]:
        consts, carries = scan_layout(self.eqn.params)
        count, length = consts + carries, self.length
        carried = [k for k in range(consts, count) if k not in self.stacks]

        def one(state: list[Any], xs: Any) -> tuple[list[Any], Any]:
            rows, slices = xs
            values = dict(enumerate(given[:consts])) | dict(zip(carried, state, strict=True))
            values |= {k: row[None] for k, row in zip(self.stacks, rows, strict=True)}
            made = self._body([*(values[k] for k in range(count)), *slices])
            new = {k: made[k - consts] for k in range(consts, count)}
            stacked = [new[k][0] for k in self.stacks if k in new]
            return [new[k] for k in carried], (stacked, made[carries:])

        xs = [given[k] for k in self.stacks], list(given[count:])
        params = {name: self.eqn.params[name] for name in ("reverse", "unroll")}
        last, (stacked, ys) = lax.scan(one, [given[k] for k in carried], xs, length=length, **params)
        found = dict(zip(carried, last, strict=True))
        found |= zip((k for k in self.stacks if k >= consts), stacked, strict=True)
        return [*(found[k] for k in range(consts, count)), *ys]

    def _body(self, given: Sequence[Any]) -> list[Any]:
        """One iteration; stacks are their row alone, so that every access is to row 0."""
        jaxpr = self.jaxpr
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*self.body.consts, *given), strict=True))
        done = 0
        for i, (operand, column) in sorted(self.accesses.items()):
            run_part(jaxpr, done, i, env)
            eqn = jaxpr.eqns[i]
            with user_context(eqn.source_info.traceback), jax.named_scope(name_scope_of(eqn) or "row"):
                env[eqn.outvars[0]] = accessed(eqn, [read(env, a) for a in eqn.invars], operand, column)
            done = i + 1
        run_part(jaxpr, done, len(jaxpr.eqns), env)
        return [read(env, a) for a in jaxpr.outvars]
