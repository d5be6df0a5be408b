"""Plans with and without padding of dims that do not divide, and takes the cheaper plan.

The padded program is an ordinary one (``trace.pad_program``), so that whatever padding costs is in the objective: pads,
slices, masks, the longer tensors, and the conversions where tensors enter and leave. A group of dims is tried only if the
ops that it would help are worth it; groups that the plan then does not split are taken out again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program, Value
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import AlpaLiteError, MemoryBudgetError, PinClashError, PinError, SolverError, UnevenPinError
from alpa_lite.plan.pins import PinnedDims, ResolvedPins, parse_dims
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import MeshCandidate, OpDecision, Padding
from alpa_lite.planner.budget import OVER_BUDGET
from alpa_lite.trace.flatten import FlatJaxpr
from alpa_lite.trace.pad_groups import PadGroup, Place, pad_groups, places_of, tied_ops
from alpa_lite.trace.pad_program import Padded, pad_traced
from alpa_lite.trace.program import Traced
from alpa_lite.units import format_cost, next_multiple

WORTH = 0.01  # of the plan's objective: groups whose ops and conversions cost less together are not tried
_WASTES = (0.25, 0.05)  # groups of which more is padding are left out; the second is tried where the first loses
_FEW = 4  # groups up to which fewer are tried
_OVERHEAD = ("pad", "slice", "pad_mask")

_NO_WAY = "(It is 'auto', and there is no way to: no op at this tensor can run padded in this dim; docs/uneven.md lists the ops.)"

Planned = Callable[..., Plan]  # (program, pins, meshes=None)


def plan_with_padding(
    traced: Traced,
    cluster: Cluster,
    pins: ResolvedPins,
    meshes: tuple[DeviceMesh, ...],
    plan_program: Planned,
    rules: tuple[NamedRule, ...] = (),
) -> tuple[Traced, Plan]:
    """The cheaper of the plan as it is and the plan with padding, and the program that it is for.

    Args:
        traced, pins: of the user's function.
        cluster: its number of devices is what padded sizes are multiples of, so that any split of the mesh divides them.
        meshes: those that ``plan_program`` tries.
        plan_program: plans a program, e.g. ``plan_step`` with the other arguments filled in.
        rules: the user's, by primitive.

    Raises:
        AlpaLiteError: what planning without padding raises; uneven pins, clashes and budgets only if padding does not help.
    """
    uneven = groups = uneven_groups(traced, cluster.num_devices)
    refusal: AlpaLiteError | None = None
    plain: Plan | None = None
    try:
        plain = plan_program(traced.program, pins)
    except (UnevenPinError, PinClashError, MemoryBudgetError) as error:
        refusal = error
    if plain is not None:
        shares = _shares(groups, traced, plain) if groups else []
        groups = tuple(g for g, share in zip(groups, shares, strict=True) if share >= WORTH)
    found: tuple[Padded, Plan] | None = None
    if not isinstance(refusal, UnevenPinError):
        search = _Search(traced, cluster.num_devices, pins, (), plan_program, rules)
        for waste in _WASTES:
            if found is None or (plain is not None and not _wins(found[1], plain)):
                found = search.best([g for g in groups if search.waste(g) <= waste]) or found
    made = [plan for plan in (plain, found and found[1]) if plan is not None]
    # Meshes on which a pin does not divide are planned with padding alone: if the same ones do on others, each for itself.
    pinned = [g for g in uneven if _is_pinned(g, traced.program, pins, meshes)]
    needed = {mesh: frozenset(g for g in pinned if _is_pinned(g, traced.program, pins, (mesh,))) for mesh in meshes}
    is_split = len(set(needed.values())) > 1
    refused: dict[DeviceMesh, AlpaLiteError] = {}
    for chosen in [(mesh,) for mesh in meshes if needed[mesh]] if is_split else [meshes]:
        search = _Search(traced, cluster.num_devices, pins, chosen, partial(plan_program, meshes=chosen), rules)
        held = search.best([g for g in pinned if search.keeps(g, chosen)])
        if held is None:
            refused |= dict.fromkeys(chosen, search.refused[-1]) if search.refused else {}
            continue
        made.append(held[1])
        if found is None or _wins(held[1], found[1]):
            found = held

    def told(plan: Plan) -> Plan:
        return _of_all_meshes(plan, made, refused, meshes) if is_split else plan

    if found is None:
        if plain is None:
            assert refusal is not None
            if not isinstance(refusal, UnevenPinError):
                raise refusal
            found_out = min(reversed(refused.values()), key=_is_uneven, default=refusal)
            if isinstance(found_out, UnevenPinError):  # the first pin that padding does not help
                raise UnevenPinError(f"{found_out} {_NO_WAY}") from refusal
            raise found_out
        return traced, told(plain)
    padded, plan = found
    if plain is not None and not _wins(plan, plain):
        return traced, told(replace(plain, notes=(*plain.notes, _not_taken(plan, plain))))
    without = None if plain is None else plain.objective
    return padded.traced, told(replace(plan, paddings=tuple(replace(p, without=without) for p in plan.paddings)))


def _is_uneven(error: AlpaLiteError) -> bool:
    return isinstance(error, UnevenPinError)


def _of_all_meshes(
    plan: Plan, made: Sequence[Plan], refused: Mapping[DeviceMesh, AlpaLiteError], meshes: Sequence[DeviceMesh]
) -> Plan:
    """The plan with the best of each mesh in its table, and a bound for all, where some meshes were planned each for itself.

    Args:
        plan: the one that is taken.
        made: all that were made.
        refused: why there is no padded plan on a mesh.
        meshes: all of them.
    """
    rows = {row.mesh: row for row in plan.mesh_table}
    for mesh, error in refused.items():
        if isinstance(error, MemoryBudgetError | SolverError):
            status = OVER_BUDGET if isinstance(error, MemoryBudgetError) else "no-solution"
            rows[mesh] = MeshCandidate(mesh=mesh, status=status, reason="padded, as a pin does not divide there")
    for row in (row for other in made for row in other.mesh_table):
        known = rows.setdefault(row.mesh, row)
        if row.objective is not None and (known.objective is None or row.objective < known.objective):
            rows[row.mesh] = row
    bound = min(plan.lower_bound, *(other.lower_bound for other in made))
    return replace(plan, mesh_table=tuple(rows[mesh] for mesh in meshes if mesh in rows), lower_bound=bound)


def _wins(plan: Plan, plain: Plan) -> bool:
    return plan.objective < plain.objective * (1 - 1e-9)


def padded_like(traced: Traced, paddings: Sequence[Padding], rules: tuple[NamedRule, ...] = ()) -> Traced:
    """The program that a plan with these paddings is for; ``traced`` is of the user's function."""
    if not paddings:
        return traced
    sizes = {p.dim: p.padded for p in paddings}
    wanted = {p.size for p in paddings}
    found = pad_groups(traced.flat, traced.program, lambda size: size in wanted)
    groups = [(g, sizes[g.name]) for g in found if g.name in sizes]
    pins = {position: text for p in paddings for position, text in p.pins}
    return pad_traced(traced, groups, pins, rules).traced


