"""The body of the microbatch loop -> for each op whether it is part of the forward or backward pass, and of which layer.

Layers are what lies between boundaries (``al.layer_boundary``). A boundary numbered k ends layer k; its twin in the backward
pass ends the backward part of layer k + 1.

- Forward ops lie in the latest layer among what they read. What reads no layer's result (masks, positions, an embedding)
  lies in the first layer that reads it.
- Backward ops lie in the earliest layer among the cotangents that they read. What reads no cotangent that passed a boundary
  (recomputation, and all of the last layer) lies in the latest layer that reads it.

So a value made in one layer is read by it or, forward, by later ones and, backward, by earlier ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite._jax_compat import Literal
from alpa_lite.errors import LayerError
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.row_ops import joins_rows
from alpa_lite.trace.stage_pin import PIN_STAGE, StagePin

BOUNDARY = "layer_boundary"
_MARKS = (BOUNDARY, PIN_STAGE)  # identities that say something about layers
_SUMS = ("add", "add_any", "convert_element_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layered:
    """A flat jaxpr without boundaries, its ops assigned to layers.

    Attributes:
        flat: the ops in order.
        backward: per op, whether it belongs to the backward pass.
        layer: per op.
        num_layers: one more than there were boundaries.
        pins: layers that the user gave to stages.
    """

    flat: FlatJaxpr
    backward: tuple[bool, ...]
    layer: tuple[int, ...]
    num_layers: int
    pins: tuple[StagePin, ...] = ()


def assign_layers(flat: FlatJaxpr) -> Layered:
    """Assign the ops of a loss-and-gradient function, boundaries kept by ``flatten``, to layers.

    Raises:
        LayerError: a boundary is not passed by the gradient, or stands in what is recomputed.
    """
    numbers = _number_boundaries(flat)
    num_layers = 2 + max(numbers.values(), default=-1)
    backward = _backward_ops(flat)
    layer = _Assignment(flat, numbers, backward, num_layers).run()
    keep = [i for i, op in enumerate(flat.ops) if op.name not in _MARKS]
    return Layered(
        flat=without_boundaries(flat),
        backward=tuple(backward[i] for i in keep),
        layer=tuple(layer[i] for i in keep),
        num_layers=num_layers,
        pins=_stage_pins(flat, layer, backward),
    )


def _stage_pins(flat: FlatJaxpr, layer: list[int], backward: list[bool]) -> tuple[StagePin, ...]:
    """Of the layers in which pinned values are made; recomputing one pins nothing more."""
    maker = {o: i for i, op in enumerate(flat.ops) for o in op.outputs if o >= 0 and op.name != BOUNDARY}
    found: set[StagePin] = set()
    for i, op in enumerate(flat.ops):
        if op.name == PIN_STAGE and not backward[i]:
            made = i if isinstance(op.inputs[0], Literal) else maker.get(op.inputs[0], i)
            found.add(StagePin(place=layer[made], stage=op.params["stage"], source=op.source))
    return tuple(sorted(found, key=lambda pin: (pin.place, pin.stage, pin.source)))


def without_boundaries(flat: FlatJaxpr) -> FlatJaxpr:
    """The same with the result of every boundary, and of every pin to a stage, replaced by its operand."""
    same: dict[int, Any] = {}

    def read(value: Any) -> Any:
        return value if isinstance(value, Literal) else same.get(value, value)

    ops = []
    for op in flat.ops:
        if op.name in _MARKS:
            same[op.all_outputs[0]] = read(op.inputs[0])
        else:
            ops.append(_with_inputs(op, [read(i) for i in op.inputs]))
    return replace(flat, ops=ops, outputs=[read(o) for o in flat.outputs])


def _with_inputs(op: FlatOp, inputs: list[Any]) -> FlatOp:
    if inputs == op.inputs:
        return op
    fresh = replace(op, inputs=inputs)
    fresh.all_outputs = op.all_outputs
    return fresh


def _number_boundaries(flat: FlatJaxpr) -> dict[int, int]:
    """Group of a boundary -> its number, the same for the two directions."""
    inside = next((op for op in flat.ops if any(map(_first_mark, op.bodies))), None)
    if inside is not None:
        mark = next(b for body in inside.bodies if (b := _first_mark(body)))
        word = "boundary" if mark.name == BOUNDARY else "pin to a stage"
        raise LayerError(
            f"{word} inside a {inside.name} body: al.{mark.name} at {mark.source} stands inside the loop or branch at "
            f"{inside.source}. Layers end between ops of the loss itself. Take it out: scans over layers are cut by themselves."
        )
    directions: dict[bool, dict[int, FlatOp]] = {False: {}, True: {}}
    for op in flat.ops:
        if op.name == BOUNDARY:
            directions[op.params["backward"]].setdefault(op.params["group"], op)
    forward, back = directions[False], directions[True]
    again = [op for op in forward.values() if "transpose(" in op.scope]
    if again:
        raise LayerError(
            f"al.layer_boundary at {again[0].source} stands inside of jax.checkpoint, which recomputes across it in the backward "
            "pass. A layer may be recomputed as a whole or in parts, not several layers at once. Put jax.checkpoint around the "
            "layers between the boundaries."
        )
    differentiated = any("transpose(" in op.scope for op in flat.ops)
    if differentiated and len(back) != len(forward):
        sources = ", ".join(dict.fromkeys(op.source for op in forward.values()))
        raise LayerError(
            f"{len(forward)} layer boundaries (at {sources}) and the gradient passes {len(back)} of them. Every boundary must "
            "lie between parameters and the loss. Mark tensors that the loss depends on, of a type that has gradients."
        )
    numbers = {group: k for k, group in enumerate(forward)}
    return numbers | {group: len(forward) - 1 - k for k, group in enumerate(back)}


def _first_mark(flat: FlatJaxpr) -> FlatOp | None:
    for op in flat.ops:
        if op.name in _MARKS:
            return op
        for body in op.bodies:
            if found := _first_mark(body):
                return found
    return None


def _backward_ops(flat: FlatJaxpr) -> list[bool]:
    """An op is part of the backward pass if autodiff made it so, or if it reads what is."""
    found, values = [], set()
    for op in flat.ops:
        mine = "transpose(" in op.scope or (op.name == BOUNDARY and op.params["backward"])
        mine = mine or any(not isinstance(i, Literal) and i in values for i in op.inputs)
        if mine:
            values.update(op.outputs)
        found.append(mine)
    return found


def final_sums(flat: FlatJaxpr, backward: Sequence[bool]) -> list[bool]:
    """Per op whether it does nothing but add up gradients for the result. Such sums join what comes from several layers, and
    do not say where their terms are made."""
    found = [False] * len(flat.ops)
    results = {o for o in flat.outputs if not isinstance(o, Literal)}
    read: set[int] = set()  # by what is no such sum
    for i, op in reversed(list(enumerate(flat.ops))):
        if backward[i] and op.name in _SUMS:
            found[i] = all(o in results or o not in read for o in op.outputs if o >= 0)
        if not found[i]:
            read.update(v for v in op.inputs if not isinstance(v, Literal))
    return found


def _final_joins(flat: FlatJaxpr, backward: Sequence[bool]) -> list[bool]:
    """Per op whether it puts rows together that nothing but results are made of. Such a join does not say where its rows are
    made: each lies with its layer."""
    found = [False] * len(flat.ops)
    read: set[int] = set()  # by what is no such join
    for i, op in reversed(list(enumerate(flat.ops))):
        joins = not backward[i] and joins_rows(op.name, op.params)
        found[i] = joins and not any(o in read for o in op.outputs)
        if not found[i]:
            read.update(v for v in op.inputs if not isinstance(v, Literal))
    return found


class _Assignment:
    """Layers of ops: first what boundaries say, then what readers say, then what is left."""

    def __init__(self, flat: FlatJaxpr, numbers: dict[int, int], backward: list[bool], num_layers: int) -> None:
        self.flat, self.numbers, self.backward, self.num_layers = flat, numbers, backward, num_layers
        self.layer: list[int | None] = [None] * len(flat.ops)
        self.made_by = {o: i for i, op in enumerate(flat.ops) for o in op.outputs if o >= 0}
        self.readers: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(flat.ops):
            for value in self.inputs(op):
                self.readers[value].append(i)
        self.sums, self.joins = final_sums(flat, backward), _final_joins(flat, backward)

    def inputs(self, op: FlatOp) -> list[int]:
        return [i for i in op.inputs if not isinstance(i, Literal)]

    def run(self) -> list[int]:
        self.by_inputs()
        passed = [layer is not None for layer in self.layer]  # downstream of a boundary
        self.by_readers()
        self.by_ends(passed)
        found: list[int] = []
        for i, op in enumerate(self.flat.ops):
            layer, last = self.layer[i], self.num_layers - 1 if self.backward[i] else 0
            if layer is None:
                made = [self.made_by[v] for v in self.inputs(op) if v in self.made_by]
                layer = max((found[j] for j in made if self.backward[j] == self.backward[i]), default=last)
            found.append(layer)
        return found

    def by_inputs(self) -> None:
        """Downstream of boundaries."""
        after: dict[int, tuple[int, bool]] = {}  # value -> (layer in which it can first be read, backward)
        for i, op in enumerate(self.flat.ops):
            if op.name == BOUNDARY:
                number, back = self.numbers[op.params["group"]], op.params["backward"]
                self.layer[i] = number + 1 if back else number  # the layer that it ends
                after[op.all_outputs[0]] = (number if back else number + 1, back)
                continue
            read = [after[v][0] for v in self.inputs(op) if v in after and after[v][1] == self.backward[i]]
            if read:
                layer = min(read) if self.backward[i] else max(read)
                self.layer[i] = layer
                after.update((o, (layer, self.backward[i])) for o in op.outputs if o >= 0)

    def by_readers(self) -> None:
        """Upstream: forward ops in the first layer that reads them, backward ops in the last."""
        for i in reversed(range(len(self.flat.ops))):
            if self.layer[i] is not None:
                continue
            readers = [r for o in self.flat.ops[i].outputs if o >= 0 for r in self.readers[o]]
            readers = [r for r in readers if not self.sums[r]]
            alike = [self.layer[r] for r in readers if self.backward[r] == self.backward[i]]
            known = [k for k in alike if k is not None]
            if known:
                self.layer[i] = max(known) if self.backward[i] else min(known)
            elif not self.backward[i]:
                others = [k for r in readers if (k := self.layer[r]) is not None]
                self.layer[i] = max(others) if others else None

    def by_ends(self, passed: list[bool]) -> None:
        """What a result alone needs lies where the last of what it is made of is made, or in the first layer if no layer makes
        any of it. If it shares masks or positions with a layer behind, these lie in the first of the two."""
        ends, firm = [False] * len(passed), list(passed)
        for i in reversed(range(len(passed))):
            if not self.backward[i] and not passed[i]:
                readers = [r for o in self.flat.ops[i].outputs if o >= 0 for r in self.readers[o]]
                ends[i] = all(ends[r] or self.joins[r] for r in readers)
                firm[i] = any(self.flat.ops[r].name == BOUNDARY or (firm[r] and not passed[r]) for r in readers)
        for i, op in enumerate(self.flat.ops):
            if ends[i]:
                made = [self.made_by[v] for v in self.inputs(op) if v in self.made_by]
                layers = [k for j in made if firm[j] and (k := self.layer[j]) is not None]
                self.layer[i] = max(layers, default=0)
                firm[i] = bool(layers)
        for i in reversed(range(len(passed))):
            if not firm[i] and not self.backward[i]:
                readers = [r for o in self.flat.ops[i].outputs if o >= 0 for r in self.readers[o]]
                known = [k for r in readers if not self.backward[r] and (k := self.layer[r]) is not None]
                self.layer[i] = min(known, default=self.layer[i])
