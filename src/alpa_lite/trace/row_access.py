"""Accesses to single rows of a stack whose numbers are known: what is done with them, and the same on that row alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from alpa_lite._jax_compat import Jaxpr, JaxprEqn, Literal

MOST_ROWS = 4096  # rows of a stack
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


class Numbers:
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
        if self.of_body and shape_of(result):  # one number per iteration is no vector
            return
        made: Any = None
        if (
            name == "iota"
            and params["dimension"] == 0
            and len(params["shape"]) == 1
            and params["shape"][0] <= MOST_ROWS
        ):
            made = np.arange(params["shape"][0])
        elif name in _NUMBERS:
            made = _NUMBERS[name](*given)
        elif name == "convert_element_type":
            made = given[0]
        elif name == "slice":
            made = given[0][
                slice(params["start_indices"][0], params["limit_indices"][0], (params["strides"] or [1])[0])
            ]
        elif name == "squeeze":
            made = given[0].reshape(shape_of(result))
        elif name == "select_n" and len(given) == 3:
            made = np.where(given[0].astype(bool), given[2], given[1])
        if made is not None and np.dtype(result.aval.dtype).kind in "iub":
            self.found[result] = made.astype(result.aval.dtype)


def shape_of(atom: Any) -> tuple[int, ...]:
    """Of a variable or a literal."""
    return atom.aval.shape


def _is_small(number: Any) -> bool:
    return number.dtype.kind in "iub" and number.ndim <= 1 and number.size <= MOST_ROWS


def _holds_rows(dtype: Any) -> bool:
    """Whether no number of a row is another one in this type."""
    return np.dtype(dtype).kind in "iu" and np.iinfo(dtype).max >= MOST_ROWS


@dataclass(frozen=True, slots=True)
class RowAccess:
    """An op that reads or writes one row of its first operand.

    Attributes:
        number: of the row, a scalar; a variable or a literal.
        operand: position of the operand that has it.
        column: of that operand, where it is an array of indices; None of a scalar.
    """

    number: Any
    operand: int
    column: int | None = None


def is_write(eqn: JaxprEqn) -> bool:
    """Whether an access makes another version of the stack."""
    return eqn.primitive.name.startswith(("dynamic_update_slice", "scatter"))


def makers(jaxpr: Jaxpr) -> dict[Any, JaxprEqn]:
    """What makes each variable."""
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def row_access(eqn: JaxprEqn, maker: Mapping[Any, JaxprEqn]) -> RowAccess | None:
    """How an op reads or writes a single row; None if it is not seen that it does."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dynamic_slice":
        return RowAccess(eqn.invars[1], 1) if params["slice_sizes"][0] == 1 else None
    if name == "dynamic_update_slice":
        return RowAccess(eqn.invars[2], 2) if shape_of(eqn.invars[1])[0] == 1 else None
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
    column = _column(eqn.invars[1], indexed.index(0), maker)
    return None if column is None else RowAccess(column, 1, indexed.index(0))


def _column(indices: Any, column: int, maker: Mapping[Any, JaxprEqn]) -> Any:
    """The one number that stands in a column of an array of indices; None if that is not seen."""
    has_columns = True  # else all entries are wanted
    while (shape := shape_of(indices)) and not isinstance(indices, Literal) and indices in maker:
        eqn, last = maker[indices], len(shape) - 1
        name = eqn.primitive.name
        if has_columns and name == "concatenate" and eqn.params["dimension"] == last:
            ends = np.cumsum([shape_of(a)[-1] for a in eqn.invars])
            piece = int(np.searchsorted(ends, column, side="right"))
            column -= int(ends[piece]) - shape_of(eqn.invars[piece])[-1]
            indices = eqn.invars[piece]
        elif name == "broadcast_in_dim" and (not has_columns or last not in eqn.params["broadcast_dimensions"]):
            indices, has_columns = eqn.invars[0], False
        elif name == "convert_element_type" and _holds_rows(eqn.params["new_dtype"]):
            indices = eqn.invars[0]
        else:
            return None
    return None if shape else indices


def accessed(eqn: JaxprEqn, given: list[Any], operand: int, column: int | None) -> Any:
    """What an access gives of, or makes of, a stack's only row (or only rows, of a ``dynamic_slice`` of as many)."""
    name, row = eqn.primitive.name, given[0]
    if name == "dynamic_slice" and tuple(eqn.params["slice_sizes"]) == row.shape:
        return row
    if name == "gather" and given[1].shape == (1,) and tuple(eqn.params["slice_sizes"]) == row.shape:
        # Of the one window, all of the row.
        return lax.squeeze(row, eqn.params["dimension_numbers"].collapsed_slice_dims)
    if name == "dynamic_update_slice" and given[1].shape == row.shape:
        return given[1]
    if name == "scatter" and given[1].ndim == 1 and given[2].shape == row.shape[1:]:  # the one window is all of the row
        return given[2][None]
    indices = given[operand]
    if column is None:
        given[operand] = np.zeros((), indices.dtype)
    else:
        last = indices.ndim - 1
        parts = list(lax.split(indices, [1] * indices.shape[last], axis=last))
        parts[column] = lax.full_like(parts[column], 0)
        given[operand] = lax.concatenate(parts, last)
    return eqn.primitive.bind(*given, **eqn.params)
