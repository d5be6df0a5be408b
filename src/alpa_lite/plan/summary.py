"""A plan as headed tables of text: what to show and in which order. Renderers (plain, rich, HTML) only lay it out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from alpa_lite.core.collective import Collective
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.grouping import group_paths
from alpa_lite.plan.records import Leaf, LeafRole, MeshCandidate, Pipeline, Rematerialisation, StageCount
from alpa_lite.units import format_bytes, format_cost, numbers_text

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan

# Groups beyond these stand summed up in the last line; the plan file has them all.
SHOWN_OP_GROUPS = 16
SHOWN_COLLECTIVE_GROUPS = 24
SHOWN_NOTES = 40
SHOWN_SUBMESHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table.

    Attributes:
        title: heading.
        columns: column headings; empty for a list of sentences.
        rows: cells, one per column.
        right: positions of right-aligned columns.
        footer: a line below, "" for none.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    footer: str = ""


def summary(plan: Plan) -> tuple[Section, ...]:
    """All sections that have something to say, in reading order."""
    sections = (
        _header(plan),
        _stages(plan),
        _stage_counts(plan),
        _timeline(plan),
        _arguments(plan),
        _results(plan),
        _ops(plan),
        _collectives(plan),
        _memory(plan),
        _paddings(plan),
        _meshes(plan),
        _pins(plan),
        _notes(plan),
    )
    return tuple(section for section in sections if section.rows)


def _header(plan: Plan) -> Section:
    identity = plan.identity
    measured = " (calibrated)" if identity.calibration else ""
    compute, communication = (format_cost(t, plan.unit) for t in (plan.compute_s, plan.communication_s))
    rows = [
        ("mesh", ", ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))),
        ("cluster", (identity.cluster or "not given") + measured),
        ("objective", format_cost(plan.objective, plan.unit) + f" per step, costs {plan.costs}"),
        ("lower bound", format_cost(plan.lower_bound, plan.unit) + f", gap {100 * plan.gap:.2g} %, {plan.status}"),
        ("parts", f"compute {compute}, communication {communication}"),
        ("peak memory", f"{format_bytes(plan.memory.peak)} per device"),
    ]
    if plan.pipeline is not None:
        rows.append(("schedule", _schedule(plan.pipeline)))
    if plan.remat is not None:
        rows.append(("recomputed", _recomputed(plan.remat)))
    if plan.options:
        rows.append(("options", ", ".join(f"{name}={value}" for name, value in plan.options)))
    return Section(title="Plan", columns=("", ""), rows=tuple(rows))


def _recomputed(remat: Rematerialisation) -> str:
    kept = f", all but {', '.join(remat.saved)}" if remat.saved else ""
    return f"layers {numbers_text(remat.layers)} of {remat.num_layers}{kept}"


def _schedule(pipeline: Pipeline) -> str:
    chunks = f", {pipeline.num_chunks} stages on each submesh" if pipeline.num_chunks > 1 else ""
    share = f"bubble {pipeline.bubble_share:.1%}"
    return f"{pipeline.schedule}, {pipeline.num_microbatches} microbatches{chunks}, {share}"


def _stages(plan: Plan) -> Section:
    if len(plan.stages) == 1:
        return Section(title="Stages", columns=(), rows=())
    rows = tuple(
        (
            str(index),
            _span(stage.layers),
            f"{stage.submesh[0]}x{stage.submesh[1]}",
            _span(tuple(range(stage.first_device, stage.first_device + stage.mesh.num_devices))),
            str(stage.mesh),
            format_cost(stage.compute_s, plan.unit),
            format_cost(stage.communication_s, plan.unit),
            format_bytes(stage.memory.peak),
        )
        for index, stage in enumerate(plan.stages)
    )
    columns = ("stage", "layers", "submesh", "devices", "mesh", "compute", "communication", "peak")
    return Section(title="Stages", columns=columns, rows=rows, right=(0, 5, 6, 7))


def _timeline(plan: Plan) -> Section:
    rows = plan.pipeline.timeline if plan.pipeline else ()
    rest = len(rows) - SHOWN_SUBMESHES
    footer = f"and {rest} more submeshes" if rest > 0 else ""
    shown = tuple((row,) for row in rows[:SHOWN_SUBMESHES])
    return Section(title="Timeline", columns=("",), rows=shown, footer=footer)


def _span(numbers: tuple[int, ...]) -> str:
    return "" if not numbers else str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _stage_counts(plan: Plan) -> Section:
    """Why this number of stages and no other."""
    best = next((c.objective for c in plan.stage_counts if c.num_stages == len(plan.stages)), None) or 0.0

    def row(count: StageCount) -> tuple[str, ...]:
        chosen = "chosen" if count.num_stages == len(plan.stages) else ""
        if count.objective is None:
            return (str(count.num_stages), "-", "-", "-", count.status, chosen)
        over = f"{count.objective / best - 1:.1%}" if best else "-"
        bubble = "-" if count.bubble_share is None else f"{count.bubble_share:.1%}"
        return (str(count.num_stages), format_cost(count.objective, plan.unit), over, bubble, count.status, chosen)

    columns = ("stages", "per step", "over this", "bubble", "status", "")
    return Section(
        title="Numbers of stages", columns=columns, rows=tuple(map(row, plan.stage_counts)), right=(0, 1, 2, 3)
    )


def pins_shown(plan: Plan) -> list[str]:
    """Of every argument, then of every result: the key of its pin, or how its padded form is pinned; "" without one."""
    inside = {position: text for p in plan.paddings for position, text in p.pins}
    ends = enumerate((*plan.inputs, *plan.outputs))
    return [f"{inside[position]} when padded" if position in inside else leaf.pin for position, leaf in ends]


def _arguments(plan: Plan) -> Section:
    columns = ("argument", "count", "tensor", "spec", "per device", "role", "pin")
    rows = _leaf_rows(plan, zip(plan.inputs, pins_shown(plan), strict=False))
    return Section(title="Arguments", columns=columns, rows=rows, right=(1, 4))


def _results(plan: Plan) -> Section:
    results = zip(plan.outputs, pins_shown(plan)[len(plan.inputs) :], strict=True)
    own = [(leaf, pin) for leaf, pin in results if leaf.role is LeafRole.OUTPUT]
    columns = ("result", "count", "tensor", "spec", "per device", "role", "pin")
    state = len(plan.outputs) - len(own)
    footer = f"and {state} leaves of new state, laid out as the arguments they replace" if state else ""
    return Section(title="Results", columns=columns, rows=_leaf_rows(plan, own), right=(1, 4), footer=footer)


def _leaf_rows(plan: Plan, pinned: Iterable[tuple[Leaf, str]]) -> tuple[tuple[str, ...], ...]:
    pinned = tuple(pinned)
    keys = [(leaf.value, leaf.spec, leaf.role, leaf.stage, pin) for leaf, pin in pinned]
    rows = []
    for group in group_paths([leaf.path for leaf, _ in pinned], keys):
        value, spec, role, stage, pin = group.key
        each = spec.local_size_bytes(value.shape, value.itemsize, plan.stages[stage].mesh)
        count = f"x{len(group.members)}" if len(group.members) > 1 else ""
        place = f"{spec} on stage {stage}" if len(plan.stages) > 1 else str(spec)
        size = format_bytes(each * len(group.members))
        rows.append((group.label, count, str(value), place, size, role.value.replace("_", " "), pin))
    return tuple(rows)


def _ops(plan: Plan) -> Section:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for stage in plan.stages:
        for d in stage.decisions:
            groups[d.op or "op", f"{_joined(d.operands)} -> {_joined(d.results)}"].append(d.time_s)
    # Sorted by time, then by count; Python's sort keeps program order among equals.
    ordered = sorted(groups.items(), key=lambda item: (-sum(item[1]), -len(item[1])))
    rows = tuple(
        (f"x{len(times)}", op, layouts, format_cost(sum(times), plan.unit))
        for (op, layouts), times in ordered[:SHOWN_OP_GROUPS]
    )
    rest = [time for _, times in ordered[SHOWN_OP_GROUPS:] for time in times]
    footer = ""
    if rest:
        groups_left = len(ordered) - SHOWN_OP_GROUPS
        footer = f"and {groups_left} further groups: {len(rest)} ops, {format_cost(sum(rest), plan.unit)}"
    columns = ("count", "op", "operands -> results", "time")
    return Section(title="Ops", columns=columns, rows=rows, right=(0, 3), footer=footer)


def _joined(specs: Iterable[ShardingSpec]) -> str:
    return " ".join(map(str, specs)) or "()"


def _collectives(plan: Plan) -> Section:
    members = [(stage, c) for stage in plan.stages for c in stage.collectives]
    labels = _tensor_labels(plan)
    groups: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for c, label in zip((c for _, c in members), labels, strict=True):
        groups[c.kind.value, ",".join(c.axes), label, _file_and_line(c.source)].append(c)
    ordered = sorted(groups.items(), key=lambda item: (-_time(item[1]), -_size(item[1])))
    rows = tuple(
        (*group, f"x{_count(cs)}", format_bytes(_size(cs)), format_cost(_time(cs), plan.unit))
        for group, cs in ordered[:SHOWN_COLLECTIVE_GROUPS]
    )
    rest = [c for _, cs in ordered[SHOWN_COLLECTIVE_GROUPS:] for c in cs]
    everything = [c for _, c in members]
    footer = f"total: {_totals(everything, plan.unit)}" if everything else ""
    if rest:
        footer = f"and {len(ordered) - SHOWN_COLLECTIVE_GROUPS} further groups: {_totals(rest, plan.unit)}; {footer}"
    columns = ("collective", "axes", "tensor", "source", "count", "bytes", "time")
    return Section(title="Collectives per step", columns=columns, rows=rows, right=(4, 5, 6), footer=footer)


def _tensor_labels(plan: Plan) -> list[str]:
    """Argument tensors by the pattern of their path, intermediates by the op at which they are converted."""
    labels: list[str] = []
    for stage in plan.stages:
        primitives = {d.path: d.op.partition("(")[0].partition(" ")[0] for d in stage.decisions}
        named = [c.tensor if c.tensor and not c.tensor.startswith("%") else "" for c in stage.collectives]
        paths = [name for name in dict.fromkeys(named) if name]
        patterns = {paths[m]: g.label for g in group_paths(paths, [None] * len(paths)) for m in g.members}
        for c, name in zip(stage.collectives, named, strict=True):
            primitive = primitives.get(c.op, "")
            labels.append(patterns[name] if name else f"at {primitive}" if primitive else "intermediate")
    return labels


def _file_and_line(source: str) -> str:
    return PurePosixPath(source.partition(" (")[0]).name


def _count(collectives: list[Collective]) -> int:
    return sum(c.count for c in collectives)


def _size(collectives: list[Collective]) -> int:
    return sum(c.size_bytes * c.count for c in collectives)


def _time(collectives: list[Collective]) -> float:
    return sum(c.time_s * c.count for c in collectives)


def _totals(collectives: list[Collective], unit: str) -> str:
    parts = (_count(collectives), format_bytes(_size(collectives)), format_cost(_time(collectives), unit))
    return f"{parts[0]} collectives, {parts[1]}, {parts[2]}"


def _memory(plan: Plan) -> Section:
    names = [name for name, _ in plan.stages[0].memory.items()]
    profiles = [dict(stage.memory.items()) for stage in plan.stages]
    rows = tuple(
        (name.replace("_", " "), *(format_bytes(profile[name]) for profile in profiles))
        for name in names
        if name == "peak" or any(profile[name] for profile in profiles)
    )
    heads = ("per device",) if len(plan.stages) == 1 else tuple(f"stage {i}" for i in range(len(plan.stages)))
    right = tuple(range(1, len(heads) + 1))
    shown = any(profile["peak"] for profile in profiles)
    return Section(title="Memory", columns=("", *heads), rows=rows if shown else (), right=right)


def _paddings(plan: Plan) -> Section:
    rows = tuple(
        (
            p.dim,
            f"{p.size} -> {p.padded}",
            str(p.shards),
            format_bytes(p.waste_bytes),
            format_cost(p.waste_s, plan.unit),
        )
        for p in plan.paddings
    )
    columns = ("padded inside the step", "size", "split into", "waste per device", "time")
    without = plan.paddings[0].without if plan.paddings else None
    gain = (
        "there is no plan without it" if without is None else f"without it: {format_cost(without, plan.unit)} per step"
    )
    return Section(title="Padding", columns=columns, rows=rows, right=(1, 2, 3, 4), footer=gain)


def _meshes(plan: Plan) -> Section:
    chosen = {stage.mesh for stage in plan.stages}

    def row(c: MeshCandidate) -> tuple[str, ...]:
        objective = "-" if c.objective is None else format_cost(c.objective, plan.unit)
        bound = "-" if c.lower_bound is None else format_cost(c.lower_bound, plan.unit)
        peak = "-" if c.peak_bytes is None else format_bytes(c.peak_bytes)
        remark = "; ".join(text for text in ("chosen" if c.mesh in chosen else "", c.reason) if text)
        return (str(c.mesh), objective, bound, peak, c.status, remark)

    columns = ("mesh", "objective", "lower bound", "peak", "status", "")
    return Section(title="Meshes", columns=columns, rows=tuple(map(row, plan.mesh_table)), right=(1, 2, 3))


def _pins(plan: Plan) -> Section:
    return Section(title="Pins", columns=("key", "spec"), rows=plan.pins)


def _notes(plan: Plan) -> Section:
    rest = len(plan.notes) - SHOWN_NOTES
    footer = f"and {rest} more, all in plan.notes" if rest > 0 else ""
    return Section(title="Notes", columns=(), rows=tuple((note,) for note in plan.notes[:SHOWN_NOTES]), footer=footer)