def uneven_groups(traced: Traced, devices: int) -> tuple[PadGroup, ...]:
    """Groups that do not divide over the devices and are large enough to give most of them something."""
    return pad_groups(traced.flat, traced.program, lambda size: bool(size % devices) and 2 * size > devices)


def _shares(groups: Sequence[PadGroup], traced: Traced, plan: Plan) -> list[float]:
    """Per group, what the ops that tie its dims and the conversions of their tensors cost, of the whole plan.

    Padding cannot save more than that (but for ops that then need not wait for a conversion). Of an op it cannot save
    what is split over all devices already.
    """
    numbers = {(g.region, place): i for i, g in enumerate(groups) for place in g.places}
    costs = [0.0] * len(groups)
    times = {d.path: d.time_s * _repeated(d, stage.mesh) for stage in plan.stages for d in stage.decisions}
    for region, flat, program in _regions("", traced.flat, traced.program):
        for index, (op, factors) in enumerate(zip(flat.ops, tied_ops(flat, program), strict=True)):
            for i in {numbers.get((region, places_of(op, positions)[0]), -1) for positions in factors.values()} - {-1}:
                costs[i] += times[f"{region}{index}"]
    values = {(g.region, v): i for i, g in enumerate(groups) for v, _ in g.places}
    for stage in plan.stages:
        for c in stage.conversions:
            region = f"{c.op.rpartition('.')[0]}.".removeprefix(".")
            if (region, c.value) in values:
                costs[values[region, c.value]] += c.cost
    return [cost / plan.objective if plan.objective > 0 else 0.0 for cost in costs]


