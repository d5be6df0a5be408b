"""A loss function's jaxpr as a sequence of ops that can be cut into layers: FLOPs per op, bytes per cut.

Calls of ``jit`` are inlined; recomputed and custom-derivative functions and loops stay whole, but for a ``scan`` over layers
(one over stacked parameters, with heavy ops in its body), whose iterations count as ops of their own.

What crosses a cut is activations: values made of the batch together with parameters (or by heavy ops), read behind the cut.
Parameters, and what is made of parameters or of the batch alone (casts, masks, positions), need not be sent. A cut is possible
where the gradient passes: an activation crosses it that depends on a differentiated input and that the loss depends on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from alpa_lite._jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    inner_jaxprs,
    is_tracer,
    jaxpr_part,
    scan_layout,
)
from alpa_lite.trace.flatten import flatten, source_of
from alpa_lite.trace.flops import total_flops
from alpa_lite.trace.jaxprs import HEAVY, contains, is_heavy, variables
from alpa_lite.trace.leaf_stages import LeafReads, pins_of_leaves
from alpa_lite.trace.openings import row_openings
from alpa_lite.trace.row_ops import joins_rows, rows_joined
from alpa_lite.trace.stage_pin import StagePin, pin_stage_p

# Position of a leaf, and rows of it, or None for all of it.
LeafRows = tuple[int, tuple[int, int] | None]
# Of leaves that lie on stages: the stage of their readers, None = anywhere, and the path.
Homes = Mapping[LeafRows, tuple[int | None, str]]


def _pins_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equation itself, or those in the functions that it calls, if they pin a stage."""
    if eqn.primitive is pin_stage_p:
        yield eqn
    for jaxpr in inner_jaxprs(eqn):
        for inner in jaxpr.eqns:
            yield from _pins_inside(inner)


