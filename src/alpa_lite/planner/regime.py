"""One regime of a symbolic plan: numbers of workers with the same decisions, and what these cost as formulas.

Comes in: the written-out plan at one of the numbers. Goes out: local shapes, memory and traffic as exact formulas in n.

Every tensor on a device is a tile of B/n or of B bytes, n the size of the symbolic axis and B what the other axes leave.
What is alive at a moment t is therefore a_t + b_t/n, and the peak is the largest of these; only the pairs on the upper
hull are kept in its formula. Where more goes into memory than tensors in an order that no n changes (XLA:CPU's allocator, split
matmuls and overlapped collectives of XLA:GPU), the peak has no such formula, and stands as counted for every n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.core.formula import Formula, Largest, total, upper_envelope
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import sizing_spec
from alpa_lite.costs.facts import Located, located
from alpa_lite.costs.profile import step_totals
from alpa_lite.costs.tensors import Stored
from alpa_lite.errors import AlpaLiteError
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.posing import MeshTask
from alpa_lite.planner.realise import Decided, Realised

_TEMPORARY = ("gradients", "activations", "temporaries")
_MOVED = {  # times (g - 1) / g of the size, g the number of devices of the group
    CollectiveKind.ALL_GATHER: 1,
    CollectiveKind.REDUCE_SCATTER: 1,
    CollectiveKind.ALL_TO_ALL: 1,
    CollectiveKind.ALL_REDUCE: 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFormula:
    """One collective for every number of workers.

    Attributes:
        kind, axes, count, op, source, tensor: as in ``core.collective.Collective``.
        size_bytes: by its convention, the larger side, per device and execution.
        moved_bytes: that each device sends in one execution.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    size_bytes: Formula
    moved_bytes: Formula
    count: int
    op: str
    source: str
    tensor: str

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count != 1 else ""
        return f"{times}{self.kind} over {','.join(self.axes)} of {self.tensor}: {self.size_bytes} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Numbers of workers with one plan.

    Attributes:
        name: of the number.
        axis: of the mesh, whose size it is.
        values: the numbers, of those considered.
        divides: what every n of this plan must divide (0: nothing is split, so nothing).
        memory: per category of ``MemoryProfile`` that counts for the whole step its formula; "peak" where one formula gives it
            for all ``values``.
        collectives: in the order of ``Plan.collectives``.
        traffic: bytes that each device sends in one step.
        local_shapes: path of every argument and result leaf -> sizes of its tile.
        specs: path of every argument and result leaf -> its layout.
        profiles: what was counted for every number; ``memory_at`` checks the number.
        others: the values of other regimes, for messages.
    """

    name: str
    axis: str
    values: tuple[int, ...]
    divides: int
    memory: Mapping[str, Formula | Largest]
    collectives: tuple[CollectiveFormula, ...]
    traffic: Formula
    local_shapes: Mapping[str, tuple[Formula, ...]]
    specs: Mapping[str, ShardingSpec]
    profiles: Mapping[int, MemoryProfile]
    others: tuple[int, ...] = ()

    @property
    def condition(self) -> str:
        """The divisibility that the plan needs, as text."""
        return f"{self.name} divides {self.divides:,}" if self.divides else f"any {self.name}"

    def check(self, n: int) -> int:
        """``n``, if it is of this regime.

        Raises:
            AlpaLiteError: it is not; the message says where it is.
        """
        if n in self.values:
            return n
        where = "another regime holds it" if n in self.others else "no regime of the symbolic plan holds it"
        raise AlpaLiteError(
            f"{self.name} = {n!r} is outside of this regime. Its formulas hold for {self.name} in {ranges(self.values)} "
            f"(condition: {self.condition}); {where}. Ask plan.regime({n!r}) or plan.specialize({n!r}) of the symbolic plan"
            f"{'' if n in self.others else ', made with values that hold it, for why'}."
        )

    def memory_at(self, n: int) -> MemoryProfile:
        """Bytes per device for ``n`` workers, equal to those of the plan for ``n``."""
        return self.profiles[self.check(n)]

    def traffic_at(self, n: int) -> Fraction:
        """Bytes that each device sends in one step."""
        return self.traffic.exactly(self.check(n))

    def __str__(self) -> str:
        need = f"needs: {self.condition}" if self.divides else f"nothing is split over {self.name}"
        lines = [f"{self.name} in {ranges(self.values)}; {need}"]
        lines += [f"  {word:16} {formula} bytes" for word, formula in self.memory.items() if str(formula) != "0"]
        if "peak" not in self.memory:
            peaks = ", ".join(f"{n}: {profile.peak:,}" for n, profile in self.profiles.items())
            lines.append(f"  {'peak':16} by {self.name}, {peaks} bytes")
        lines.append(f"  {'sent in a step':16} {self.traffic} bytes")
        kinds = sorted({(c.kind.value, c.axes) for c in self.collectives})
        for kind, axes in kinds:
            same = [c for c in self.collectives if (c.kind.value, c.axes) == (kind, axes)]
            moved = total([c.moved_bytes * c.count for c in same], self.name)
            lines.append(f"    {sum(c.count for c in same)} {kind} over {','.join(axes)}: {moved} bytes")
        split = [f"{path} {_shape_text(shape)}" for path, shape in self.local_shapes.items() if not _constant(shape)]
        more = f" and {len(split) - 4} more" if len(split) > 4 else ""
        lines.append(f"  split: {'; '.join(split[:4])}{more}" if split else "  every argument and result is whole")
        return "\n".join(lines)


def regime_of(
    task: MeshTask,
    result: MeshResult,
    axis: str,
    name: str,
    profiles: Mapping[int, MemoryProfile],
    planned: Iterable[int],
) -> Regime:
    """The regime of the plan that was found on a mesh whose axis ``axis`` has one of the numbers of devices.

    Args:
        task, result: what was planned, and the plan.
        axis: whose size is the number of workers; ``name`` is what the number is called.
        profiles: the numbers with this plan, and the memory that was counted for each; ``planned`` are all that have one.
    """
    mesh, written = result.mesh, result.realised
    assert written is not None and result.peak is not None
    program = task.program
    specs = dict(zip(program.input_paths, written.in_specs, strict=True))
    specs |= dict(zip(program.output_paths, written.out_specs, strict=True))
    leaves = [(path, v) for path, v in zip(program.input_paths, program.inputs, strict=True)]
    leaves += [(path, v) for path, v in zip(program.output_paths, program.outputs, strict=True)]
    shapes = {path: program.values[v].shape if v >= 0 else () for path, v in leaves}
    collectives = _collectives(written, mesh, axis, name)
    return Regime(
        name=name,
        axis=axis,
        values=tuple(profiles),
        divides=_divides(task, mesh, axis, written) if mesh.axis_size(axis) > 1 else 0,
        memory=_memory(task, result, axis, name, profiles),
        collectives=collectives,
        traffic=_traffic(collectives, name),
        local_shapes=_local_shapes(shapes, specs, mesh, axis, name),
        specs=specs,
        profiles=profiles,
        others=tuple(sorted(set(planned) - set(profiles))),
    )


def with_size(mesh: DeviceMesh, axis: str, n: int) -> DeviceMesh:
    """The mesh with ``n`` devices along ``axis``."""
    shape = tuple(n if a == axis else size for a, size in zip(mesh.axis_names, mesh.shape, strict=True))
    return DeviceMesh(shape=shape, axis_names=mesh.axis_names)


# -- memory ----------------------------------------------------------------------------------------------------------


def _memory(
    task: MeshTask, result: MeshResult, axis: str, name: str, profiles: Mapping[int, MemoryProfile]
) -> dict[str, Formula | Largest]:
    """Formulas of what counts for the whole step, and of the peak where one formula holds for every number."""
    mesh, written = result.mesh, result.realised
    assert written is not None and result.peak is not None
    one = with_size(mesh, axis, 1)
    ends = {"in_specs": written.in_specs, "out_specs": written.out_specs, "roles": task.roles}
    whole, split = step_totals(task.program, one, **ends), step_totals(task.program, mesh, **ends)
    leaves = {word: _parted(whole[word], split[word], mesh.axis_size(axis)) for word in whole}
    memory: dict[str, Formula | Largest] = {w: Formula.of({0: a, -1: b}, name) for w, (a, b) in leaves.items()}
    if not task.line.order.on_cpu:
        base = [sum(pair[kind] for pair in leaves.values()) for kind in (0, 1)]
        constant, shared = _alive(result.peak.stored, one, axis, task.line.num_times)
        order = np.lexsort((constant, shared))
        constant, shared = constant[order], shared[order]
        above = np.maximum.accumulate(constant[::-1])[::-1][1:]  # of those that share as much or more
        highest = np.flatnonzero(np.append(constant[:-1] > above, True)) if len(order) else order
        moments = zip((base[0] + constant[highest]).tolist(), (base[1] + shared[highest]).tolist(), strict=True)
        peak = upper_envelope(moments, name)
        if all(peak.at(n) == profile.peak for n, profile in profiles.items()):
            memory["peak"] = peak
    return memory


def _parted(whole: int, split: int, n: int) -> tuple[int, int]:
    """(a, b) with a + b = ``whole`` and a + b/n = ``split``: what an axis of n devices leaves whole, and what it splits."""
    if n == 1 or whole == split:
        return whole, 0
    shared, rest = divmod((whole - split) * n, n - 1)
    assert rest == 0 and shared % n == 0, "a size that is not a multiple of the number of workers was split"
    return whole - shared, shared


def _alive(stored: tuple[Stored, ...], one: DeviceMesh, axis: str, num_times: int) -> np.ndarray:
    """[kind, time] bytes of what lives at a time, ``axis`` taken as 1: kind 0 it leaves whole, 1 it splits."""
    shares: dict[int, tuple[int, int]] = {}  # by identity: thousands of tensors share a few layouts
    steps = np.zeros((2, num_times + 1), dtype=np.int64)
    kinds, sizes = [], []
    for t in stored:
        share = shares.get(id(t.spec))
        if share is None:
            share = one.axes_size(t.spec.sharded_axes), int(axis in t.spec.sharded_axes)
            shares[id(t.spec)] = share
        sizes.append(t.whole_bytes // share[0])
        kinds.append(share[1])
    ends = np.minimum(np.array([t.hi for t in stored], dtype=np.int64), num_times)
    size = np.array(sizes, dtype=np.int64)
    np.add.at(steps, (np.array(kinds, dtype=np.int64), np.array([t.lo for t in stored], dtype=np.int64)), size)
    np.subtract.at(steps, (np.array(kinds, dtype=np.int64), ends), size)
    return np.cumsum(steps[:, :-1], axis=1)


# -- traffic ---------------------------------------------------------------------------------------------------------


def _collectives(written: Realised, mesh: DeviceMesh, axis: str, name: str) -> tuple[CollectiveFormula, ...]:
    made = []
    n0 = mesh.axis_size(axis)
    known: dict[tuple[object, ...], tuple[Formula, Formula]] = {}  # layers repeat
    for collective, spec in zip(written.collectives, _sizing_specs(written), strict=True):
        exponent = -1 if n0 > 1 and axis in spec.sharded_axes else 0
        key = (collective.kind, collective.axes, collective.size_bytes, exponent)
        if key not in known:
            size = Formula.term(collective.size_bytes * n0**-exponent, exponent, name)
            known[key] = size, _moved(collective, size, mesh, axis)
        made.append(_collective(collective, *known[key]))
    return tuple(made)


def _traffic(collectives: tuple[CollectiveFormula, ...], name: str) -> Formula:
    """Bytes that each device sends in one step; collectives of equal formula are added up as numbers."""
    counts: dict[int, tuple[Formula, int]] = {}
    for c in collectives:
        counts[id(c.moved_bytes)] = c.moved_bytes, counts.get(id(c.moved_bytes), (c.moved_bytes, 0))[1] + c.count
    return total([moved * count for moved, count in counts.values()], name)


def _sizing_specs(written: Realised) -> list[ShardingSpec]:
    """Per collective, the layout whose tile is its size."""
    found: dict[int, ShardingSpec] = {}
    for conversion in written.conversions:
        for step, number in zip(conversion.steps, conversion.collectives, strict=True):
            if number >= 0:
                found[number] = sizing_spec(step)
    inside = range(len(found), len(written.collectives))  # all-reduces inside ops come last
    by_op = {d.path: d for d in written.decisions} if inside else {}
    found.update((number, by_op[written.collectives[number].op].results[0]) for number in inside)
    return [found[number] for number in range(len(written.collectives))]


def _moved(collective: Collective, size: Formula, mesh: DeviceMesh, axis: str) -> Formula:
    """Bytes that each device sends in one execution."""
    group = mesh.axes_size(collective.axes)
    rounds = _MOVED.get(collective.kind)
    if rounds is None:  # a permute sends its tile once
        return size
    if axis in collective.axes:  # (g - 1)/g with g = n * others
        others = group // mesh.axis_size(axis)
        return size * Formula.of({0: rounds, -1: Fraction(-rounds, others)}, size.name)
    return size * Fraction(rounds * (group - 1), group)


def _collective(collective: Collective, size: Formula, moved: Formula) -> CollectiveFormula:
    return CollectiveFormula(
        kind=collective.kind,
        axes=collective.axes,
        size_bytes=size,
        moved_bytes=moved,
        count=collective.count,
        op=collective.op,
        source=collective.source,
        tensor=collective.tensor,
    )


# -- shapes ----------------------------------------------------------------------------------------------------------


def _local_shapes(
    shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, ShardingSpec], mesh: DeviceMesh, axis: str, name: str
) -> dict[str, tuple[Formula, ...]]:
    known: dict[tuple[tuple[int, ...], int], tuple[Formula, ...]] = {}
    found = {}
    for path, spec in specs.items():
        key = shapes[path], id(spec)
        if key not in known:
            known[key] = _local_shape(shapes[path], spec, mesh, axis, name)
        found[path] = known[key]
    return found


def _local_shape(
    shape: tuple[int, ...], spec: ShardingSpec, mesh: DeviceMesh, axis: str, name: str
) -> tuple[Formula, ...]:
    sizes = []
    for size, axes in zip(shape, spec.dims, strict=True):
        others = mesh.axes_size(tuple(a for a in axes if a != axis))
        split = axis in axes and mesh.axis_size(axis) > 1
        sizes.append(Formula.term(Fraction(size, others), -1 if split else 0, name))
    return tuple(sizes)


def _divides(task: MeshTask, mesh: DeviceMesh, axis: str, written: Realised) -> int:
    """The greatest common divisor of all sizes that the axis splits, other axes of the same dims taken out; 0 if none."""
    program, facts, decisions = task.program, task.shared.facts, written.decisions
    one, values, ops = with_size(mesh, axis, 1), program.values, facts.of(located, program)
    ends = [(program.inputs, written.in_specs), (program.outputs, written.out_specs)]
    different = {(values[v].shape, id(s)): s for vs, specs in ends for v, s in zip(vs, specs, strict=True) if v >= 0}
    divisor = math.gcd(*(_divisor(shape, spec, one, axis) for (shape, _), spec in different.items()))

    def divisor_of(place: int) -> int:
        (_, _, owner, op), decision = ops[place], decisions[place]
        tensors = zip((*op.inputs, *op.outputs), (*decision.operands, *decision.results), strict=True)
        return math.gcd(*(_divisor(owner.values[v].shape, spec, one, axis) for v, spec in tensors if v >= 0))

    decided = facts.of(Decided, program)
    if decided.kinds is None:
        decided.kinds = _kinds(decided.ops)
    known = decided.divisors.setdefault((axis, one), {})
    keys, first = np.unique(decided.kinds << 32 | written.layouts, return_index=True)  # one of each kind in each layout
    for key, place in zip(keys.tolist(), decided.places[first].tolist(), strict=True):
        if key not in known:
            known[key] = divisor_of(place)
        divisor = math.gcd(divisor, known[key])
    others = [place for place, (_, _, _, op) in enumerate(ops) if op.bodies] if len(decided.ops) < len(ops) else []
    return math.gcd(divisor, *map(divisor_of, others))


def _divisor(shape: tuple[int, ...], spec: ShardingSpec, one: DeviceMesh, axis: str) -> int:
    """The same of one tensor; ``one``: the mesh with one device along the axis."""
    split = (size // one.axes_size(axes) for size, axes in zip(shape, spec.dims, strict=True) if axis in axes)
    return math.gcd(*split)


def _kinds(ops: Sequence[Located]) -> np.ndarray:
    """Per op, a number that ops on equal shapes share."""
    known: dict[tuple[int, ...], int] = {}  # shapes, and numbers of the shapes of an op
    numbers: dict[int, list[int]] = {}  # of shapes, by owner; the last one, where the value is a literal, is -1
    kinds = []
    for _, _, owner, op in ops:
        if id(owner) not in numbers:
            numbers[id(owner)] = [*(known.setdefault(v.shape, len(known)) for v in owner.values), -1]
        kinds.append((-2, *map(numbers[id(owner)].__getitem__, (*op.inputs, *op.outputs))))
    return np.array([known.setdefault(kind, len(known)) for kind in kinds], dtype=np.int64)


def _constant(shape: tuple[Formula, ...]) -> bool:
    return all(size.is_constant for size in shape)


def _shape_text(shape: tuple[Formula, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def ranges(values: Iterable[int]) -> str:
    """Rising numbers as text, runs put together: ``1, 2, 4-8``."""
    runs: list[list[int]] = []
    for n in values:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
