"""Memory of a planned stage: every program that it is cut into is profiled like a step of its own, then they are composed.

What a cut costs shows here alone: a value that crosses it is stored; within one program XLA may compute it where it is read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alpa_lite._jax_compat import CPU_KEEPS_BARRIERS
from alpa_lite.core.conversion import Conversion
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.cuts import Cut
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.late_order import has_barriers, late_order
from alpa_lite.costs.memory import Order, Timeline, timeline, with_moves
from alpa_lite.costs.overlap_order import Schedule, overlap_order
from alpa_lite.costs.profile import memory_profile
from alpa_lite.costs.stage_cut import StageCut, passes_of
from alpa_lite.costs.stage_memory import SubmeshPeak, submesh_peak
from alpa_lite.plan.records import LeafRole, OpDecision
from alpa_lite.planner.realise import Realised
from alpa_lite.schedule import InFlight
from alpa_lite.trace.stages import StageProgram


def cut_stage(part: StageProgram, program: Program, mesh: DeviceMesh, written: Realised) -> StageCut:
    """The stage under its plan, cut into what runs at different times."""
    loop = program.ops[part.loop]
    body, path = loop.bodies[0], f"{part.loop}"
    decisions = {d.path: d for d in written.decisions}
    conversions: dict[str, list[Conversion]] = defaultdict(list)
    for conversion in written.conversions:
        conversions[conversion.op].append(conversion)
    first, sums = loop.num_consts, loop.num_consts + loop.num_carry
    operands, results = decisions[path].operands, decisions[path].results
    halves = () if part.weight_half is None else (part.weight_half,)

    def region(of: Program, **where: Any) -> Cut:
        return Cut(
            inputs=of.inputs,
            outputs=of.outputs,
            ops=[(op.inputs, op.outputs) for op in of.ops],
            constants=frozenset(of.constants),
            decisions=decisions,
            conversions=conversions,
            **where,
        )

    return StageCut(
        mesh=mesh,
        outer=region(
            program,
            prefix="",
            cuts=(part.loop, *part.rounds),
            in_specs=written.in_specs,
            out_specs=written.out_specs,
            skipped=frozenset({part.loop}),
            late=part.late,
        ),
        body=region(
            body,
            prefix=f"{path}.0.",
            cuts=passes_of(part.num_forward, halves, len(body.ops)),
            in_specs=(*operands[:sums], *map(_slice, operands[sums:])),
            out_specs=(*results[: loop.num_carry], *map(_slice, results[loop.num_carry :])),
        ),
        outer_values=program.values,
        body_values=body.values,
        loop=part.loop,
        num_consts=first,
        num_carry=loop.num_carry,
        num_args=len(part.args),
        received=tuple(c.when for c in part.received),
        num_sent=sum(c.when == "loop" for c in part.sent),
        replaced=tuple((i, o) for i, o in program.aliases if program.donated[i]),
    )


def _slice(spec: ShardingSpec) -> ShardingSpec:
    return ShardingSpec(spec.dims[1:], spec.unreduced)


def stage_peak(cut: StageCut, flying: InFlight, own: Mapping[str, int]) -> SubmeshPeak:
    """The predicted peak of a stage that has its submesh to itself, with so many microbatches in flight; ``own`` is of
    ``programs_own_bytes``."""
    return submesh_peak({0: cut}, _column(cut, flying), {(0, name): size for name, size in own.items()})


@dataclass(eq=False, slots=True)
class KnownParts:
    """Of one stage, cut into programs under several plans: a part that was cut alike before is the same program.

    Plans on other meshes mostly read and write the same values there.
    """

    _facts: dict[Hashable, Facts] = field(default_factory=dict)
    _lines: dict[int, tuple[tuple[bool, Sequence[int]], Timeline]] = field(
        default_factory=dict
    )  # the last of each part

    def facts(self, prefix: str, run: Sequence[int], part: Program) -> Facts:
        """``prefix`` of the part's region, numbers of its ops there, and the part."""
        key = (prefix, tuple(run), part.inputs, part.outputs, part.donated, part.aliases)
        return self._facts.setdefault(key, Facts(part))

    def line(self, facts: Facts, schedule: Schedule) -> Timeline:
        """When a part's ops and their conversions run."""
        key, known = (schedule.overlaps, schedule.order), self._lines.get(id(facts))
        if known is None or known[0] != key:
            known = self._lines[id(facts)] = key, timeline(facts.program, schedule=schedule, facts=facts)
        return with_moves(known[1], schedule)


def programs_own_bytes(
    cut: StageCut, program: Program, *, on_cpu: bool, known: KnownParts | None = None
) -> dict[str, int]:
    """Per program of a stage, the bytes per device that it needs beside its arguments; ``known`` is of the stage's program."""
    known = KnownParts() if known is None else known
    body = program.ops[cut.loop].bodies[0]
    own = {name: own_bytes(cut, cut.outer, program, k, known, on_cpu) for k, name in enumerate(cut.outer_names)}
    return own | {name: own_bytes(cut, cut.body, body, k, known, on_cpu) for k, name in enumerate(cut.pass_names)}


