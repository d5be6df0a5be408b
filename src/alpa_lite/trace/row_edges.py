"""Which values of a step are split by rows (along the first dim), and where: see ``trace/unstack.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from jax import lax

from alpa_lite._jax_compat import Literal, scan_layout
from alpa_lite.trace.auto_layers import SLICES
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.layers import Layered, assign_layers
from alpa_lite.trace.microbatch_loop import SCOPE
from alpa_lite.trace.row_ops import is_slice_of_rows, joins_rows, row_operands, rows_joined

Edges = dict[tuple[int, int], tuple[int, ...]]  # (id of the jaxpr, value) -> where it is split, from 0 to its size

JOINED_BY = {
    "reduce_sum": lax.add_p,
    "reduce_max": lax.max_p,
    "reduce_min": lax.min_p,
    "reduce_prod": lax.mul_p,
    "reduce_and": lax.and_p,
    "reduce_or": lax.or_p,
}


class _Groups:
    """Values that are split alike."""

    def __init__(self) -> None:
        self.parent: dict[Any, Any] = {}

    def find(self, key: Any) -> Any:
        while self.parent.setdefault(key, key) != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def join(self, keys: list[Any]) -> None:
        for key in keys[1:]:
            self.parent[self.find(key)] = self.find(keys[0])


def row_edges(flat: FlatJaxpr, aliases: tuple[tuple[int, int], ...]) -> Edges:
    """What is split, starting from slices for layers and what is computed row by row with them."""
    groups = _Groups()
    seeds: defaultdict[Any, set[int]] = defaultdict(set)
    joins: defaultdict[Any, set[int]] = defaultdict(set)
    for body in filter(is_forward, (op.bodies[0] for op in flat.ops if is_loop(op))):
        layered = assign_layers(body)
        for value, rows in rows_of_layers(body, layered).items():
            seeds[id(body), value].update(rows)
        for value, rows in joined_of_layers(body, layered).items():
            joins[id(body), value].update(rows)
    jaxprs = [flat, *(op.bodies[0] for op in flat.ops if is_loop(op))]
    for jaxpr in jaxprs:
        for op in jaxpr.ops:
            if SLICES in op.scope and (found := rows_of(op, jaxpr)):
                value, rows = found
                seeds[id(jaxpr), value].update(rows)
            groups.join([(id(j), v) for j, v in _alike(op, jaxpr)])
    for loop in (op for op in flat.ops if is_loop(op)):
        for same in _across(loop):
            groups.join([(id(flat if outer else loop.bodies[0]), v) for outer, v in same])
    for argument, result in aliases:
        value, after = flat.inputs[argument], flat.outputs[result]
        if not isinstance(after, Literal) and flat.avals[value].shape == flat.avals[after].shape:
            groups.join([(id(flat), value), (id(flat), after)])
    points: dict[Any, set[int]] = defaultdict(set)
    for key, rows in seeds.items():
        points[groups.find(key)].update(rows)
    state = {groups.find((id(body), v)) for body, v in _carried(flat)}
    for key, rows in joins.items():
        if groups.find(key) in state:
            points[groups.find(key)].update(rows)
    avals = {id(j): j.avals for j in jaxprs}
    keys = [k for k in groups.parent if groups.find(k) in points]
    found = {k: tuple(sorted(points[groups.find(k)] | {0, avals[k[0]][k[1]].shape[0]})) for k in {*keys, *seeds}}
    return {k: edges for k, edges in found.items() if len(edges) > 2}


def rows_of_layers(body: FlatJaxpr, layered: Layered) -> dict[int, set[int]]:
    """Stacked arguments, or what is made of such row by row, of which each layer takes rows of its own, as where a scan over
    layers is written out: value -> where the rows of a layer start."""
    taken: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)  # value -> layer -> from the first to the last row
    whole: set[int] = set()
    stacks = set(body.inputs)
    by_rows: list[tuple[list[Any], list[int]]] = []
    for op, layer in zip(layered.flat.ops, layered.layer, strict=True):
        own = row_operands(op, layered.flat)
        if any(op.inputs[i] in stacks for i in own):
            stacks.update(op.outputs)
            by_rows.append(([op.inputs[i] for i in own], op.outputs))
            whole.update(v for i, v in enumerate(op.inputs) if i not in own and not isinstance(v, Literal))
            continue
        rows = rows_of(op, layered.flat) if op.name == "slice" else None
        if rows is None:
            whole.update(v for v in op.inputs if not isinstance(v, Literal))
            continue
        value, (start, stop) = rows
        low, high = taken[value].get(layer, (start, stop))
        taken[value][layer] = min(low, start), max(high, stop)
    for operands, results in reversed(by_rows):
        if whole.intersection(results):
            whole.update(operands)
    found = {}
    for value in stacks.intersection(taken) - whole:
        spans = [span for _, span in sorted(taken[value].items())]
        if all(before[1] <= after[0] for before, after in pairwise(spans)):
            found[value] = {start for start, _ in spans}
    return found


def joined_of_layers(body: FlatJaxpr, layered: Layered) -> dict[int, set[int]]:
    """What is put together of rows that several layers make: value -> where the rows of another layer start."""
    made = {o: k for op, k in zip(layered.flat.ops, layered.layer, strict=True) for o in op.outputs}
    found: dict[int, set[int]] = defaultdict(set)
    for op in layered.flat.ops:
        if joins_rows(op.name, op.params):
            layers = [None if isinstance(v, Literal) else made.get(v) for v in op.inputs]
            starts = starts_joined(op, layered.flat)
            changes = [row for row, (a, b) in zip(starts[1:], pairwise(layers), strict=False) if a != b]
            found[op.all_outputs[0]].update(changes)
    return found


def starts_joined(op: FlatOp, flat: FlatJaxpr) -> list[int]:
    """As ``rows_joined`` of an op's operands."""
    avals: list[Any] = [v.aval if isinstance(v, Literal) else flat.avals[v] for v in op.inputs]
    return rows_joined(op.name, [aval.shape for aval in avals])


