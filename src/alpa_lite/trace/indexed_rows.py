"""Scans that index a stack by the number of their iteration -> scans over the rows of that stack.

A scan over layers may carry the caches of all layers, of which each iteration reads and writes its own row, or take such a row
of an array that it reads as a whole. Cut between two layers as it is, the whole stack would go from one stage to the next. Given
to the scan row by row, with new rows stacked up again, it is the same function, as no iteration touches what belongs to another.
Where that is not proven the scan stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from alpa_lite._jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, name_scope_of, scan_layout, user_context
from alpa_lite.trace.forward_ops import inlined, read, run_part, variables

_MOST = 4096  # rows of a stack
_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def indexed_by_rows(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function, its scans as far as that is proven over rows; ``closed`` is without calls."""
    known = _Numbers(dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)))
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


class _Numbers:
    """Whole numbers that are known: of a scan's body one per iteration, in the order of rows."""

    def __init__(self, given: Mapping[Any, Any], *, of_body: bool = False) -> None:
        self.of_body = of_body
        self.found = {v: n for v, n in given.items() if isinstance(n, np.ndarray | np.generic) and _is_small(n)}

    def read(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            number = np.asarray(atom.val)
            return number if number.ndim == 0 and _is_small(number) else None
        return self.found.get(atom)

    def take(self, eqn: JaxprEqn) -> None:
        """What an op makes of such numbers."""
        name, params = eqn.primitive.name, eqn.params
        given = [self.read(a) for a in eqn.invars]
        if len(eqn.outvars) != 1 or any(n is None for n in given):
            return
        result: Any = eqn.outvars[0]
        if self.of_body and result.aval.shape:  # one number per iteration is no vector
            return
        made: Any = None
        if name == "iota" and params["dimension"] == 0 and len(params["shape"]) == 1 and params["shape"][0] <= _MOST:
            made = np.arange(params["shape"][0])
        elif name in _NUMBERS:
            made = _NUMBERS[name](*given)
        elif name == "convert_element_type":
            made = given[0]
        elif name == "select_n" and len(given) == 3:
            made = np.where(given[0].astype(bool), given[2], given[1])
        if made is not None and np.dtype(result.aval.dtype).kind in "iub":
            self.found[result] = made.astype(result.aval.dtype)


def _is_small(number: Any) -> bool:
    return number.dtype.kind in "iub" and number.ndim <= 1 and number.size <= _MOST


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _holds_rows(dtype: Any) -> bool:
    """Whether no number of a row is another one in this type."""
    return np.dtype(dtype).kind in "iu" and np.iinfo(dtype).max >= _MOST


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
    def of(cls, eqn: JaxprEqn, outer: _Numbers) -> _Scan:
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

    def numbers(self, outer: _Numbers) -> _Numbers:
        """Of the body: rows of known arrays, counters, and what is made of them."""
        consts, carries = scan_layout(self.eqn.params)
        found = _Numbers({}, of_body=True)
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

    def take(self, position: int, numbers: _Numbers) -> None:
        """Makes an operand a stack, if all that is done with it is to read and write the row of the iteration."""
        var, carried = self.jaxpr.invars[position], position >= self.num_consts
        if _shape(var)[:1] != (self.length,) or len(_shape(var)) < 2:
            return
        versions, accesses = {var}, {}
        for i, eqn in enumerate(self.jaxpr.eqns):
            if not any(v in versions for v in variables(eqn.invars)):
                continue
            access = self._access(eqn, numbers)
            others = [v for v in variables(eqn.invars[1:]) if v in versions]
            if access is None or others or eqn.invars[0] not in versions:
                return
            if eqn.primitive.name.startswith(("dynamic_update_slice", "scatter")):
                versions.update(eqn.outvars)
            accesses[i] = access
        own = self.jaxpr.outvars[position - self.num_consts] if carried else None
        elsewhere = [v for k, v in enumerate(self.jaxpr.outvars) if k != position - self.num_consts or not carried]
        if accesses and (not carried or own in versions) and not any(v in versions for v in variables(elsewhere)):
            self.stacks.append(position)
            self.accesses |= accesses

    def _access(self, eqn: JaxprEqn, numbers: _Numbers) -> tuple[int, int | None] | None:
        name, params = eqn.primitive.name, eqn.params
        rows = np.arange(self.length)

        def is_row(atom: Any) -> bool:
            number = numbers.read(atom)
            return number is not None and number.ndim == 1 and np.array_equal(number, rows)

        if name == "dynamic_slice":
            return (1, None) if params["slice_sizes"][0] == 1 and is_row(eqn.invars[1]) else None
        if name == "dynamic_update_slice":
            return (2, None) if _shape(eqn.invars[1])[0] == 1 and is_row(eqn.invars[2]) else None
        if name == "gather":
            indexed = params["dimension_numbers"].start_index_map
            one_row = params["slice_sizes"][0] == 1
        elif name.startswith("scatter"):
            dims = params["dimension_numbers"]
            indexed = dims.scatter_dims_to_operand_dims
            one_row = 0 in dims.inserted_window_dims
        else:
            return None
        if 0 not in indexed or not one_row:
            return None
        column = self._column(eqn.invars[1], indexed.index(0))
        return (1, indexed.index(0)) if column is not None and is_row(column) else None

    def _column(self, indices: Any, column: int) -> Any:
        """The one number that stands in a column of an array of indices; None if that is not seen."""
        maker = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        has_columns = True  # else all entries are wanted
        while (shape := _shape(indices)) and not isinstance(indices, Literal) and indices in maker:
            eqn, last = maker[indices], len(shape) - 1
            name = eqn.primitive.name
            if has_columns and name == "concatenate" and eqn.params["dimension"] == last:
                ends = np.cumsum([_shape(a)[-1] for a in eqn.invars])
                piece = int(np.searchsorted(ends, column, side="right"))
                column -= int(ends[piece]) - _shape(eqn.invars[piece])[-1]
                indices = eqn.invars[piece]
            elif name == "broadcast_in_dim" and (not has_columns or last not in eqn.params["broadcast_dimensions"]):
                indices, has_columns = eqn.invars[0], False
            elif name == "convert_element_type" and _holds_rows(eqn.params["new_dtype"]):
                indices = eqn.invars[0]
            else:
                return None
        return None if shape else indices

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
                env[eqn.outvars[0]] = _accessed(eqn, [read(env, a) for a in eqn.invars], operand, column)
            done = i + 1
        run_part(jaxpr, done, len(jaxpr.eqns), env)
        return [read(env, a) for a in jaxpr.outvars]


def _accessed(eqn: JaxprEqn, given: list[Any], operand: int, column: int | None) -> Any:
    """What an access gives of, or makes of, a stack's only row."""
    name, row = eqn.primitive.name, given[0]
    if name == "dynamic_slice" and tuple(eqn.params["slice_sizes"]) == row.shape:
        return row
    if name == "dynamic_update_slice" and given[1].shape == row.shape:
        return given[1]
    indices = given[operand]
    if column is None:
        given[operand] = np.zeros((), indices.dtype)
    else:
        last = indices.ndim - 1
        parts = list(lax.split(indices, [1] * indices.shape[last], axis=last))
        parts[column] = lax.full_like(parts[column], 0)
        given[operand] = lax.concatenate(parts, last)
    return eqn.primitive.bind(*given, **eqn.params)
