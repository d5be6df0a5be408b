"""Layers whose backward pass recomputes what it reads of the forward pass, in place of keeping it.

The backward ops of such a layer read clones of its forward ops. Clones start from what exists anyway: values of other layers,
arguments, values that later layers read, and values whose names (``jax.ad_checkpoint.checkpoint_name``) are saved. These pass
an ``optimization_barrier`` together with the cotangents that enter the layer, as in ``jax.checkpoint``: so the compiler neither
joins clones with what they repeat nor runs them before the backward pass gets there. Random draws read the same keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from alpa_lite._jax_compat import Literal
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp, drop_dead
from alpa_lite.trace.layers import Layered, final_sums
from alpa_lite.trace.renumbered import values_of

_BARRIER = "optimization_barrier"


def rematerialised(layered: Layered, layers: Collection[int], fixed: int, saved: Collection[str] = ()) -> Layered:
    """The same loop body with some layers recomputed in the backward pass.

    Args:
        layered: the loop's body.
        layers: numbers of the layers; those that hold the user's own ``jax.checkpoint`` stay as they are.
        fixed: how many of the body's first inputs are the same for all microbatches (parameters).
        saved: names of values that are kept all the same.
    """
    chosen = sorted(set(layers) & set(recomputable(layered)))
    return _Rewrite(layered, fixed, frozenset(saved)).run(chosen) if chosen else layered


def recomputable(layered: Layered) -> tuple[int, ...]:
    """The layers with a backward pass in which the user has not asked for recomputation."""
    ops = list(zip(layered.flat.ops, layered.backward, layered.layer, strict=True))
    own = {k for op, back, k in ops if back and (op.name == _BARRIER or "rematted_computation" in op.scope)}
    return tuple(sorted({k for _, back, k in ops if back} - own))


def saved_names(flat: FlatJaxpr) -> tuple[str, ...]:
    """Names that ``checkpoint_name`` gives to values of the body, in order; not those inside of loops."""
    return tuple(dict.fromkeys(op.params["name"] for op in flat.ops if op.name == "name"))


@dataclass(slots=True)
class _Unit:
    """Ops that stay together, and where they would like to stand."""

    ops: list[FlatOp]
    backward: bool
    layer: int
    place: tuple[int, ...]


class _Rewrite:
    def __init__(self, layered: Layered, fixed: int, saved: frozenset[str]) -> None:
        self.layered, self.flat = layered, layered.flat
        self.avals = list(layered.flat.avals)
        self.fixed = {*layered.flat.inputs[:fixed], *layered.flat.constants}
        self.made_by = {o: i for i, op in enumerate(self.flat.ops) for o in op.outputs if o >= 0}
        self.sums = final_sums(self.flat, layered.backward)
        self.named = {
            op.inputs[0]: op.outputs[0]
            for op in self.flat.ops
            if op.name == "name" and op.params["name"] in saved and op.outputs[0] >= 0
        }
        self.crossing = self._crossing()

    def _crossing(self) -> set[int]:
        """Forward values that live on anyway: later layers or the results read them, or the user keeps them by name."""
        found = {o for o in self.flat.outputs if not isinstance(o, Literal)} | {*self.named, *self.named.values()}
        for i, op in enumerate(self.flat.ops):
            if not self.layered.backward[i]:
                layer = self.layered.layer[i]
                found.update(v for v in values_of(op) if v in self.made_by and self._layer_of(v) != layer)
        return found

    def _layer_of(self, value: int) -> int:
        return self.layered.layer[self.made_by[value]]

    def run(self, layers: list[int]) -> Layered:
        units = []
        recomputed: dict[int, dict[int, int]] = {}
        for k in layers:
            more, recomputed[k] = self.recompute(k)
            units += more
        for i, op in enumerate(self.flat.ops):
            back, k = self.layered.backward[i], self.layered.layer[i]
            renamed = recomputed.get(k, {}) if back and not self.sums[i] else {}
            place = (1, -k, 2, i) if back else (0, i)
            units.append(_Unit([_reading(op, renamed)], back, k, place))
        units = _ordered(units)
        ops = [op for unit in units for op in unit.ops]
        marks = {id(op): (unit.backward, unit.layer) for unit in units for op in unit.ops}
        flat = replace(self.flat, avals=self.avals, ops=ops)
        drop_dead(flat)
        backward, layer = zip(*(marks[id(op)] for op in flat.ops), strict=True)
        return replace(self.layered, flat=flat, backward=backward, layer=layer)

    def recompute(self, k: int) -> tuple[list[_Unit], dict[int, int]]:
        """The barrier and the clones of one layer, and what its backward ops read in place of what."""
        readers = [i for i, op in enumerate(self.flat.ops) if self._is(i, k, backward=True) and not self.sums[i]]
        wanted = [v for i in readers for v in values_of(self.flat.ops[i])]
        clones = self._needed(wanted, k)
        if not clones:
            return [], {}
        entering = [v for v in wanted if v in self.made_by and self._layer_of(v) > k and self._is_backward(v)]
        same = self.named  # a value and the named one are one buffer
        through = dict.fromkeys(same.get(v, v) for v in [*self._entries(clones), *entering])
        renamed = {v: self._new(v) for v in through}
        first = self.flat.ops[readers[0]]
        params = {"group": tuple(renamed.values())}
        barrier = [
            FlatOp(lax.optimization_barrier_p, dict(params), [v], [fresh], first.source, first.scope)
            for v, fresh in renamed.items()
        ]
        units = [_Unit(barrier, True, k, (1, -k, 0))]
        inside = renamed | {v: renamed.get(named, named) for v, named in same.items()}
        for i in clones:
            op = _reading(self.flat.ops[i], inside)
            everything = tuple(self._new(o) for o in op.all_outputs)
            op.outputs = [new if o >= 0 else -1 for new, o in zip(everything, op.outputs, strict=True)]
            inside |= {o: new for o, new in zip(op.all_outputs, everything, strict=True) if o not in inside}
            op.all_outputs, op.scope = everything, "/".join(("rematted_computation", op.scope)).rstrip("/")
            units.append(_Unit([op], True, k, (1, -k, 1, i)))
        made = {o for i in clones for o in self.flat.ops[i].outputs}
        changed = {v: new for v, new in inside.items() if (v in made and v not in self.crossing) or v in renamed}
        return units, {v: renamed.get(named, named) for v, named in same.items()} | changed

    def _is(self, i: int, k: int, *, backward: bool) -> bool:
        return self.layered.backward[i] == backward and self.layered.layer[i] == k

    def _is_backward(self, value: int) -> bool:
        return self.layered.backward[self.made_by[value]]

    def _needed(self, wanted: list[int], k: int) -> list[int]:
        """Numbers of the forward ops of a layer that must run again for these values, in order."""
        found: set[int] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            made = self.made_by.get(value)
            if made is None or made in found or value in self.crossing or not self._is(made, k, backward=False):
                continue
            if not self.flat.ops[made].has_effects:
                found.add(made)
                stack += values_of(self.flat.ops[made])
        return sorted(found)

    def _entries(self, clones: list[int]) -> list[int]:
        """What has to pass the barrier so that every clone waits for it: all values of the microbatch that clones start from,
        and parameters where a clone reads nothing else."""
        waiting: set[int] = set()
        found: dict[int, None] = {}
        cloned = {o for i in clones for o in self.flat.ops[i].outputs} - self.crossing
        for i in clones:
            given = values_of(self.flat.ops[i])
            start = [v for v in given if v not in cloned and v not in self.fixed]
            if not start and not any(v in waiting for v in given):
                start = [v for v in given if v not in cloned]
            found.update(dict.fromkeys(start))
            waiting.update(self.flat.ops[i].outputs)
        return list(found)

    def _new(self, like: int) -> int:
        self.avals.append(self.avals[like])
        return len(self.avals) - 1


def _reading(op: FlatOp, renamed: dict[int, int]) -> FlatOp:
    """A copy of the op with other inputs."""
    inputs: list[Any] = [i if isinstance(i, Literal) else renamed.get(i, i) for i in op.inputs]
    fresh = replace(op, inputs=inputs)
    fresh.all_outputs = op.all_outputs
    return fresh


def _ordered(units: list[_Unit]) -> list[_Unit]:
    """The units by their places, each after those that it reads."""
    maker = {o: n for n, unit in enumerate(units) for op in unit.ops for o in op.outputs if o >= 0}
    before = [{maker[v] for op in unit.ops for v in values_of(op) if v in maker} for unit in units]
    after: list[list[int]] = [[] for _ in units]
    for n, needs in enumerate(before):
        for m in needs:
            after[m].append(n)
    missing = [len(needs) for needs in before]
    ready = [(unit.place, n) for n, unit in enumerate(units) if not missing[n]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, n = heapq.heappop(ready)
        found.append(units[n])
        for m in after[n]:
            missing[m] -= 1
            if not missing[m]:
                heapq.heappush(ready, (units[m].place, m))
    assert len(found) == len(units), "recomputation waits for what waits for it"
    return found