def _column(cut: StageCut, flying: InFlight) -> list[tuple[int, int, int]]:
    """Passes of as many microbatches as are in flight at most."""
    count, last = max(flying.residuals, 1), len(cut.body.cuts) - 1
    passes = [(0, 0, k) for k in range(count)]
    if flying.residuals and last == 2:
        between = max(flying.halves, 1)
        passes += [(0, 1, k) for k in range(between)] + [(0, 2, k) for k in range(between)]
    elif flying.residuals:
        passes += [(0, number, k) for k in range(count) for number in range(1, 1 + last)]
    return passes


def own_bytes(cut: StageCut, region_cut: Cut, region: Program, number: int, known: KnownParts, on_cpu: bool) -> int:
    """Bytes per device that one program needs beside its arguments."""
    segment = region_cut.segments[number]
    run = region_cut.run(segment.start, segment.stop)
    if not run and not segment.writes:
        return 0
    place = {f"{region_cut.prefix}{i}": str(k) for k, i in enumerate(run)}

    def moved(path: str) -> str:
        """The path of an op in the program of its own; "" if it is not there."""
        rest = path.removeprefix(region_cut.prefix)
        head, dot, tail = rest.partition(".")
        found = place.get(f"{region_cut.prefix}{head}") if path.startswith(region_cut.prefix) else None
        return "" if found is None else f"{found}{dot}{tail}"

    decisions = [replace(d, path=p) for d in region_cut.decisions.values() if (p := moved(d.path))]
    conversions = [replace(c, op=p) for at in region_cut.conversions.values() for c in at if (p := moved(c.op))]
    conversions += [replace(c, op="out") for c in segment.out]
    part, in_specs = _program_of(cut, region_cut, region, number, [region.ops[i] for i in run])
    out_specs = [spec for _, spec in segment.writes]
    facts = known.facts(region_cut.prefix, run, part)
    profile = _profile(facts, known, cut.mesh, in_specs, out_specs, decisions, conversions, on_cpu=on_cpu)
    return profile - sum(
        spec.local_size_bytes(part.values[v].shape, part.values[v].itemsize, cut.mesh)
        for v, spec in zip(part.inputs, in_specs, strict=True)
    )


def _program_of(
    cut: StageCut, region_cut: Cut, region: Program, number: int, ops: Sequence[Op]
) -> tuple[Program, list[ShardingSpec]]:
    """A segment as a program, and the layouts of its arguments; a value that it reads in two layouts is two of them."""
    segment = region_cut.segments[number]
    replaced = cut.freed[number] if region_cut is cut.outer else cut.added[number]
    aliases = [(segment.reads.index(old), segment.writes.index(new)) for old, new in replaced]
    taken = {position for position, _ in aliases}
    part = Program(
        values=region.values,
        ops=tuple(ops),
        inputs=tuple(value for value, _ in segment.reads),
        outputs=tuple(value for value, _ in segment.writes),
        donated=tuple(position in taken for position in range(len(segment.reads))),
        aliases=tuple(aliases),
        constants=tuple(v for v in region.constants if any(v in op.inputs for op in ops)),
    )
    return part, [spec for _, spec in segment.reads]


def _profile(
    facts: Facts,
    known: KnownParts,
    mesh: DeviceMesh,
    in_specs: Sequence[ShardingSpec],
    out_specs: Sequence[ShardingSpec],
    decisions: Sequence[OpDecision],
    conversions: Sequence[Conversion],
    *,
    on_cpu: bool,
) -> int:
    part = facts.program
    moves = any(step.kind is not None for c in conversions for step in c.steps)
    if on_cpu:
        line = timeline(part, Order.BREADTH_FIRST, facts=facts)
    elif moves and has_barriers(part):
        order = sums_at_once(part, late_order(part))
        line = known.line(facts, Schedule(order=order, moves={}))
    else:
        line = known.line(facts, overlap_order(part, mesh, decisions, conversions, facts))
    report = memory_profile(
        part,
        line,
        mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        decisions=decisions,
        conversions=conversions,
        roles=(LeafRole.INPUT,) * len(part.inputs),
        facts=facts,
        barriers_copy=not CPU_KEEPS_BARRIERS,
    )
    return report.profile.peak


def sums_at_once(part: Program, order: Sequence[int]) -> list[int]:
    """``order`` with every addition to a donated sum right after what it adds: it frees a buffer and takes none, so that XLA's
    scheduler does not put it off as it does with gradients themselves."""
    maker = {o: i for i, op in enumerate(part.ops) for o in op.outputs if o >= 0}
    readers = Counter(v for op in part.ops for v in op.inputs)
    at = {index: place for place, index in enumerate(order)}
    keys = {index: (place, 0) for index, place in at.items()}
    for _, result in part.aliases:
        add = maker.get(part.outputs[result])
        if add is None or not part.ops[add].elementwise:
            continue
        made = [maker[v] for v in part.ops[add].inputs if v in maker]
        casts = [i for i in made if part.ops[i].elementwise and readers[part.ops[i].outputs[0]] == 1]
        moved = {add, *casts}
        needed = [maker[v] for i in moved for v in part.ops[i].inputs if v in maker and maker[v] not in moved]
        place = max((at[i] for i in needed), default=-1)
        keys |= dict.fromkeys(casts, (place, 1)) | {add: (place, 2)}
    return sorted(order, key=lambda index: (keys[index], at[index]))
