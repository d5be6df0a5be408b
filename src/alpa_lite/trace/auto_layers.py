"""Automatic layer boundaries: a loss function is cut into layers before it is differentiated.

The function is traced, the cuts are chosen by a function of (FLOPs per op, bytes per cut) that the planner gives, and the
trace is evaluated piece by piece with ``layer_boundary`` on the activations that cross. A scan over layers that is cut
becomes consecutive scans over slices of its stacked parameters, or its body where one iteration is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
from jax import lax

from alpa_lite._jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    evaluate_jaxpr,
    inner_jaxprs,
    name_scope_of,
    scan_layout,
    user_context,
)
from alpa_lite.errors import LayerError
from alpa_lite.trace.boundary import layer_boundary_p
from alpa_lite.trace.flatten import source_of
from alpa_lite.trace.forward_ops import ForwardOps, Homes, LeafRows
from alpa_lite.trace.indexed_rows import indexed_by_rows
from alpa_lite.trace.jaxprs import contains, inlined, is_heavy, read, run_part, variables
from alpa_lite.trace.op_places import gathered
from alpa_lite.trace.read_rows import read_by_slices
from alpa_lite.trace.written_rows import written_by_rows

# (FLOPs of each op, bytes of the cut before each op but the first) -> the ops that start a layer, rising. Where ops are
# pinned to stages, their ``StagePin``s are a third argument. ``forward=True`` is given for a function without a gradient.
LayerCuts = Callable[..., Sequence[int]]

SLICES = "al_layer_slices"  # name scope of the slices of stacked parameters
_BOUNDARY = frozenset({"layer_boundary"})


def with_layers(
    f: Callable[..., Any],
    leaves: Sequence[Any],
    batch: frozenset[int],
    differentiated: frozenset[int],
    layers: LayerCuts,
    homes: Homes | None = None,
    *,
    forward: bool = False,
    starts: list[Any] | None = None,
) -> Callable[..., Any]:
    """The same function with boundaries.

    Args:
        f: of array leaves; the first leaf of its result is the loss.
        leaves: arrays or tracers, for their types.
        batch: positions of the leaves that are split in microbatches.
        differentiated: positions of the leaves whose gradient is taken.
        layers: chooses the cuts; not asked if ``f`` has boundaries of its own.
        homes: position of a leaf, or of rows of it, -> the stage on which its readers lie, and its path; None = anywhere.
        forward: ``f`` is differentiated by nobody: all its results count as the first one does, and what a result alone needs
            (a cache) is done where its values are.
        starts: is filled with the cuts; with paths and stages where ``f`` has no matmul, so that its layers are where leaves lie.

    Raises:
        LayerError: ``f`` has boundaries inside of a loop, or the chosen cuts cannot be made.
    """
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)) for x in leaves]
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*structs)
    tree = jax.tree_util.tree_structure(shape)
    closed = inlined(closed)
    closed = written_by_rows(read_by_slices(closed)) if forward else closed
    if contains(closed.jaxpr, _BOUNDARY):
        return partial(_evaluated, closed, tree) if forward else f
    closed = gathered(indexed_by_rows(closed), batch) if forward else closed
    known = {leaf: (stage, path) for leaf, (stage, path) in (homes or {}).items() if stage is not None}
    if forward and known and not any(map(is_heavy, closed.jaxpr.eqns)):
        if starts is not None:
            starts[:] = [(path, stage) for stage, path in known.values()]
        return partial(_at_homes, closed, tree, known)
    ops = ForwardOps(closed, batch, differentiated, forward=forward)
    pins = (*ops.stage_pins, *ops.home_pins(homes or {}))
    given = (ops.flops, ops.cut_bytes, pins) if pins else (ops.flops, ops.cut_bytes)
    try:
        chosen = layers(*given, forward=True) if forward else layers(*given)
    except LayerError as error:
        raise LayerError(f"{error}{_not_cut(ops)}") from None
    cuts = sorted({*chosen, *ops.row_cuts(homes or {}, chosen)})
    _check(ops, cuts)
    if starts is not None:
        starts[:] = cuts

    def cut(*args: Any) -> Any:
        found = _Evaluation(ops, cuts, args).run()
        return jax.tree_util.tree_unflatten(tree, _distinct(ops.jaxpr, found) if forward else found)

    return cut


def are_homes(starts: Sequence[Any]) -> bool:
    """Whether what ``with_layers`` says of layers are homes of leaves, not cuts."""
    return bool(starts) and not isinstance(starts[0], int)


def _at_homes(closed: ClosedJaxpr, tree: Any, homes: Mapping[LeafRows, tuple[int, str]], *args: Any) -> Any:
    """A function without layers of its own, as one that copies slots of a cache: leaves, or rows of them, pass as many boundaries
    as there are stages before theirs, so that what is done with them is done there."""
    jaxpr = closed.jaxpr
    wanted = {v for atoms in (jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns)) for v in variables(atoms)}
    parts: dict[int, dict[tuple[int, int], Any]] = {}  # position of a leaf -> (first row, stage) -> its part
    for (position, rows), (stage, _) in homes.items():
        if jaxpr.invars[position] in wanted:
            with jax.named_scope(SLICES):
                part = args[position] if rows is None else lax.slice_in_dim(args[position], *rows)
            parts.setdefault(position, {})[rows[0] if rows else 0, stage] = part
    last = max((stage for own in parts.values() for _, stage in own), default=0)
    for number in range(1, last + 1):
        behind = [(position, key) for position, own in sorted(parts.items()) for key in sorted(own) if key[1] >= number]
        passed = layer_boundary_p.bind(*(parts[position][key] for position, key in behind), backward=False)
        for (position, key), value in zip(behind, passed, strict=True):
            parts[position][key] = value
    given = list(args)
    for position, own in parts.items():
        rows = [part for _, part in sorted(own.items(), key=lambda item: item[0])]
        given[position] = _joined(rows) if len(rows) > 1 else rows[0]
    return _evaluated(closed, tree, *given)


def _evaluated(closed: ClosedJaxpr, tree: Any, *args: Any) -> Any:
    found = evaluate_jaxpr(closed.jaxpr, closed.consts, args)
    return jax.tree_util.tree_unflatten(tree, _distinct(closed.jaxpr, found))


def _distinct(jaxpr: Jaxpr, results: Sequence[Any]) -> list[Any]:
    """Results, each made by an op of its own: what is an argument, a constant or another result is copied. A loop carries them,
    and a buffer that it gives back twice, or as it was given, could not be given to it again."""
    seen: set[Any] = {*jaxpr.invars, *jaxpr.constvars}
    found = []
    for atom, value in zip(jaxpr.outvars, results, strict=True):
        again = isinstance(atom, Literal) or atom in seen
        found.append(lax.copy_p.bind(value) if again else value)
        if not isinstance(atom, Literal):
            seen.add(atom)
    return found


def _check(ops: ForwardOps, cuts: Sequence[int]) -> None:
    bad = [c for c in cuts if not 0 < c < len(ops.units) or ops.cut_bytes[c - 1] == float("inf")]
    if bad:
        raise LayerError(
            f"the cuts {bad} of {len(ops.units)} ops were chosen. Allowed are those that the gradient passes: their bytes are "
            "finite. They come from the function given as trace(layers=...); choose among the finite ones."
        )


def _not_cut(ops: ForwardOps) -> str:
    """For messages: the loop or call with most FLOPs of those that are one op, if it has a tenth of all."""
    if not any(map(is_heavy, ops.jaxpr.eqns)):
        return (
            " It has no matmul. Where others say where its leaves lie (al.plan_shared, follow=), each stage does what concerns "
            "its own."
        )
    dearest = max(range(len(ops.units)), key=lambda n: ops.flops[n], default=None)
    if dearest is None or ops.flops[dearest] <= 0.1 * sum(ops.flops):
        return ""
    eqn = ops.jaxpr.eqns[ops.units[dearest].eqn]
    if ops.over_layers(eqn) or not any(inner_jaxprs(eqn)):
        return ""
    name, share = eqn.primitive.name, ops.flops[dearest] / sum(ops.flops)
    what = (
        "scan over parameters that are stacked by layers"
        if name in ("scan", "while")
        else "put it around single layers"
    )
    return f" The {name} at {source_of(eqn)} has {share:.0%} of its FLOPs and is one op: {what}."


class _Evaluation:
    """The function on one set of arguments."""

    def __init__(self, ops: ForwardOps, cuts: Sequence[int], args: Sequence[Any]) -> None:
        self.ops, self.cuts, self.jaxpr = ops, cuts, ops.jaxpr
        ends = (*self.jaxpr.constvars, *self.jaxpr.invars)
        self.env: dict[Any, Any] = dict(zip(ends, (*ops.closed.consts, *args), strict=True))
        self.made: dict[Any, Any] = {}  # what has passed a boundary, as it was before

    def run(self) -> list[Any]:
        done = 0
        for eqn, cuts in self.by_equation().items():
            self.part(done, eqn)
            if self.ops.first[eqn] in cuts:
                self.cross(self.ops.crossing(self.ops.first[eqn]))
            inner = [c for c in cuts if c > self.ops.first[eqn]]
            if inner:
                self.scan(eqn, inner)
            done = eqn + bool(inner)
        self.part(done, len(self.jaxpr.eqns))
        return [read({**self.env, **self.made}, a) for a in self.jaxpr.outvars]

    def part(self, start: int, stop: int) -> None:
        """Equations between cuts. Rows of a result are put together as they were before they passed a boundary."""
        for join in sorted(i for i in self.ops.joins if start <= i < stop):
            run_part(self.jaxpr, start, join, self.env)
            before = {**self.env, **self.made}
            run_part(self.jaxpr, join, join + 1, before)
            self.env.update((v, before[v]) for v in self.jaxpr.eqns[join].outvars)
            start = join + 1
        run_part(self.jaxpr, start, stop, self.env)

    def by_equation(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for cut in self.cuts:
            found.setdefault(self.ops.units[cut].eqn, []).append(cut)
        return found

    def cross(self, live: list[Any], more: list[Any] | None = None) -> list[Any]:
        """Put a boundary on variables, and on values, whose counterparts behind it are returned."""
        for var in live:
            self.made.setdefault(var, self.env[var])
        passed = layer_boundary_p.bind(*(self.env[v] for v in live), *(more or []), backward=False)
        self.env.update(zip(live, passed, strict=False))
        return passed[len(live) :]

    def scan(self, index: int, cuts: list[int]) -> None:
        """A scan as one scan per layer, with boundaries on the carry between them."""
        eqn, first = self.jaxpr.eqns[index], self.ops.first[index]
        num_consts, num_carry = scan_layout(eqn.params)
        activations = [eqn.outvars.index(v) for v in self.ops.carry(eqn)]
        edges = [0, *(c - first for c in cuts), eqn.params["length"]]
        carry = [read(self.env, a) for a in eqn.invars[num_consts : num_consts + num_carry]]
        rows: list[list[Any]] = []
        for start, stop in pairwise(edges):
            if start:
                passed = self.cross(self.ops.crossing(first + start), [carry[j] for j in activations])
                for j, value in zip(activations, passed, strict=True):
                    carry[j] = value
            results = self.scan_part(eqn, carry, start, stop)
            carry, ys = results[:num_carry], results[num_carry:]
            rows.append(ys)
        rows = rows[::-1] if eqn.params["reverse"] else rows
        self.env.update(zip(eqn.outvars, [*carry, *map(_joined, zip(*rows, strict=True))], strict=True))

    def scan_part(self, eqn: JaxprEqn, carry: list[Any], start: int, stop: int) -> list[Any]:
        num_consts, num_carry = scan_layout(eqn.params)
        length = eqn.params["length"]
        low, high = (length - stop, length - start) if eqn.params["reverse"] else (start, stop)
        consts = [read(self.env, a) for a in eqn.invars[:num_consts]]
        with user_context(eqn.source_info.traceback), jax.named_scope(name_scope_of(eqn) or "layers"):
            with jax.named_scope(SLICES):
                xs = [
                    lax.slice_in_dim(read(self.env, a), low, high, axis=0) for a in eqn.invars[num_consts + num_carry :]
                ]
            if stop - start == 1:
                body = eqn.params["jaxpr"]
                results = evaluate_jaxpr(body.jaxpr, body.consts, [*consts, *carry, *(x[0] for x in xs)])
                return [*results[:num_carry], *(y[None] for y in results[num_carry:])]
            params = {"length": stop - start, "unroll": min(eqn.params["unroll"], stop - start)}
            return eqn.primitive.bind(*consts, *carry, *xs, **{**eqn.params, **params})


def _joined(rows: Sequence[Any]) -> Any:
    return lax.concatenate(rows, dimension=0)