def _repeated(decision: OpDecision, mesh: DeviceMesh) -> float:
    """The share of an op's work that some other device does too."""
    specs = [*decision.operands, *decision.results]
    axes = {axis for spec in specs for axis in (*spec.sharded_axes, *spec.unreduced)}
    return 1.0 - mesh.axes_size(mesh.sort_axes(axes)) / mesh.num_devices


def _regions(region: str, flat: FlatJaxpr, program: Program) -> Iterator[tuple[str, FlatJaxpr, Program]]:
    yield region, flat, program
    for index, (op, mirror) in enumerate(zip(flat.ops, program.ops, strict=True)):
        for b, (body, inner) in enumerate(zip(op.bodies, mirror.bodies, strict=True)):
            yield from _regions(f"{region}{index}.{b}.", body, inner)


def _ends(program: Program, pins: ResolvedPins) -> Iterator[tuple[int, int, PinnedDims]]:
    """(position among arguments and results, value, pin) of what is pinned."""
    values = (*program.inputs, *program.outputs)
    for position, (value, pin) in enumerate(zip(values, (*pins.inputs, *pins.outputs), strict=True)):
        if not pin.is_free:
            yield position, value, pin


def _splits(axes: tuple[str, ...] | None, size: int, meshes: Iterable[DeviceMesh]) -> bool:
    """Whether a dim is split unevenly on one of the meshes."""
    return bool(axes) and any(set(axes) <= set(mesh.axis_names) and size % mesh.axes_size(axes) for mesh in meshes)


def _is_pinned(group: PadGroup, program: Program, pins: ResolvedPins, meshes: Iterable[DeviceMesh]) -> bool:
    """Whether a pin of an argument or result, or an ``al.pin``, splits a dim of the group unevenly on one of the meshes."""
    pinned = [(value, pin.dims) for _, value, pin in _ends(program, pins)] if not group.region else []
    for path, _, op in program.walk():
        if op.primitive == "pin" and f"{path.rpartition('.')[0]}.".removeprefix(".") == group.region:
            pinned.append((op.outputs[0], parse_dims(op.pinned)))
    places = [((value, dim), axes) for value, dims in pinned for dim, axes in enumerate(dims)]
    return any(place in group.places and _splits(axes, group.size, meshes) for place, axes in places)


def _pins_on(
    groups: Iterable[PadGroup], program: Program, pins: ResolvedPins, meshes: Iterable[DeviceMesh]
) -> dict[int, str]:
    """Pins that split dims of the groups unevenly on one of the meshes: they hold for the padded form instead."""
    sizes: dict[Place, int] = {place: g.size for g in groups if not g.region for place in g.places}
    return {
        position: str(pin)
        for position, value, pin in _ends(program, pins)
        if any((value, d) in sizes and _splits(axes, sizes[value, d], meshes) for d, axes in enumerate(pin.dims))
    }


