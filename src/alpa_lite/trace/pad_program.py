"""Rewrites a traced function so that chosen groups of dims are padded: ``pad`` where a tensor enters the padded part,
``slice`` where it leaves, ``pad_mask`` where an op reads across the padding and needs a neutral value there.

Arguments and results keep their sizes, so the user sees nothing of it; planner, lowering and audit see an ordinary program
in which the padded dims divide. ``docs/design/0008-uneven-dims.md`` has the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite._jax_compat import Literal
from alpa_lite.core.program import Op, Program
from alpa_lite.core.rule import FactorKind
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.trace.elementwise import ELEMENTWISE
from alpa_lite.trace.fills import Fill, beside, elementwise_fill, joined, literal_fill, product
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp, flatten
from alpa_lite.trace.pad_groups import Factors, PadGroup, Place, is_anchor, places_of, tied_ops
from alpa_lite.trace.pad_mask import pad_mask_p
from alpa_lite.trace.pin_op import pin_p
from alpa_lite.trace.program import Traced, build_program

_NEUTRAL = {"reduce_sum": Fill.ZERO, "reduce_max": Fill.LOWEST, "reduce_min": Fill.HIGHEST, "scatter-add": Fill.ZERO}
_PRODUCTS = ("dot_general", "conv_general_dilated")
_FINITE = (Fill.ZERO, Fill.ROW, Fill.FINITE)
_REPEATABLE = (Fill.ZERO, Fill.ROW)  # sums and picks of such elements are such elements again


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """A rewritten function.

    Attributes:
        traced: the function.
        regions: per region of the original program its path in the new one, and which original value each new one is a
            form of.
        pins: per position among arguments and results the layout that its padded form must have.
    """

    traced: Traced
    regions: dict[str, tuple[str, dict[int, int]]]
    pins: dict[int, str]


def pad_traced(
    traced: Traced,
    groups: Sequence[tuple[PadGroup, int]],
    pins: Mapping[int, str] | None = None,
    rules: tuple[NamedRule, ...] = (),
) -> Padded:
    """The function with every group padded to the size beside it; same arguments, same results.

    Args:
        traced: of the user's function.
        groups: of ``pad_groups(traced.flat, traced.program)``, with padded sizes.
        pins: per argument position (results follow, counted on) the layout that its padded form must have.
        rules: the user's, by primitive.
    """
    job = _Job()
    for group, padded in groups:
        job.sizes.setdefault(group.region, {}).update(dict.fromkeys(group.places, padded))
    program = traced.program
    held = dict(pins or {})
    flat = _Rewriter(traced.flat, program, job, pins=held).run()
    made = build_program(flat, list(program.input_paths), list(program.output_paths), list(program.donated), rules)
    result = Traced(program=made, flat=flat, in_tree=traced.in_tree, out_tree=traced.out_tree)
    return Padded(traced=result, regions=job.regions, pins=held)


@dataclass(slots=True)
class _Job:
    """What the regions share: padded sizes by region and place, ``Padded.regions``, and the ties by key of the op."""

    sizes: dict[str, dict[Place, int]] = field(default_factory=dict)
    regions: dict[str, tuple[str, dict[int, int]]] = field(default_factory=dict)
    known: dict[str, Factors] = field(default_factory=dict)


@dataclass(slots=True)
class _Version:
    """A form of a value: its id and what its padding holds, by padded dim."""

    id: int
    fills: dict[int, Fill] = field(default_factory=dict)


class _Rewriter:
    """One program or body. ``made[v]`` says in which dims the op that makes v leaves it padded."""

    def __init__(
        self,
        flat: FlatJaxpr,
        program: Program,
        job: _Job,
        place: tuple[str, str] = ("", ""),
        pins: dict[int, str] | None = None,
    ) -> None:
        self.flat, self.program, self.job = flat, program, job
        self.region, self.new_region = place
        _, self.origins = job.regions[self.region] = (self.new_region, {})
        pins = pins or {}
        self.sizes = job.sizes.get(self.region, {})
        self.avals, self.ops = list(flat.avals), []
        self.made: dict[int, frozenset[int]] = {}
        self.versions: dict[tuple[int, frozenset[int]], _Version] = {}
        paths = (*program.input_paths, *program.output_paths)
        held = {i: (text, f"the padded form of {paths[i]}") for i, text in pins.items()}
        self.in_pins = {flat.inputs[i]: pin for i, pin in held.items() if i < len(flat.inputs)}
        self.out_pins = {i - len(flat.inputs): pin for i, pin in held.items() if i >= len(flat.inputs)}
        self.runs = self._padded_factors()

    def _padded_factors(self) -> list[Factors]:
        """Per op the factors that it runs padded: anchors do, what leads to them, and what reads padded tensors alone.

        With pins all that can. What is left, e.g. an optimizer's update of unpadded state, runs at the true size.
        """
        tied = [
            {f: positions for f, positions in factors.items() if places_of(op, positions)[0] in self.sizes}
            for op, factors in zip(self.flat.ops, tied_ops(self.flat, self.program, self.job.known), strict=True)
        ]
        forced = bool(self.in_pins or self.out_pins)
        needed: set[Place] = set()
        runs: list[Factors] = [{} for _ in tied]
        for index in reversed(range(len(tied))):
            op = self.flat.ops[index]
            for factor, (ins, outs) in tied[index].items():
                if forced or is_anchor(op) or not needed.isdisjoint((op.all_outputs[t], d) for t, d in outs):
                    runs[index][factor] = (ins, outs)
                    needed.update((op.inputs[t], d) for t, d in ins)
        made: set[Place] = set()
        for index, op in enumerate(self.flat.ops):
            for factor, (ins, outs) in tied[index].items():
                if factor in runs[index] or (ins and made.issuperset((op.inputs[t], d) for t, d in ins)):
                    runs[index][factor] = (ins, outs)
                    made.update((op.all_outputs[t], d) for t, d in outs)
        return runs

    def run(self) -> FlatJaxpr:
        flat = self.flat
        for index, op in enumerate(flat.ops):
            if op.name == "optimization_barrier":
                self._prepare_barrier(index)
            self._rewrite(index, op)
        outputs = [self._output(position, out) for position, out in enumerate(flat.outputs)]
        return FlatJaxpr(self.avals, self.ops, flat.inputs, outputs, flat.constants)

    def _output(self, position: int, out: Any) -> Any:
        """A result at its true size, cut from the pinned form if there is one."""
        if isinstance(out, Literal):
            return out
        dims = frozenset(d for v, d in self.sizes if v == out)
        if position not in self.out_pins or not dims:
            return self._version(out, frozenset()).id
        pinned = self._pinned(out, self._version(out, dims), *self.out_pins[position])
        return self._resized(out, pinned, {d: self._true_size(out, d) for d in dims}, None).id

    def _prepare_barrier(self, index: int) -> None:
        """All tensors of one barrier are brought to their sizes before it: lowering wants its ops in one run."""
        group = self.flat.ops[index].params["group"]
        for other in range(index, len(self.flat.ops)):
            op = self.flat.ops[other]
            if op.name != "optimization_barrier" or op.params["group"] != group:
                break
            self._version(op.inputs[0], self._wanted(other, 0), op)

    def _wanted(self, index: int, position: int) -> frozenset[int]:
        """Dims in which op ``index`` reads an operand padded."""
        return frozenset(d for ins, _ in self.runs[index].values() for t, d in ins if t == position)

    # -- forms of a value ---------------------------------------------------------------------------------------------

    def _version(self, value: int, dims: frozenset[int], near: FlatOp | None = None) -> _Version:
        """The value padded in exactly ``dims``, made on first demand."""
        made = self.made.get(value, frozenset())
        if (value, dims) in self.versions:
            return self.versions[value, dims]
        if dims == made:
            return self.versions.setdefault((value, dims), _Version(value))
        version = self.versions.get((value, made), _Version(value))
        if made - dims:
            version = self._resized(value, version, {d: self._true_size(value, d) for d in made - dims}, near)
        if dims - made:
            version = self._resized(value, version, {d: self.sizes[value, d] for d in dims - made}, near)
        if value in self.in_pins and not made:
            version = self._pinned(value, version, *self.in_pins[value])
        self.versions[value, dims] = version
        return version

    def _true_size(self, value: int, dim: int) -> int:
        return self.flat.avals[value].shape[dim]

    def _resized(self, value: int, version: _Version, sizes: dict[int, int], near: FlatOp | None) -> _Version:
        shape = self.avals[version.id].shape
        target = tuple(sizes.get(d, n) for d, n in enumerate(shape))
        if any(new < old for new, old in zip(target, shape, strict=True)):
            made = self._form(value, lambda x: lax.slice(x, (0,) * len(shape), target), version, near)
            return _Version(made, {d: f for d, f in version.fills.items() if d not in sizes})
        zero = np.zeros((), self.avals[version.id].dtype)
        config = [(0, new - old, 0) for new, old in zip(target, shape, strict=True)]
        made = self._form(value, lambda x: lax.pad(x, zero, config), version, near)
        kept = {d: beside(f, Fill.ZERO) for d, f in version.fills.items()}
        return _Version(made, {**kept, **dict.fromkeys(sizes, Fill.ZERO)})

    def _pinned(self, value: int, version: _Version, text: str, source: str) -> _Version:
        made = self._form(value, lambda x: pin_p.bind(x, pinned=text), version, None)
        self.ops[-1].source = source
        return _Version(made, version.fills)

    def _masked(self, value: int, dims: frozenset[int], dim: int, fill: Fill, near: FlatOp) -> None:
        """Set the padding; whoever reads the padded value later reads the masked one."""
        version = self.versions[value, dims]
        size = self._true_size(value, dim)
        made = self._form(value, lambda x: pad_mask_p.bind(x, dim=dim, size=size, fill=str(fill))[0], version, near)
        kept = {d: beside(f, fill) for d, f in version.fills.items()}
        self.versions[value, dims] = _Version(made, {**kept, dim: fill})

    def _form(self, value: int, function: Callable[..., Any], version: _Version, near: FlatOp | None) -> int:
        """Another form of a value, made from one that exists."""
        made = self._emit(function, [version.id], near)
        self.origins[made] = value
        return made

    def _emit(self, function: Callable[..., Any], inputs: list[int], near: FlatOp | None) -> int:
        """Append what ``function`` does, traced on abstract values; returns the id of its one result."""
        closed = jax.make_jaxpr(function)(
            *(jax.ShapeDtypeStruct(self.avals[i].shape, self.avals[i].dtype) for i in inputs)
        )
        inner = flatten(closed)
        assert not inner.constants, "the helper captured an array"
        ids = dict(zip(inner.inputs, inputs, strict=True))
        source, scope = (near.source, near.scope) if near is not None else ("", "")
        for op in inner.ops:
            for value in op.all_outputs:
                ids[value] = len(self.avals)
                self.avals.append(inner.avals[value])
            copied = FlatOp(
                op.primitive,
                op.params,
                [i if isinstance(i, Literal) else ids[i] for i in op.inputs],
                [ids[o] for o in op.all_outputs],
                source,
                scope,
                traceback=near.traceback if near is not None else None,
            )
            copied.outputs = [ids[o] if o >= 0 else -1 for o in op.outputs]
            self.ops.append(copied)
        return ids[inner.outputs[0]]

    # -- ops ----------------------------------------------------------------------------------------------------------

    def _rewrite(self, index: int, op: FlatOp) -> None:
        mirror, run = self.program.ops[index], self.runs[index]
        wanted = [self._wanted(index, t) for t in range(len(op.inputs))]
        for value, dims in zip(op.inputs, wanted, strict=True):
            if not isinstance(value, Literal):
                self._version(value, dims, op)
        for factor, (ins, outs) in run.items():
            self._neutralise(op, mirror, factor, ins, outs, wanted)
        inputs = [
            value if isinstance(value, Literal) else self.versions[value, dims].id
            for value, dims in zip(op.inputs, wanted, strict=True)
        ]
        self._fix_indices(op, run, inputs)
        for position, out in enumerate(op.all_outputs):
            dims = {d: factor for factor, (_, outs) in run.items() for t, d in outs if t == position}
            shape = [self.sizes[out, d] if d in dims else n for d, n in enumerate(_shape(self.flat.avals[out]))]
            if dims:
                self.avals[out] = self.flat.avals[out].update(shape=tuple(shape), sharding=None)
                fills = {d: self._fill(op, factor, run[factor], wanted) for d, factor in dims.items()}
                self.made[out] = frozenset(dims)
                self.versions[out, frozenset(dims)] = _Version(out, fills)
        made = FlatOp(op.primitive, self._params(op, run), inputs, list(op.all_outputs), op.source, op.scope)
        made.outputs, made.has_effects, made.traceback = list(op.outputs), op.has_effects, op.traceback
        made.bodies = [
            _Rewriter(body, inner, self.job, self._body_place(index, b)).run()
            for b, (body, inner) in enumerate(zip(op.bodies, mirror.bodies, strict=True))
        ]
        self.ops.append(made)

    def _body_place(self, index: int, body: int) -> tuple[str, str]:
        """Where a body of op ``index``, which comes next, is in the original and in the new program."""
        return f"{self.region}{index}.{body}.", f"{self.new_region}{len(self.ops)}.{body}."

    def _params(self, op: FlatOp, run: dict[int, Any]) -> dict[str, Any]:
        """Parameters that are sizes, at the padded size."""
        if not run:
            return op.params
        params, result = dict(op.params), tuple(_shape(self.avals[op.all_outputs[0]]))
        if op.name in ("broadcast_in_dim", "iota"):
            params["shape"] = result
        elif op.name == "reshape":
            params["new_sizes"] = result
        elif op.name == "dynamic_slice":
            params["slice_sizes"] = result
        elif op.name in ("slice", "gather"):
            name = "limit_indices" if op.name == "slice" else "slice_sizes"
            padded = {d: self.sizes[op.inputs[0], d] for ins, _ in run.values() for t, d in ins if t == 0}
            whole = self.flat.avals[op.inputs[0]].shape
            params[name] = tuple(padded[d] if d in padded and n == whole[d] else n for d, n in enumerate(params[name]))
        return params

    def _fix_indices(self, op: FlatOp, run: dict[int, Any], inputs: list[Any]) -> None:
        """An index beyond the true size means at the padded size what it meant before: clamped, filled or dropped."""
        if op.name not in ("gather", "scatter", "scatter-add"):
            return
        numbers, mode = op.params["dimension_numbers"], op.params["mode"]
        gather = op.name == "gather"
        indexed = numbers.start_index_map if gather else numbers.scatter_dims_to_operand_dims
        for d in (d for ins, _ in run.values() for t, d in ins if t == 0 and d in indexed):
            component, size, padded = indexed.index(d), self._true_size(op.inputs[0], d), self.sizes[op.inputs[0], d]

            def fixed(i: Any, c: int = component, size: int = size, padded: int = padded) -> Any:
                if mode == lax.GatherScatterMode.CLIP:
                    moved = jnp.minimum(i, np.asarray(size - 1, i.dtype))
                else:
                    moved = jnp.where(i >= size, np.asarray(padded, i.dtype), i)
                return (
                    moved
                    if i.shape[-1] == 1
                    else jnp.where(lax.broadcasted_iota(i.dtype, i.shape, i.ndim - 1) == c, moved, i)
                )

            if mode != lax.GatherScatterMode.PROMISE_IN_BOUNDS:
                inputs[1] = self._emit(fixed, [inputs[1]], op)

    # -- what the padding holds ---------------------------------------------------------------------------------------

    def _neutralise(
        self, op: FlatOp, mirror: Op, factor: int, ins: list[Any], outs: list[Any], wanted: list[frozenset[int]]
    ) -> None:
        """Mask operands whose padding would count."""
        if mirror.rule.factors[factor].kind is not FactorKind.REDUCTION or op.name == "gather":
            return
        places = [(t, d) for t, d in ins if op.name != "scatter-add" or t == 2]
        for t, d in places:
            fill = self.versions[op.inputs[t], wanted[t]].fills[d]
            if fill not in _FINITE if op.name in _PRODUCTS else fill is not _NEUTRAL[op.name]:
                self._masked(op.inputs[t], wanted[t], d, Fill.ZERO if op.name in _PRODUCTS else _NEUTRAL[op.name], op)
        if op.name in _PRODUCTS and product(self._fills(op, ins, wanted)) is not Fill.ZERO:
            smallest = min(places, key=lambda p: _elements(self.avals[self.versions[op.inputs[p[0]], wanted[p[0]]].id]))
            self._masked(op.inputs[smallest[0]], wanted[smallest[0]], smallest[1], Fill.ZERO, op)

    def _fills(self, op: FlatOp, ins: list[tuple[int, int]], wanted: list[frozenset[int]]) -> list[Fill]:
        """Of every operand; one without the padded dim is the same all along it, a constant is what it is."""
        dims = dict(ins)

        def fill(position: int, value: Any) -> Fill:
            if isinstance(value, Literal):
                return literal_fill(value.val)
            if position not in dims:
                return Fill.ROW
            found = self.versions[value, wanted[position]].fills[dims[position]]
            return found if self._is_inexact(value) or found in _FINITE else Fill.FINITE

        return [fill(t, value) for t, value in enumerate(op.inputs)]

    def _is_inexact(self, value: int) -> bool:
        return bool(jax.dtypes.issubdtype(self.flat.avals[value].dtype, jnp.inexact))

    def _fill(self, op: FlatOp, factor: int, places: tuple[list[Any], list[Any]], wanted: list[frozenset[int]]) -> Fill:
        """Of the result."""
        fill = _result_fill(op, places[0], self._fills(op, places[0], wanted))
        # There are no infinite integers.
        return fill if self._is_inexact(op.all_outputs[0]) or fill in _REPEATABLE else Fill.FINITE


def _result_fill(op: FlatOp, ins: list[tuple[int, int]], fills: list[Fill]) -> Fill:
    name, carried = op.name, [fills[t] for t, _ in ins]
    if name in ELEMENTWISE:
        return elementwise_fill(name, op.params, fills)
    if name in ("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "stop_gradient"):
        return carried[0] if carried else fills[0]
    if name == "iota":
        return Fill.FINITE
    if name in _PRODUCTS:
        return product(fills)
    if name == "concatenate":
        return joined(fills)
    if name in ("reduce_max", "reduce_min", "slice", "dynamic_slice"):
        return carried[0]
    if name in ("reduce_sum", "cumsum"):
        return carried[0] if carried[0] in _REPEATABLE else Fill.ANY
    if name in ("pad", "dynamic_update_slice"):
        return joined(fills[:2])
    if name == "gather":
        return carried[0] if [t for t, _ in ins] == [0] and carried[0] in _REPEATABLE else Fill.ANY
    if name in ("scatter", "scatter-add"):
        positions = [t for t, _ in ins]
        return fills[0] if positions == [0] else joined([fills[0], fills[2]]) if 2 in positions else Fill.ANY
    return Fill.ANY


def _shape(aval: Any) -> tuple[int, ...]:
    return tuple(getattr(aval, "shape", ()))


def _elements(aval: Any) -> int:
    return math.prod(aval.shape)
