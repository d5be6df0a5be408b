"""Which dims could be padded together: groups of dims that ops tie to one another, found from the sharding rules.

An op ties the dims that share a factor of its rule, provided that ``ties`` knows how to run the op with that factor longer.
Ops that are not on that list run at the true size: padded tensors are sliced before them, so that a group never fails, it
only ends there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from alpa_lite._jax_compat import Literal
from alpa_lite.core.program import Op, Program
from alpa_lite.core.rule import FactorKind, OpShardingRule
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.rules import ELEMENTWISE

Place = tuple[int, int]  # (value id, dim)

_MODES = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)
_BITS = frozenset(["threefry2x32", "bitcast_convert_type"])  # what they make depends on more than the element
_SHAPE_OPS = frozenset(
    ["broadcast_in_dim", "transpose", "squeeze", "expand_dims", "iota", "stop_gradient", "dot_general", "pad_mask"]
)
_REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min"])
_RUNNING = frozenset(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
_WINDOWS = frozenset(["slice", "dynamic_slice", "dynamic_update_slice"])
# Ops that gain from being split. Those that only lead to or from a result (an optimizer's update) stay at the true size.
_ANCHORS = frozenset(["dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add"]) | _REDUCTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class PadGroup:
    """Dims that are padded together or not at all.

    Attributes:
        name: an argument and its dim, e.g. "0/params/wte dim 0"; "op 12 dim 1" where no argument has the dim.
        size: of the dims.
        places: (value, dim) pairs in the program or body ``region``.
        region: "" or a body's path with a dot, e.g. "12.0.".
    """

    name: str
    size: int
    places: frozenset[Place]
    region: str = ""


def pad_groups(flat: FlatJaxpr, program: Program) -> tuple[PadGroup, ...]:
    """All groups of dims, bodies included, in program order."""
    return tuple(_groups(flat, program, ""))


def factor_places(
    op: Op, all_outputs: tuple[int, ...]
) -> Iterator[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]]:
    """Per factor: its (operand, dim) and (result, dim) positions, if it has every one of these dims for itself."""
    rule = op.rule
    for factor, record in enumerate(rule.factors):
        if record.size == 1:
            continue
        sides = [
            [(t, d) for t, dims in enumerate(tensors) for d, fs in enumerate(dims) if factor in fs]
            for tensors in (rule.operands, rule.results)
        ]
        alone = all(
            tensors[t][d] == (factor,)
            for tensors, found in zip((rule.operands, rule.results), sides, strict=True)
            for t, d in found
        )
        if alone and len({t for t, _ in sides[0]}) == len(sides[0]) and len({t for t, _ in sides[1]}) == len(sides[1]):
            yield factor, sides[0], sides[1]


def ties(op: FlatOp, rule: OpShardingRule, factor: int, flat: FlatJaxpr) -> bool:
    """Whether the op may run with this factor padded: it ties all dims of the factor."""
    if (
        rule.factors[factor].kind is FactorKind.REPLICATED
        or op.bodies
        or op.has_effects
        or rule.origin in ("user", "none")
    ):
        return False
    name, params = op.name, op.params
    first = [d for d, fs in enumerate(rule.operands[0]) if factor in fs] if rule.operands else []
    if name in ELEMENTWISE:
        return name not in _BITS
    if name in _SHAPE_OPS or name in _REDUCTIONS or name in _WINDOWS:
        return True
    if name == "reshape":
        return params["dimensions"] is None
    if name in _RUNNING:
        return params["axis"] not in first
    if name == "concatenate":
        return params["dimension"] not in first
    if name == "pad":
        return all(params["padding_config"][d] == (0, 0, 0) for d in first)
    if name == "conv_general_dilated":
        return _ties_convolution(op, rule, factor)
    if name in ("gather", "scatter", "scatter-add"):
        return _ties_indexing(op, rule, factor, flat)
    return False


def _ties_convolution(op: FlatOp, rule: OpShardingRule, factor: int) -> bool:
    numbers = op.params["dimension_numbers"]
    if op.params["feature_group_count"] > 1 or op.params["batch_group_count"] > 1:
        return False
    specs = zip((numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec), (*rule.operands, *rule.results), strict=True)
    return not any(factor in dims[d] for spec, dims in specs for d in spec[2:])


def _ties_indexing(op: FlatOp, rule: OpShardingRule, factor: int, flat: FlatJaxpr) -> bool:
    """Out-of-bounds indices must stay so, which is possible where the index type can name the padded size."""
    if isinstance(op.inputs[0], Literal) or isinstance(op.inputs[1], Literal) or op.params["mode"] not in _MODES:
        return False
    index_dtype = flat.avals[op.inputs[1]].dtype
    if not jax.dtypes.issubdtype(index_dtype, jnp.integer) or jnp.iinfo(index_dtype).max < 2**31 - 1:
        return False
    summed = rule.factors[factor].kind is FactorKind.REDUCTION
    in_operand = any(factor in dims for dims in rule.operands[0])
    return op.name == "gather" or not summed or (op.name == "scatter-add" and not in_operand)


def is_anchor(op: FlatOp) -> bool:
    """Whether the op gains from being split itself."""
    return op.name in _ANCHORS or (op.name == "pin" and op.params["pinned"].strip("[]?,_") != "")


class _Union:
    def __init__(self) -> None:
        self.parent: dict[Place, Place] = {}

    def find(self, place: Place) -> Place:
        root = place
        while (up := self.parent.setdefault(root, root)) != root:
            root = up
        while self.parent[place] != root:
            self.parent[place], place = root, self.parent[place]
        return root

    def join(self, a: Place, b: Place) -> None:
        self.parent[self.find(b)] = self.find(a)


def tied_factors(
    op: FlatOp, mirror: Op, flat: FlatJaxpr
) -> dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """The factors that the op ties: operand and result positions of each."""
    return {f: (ins, outs) for f, ins, outs in factor_places(mirror, op.all_outputs) if ties(op, mirror.rule, f, flat)}


def _groups(flat: FlatJaxpr, program: Program, region: str) -> Iterator[PadGroup]:
    union = _Union()
    made_by: dict[int, int] = {}
    for index, (op, mirror) in enumerate(zip(flat.ops, program.ops, strict=True)):
        for ins, outs in tied_factors(op, mirror, flat).values():
            places = [(op.inputs[t], d) for t, d in ins] + [(op.all_outputs[t], d) for t, d in outs]
            for place in places:
                union.join(places[0], place)
        made_by.update(dict.fromkeys(op.all_outputs, index))
    members: dict[Place, list[Place]] = {}
    for place in sorted(union.parent):
        members.setdefault(union.find(place), []).append(place)
    argument = {value: position for position, value in enumerate(program.inputs)}
    for places in members.values():
        named = next((p for p in places if p[0] in argument and program.input_paths), None)
        value, dim = named or places[0]
        owner = program.input_paths[argument[value]] if named else f"op {region}{made_by.get(value, 'in')}"
        size = flat.avals[value].shape[dim]
        yield PadGroup(name=f"{owner} dim {dim}", size=size, places=frozenset(places), region=region)
    for index, (op, mirror) in enumerate(zip(flat.ops, program.ops, strict=True)):
        for b, (body, inner) in enumerate(zip(op.bodies, mirror.bodies, strict=True)):
            yield from _groups(body, inner, f"{region}{index}.{b}.")
