"""Stacked parameters of a scan that was cut into layers: each layer's slice becomes an argument of its own.

A scan over layers reads one stacked array per weight. Cut in two, both halves read slices of it, its gradient is a sum of two
arrays that are zero but for a slice, and the update changes it whole. So one stage would own, receive and update what belongs
to several. This pass splits such arrays, and all that goes with them (gradients and their sums over microbatches, moments of
the optimizer), along their first dim where the cuts are. What is computed element by element is computed per part, full
reductions are put together from the parts', and any other op reads the parts put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite._jax_compat import Literal
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.plan.leaf_rows import rows_path, split_path
from alpa_lite.trace.flatten import FlatJaxpr, drop_dead
from alpa_lite.trace.layers import without_boundaries
from alpa_lite.trace.program import Traced, build_program
from alpa_lite.trace.row_edges import Edges, is_loop, row_edges
from alpa_lite.trace.row_rewriter import Rewriter


@dataclass(frozen=True, slots=True)
class LeafPart:
    """An argument or result of the step, or rows ``start`` to ``stop`` of it; ``stop`` is -1 for all of it."""

    leaf: int
    start: int = 0
    stop: int = -1

    def path(self, path: str) -> str:
        return path if self.stop < 0 else rows_path(path, self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredStep:
    """A step with layer boundaries.

    Attributes:
        flat: its jaxpr; stacked parameters of scans that were cut are several inputs.
        arguments, results: what its inputs and outputs are of the step's; the parts of one leaf follow each other.
        aliases: (input, output) numbers of state.
    """

    flat: FlatJaxpr
    arguments: tuple[LeafPart, ...]
    results: tuple[LeafPart, ...]
    aliases: tuple[tuple[int, int], ...]

    def split(self, leaves: Sequence[Any]) -> list[Any]:
        """The step's arguments -> the jaxpr's."""
        return [leaves[p.leaf] if p.stop < 0 else leaves[p.leaf][p.start : p.stop] for p in self.arguments]

    def join(self, made: Sequence[Any], joined: Callable[[list[Any]], Any] = jnp.concatenate) -> list[Any]:
        """The jaxpr's results -> the step's; ``joined`` makes a leaf of its rows, in order."""
        rows: dict[int, list[Any]] = {}
        for part, array in zip(self.results, made, strict=True):
            rows.setdefault(part.leaf, []).append(array)
        return [found[0] if len(found) == 1 else joined(found) for _, found in sorted(rows.items())]

    def argument_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of the step's arguments."""
        found: dict[int, jax.ShapeDtypeStruct] = {}
        for part, value in zip(self.arguments, self.flat.inputs, strict=True):
            aval = self.flat.avals[value]
            shape = aval.shape if part.stop < 0 else (part.stop, *aval.shape[1:])  # the last part's rows end the leaf
            found[part.leaf] = jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
        return tuple(struct for _, struct in sorted(found.items()))


def unstack(
    flat: FlatJaxpr, aliases: Iterable[tuple[int, int]], unread: Mapping[int, Iterable[int]] | None = None
) -> LayeredStep:
    """Split the stacked parameters of scans that were cut.

    Args:
        flat: the step, with its microbatch loop.
        aliases: (argument, result) positions of state.
        unread: position of an argument -> where its rows lie apart in other functions. Followed if nothing here reads it.
    """
    pairs = tuple(aliases)
    edges = row_edges(flat, pairs)
    if unread:
        read = {v for op in flat.ops for v in op.inputs if not isinstance(v, Literal)}.union(
            v for v in flat.outputs if not isinstance(v, Literal)
        )
        for argument, starts in unread.items():
            value = flat.inputs[argument]
            if value not in read:
                edges[id(flat), value] = tuple(sorted({0, *starts, flat.avals[value].shape[0]}))
    arguments = _parts((v, flat, edges) for v in flat.inputs)
    results = _parts((v, flat, edges) for v in flat.outputs)
    number = {part: i for i, part in enumerate(arguments)}
    of_argument = {r: a for a, r in pairs}
    states = ((part, i) for i, part in enumerate(results) if part.leaf in of_argument)
    linked = sorted((number[replace(part, leaf=of_argument[part.leaf])], i) for part, i in states)
    if edges:
        flat = Rewriter(flat, edges).run()
        drop_dead(flat)
    return LayeredStep(flat=flat, arguments=arguments, results=results, aliases=tuple(linked))


def unstacked(traced: Traced, rules: tuple[NamedRule, ...] = (), paths: Iterable[str] = ()) -> Traced:
    """A step traced with layers -> the same as a function of parts: each is a leaf of its own, with its rows in its path.

    Args:
        traced: with ``layered``.
        rules: the user's, by primitive.
        paths: of leaves, or rows of them, as they lie in other functions: what this one does not read has these rows too.

    Returns:
        The step with ``parts``, of as many arguments and results as there are parts; its trees are still the user's.
    """
    whole, flat = traced.program, traced.layered
    assert flat is not None
    rows: dict[int, list[int]] = {}
    number = {path: i for i, path in enumerate(whole.input_paths)}
    for path, span in map(split_path, paths):
        if span is not None and path in number:
            rows.setdefault(number[path], []).append(span[0])
    step = unstack(flat, whole.aliases, rows)
    if all(part.stop < 0 for part in step.arguments):
        return replace(traced, parts=step)
    in_paths = [part.path(whole.input_paths[part.leaf]) for part in step.arguments]
    out_paths = [part.path(whole.output_paths[part.leaf]) for part in step.results]
    donated = [whole.donated[part.leaf] for part in step.arguments]
    plain = _plain(step.flat)
    program = build_program(plain, in_paths, out_paths, donated, rules, step.aliases, traced.known)
    return replace(traced, program=program, flat=plain, layered=step.flat, parts=step)


def _plain(flat: FlatJaxpr) -> FlatJaxpr:
    """Without boundaries, also in the microbatch loop."""
    ops = list(flat.ops)
    for i, op in enumerate(ops):
        if is_loop(op):
            ops[i] = replace(op, bodies=[without_boundaries(op.bodies[0])])
            ops[i].all_outputs = op.all_outputs
    return without_boundaries(replace(flat, ops=ops))


def _parts(values: Iterable[tuple[Any, FlatJaxpr, Edges]]) -> tuple[LeafPart, ...]:
    found: list[LeafPart] = []
    for position, (value, flat, edges) in enumerate(values):
        split = None if isinstance(value, Literal) else edges.get((id(flat), value))
        found += [LeafPart(position, a, b) for a, b in pairwise(split)] if split else [LeafPart(position)]
    return tuple(found)
