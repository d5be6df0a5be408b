"""Stacks that layers written out one by one index by constants -> their rows.

``cache.at[3, slot, at].set(new)`` makes a new array of all layers' caches, which each layer would hand to the next, and each
stage to the next stage. As long as every op on such an array writes one row of which the number is known, or slices rows, it
is the same function of the rows alone. They are put together for results, and for what reads the last version as a whole, if
all rows were written by then. Where that is not proven the array stays as it is.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from alpa_lite._jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, name_scope_of, user_context
from alpa_lite.trace.jaxprs import read, run_part, variables
from alpa_lite.trace.row_access import MOST_ROWS, Numbers, RowAccess, accessed, is_write, makers, row_access, shape_of
from alpa_lite.trace.row_ops import is_slice_of_rows


def written_by_rows(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function, its stacks as far as that is proven in rows.

    Args:
        closed: without calls, its reads of known rows as slices (``trace/read_rows.py``).
    """
    written = dict.fromkeys(v for eqn in closed.jaxpr.eqns if is_write(eqn) for v in variables(eqn.invars[:1]))
    if not any(len(shape_of(v)) > 1 and 1 < shape_of(v)[0] <= MOST_ROWS for v in written):
        return closed
    search = _Search(closed)
    stacks = [stack for root in dict.fromkeys(map(search.root, written)) if (stack := search.stack(root))]
    if not stacks:
        return closed
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]
    return jax.make_jaxpr(lambda *args: _Evaluation(closed, stacks, args).run())(*structs)


@dataclass(slots=True)
class _Stack:
    """An array, and all that is done with it.

    Attributes:
        root: before rows of it are written.
        writes: number of an op -> how it writes which row.
        slices: number of an op -> the rows that it takes, from and to.
        whole: number of an op -> versions that it reads as a whole.
    """

    root: Any
    writes: dict[int, tuple[RowAccess, int]] = field(default_factory=dict)
    slices: dict[int, tuple[int, int]] = field(default_factory=dict)
    whole: dict[int, list[Any]] = field(default_factory=dict)


class _Search:
    def __init__(self, closed: ClosedJaxpr) -> None:
        self.jaxpr: Jaxpr = closed.jaxpr
        self.maker = makers(self.jaxpr)
        self.numbers = Numbers(dict(zip(self.jaxpr.constvars, closed.consts, strict=True)))
        self.readers: defaultdict[Any, list[int]] = defaultdict(list)
        for i, eqn in enumerate(self.jaxpr.eqns):
            self.numbers.take(eqn)
            for var in dict.fromkeys(variables(eqn.invars)):
                self.readers[var].append(i)

    def root(self, var: Any) -> Any:
        """What a version was before single rows were written to it."""
        while (eqn := self.maker.get(var)) is not None and self._write(eqn, {*variables(eqn.invars[:1])}):
            var = eqn.invars[0]
        return var

    def stack(self, root: Any) -> _Stack | None:
        """None if it is not gone through row by row."""
        if len(shape_of(root)) < 2 or not 1 < shape_of(root)[0] <= MOST_ROWS:
            return None
        found, versions, old = _Stack(root), {root}, set()
        ahead, rows = list(self.readers[root]), set()
        while ahead:
            i = heapq.heappop(ahead)
            eqn = self.jaxpr.eqns[i]
            if rows_of := self._slice(eqn, versions):
                found.slices[i] = rows_of
            elif write := self._write(eqn, versions):
                found.writes[i] = write
                rows.add(write[1])
                old.add(eqn.invars[0])
                versions.add(eqn.outvars[0])
                for reader in self.readers[eqn.outvars[0]]:
                    heapq.heappush(ahead, reader)
            else:
                found.whole[i] = [v for v in dict.fromkeys(variables(eqn.invars)) if v in versions]
        if any(v in old for read in found.whole.values() for v in read):
            return None
        return found if len(rows) >= (shape_of(root)[0] if found.whole else 2) else None

    def _slice(self, eqn: JaxprEqn, versions: set[Any]) -> tuple[int, int] | None:
        params = eqn.params
        if eqn.primitive.name != "slice" or eqn.invars[0] not in versions:
            return None
        plain = not params["strides"] or params["strides"][0] == 1
        return (params["start_indices"][0], params["limit_indices"][0]) if plain else None

    def _write(self, eqn: JaxprEqn, versions: set[Any]) -> tuple[RowAccess, int] | None:
        if (
            not is_write(eqn)
            or isinstance(eqn.invars[0], Literal)
            or eqn.invars[0] not in versions
            or any(v in versions for v in variables(eqn.invars[1:]))
        ):
            return None
        access = row_access(eqn, self.maker)
        number = None if access is None else self.numbers.read(access.number)
        if access is None or number is None or number.ndim or not 0 <= number < shape_of(eqn.invars[0])[0]:
            return None
        return access, int(number)