@dataclass(frozen=True, slots=True)
class Unit:
    """What may not be cut: an equation, or one iteration of a scan over layers."""

    eqn: int
    iteration: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Of the variables of a jaxpr.

    Attributes:
        activations: made of the batch together with parameters, or of other activations.
        from_batch: made of the batch at all.
        with_gradient: the gradient passes them.
        needed: something is made of them that the function returns.
    """

    activations: frozenset[Any]
    from_batch: frozenset[Any]
    with_gradient: frozenset[Any]
    needed: frozenset[Any]


class ForwardOps:
    """The sequence; ``units[i]`` is op i, and a cut i lies before it.

    Attributes:
        closed: without calls; its first result is the loss.
    """

    def __init__(
        self, closed: ClosedJaxpr, batch: frozenset[int], differentiated: frozenset[int], *, forward: bool = False
    ) -> None:
        """``batch`` and ``differentiated`` are positions of inputs. ``forward``: every result counts as the loss does."""
        self.closed, self.jaxpr, self.forward = closed, closed.jaxpr, forward
        self.kinds = _kinds(closed, batch, differentiated, None if forward else 1)
        self.units = [u for i, eqn in enumerate(self.jaxpr.eqns) for u in self._units(i, eqn)]
        self._making: dict[tuple[Any, tuple[int, int]], list[int]] = {}  # what ``_units_making`` found
        self.first = {u.eqn: n for n, u in reversed(list(enumerate(self.units)))}

    def _units(self, i: int, eqn: JaxprEqn) -> Iterator[Unit]:
        count = eqn.params["length"] if self.over_layers(eqn) else 1
        return (Unit(i, t) for t in range(count))

    def over_layers(self, eqn: JaxprEqn) -> bool:
        """A scan with heavy ops over stacked parameters: arrays that no value of the batch goes into."""
        if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
            return False
        stacked = variables(eqn.invars[sum(scan_layout(eqn.params)) :])
        parameters = any(v not in self.kinds.from_batch and v.aval.ndim > 1 for v in stacked)
        return parameters and contains(eqn.params["jaxpr"].jaxpr, HEAVY)

    @cached_property
    def stage_pins(self) -> tuple[StagePin, ...]:
        """Pins to stages, of the op that makes the value and of the pin itself."""
        found = {}
        for i, eqn in enumerate(self.jaxpr.eqns):
            for pin in _pins_inside(eqn):
                made = {i, *(self._maker.get(v, i) for v in variables(eqn.invars) if pin is eqn)}
                found |= {(self.first[k], pin.params["stage"]): source_of(pin) for k in made}
        return tuple(StagePin(place=place, stage=stage, source=source) for (place, stage), source in found.items())

    def home_pins(self, homes: Homes) -> list[StagePin]:
        """Of ops that read leaves which lie on stages."""
        reads: list[LeafReads] = []
        for (position, rows), (stage, path) in homes.items():
            if stage is None:
                continue
            units = {n for i, k in self._readers[self.jaxpr.invars[position]] for n in self._units_reading(i, k, rows)}
            reads.append(LeafReads(path=path, stage=stage, places=tuple(sorted(units))))
        return pins_of_leaves([leaf for leaf in reads if leaf.places])

    def row_cuts(self, homes: Homes, chosen: Collection[int]) -> list[int]:
        """Where further layers must start so that stacked parameters lie in these rows: before the first op that reads some of
        them, unless a ``chosen`` cut lies between the ops that read rows of a parameter and those that read the rows before."""
        first: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        for position, rows in homes:
            if rows is not None:
                reads = self._readers[self.jaxpr.invars[position]]
                units = [n for i, k in reads for n in self._units_reading(i, k, rows)]
                first[position, rows[0]] = min(units, default=len(self.units))
                last[position, rows[1]] = max(units, default=-1)
        found: dict[int, int] = {}
        for (position, row), n in first.items():
            if row and not any(last.get((position, row), -1) < c <= n for c in chosen):
                found[row] = min(n, found.get(row, n))
        return [n for n in found.values() if 0 < n < len(self.units) and math.isfinite(self.cut_bytes[n - 1])]

    @cached_property
    def _readers(self) -> defaultdict[Any, list[tuple[int, int]]]:
        """Per variable the equations that read it, as which operand."""
        found = defaultdict(list)
        for i, eqn in enumerate(self.jaxpr.eqns):
            for k, atom in enumerate(eqn.invars):
                if not isinstance(atom, Literal):
                    found[atom].append((i, k))
        return found

    def _units_reading(self, i: int, operand: int, rows: tuple[int, int] | None) -> list[int]:
        """The ops of an equation that read rows of an operand, or all of it. What is no activation, as it is made of parameters
        alone, or of the batch alone, belongs to the first op that reads it."""
        eqn = self.jaxpr.eqns[i]
        if not any(v in self.kinds.needed for v in eqn.outvars):
            return []
        if rows is not None and i in self.row_openings:
            made = eqn.outvars[0]
            return [unit for r, k in self._readers[made] for unit in self._units_reading(r, k, rows)]
        if rows is not None and eqn.primitive.name == "slice":
            start, stop = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
            if stop <= rows[0] or rows[1] <= start:
                return []
        if not any(v in self.kinds.activations for v in eqn.outvars):
            readers = [
                unit for v in eqn.outvars for r, k in self._readers[v] for unit in self._units_reading(r, k, None)
            ]
            return [min(readers, default=self.first[i])]
        if not self.over_layers(eqn):
            # Rows that are written lie where the new ones are made.
            made = self._units_making(eqn.outvars[0], rows) if rows is not None else []
            return made or [self.first[i]]
        stacked = rows is not None and operand >= sum(scan_layout(eqn.params))
        return self._iterations(i, rows if stacked and rows is not None else (0, eqn.params["length"]))

    def _iterations(self, i: int, rows: tuple[int, int]) -> list[int]:
        """The ops that are the iterations of a scan over layers on these rows."""
        (start, stop), length = rows, self.jaxpr.eqns[i].params["length"]
        numbers = range(length - stop, length - start) if self.jaxpr.eqns[i].params["reverse"] else range(start, stop)
        return [self.first[i] + n for n in numbers]

    def _units_making(self, value: Any, rows: tuple[int, int]) -> list[int]:
        """The ops that make rows of a value which a scan over layers, or layers one by one, make row by row."""
        if isinstance(value, Literal) or value not in self._maker:
            return []
        if (value, rows) not in self._making:
            self._making[value, rows] = sorted(set(self._found_making(self._maker[value], value, rows)))
        return self._making[value, rows]

    def _found_making(self, i: int, value: Any, rows: tuple[int, int]) -> list[int]:
        eqn = self.jaxpr.eqns[i]
        if self.over_layers(eqn):
            num_carry = scan_layout(eqn.params)[1]
            return self._iterations(i, rows) if value in eqn.outvars[num_carry:] else []
        if joins_rows(eqn.primitive.name, eqn.params):
            starts = rows_joined(eqn.primitive.name, [a.aval.shape for a in eqn.invars])
            pieces = zip(eqn.invars, pairwise(starts), strict=True)
            within = [a for a, (start, stop) in pieces if max(start, rows[0]) < min(stop, rows[1])]
            return [self.first[self._maker[a]] for a in variables(within) if a in self._maker]
        if is_heavy(eqn):
            return []
        alike = [a for a in variables(eqn.invars) if a.aval.shape[:1] == value.aval.shape[:1] != ()]
        return [unit for a in alike for unit in self._units_making(a, rows)]

    @cached_property
    def _maker(self) -> dict[Any, int]:
        return {v: i for i, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}

    @cached_property
    def flops(self) -> list[float]:
        """Per op; nothing for what no result needs."""
        found: dict[int, float] = {}
        known: dict[tuple[Any, ...], float] = {}  # of equal equations, as copies of a layer have
        for i, eqn in enumerate(self.jaxpr.eqns):
            if not any(v in self.kinds.needed for v in eqn.outvars):
                found[i] = 0.0
                continue
            key = eqn.primitive, *map(id, eqn.params.values()), *(str(a.aval) for a in (*eqn.invars, *eqn.outvars))
            if key not in known:
                known[key] = total_flops(flatten(ClosedJaxpr(jaxpr_part(self.jaxpr, i, i + 1), ())))
            found[i] = known[key] / (eqn.params["length"] if self.over_layers(eqn) else 1)
        return [found[u.eqn] for u in self.units]

    @cached_property
    def cut_bytes(self) -> list[float]:
        """Per cut, that before op 1 first; inf where the gradient does not pass."""
        size, passes = np.zeros(len(self.units) + 1), np.zeros(len(self.units) + 1)
        for var, made, last in self.lives:
            size[made + 1] += _bytes(var)
            size[last + 1] -= _bytes(var)
            passes[made + 1] += var in self.kinds.with_gradient
            passes[last + 1] -= var in self.kinds.with_gradient
        crossing, passing = np.cumsum(size), np.cumsum(passes)
        for n, unit in enumerate(self.units):
            if unit.iteration:
                carry = self.carry(self.jaxpr.eqns[unit.eqn])
                crossing[n] += sum(map(_bytes, carry))
                passing[n] += any(v in self.kinds.with_gradient for v in carry)
        return [float(b) if p else math.inf for b, p in zip(crossing[1:-1], passing[1:-1], strict=True)]

    @cached_property
    def lives(self) -> list[tuple[Any, int, int]]:
        """Activations with the op that makes them and the last that reads them."""
        last: dict[Any, int] = {}
        count = {u.eqn: n for n, u in enumerate(self.units)}  # its last unit
        for i, eqn in enumerate(self.jaxpr.eqns):
            if not any(v in self.kinds.needed for v in eqn.outvars):
                continue
            if i in self.joins:
                continue
            init = set(map(id, self._init(eqn))) if count[i] > self.first[i] else set()
            for var in variables(eqn.invars):
                last[var] = max(last.get(var, 0), self.first[i] if id(var) in init else count[i])
        eqns = [(i, eqn) for i, eqn in enumerate(self.jaxpr.eqns) if i not in self.row_openings]
        made = ((var, count[i]) for i, eqn in eqns for var in eqn.outvars)
        return [(v, i, last[v]) for v, i in made if v in self.kinds.activations and last.get(v, -1) > i]

    @cached_property
    def row_openings(self) -> set[int]:
        """Equations that work on stacked arguments by rows, for layers of which each reads its own: no cut is crossed by that."""
        return row_openings(self.jaxpr, self.over_layers) if self.forward else set()

    @cached_property
    def joins(self) -> set[int]:
        """Equations that put rows of a result together, or work on what is put together for results alone: each row is written
        where it is made, and need not cross a cut for that."""
        if not self.forward:
            return set()
        main = set()  # what some matmul needs
        for eqn in reversed(self.jaxpr.eqns):
            if is_heavy(eqn) or any(v in main for v in eqn.outvars):
                main.update(variables(eqn.invars))
        found, rows = set(), set()
        for i, eqn in enumerate(self.jaxpr.eqns):
            made = set(eqn.outvars) - main
            if self.over_layers(eqn):
                rows.update(made.intersection(eqn.outvars[scan_layout(eqn.params)[1] :]))
            elif len(made) < len(eqn.outvars) or is_heavy(eqn):
                continue
            elif joins_rows(eqn.primitive.name, eqn.params) or not rows.isdisjoint(variables(eqn.invars)):
                found.add(i)
                rows.update(made)
        return found

    def _init(self, eqn: JaxprEqn) -> list[Any]:
        """Initial carries of a scan that nothing else in it reads."""
        consts, carry = scan_layout(eqn.params)
        others = variables([*eqn.invars[:consts], *eqn.invars[consts + carry :]])
        return [v for v in variables(eqn.invars[consts : consts + carry]) if v not in others]

    def carry(self, eqn: JaxprEqn) -> list[Any]:
        """Results of a scan over layers that stand for its carried activations."""
        _, count = scan_layout(eqn.params)
        return [v for v in eqn.outvars[:count] if v in self.kinds.activations]

    def crossing(self, cut: int) -> list[Any]:
        """Activations that cross a cut, but for the carries of a scan that it cuts; in the order in which they are made."""
        return [var for var, made, last in self.lives if made < cut <= last]


def _kinds(closed: ClosedJaxpr, batch: frozenset[int], differentiated: frozenset[int], losses: int | None) -> Kinds:
    jaxpr = closed.jaxpr
    from_batch = {v for i, v in enumerate(jaxpr.invars) if i in batch}
    passes = {v for i, v in enumerate(jaxpr.invars) if i in differentiated}
    # Concrete constants (tables of positions) are free; what the function closes over else may be parameters.
    closed_over = zip(jaxpr.constvars, closed.consts, strict=True)
    dear = {v for i, v in enumerate(jaxpr.invars) if i not in batch} | {v for v, c in closed_over if is_tracer(c)}
    activations: set[Any] = set()
    for eqn in jaxpr.eqns:
        given = set(variables(eqn.invars))
        results = [v for v in eqn.outvars if type(v).__name__ != "DropVar" or v in _carried(eqn)]
        if given & passes:
            passes.update(v for v in results if jnp.issubdtype(v.aval.dtype, jnp.inexact))
        if given & from_batch:
            from_batch.update(results)
            if is_heavy(eqn) or given & (activations | dear):
                activations.update(results)
        elif given & dear:
            dear.update(results)
    return Kinds(
        activations=frozenset(activations),
        from_batch=frozenset(from_batch),
        with_gradient=frozenset(passes & _reaching(jaxpr, jaxpr.outvars[:losses])),
        needed=frozenset(_reaching(jaxpr, jaxpr.outvars)),
    )


def _reaching(jaxpr: Jaxpr, outvars: Sequence[Any]) -> set[Any]:
    """Variables that go into some results."""
    found = set(variables(outvars))
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in found for v in eqn.outvars):
            found.update(variables(eqn.invars), eqn.outvars if eqn.effects else _carried(eqn))
    return found


def _carried(eqn: JaxprEqn) -> list[Any]:
    """Of a scan what it leaves in its state, which its own iterations read even where nobody else does."""
    return eqn.outvars[: scan_layout(eqn.params)[1]] if eqn.primitive.name == "scan" else []


def _bytes(var: Any) -> float:
    return float(math.prod(var.aval.shape)) * getattr(var.aval.dtype, "itemsize", 4)
