"""Ops whose row i (along the first dim) is a function of the operands' rows i, and such ops for fewer rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from alpa_lite._jax_compat import Literal
from alpa_lite.trace.elementwise import ELEMENTWISE
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp

_ELEMENTWISE = ELEMENTWISE - {"optimization_barrier", "pin", "pad_mask"}
_JOINS = {"concatenate": "dimension", "stack": "axis"}  # op -> which parameter says along which dim
_Shapes = Sequence[tuple[int, ...]]


def row_operands(op: FlatOp, flat: FlatJaxpr) -> list[int]:
    """Positions of the operands that are split where the results are; what is left is read whole. [] if the op is no such one."""
    shape: tuple[int, ...] = flat.avals[op.all_outputs[0]].shape if op.all_outputs else ()
    shapes = [() if isinstance(v, Literal) else getattr(flat.avals[v], "shape", ()) for v in op.inputs]
    return rows_of_operands(op.name, op.params, shapes, shape)


def rows_of_operands(name: str, params: dict[str, Any], shapes: _Shapes, shape: tuple[int, ...]) -> list[int]:
    """The same by the shapes of operands (() of literals) and of the first result."""
    if not shape:
        return []
    rows = shape[0]
    if name in _ELEMENTWISE:  # other dims of an operand may be 1
        return [i for i, own in enumerate(shapes) if len(own) == len(shape) and own[0] == rows]
    rule = "scatter" if name.startswith("scatter") else name
    found = _ROW_BY_ROW[rule](params, shapes, rows) if rule in _ROW_BY_ROW else ()
    return [i for i in found if shapes[i][:1] == (rows,)]


def for_rows(op: FlatOp, rows: int) -> dict[str, Any]:
    """The op's parameters for so many rows in place of all."""
    params = op.params
    match op.name:
        case "reshape":
            return {**params, "new_sizes": (rows, *params["new_sizes"][1:])}
        case "broadcast_in_dim":
            return {**params, "shape": (rows, *params["shape"][1:])}
        case "slice":
            return {**params, "limit_indices": (rows, *params["limit_indices"][1:])}
        case "dynamic_slice" | "gather":
            return {**params, "slice_sizes": (rows, *params["slice_sizes"][1:])}
    return params


def is_slice_of_rows(name: str, params: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether an op takes neighbouring rows of an operand of this shape, and every row whole."""
    if name != "slice" or (params["strides"] and set(params["strides"]) != {1}):
        return False
    ends = zip(params["start_indices"][1:], params["limit_indices"][1:], shape[1:], strict=True)
    return all(a == 0 and b == n for a, b, n in ends)


def joins_rows(name: str, params: dict[str, Any]) -> bool:
    """Whether an op puts its operands together along the first dim, given or new."""
    return name in _JOINS and params[_JOINS[name]] == 0


def rows_joined(name: str, shapes: _Shapes) -> list[int]:
    """At which row of the result of such an op each operand starts, and the last one ends."""
    return list(accumulate((1 if name == "stack" else shape[0] for shape in shapes), initial=0))


def _scatter(params: dict[str, Any], shapes: _Shapes, rows: int) -> tuple[int, ...]:
    """Where whole columns of rows are written."""
    numbers = params["dimension_numbers"]
    elsewhere = (
        *numbers.inserted_window_dims,
        *numbers.scatter_dims_to_operand_dims,
        *numbers.operand_batching_dims,
    )
    by_rows = 0 not in elsewhere and numbers.update_window_dims[:1] == (0,)
    return (0, 2) if by_rows and shapes[2][:1] == (rows,) else ()


def _gather(params: dict[str, Any], shapes: _Shapes, rows: int) -> tuple[int, ...]:
    """Where whole columns of rows are read."""
    numbers = params["dimension_numbers"]
    elsewhere = (*numbers.collapsed_slice_dims, *numbers.start_index_map, *numbers.operand_batching_dims)
    by_rows = 0 not in elsewhere and numbers.offset_dims[:1] == (0,)
    return (0,) if by_rows and params["slice_sizes"][0] == rows else ()


def _first(condition: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any], _Shapes, int], tuple[int, ...]]:
    return lambda params, shapes, rows: (0,) if condition(params) else ()


def _update(params: dict[str, Any], shapes: _Shapes, rows: int) -> tuple[int, ...]:
    """With as many rows the update's first index is brought to 0, whatever it is."""
    return (0, 1) if shapes[1][:1] == (rows,) else ()


def _join(params: dict[str, Any], shapes: _Shapes, rows: int) -> tuple[int, ...]:
    """Along another dim."""
    by_rows = all(s[:1] == (rows,) for s in shapes) and not any(params.get(dim) == 0 for dim in _JOINS.values())
    return tuple(range(len(shapes))) if by_rows else ()


# Op -> of its parameters, the shapes of its operands (() of literals) and its number of rows, the operands.
_ROW_BY_ROW: dict[str, Callable[[dict[str, Any], _Shapes, int], tuple[int, ...]]] = {
    "broadcast_in_dim": _first(lambda params: params["broadcast_dimensions"][:1] == (0,)),
    "concatenate": _join,
    "dynamic_slice": _first(lambda params: True),
    "dynamic_update_slice": _update,
    "gather": _gather,
    "pad": _first(lambda params: tuple(params["padding_config"][0]) == (0, 0, 0)),
    "reshape": _first(lambda params: params["dimensions"] is None),
    "scatter": _scatter,
    "slice": _first(lambda params: not params["strides"] or params["strides"][0] == 1),
    "stack": _join,
    "squeeze": _first(lambda params: 0 not in params["dimensions"]),
    "transpose": _first(lambda params: params["permutation"][0] == 0),
}
