"""A flat jaxpr -> the same with values split by rows: see ``trace/unstack.py``."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from jax import lax

from alpa_lite._jax_compat import Literal, resized_aval, scan_layout
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.row_edges import JOINED_BY, Edges, is_loop, rows_of, starts_joined
from alpa_lite.trace.row_ops import for_rows, joins_rows, row_operands

_SUMS = frozenset({"add", "add_any"})


class Rewriter:
    """Copies a jaxpr with values split. A split value is a list of its parts; None is a part that is zero."""

    def __init__(self, flat: FlatJaxpr, edges: Edges) -> None:
        self.flat, self.edges = flat, edges
        self.avals: list[Any] = []
        self.ops: list[FlatOp] = []
        self.number: dict[int, int] = {}  # whole values
        self.split: dict[int, list[int | None]] = {}
        self.like: FlatOp | None = None

    def run(self, num_carry: int | None = None) -> FlatJaxpr:
        """``num_carry``: of a loop's body; what it stacks up stays whole."""
        inputs = [n for v in self.flat.inputs for n in self.given(v)]
        constants = {self.number.setdefault(v, self.new(self.flat.avals[v])): c for v, c in self.flat.constants.items()}
        for op in self.flat.ops:
            self.like = op
            self.rewrite(op)
        outputs = [n for v in self.flat.outputs[:num_carry] for n in self.read(v)]
        if num_carry is not None:
            outputs += map(self.whole, self.flat.outputs[num_carry:])
        return FlatJaxpr(self.avals, self.ops, inputs, outputs, constants)

    # -- values ---------------------------------------------------------------------------------------------------------

    def cut(self, value: Any) -> tuple[int, ...]:
        return () if isinstance(value, Literal) else self.edges.get((id(self.flat), value), ())

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def given(self, value: int) -> list[int]:
        """New values for an input or a result."""
        aval, edges = self.flat.avals[value], self.cut(value)
        if not edges:
            self.number[value] = self.new(aval)
            return [self.number[value]]
        parts = [self.new(resized_aval(aval, b - a)) for a, b in pairwise(edges)]
        self.split[value] = list(parts)
        return parts

    def emit(self, primitive: Any, params: dict[str, Any], inputs: list[Any], aval: Any) -> int:
        """An op in the place of the one that is being rewritten."""
        assert self.like is not None
        made = self.new(aval)
        op = FlatOp(primitive, params, inputs, [made], self.like.source, self.like.scope)
        op.traceback = self.like.traceback
        self.ops.append(op)
        return made

    def read(self, value: Any) -> list[Any]:
        """Its parts, or the value alone."""
        if isinstance(value, Literal):
            return [value]
        return self.parts(value) if self.cut(value) else [self.whole(value)]

    def parts(self, value: int) -> list[int]:
        """All parts of a split value, zeros made; sliced from the whole if it was made whole."""
        aval, edges = self.flat.avals[value], self.cut(value)
        if value not in self.split:
            self.split[value] = [self.rows(self.number[value], aval, a, b) for a, b in pairwise(edges)]
        found = self.split[value]
        for i, (a, b) in enumerate(pairwise(edges)):
            if found[i] is None:
                found[i] = self.zeros(resized_aval(aval, b - a))
        return [n for n in found if n is not None]

    def whole(self, value: Any) -> Any:
        if isinstance(value, Literal):
            return value
        if value not in self.number:
            parts = self.parts(value)
            self.number[value] = self.emit(lax.concatenate_p, {"dimension": 0}, [*parts], self.flat.avals[value])
        return self.number[value]

    def rows(self, number: int, aval: Any, start: int, stop: int) -> int:
        rank = len(aval.shape)
        low, high = (start, *(0,) * (rank - 1)), (stop, *aval.shape[1:])
        params = {"start_indices": low, "limit_indices": high, "strides": None}
        return self.emit(lax.slice_p, params, [number], resized_aval(aval, stop - start))

    def zeros(self, aval: Any) -> int:
        params = {"shape": aval.shape, "broadcast_dimensions": (), "sharding": None}
        zero = Literal(np.zeros((), aval.dtype), resized_aval(aval, None))
        return self.emit(lax.broadcast_in_dim_p, params, [zero], aval)

    # -- ops ------------------------------------------------------------------------------------------------------------

    def rewrite(self, op: FlatOp) -> None:
        split_in, split_out = any(map(self.cut, op.inputs)), any(map(self.cut, op.all_outputs))
        rows = rows_of(op, self.flat)
        if is_loop(op):
            self.loop(op)
        elif op.name == "slice" and rows and split_in and set(rows[1]) <= set(self.cut(op.inputs[0])):
            self.slice(op, *rows[1])
        elif op.name == "slice" and rows and split_in and (part := self.part_of(op.inputs[0], *rows[1])) is not None:
            self.slice_part(op, part, *rows[1])
        elif op.name == "pad" and rows and split_out and set(rows[1]) <= set(self.cut(op.all_outputs[0])):
            self.pad(op, *rows[1])
        elif joins_rows(op.name, op.params) and split_out:
            self.join(op)
        elif split_out and (operands := row_operands(op, self.flat)):
            self.piecewise(op, operands)
        elif op.name in JOINED_BY and split_in:
            self.reduce(op)
        elif op.name == "broadcast_in_dim" and split_out and 0 not in op.params["broadcast_dimensions"]:
            self.broadcast(op)
        else:
            self.copy(op)

    def part_of(self, value: Any, start: int, stop: int) -> int | None:
        """The part of a split value that has all these rows."""
        parts = enumerate(pairwise(self.cut(value)))
        return next((i for i, (a, b) in parts if a <= start and stop <= b), None)

    def slice_part(self, op: FlatOp, part: int, start: int, stop: int) -> None:
        """Rows within one part."""
        value = op.inputs[0]
        low, high = self.cut(value)[part : part + 2]
        aval = resized_aval(self.flat.avals[value], high - low)
        self.number[op.all_outputs[0]] = self.rows(self.parts(value)[part], aval, start - low, stop - low)

    def copy(self, op: FlatOp) -> None:
        """On whole values."""
        inputs = [self.whole(v) for v in op.inputs]
        outputs = [self.number.setdefault(v, self.new(self.flat.avals[v])) for v in op.all_outputs]
        params = op.params
        if op.name == "optimization_barrier" and "group" in params:
            group = tuple(self.number.setdefault(v, self.new(self.flat.avals[v])) for v in params["group"])
            params = {**params, "group": group}
        elif op.name == "layer_boundary":
            first = params["group"]
            params = {**params, "group": self.number.setdefault(first, self.new(self.flat.avals[first]))}
        self.append(op, params, inputs, outputs, op.bodies)

    def append(
        self, op: FlatOp, params: dict[str, Any], inputs: list[Any], outputs: list[int], bodies: list[FlatJaxpr]
    ) -> None:
        fresh = replace(op, params=params, inputs=inputs, outputs=outputs, bodies=bodies)
        fresh.all_outputs = tuple(outputs)
        self.ops.append(fresh)

    def slice(self, op: FlatOp, start: int, stop: int) -> None:
        edges, parts = self.cut(op.inputs[0]), self.parts(op.inputs[0])
        wanted = parts[edges.index(start) : edges.index(stop)]
        result = op.all_outputs[0]
        aval = self.flat.avals[result]
        self.number[result] = (
            wanted[0] if len(wanted) == 1 else self.emit(lax.concatenate_p, {"dimension": 0}, [*wanted], aval)
        )

    def pad(self, op: FlatOp, start: int, stop: int) -> None:
        inner, aval = self.whole(op.inputs[0]), self.flat.avals[op.inputs[0]]
        parts: list[int | None] = []
        for a, b in pairwise(self.cut(op.all_outputs[0])):
            if (a, b) == (start, stop):
                parts.append(inner)
            else:
                parts.append(self.rows(inner, aval, a - start, b - start) if start <= a < b <= stop else None)
        self.split[op.all_outputs[0]] = parts

    def join(self, op: FlatOp) -> None:
        """Operands, or rows of them, put together for each part."""
        result = op.all_outputs[0]
        starts, aval = starts_joined(op, self.flat), self.flat.avals[result]
        parts: list[int | None] = []
        for a, b in pairwise(self.cut(result)):
            pieces = []
            for value, (start, stop) in zip(op.inputs, pairwise(starts), strict=True):
                low, high = max(a, start), min(b, stop)
                if low < high:
                    whole = self.whole(value)
                    part = (low, high) == (start, stop)
                    pieces.append(whole if part else self.rows(whole, aval, low - start, high - start))
            parts.append(self.joined(op, pieces, resized_aval(aval, b - a)))
        self.split[result] = parts

    def joined(self, op: FlatOp, pieces: list[Any], aval: Any) -> int:
        if len(pieces) > 1 or isinstance(pieces[0], Literal):
            return self.emit(op.primitive, op.params, pieces, aval)
        if op.name == "concatenate":
            return pieces[0]
        params = {"shape": aval.shape, "broadcast_dimensions": tuple(range(1, len(aval.shape))), "sharding": None}
        return self.emit(lax.broadcast_in_dim_p, params, pieces, aval)

    def piecewise(self, op: FlatOp, operands: list[int]) -> None:
        results = op.all_outputs
        edges = self.cut(results[0])
        keeps_zeros = op.name == "convert_element_type" or (op.name in _SUMS and all(map(self.cut, op.inputs)))
        for value in results:
            self.split[value] = []
        for i, (a, b) in enumerate(pairwise(edges)):
            inputs = [self.part(v, i, keeps_zeros) if k in operands else self.whole(v) for k, v in enumerate(op.inputs)]
            if None in inputs:
                others = [n for n in inputs if n is not None]  # of a sum
                self.split[results[0]].append(others[0] if others else None)
                continue
            made = [self.new(resized_aval(self.flat.avals[v], b - a)) for v in results]
            self.append(op, for_rows(op, b - a), inputs, made, op.bodies)
            for value, number in zip(results, made, strict=True):
                self.split[value].append(number)

    def part(self, value: Any, i: int, zeros_allowed: bool) -> Any:
        if not self.cut(value):
            return self.whole(value)
        if zeros_allowed and value in self.split:
            return self.split[value][i]
        return self.parts(value)[i]

    def reduce(self, op: FlatOp) -> None:
        value, result = op.inputs[0], op.all_outputs[0]
        aval, made = self.flat.avals[result], []
        for (a, b), part in zip(pairwise(self.cut(value)), self.parts(value), strict=True):
            made.append(self.new(resized_aval(aval, b - a) if self.cut(result) else aval))
            self.append(op, op.params, [part], [made[-1]], [])
        if self.cut(result):
            self.split[result] = made
            return
        total = made[0]
        for number in made[1:]:
            total = self.emit(JOINED_BY[op.name], {}, [total, number], aval)
        self.number[result] = total

    def broadcast(self, op: FlatOp) -> None:
        result = op.all_outputs[0]
        aval, parts = self.flat.avals[result], []
        for a, b in pairwise(self.cut(result)):
            part = resized_aval(aval, b - a)
            parts.append(self.new(part))
            self.append(op, {**op.params, "shape": part.shape}, [self.whole(v) for v in op.inputs], [parts[-1]], [])
        self.split[result] = parts

    def loop(self, op: FlatOp) -> None:
        num_consts, num_carry = scan_layout(op.params)
        body = op.bodies[0]
        inside = Rewriter(body, self.edges)
        last = num_consts + num_carry
        consts = [
            n
            for v, inner in zip(op.inputs[:num_consts], body.inputs, strict=False)
            for n in self.fit(v, inside.cut(inner))
        ]
        starts = [
            n
            for v, inner in zip(op.inputs[num_consts:last], body.inputs[num_consts:], strict=False)
            for n in self.fit(v, inside.cut(inner))
        ]
        carried = [n for v in op.all_outputs[:num_carry] for n in self.given(v)]
        rows = [self.number.setdefault(v, self.new(self.flat.avals[v])) for v in op.all_outputs[num_carry:]]
        params = {k: op.params[k] for k in ("length", "reverse", "unroll")}
        params |= {"num_consts": len(consts), "num_carry": len(starts)}
        inputs = [*consts, *starts, *map(self.whole, op.inputs[last:])]
        self.append(op, params, inputs, [*carried, *rows], [inside.run(num_carry)])

    def fit(self, value: Any, edges: tuple[int, ...]) -> list[Any]:
        """As the loop's body reads it."""
        return self.read(value) if edges else [self.whole(value)]
