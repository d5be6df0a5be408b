"""What changed between two plans, as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.plan.grouping import group_paths
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf
from alpa_lite.units import format_bytes, format_cost


def diff(before: Plan, after: Plan) -> str:
    """Objective, meshes, memory, specs that moved, collectives; "the plans are equal" if nothing differs.

    Example:
        >>> print(diff(load_plan("monday.json"), load_plan("tuesday.json")))
    """
    if before == after:
        return "the plans are equal\n"
    lines = [*_head(before, after), *_memory(before, after), *_leaves(before, after), *_collectives(before, after)]
    lines += _ops(before, after)
    return "\n".join(lines or ["the plans decide the same; they differ in notes, options or identity"]) + "\n"


def _head(before: Plan, after: Plan) -> Iterator[str]:
    pairs = (
        ("program", before.identity.fingerprint, after.identity.fingerprint),
        ("cluster", before.identity.cluster, after.identity.cluster),
        ("JAX", before.identity.jax_version, after.identity.jax_version),
        ("costs", before.costs, after.costs),
        ("stages", str(len(before.stages)), str(len(after.stages))),
        ("mesh", _meshes(before), _meshes(after)),
        ("status", before.status, after.status),
        ("objective", format_cost(before.objective, before.unit), format_cost(after.objective, after.unit)),
    )
    for name, old, new in pairs:
        if old != new:
            change = _change(before.objective, after.objective) if name == "objective" else ""
            yield f"{name}: {old} -> {new}{change}"


def _meshes(plan: Plan) -> str:
    return ", ".join(str(stage.mesh) for stage in plan.stages)


def _change(old: float, new: float) -> str:
    return f" ({100 * (new - old) / abs(old):+.1f} %)" if old else ""


def _memory(before: Plan, after: Plan) -> Iterator[str]:
    for (name, old), (_, new) in zip(before.memory.items(), after.memory.items(), strict=True):
        if old != new:
            yield f"memory {name.replace('_', ' ')}: {format_bytes(old)} -> {format_bytes(new)}{_change(old, new)}"


def _leaves(before: Plan, after: Plan) -> Iterator[str]:
    for word, old, new in (("argument", before.inputs, after.inputs), ("result", before.outputs, after.outputs)):
        old_leaves, new_leaves = ({leaf.path: leaf for leaf in leaves} for leaves in (old, new))
        yield from (f"{word} {path} gone" for path in old_leaves if path not in new_leaves)
        yield from (f"{word} {path} new" for path in new_leaves if path not in old_leaves)
        common = [path for path in old_leaves if path in new_leaves]
        moved = [path for path in common if _place(old_leaves[path]) != _place(new_leaves[path])]
        keys = [f"{_place(old_leaves[path])} -> {_place(new_leaves[path])}" for path in moved]
        for group in group_paths(moved, keys):
            count = f" x{len(group.members)}" if len(group.members) > 1 else ""
            yield f"{word} {group.label}{count}: {group.key}"


def _place(leaf: Leaf) -> str:
    return f"{leaf.value} {leaf.spec}" + (f" on stage {leaf.stage}" if leaf.stage else "")


def _collectives(before: Plan, after: Plan) -> Iterator[str]:
    old, new = _collective_totals(before), _collective_totals(after)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            kind, axes = key
            texts = (f"x{count} {format_bytes(size)}" for count, size in (old.get(key, (0, 0)), new.get(key, (0, 0))))
            yield f"{kind} over {','.join(axes)}: {' -> '.join(texts)}"


def _collective_totals(plan: Plan) -> dict[tuple[CollectiveKind, tuple[str, ...]], tuple[int, int]]:
    totals: dict[tuple[CollectiveKind, tuple[str, ...]], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for c in plan.collectives:
        count, size = totals[c.kind, c.axes]
        totals[c.kind, c.axes] = (count + c.count, size + c.count * c.size_bytes)
    return dict(totals)


def _ops(before: Plan, after: Plan) -> Iterator[str]:
    """Ops of the same program that are split otherwise; ops of different programs are not comparable."""
    old = {d.path: d for stage in before.stages for d in stage.decisions}
    new = {d.path: d for stage in after.stages for d in stage.decisions}
    if before.identity.fingerprint == after.identity.fingerprint and old.keys() == new.keys():
        changed = [p for p in old if (old[p].operands, old[p].results) != (new[p].operands, new[p].results)]
        if changed:
            yield f"ops split otherwise: {len(changed)} of {len(old)}, first op {changed[0]} ({old[changed[0]].op})"