def _freed(pins: ResolvedPins, moved: dict[int, str]) -> ResolvedPins:
    """The pins without those that moved inside; leaves tied to one another stay so."""

    def free(first: int, pinned: tuple[PinnedDims, ...]) -> tuple[PinnedDims, ...]:
        return tuple(
            (p.border or replace(p, dims=(None,) * len(p.dims), origin="")) if first + i in moved else p
            for i, p in enumerate(pinned)
        )

    return replace(pins, inputs=free(0, pins.inputs), outputs=free(len(pins.inputs), pins.outputs))


@dataclass(frozen=True, slots=True)
class _Search:
    """Tries groups of dims; pins that split dims of a group unevenly on one of ``pinned_on`` hold for its padded form."""

    traced: Traced
    devices: int
    pins: ResolvedPins
    pinned_on: tuple[DeviceMesh, ...]
    plan_program: Planned
    rules: tuple[NamedRule, ...]
    tried: set[frozenset[PadGroup]] = field(default_factory=set)
    refused: list[AlpaLiteError] = field(default_factory=list)  # what was said of those that cannot be planned

    def waste(self, group: PadGroup) -> float:
        """The part of the padded dim that is padding."""
        return 1 - group.size / next_multiple(group.size, self.devices)

    def best(self, groups: Sequence[PadGroup]) -> tuple[Padded, Plan] | None:
        """With all groups, or fewer of them; None if none is split or nothing can be planned."""
        found = self._split(groups)
        if found is None:
            return None
        # What padding one dim saves, it may cost where the padded tensors meet others.
        while len(found[2]) <= _FEW:
            fewer = (self._split([h for h in found[2] if h is not g]) for g in found[2])
            cheapest = min(filter(None, fewer), key=lambda one: one[1].objective, default=found)
            if not _wins(cheapest[1], found[1]):
                break
            found = cheapest
        return self._recorded(*self._tightened(*found))

    def _split(self, groups: Sequence[PadGroup]) -> tuple[Padded, Plan, tuple[PadGroup, ...]] | None:
        """With these groups, then with those of them that the plan splits or pins do; None also if that was tried before.

        With fewer there may be no plan: then with those before.
        """
        before = None
        while groups and frozenset(groups) not in self.tried:
            self.tried.add(frozenset(groups))
            found = self._planned({g: next_multiple(g.size, self.devices) for g in groups})
            if found is None:
                return before
            used = [g for g in groups if _parts(g, *found) or self.keeps(g, (found[1].mesh,))]
            if len(used) == len(groups):
                return *found, tuple(groups)
            before, groups = (*found, tuple(groups)), used
        return None

    def keeps(self, group: PadGroup, meshes: Iterable[DeviceMesh]) -> bool:
        """Whether a pin needs the group on one of the meshes."""
        return bool(self.pinned_on) and _is_pinned(group, self.traced.program, self.pins, meshes)

    def _planned(self, sizes: dict[PadGroup, int]) -> tuple[Padded, Plan] | None:
        """Pins of groups that are left out, and those that divide on the mesh that is taken, hold for the leaves themselves."""
        program = self.traced.program
        moved = _pins_on(sizes, program, self.pins, self.pinned_on)
        while True:
            padded = pad_traced(self.traced, tuple(sizes.items()), moved, self.rules)
            try:
                plan = self.plan_program(padded.traced.program, _freed(self.pins, moved))
            except (PinError, MemoryBudgetError, SolverError) as error:
                self.refused.append(error)
                return None
            uneven = _pins_on(sizes, program, self.pins, (plan.mesh,))
            if moved.keys() <= uneven.keys():
                return padded, plan
            moved = {position: text for position, text in moved.items() if position in uneven}

    def _tightened(
        self, padded: Padded, plan: Plan, groups: Sequence[PadGroup]
    ) -> tuple[Padded, Plan, dict[PadGroup, int]]:
        """The plan again with sizes that its own splits divide, if that takes away padding worth the time."""
        found = padded, plan
        loose = {g: next_multiple(g.size, self.devices) for g in groups}
        tight = {g: next_multiple(g.size, math.lcm(*_parts(g, *found))) for g in groups}
        if all(loose[g] - tight[g] < WORTH * loose[g] for g in groups):
            return *found, loose
        again = self._planned(tight)
        if again is None or again[1].objective > found[1].objective:
            return *found, loose
        return *again, tight

    def _recorded(self, padded: Padded, plan: Plan, sizes: dict[PadGroup, int]) -> tuple[Padded, Plan]:
        paddings = []
        for group, size in sizes.items():
            values = {v for v, _ in group.places}
            ends = (*self.traced.program.inputs, *self.traced.program.outputs)
            waste_bytes, waste_s = _waste(group, padded, plan, size)
            paddings.append(
                Padding(
                    dim=group.name,
                    size=group.size,
                    padded=size,
                    shards=max(_parts(group, padded, plan), default=1),
                    waste_bytes=waste_bytes,
                    waste_s=waste_s,
                    pins=tuple((i, text) for i, text in padded.pins.items() if ends[i] in values),
                )
            )
        notes = [self._moved_note(i, text) for i, text in padded.pins.items()]
        return padded, replace(plan, paddings=tuple(paddings), notes=(*plan.notes, *notes))

    def _moved_note(self, position: int, text: str) -> str:
        pin = (*self.pins.inputs, *self.pins.outputs)[position]
        return f"the pin {pin.origin!r} holds as {text} for the padded form of {pin.path}; JAX arrays of uneven sizes lie evenly"