class _Evaluation:
    """The function on one set of arguments."""

    def __init__(self, closed: ClosedJaxpr, stacks: Sequence[_Stack], args: Sequence[Any]) -> None:
        self.jaxpr = jaxpr = closed.jaxpr
        self.writes = {i: write for stack in stacks for i, write in stack.writes.items()}
        self.slices = {i: span for stack in stacks for i, span in stack.slices.items()}
        self.whole: defaultdict[int, list[Any]] = defaultdict(list)
        for stack in stacks:
            for i, versions in stack.whole.items():
                self.whole[i] += versions
        self.env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        self.versions: dict[Any, list[Any]] = {}  # rows (1, ...) of those that were written

    def run(self) -> list[Any]:
        done = 0
        for i in sorted({*self.writes, *self.slices, *self.whole}):
            run_part(self.jaxpr, done, i, self.env)
            done, eqn = i, self.jaxpr.eqns[i]
            for version in self.whole.get(i, ()):
                self.env[version] = self.joined(version)
            with user_context(eqn.source_info.traceback), jax.named_scope(name_scope_of(eqn) or "row"):
                if i in self.slices:
                    self.env[eqn.outvars[0]] = _sliced(eqn, self.rows(eqn.invars[0]), *self.slices[i])
                    done += 1
                elif i in self.writes:
                    self.write(eqn, *self.writes[i])
                    done += 1
        run_part(self.jaxpr, done, len(self.jaxpr.eqns), self.env)
        return [self.joined(v) if self._is_written(v) else read(self.env, v) for v in self.jaxpr.outvars]

    def rows(self, version: Any) -> list[Any]:
        if version not in self.versions:
            whole = self.env[version]
            self.versions[version] = [lax.slice_in_dim(whole, n, n + 1) for n in range(whole.shape[0])]
        return self.versions[version]

    def _is_written(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom not in self.env

    def joined(self, version: Any) -> Any:
        return self.env[version] if version in self.env else lax.concatenate(self.versions[version], 0)

    def write(self, eqn: JaxprEqn, access: RowAccess, number: int) -> None:
        stack = self.rows(eqn.invars[0])
        made = accessed(
            eqn, [stack[number], *(read(self.env, a) for a in eqn.invars[1:])], access.operand, access.column
        )
        self.versions[eqn.outvars[0]] = [*stack[:number], made, *stack[number + 1 :]]


def _sliced(eqn: JaxprEqn, stack: Sequence[Any], first: int, stop: int) -> Any:
    """What a slice takes of its rows, from ``first`` to ``stop``; there may be none."""
    low, high, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    rows = stack[first:stop] or [lax.slice_in_dim(stack[0], 0, 0)]
    own = rows[0] if len(rows) == 1 else lax.concatenate(rows, 0)
    if is_slice_of_rows(eqn.primitive.name, eqn.params, shape_of(eqn.invars[0])):
        return own
    return lax.slice(own, (0, *low[1:]), (stop - first, *high[1:]), strides)
