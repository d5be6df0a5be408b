"""Which dims could be padded together: groups of dims that ops tie to one another, found from the sharding rules.

An op ties the dims that share a factor of its rule, provided that ``ties`` knows how to run the op with that factor longer.
Ops that are not on that list run at the true size: padded tensors are sliced before them, so that a group never fails, it
only ends there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from alpa_lite._jax_compat import Literal
from alpa_lite.core.program import Program
from alpa_lite.core.rule import FactorKind, OpShardingRule
from alpa_lite.trace.elementwise import ELEMENTWISE
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp

Place = tuple[int, int]  # (value id, dim)
Positions = tuple[list[tuple[int, int]], list[tuple[int, int]]]  # (operand, dim)s and (result, dim)s
Factors = dict[int, Positions]  # by factor of an op's rule

_MODES = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)
_BITS = frozenset(["threefry2x32", "bitcast_convert_type"])  # what they make depends on more than the element
_SHAPE_OPS = frozenset(
    ["broadcast_in_dim", "transpose", "squeeze", "expand_dims", "iota", "stop_gradient", "dot_general"]
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
        name: the largest argument and its dim, e.g. "0/params/wte dim 0"; "%34 of op 12 dim 1" where no argument has the dim.
        size: of the dims.
        places: (value, dim) pairs in the program or body ``region``.
        region: "" or a body's path with a dot, e.g. "12.0.".
    """

    name: str
    size: int
    places: frozenset[Place]
    region: str = ""


def pad_groups(flat: FlatJaxpr, program: Program, is_wanted: Callable[[int], bool]) -> tuple[PadGroup, ...]:
    """All groups of dims whose size is wanted, bodies included, in program order."""
    rules = {id(op.rule): op.rule for _, _, op in program.walk()}
    if not any(is_wanted(factor.size) for rule in rules.values() for factor in rule.factors):
        return ()  # as in most programs
    return tuple(_groups(flat, program, "", is_wanted, {}))


def tied_ops(flat: FlatJaxpr, program: Program, known: dict[str, Factors] | None = None) -> list[Factors]:
    """Per op of a region the factors that it ties; ``known`` by key of the op, equal ones tie the same."""
    known = {} if known is None else known
    found = []
    for op, mirror in zip(flat.ops, program.ops, strict=True):
        if mirror.key not in known:
            rule = mirror.rule
            known[mirror.key] = {f: places for f, places in _factor_places(rule) if ties(op, rule, f, flat)}
        found.append(known[mirror.key])
    return found


def places_of(op: FlatOp, positions: Positions) -> list[Place]:
    """The dims of the op's tensors that a factor splits, operands first."""
    ins, outs = positions
    return [(op.inputs[t], d) for t, d in ins] + [(op.all_outputs[t], d) for t, d in outs]


def _factor_places(rule: OpShardingRule) -> Iterator[tuple[int, Positions]]:
    """Factors that have every one of their dims for themselves, at most one in a tensor."""
    for factor, record in enumerate(rule.factors):
        sides = []
        for tensors in (rule.operands, rule.results):
            found = [(t, d, fs) for t, dims in enumerate(tensors) for d, fs in enumerate(dims) if factor in fs]
            once = len({t for t, _, _ in found}) == len(found)
            sides.append([(t, d) for t, d, _ in found] if once and all(fs == (factor,) for _, _, fs in found) else None)
        if record.size > 1 and sides[0] is not None and sides[1] is not None and (sides[0] or sides[1]):
            yield factor, (sides[0], sides[1])


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


def _groups(
    flat: FlatJaxpr, program: Program, region: str, is_wanted: Callable[[int], bool], known: dict[str, Factors]
) -> Iterator[PadGroup]:
    union = _Union()
    made_by: dict[int, int] = {}
    for index, (op, mirror, tied) in enumerate(zip(flat.ops, program.ops, tied_ops(flat, program, known), strict=True)):
        for factor, positions in tied.items():
            if is_wanted(mirror.rule.factors[factor].size):
                first, *others = places_of(op, positions)
                union.find(first)
                for place in others:
                    union.join(first, place)
        made_by.update(dict.fromkeys(op.all_outputs, index))
    members: dict[Place, list[Place]] = {}
    for place in sorted(union.parent):
        members.setdefault(union.find(place), []).append(place)
    argument = {value: position for position, value in enumerate(program.inputs)}
    for places in members.values():
        named = [p for p in places if p[0] in argument] if program.input_paths else []
        value, dim = max(named, key=lambda p: math.prod(flat.avals[p[0]].shape)) if named else places[0]
        made = f"%{value} of op {region}{made_by[value]}" if value in made_by else f"%{value} into {region}"
        owner = program.input_paths[argument[value]] if named else made
        size = flat.avals[value].shape[dim]
        yield PadGroup(name=f"{owner} dim {dim}", size=size, places=frozenset(places), region=region)
    for index, (op, mirror) in enumerate(zip(flat.ops, program.ops, strict=True)):
        for b, (body, inner) in enumerate(zip(op.bodies, mirror.bodies, strict=True)):
            yield from _groups(body, inner, f"{region}{index}.{b}.", is_wanted, known)