@dataclass(frozen=True, slots=True)
class _Holder:
    """An op that reads or makes padding of a group; ``made``: tensors that it makes, with padded dim and layout."""

    op: Op
    decision: OpDecision
    made: tuple[tuple[Value, int, ShardingSpec], ...]


def _holders(group: PadGroup, padded: Padded, plan: Plan) -> Iterator[_Holder]:
    decisions = {d.path: d for stage in plan.stages for d in stage.decisions}
    region, origins = padded.regions[group.region]

    def padded_dims(owner: Program, value: int) -> list[int]:
        shape = owner.values[value].shape if value >= 0 else ()
        places = ((origins.get(value, value), d) in group.places and n != group.size for d, n in enumerate(shape))
        return [d for d, is_padded in enumerate(places) if is_padded]

    for path, owner, op in padded.traced.program.walk():
        if not path.startswith(region) or "." in path[len(region) :]:
            continue
        decision = decisions[path]
        made = tuple(
            (owner.values[value], dim, spec)
            for value, spec in zip(op.outputs, decision.results, strict=True)
            for dim in padded_dims(owner, value)
        )
        if made or any(padded_dims(owner, value) for value in op.inputs):
            yield _Holder(op, decision, made)


def _parts(group: PadGroup, padded: Padded, plan: Plan) -> set[int]:
    """Into how many parts padded dims of the group are split, where that would not divide without padding."""
    found = {plan.mesh.axes_size(spec.dims[dim]) for h in _holders(group, padded, plan) for _, dim, spec in h.made}
    return {n for n in found if group.size % n}


def _waste(group: PadGroup, padded: Padded, plan: Plan, padded_size: int) -> tuple[int, float]:
    """Bytes on one device and seconds that go into the padding, see ``Padding``."""
    share = 1 - group.size / padded_size
    size_bytes, seconds = 0, 0.0
    for holder in _holders(group, padded, plan):
        seconds += holder.decision.time_s * (1.0 if holder.op.primitive in _OVERHEAD else share)
        for value, _, spec in holder.made:
            size_bytes += round(spec.local_size_bytes(value.shape, value.itemsize, plan.mesh) * share)
    return size_bytes, seconds


def _not_taken(plan: Plan, plain: Plan) -> str:
    tried = ", ".join(f"{p.dim} ({p.size} -> {p.padded})" for p in plan.paddings)
    costs = (format_cost(p.objective, p.unit) for p in (plan, plain))
    return "padding {} was tried: {} per step instead of {}, so it is not used".format(tried, *costs)