def is_forward(body: FlatJaxpr) -> bool:
    """Whether a loop's body has no gradient; what is cut there has been sliced for it."""
    return not any("transpose(" in op.scope for op in body.ops)


def is_loop(op: FlatOp) -> bool:
    return op.name == "scan" and SCOPE in op.scope


def rows_of(op: FlatOp, flat: FlatJaxpr) -> tuple[int, tuple[int, int]] | None:
    """A slice of rows, or its transpose (a pad with zeros): the long value, and from where to where."""
    sliced = op.inputs[0] if op.name == "slice" else None
    if isinstance(sliced, int) and is_slice_of_rows(op.name, op.params, flat.avals[sliced].shape):
        return sliced, (int(op.params["start_indices"][0]), int(op.params["limit_indices"][0]))
    if op.name == "pad" and isinstance(op.inputs[1], Literal) and not np.any(op.inputs[1].val):
        config, size = op.params["padding_config"], flat.avals[op.all_outputs[0]].shape[0]
        (low, high, inside), *others = ([int(n) for n in dim] for dim in config)
        if min(low, high) >= 0 and not inside and not any(any(dim) for dim in others):
            return op.all_outputs[0], (low, size - high)
    return None


def _alike(op: FlatOp, flat: FlatJaxpr) -> list[tuple[FlatJaxpr, int]]:
    """Operands and results of an op that works row by row."""
    if operands := row_operands(op, flat):
        return [(flat, v) for v in (*(op.inputs[i] for i in operands), *op.all_outputs)]
    if op.name in JOINED_BY and 0 not in op.params["axes"] and not isinstance(op.inputs[0], Literal):
        return [(flat, op.inputs[0]), (flat, op.all_outputs[0])]
    return []


def _carried(flat: FlatJaxpr) -> Iterator[tuple[FlatJaxpr, int]]:
    """What is carried from trip to trip, as the bodies of loops make it."""
    for loop in filter(is_loop, flat.ops):
        body, (_, num_carry) = loop.bodies[0], scan_layout(loop.params)
        yield from ((body, v) for v in body.outputs[:num_carry] if not isinstance(v, Literal))


def _across(loop: FlatOp) -> Iterator[list[tuple[bool, int]]]:
    """Values of the outer jaxpr (True) and of the loop's body that are the same, or turn into each other."""
    body = loop.bodies[0]
    num_consts, num_carry = scan_layout(loop.params)
    for outer, inner in zip(loop.inputs[:num_consts], body.inputs, strict=False):
        yield [(False, inner)] if isinstance(outer, Literal) else [(True, outer), (False, inner)]
    for j in range(num_carry):
        ends = [(True, loop.inputs[num_consts + j]), (True, loop.all_outputs[j])]
        ends += [(False, body.inputs[num_consts + j]), (False, body.outputs[j])]
        yield [(outer, v) for outer, v in ends if not isinstance(v, Literal)]
