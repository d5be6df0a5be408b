"""Why there is no plan: the smallest clashing set of pins, restrictions and budget, or how far the budget is off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.costs.conventions import cost_model
from alpa_lite.errors import AlpaLiteError, MemoryBudgetError, PinClashError
from alpa_lite.intraop.clash import minimal_clash
from alpa_lite.plan.pins import PinnedDims
from alpa_lite.planner.one_mesh import MeshResult, MeshTask, plan_on_mesh
from alpa_lite.units import format_bytes

_BUDGET, _FORBID, _CONTRACTIONS = "memory budget", "forbid", "require_sharded_contractions"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """One thing that the user asked for."""

    name: str
    text: str


def explain_infeasible(task: MeshTask, results: Sequence[MeshResult], cluster: Cluster) -> AlpaLiteError:
    """The error to raise when every mesh is infeasible; explains the first mesh."""
    mesh = results[0].mesh
    demands = _demands(task)
    quick = replace(task.options, time_limit_s=min(task.options.time_limit_s, 10.0))

    def feasible(chosen: tuple[_Demand, ...]) -> bool:
        part = _restricted(replace(task, options=quick), {d.name for d in chosen})
        costs = cost_model(
            part.options.costs,
            cluster,
            mesh,
            forbid=part.options.forbid,
            require_sharded_contractions=part.options.require_sharded_contractions,
        )
        return plan_on_mesh(part, costs, mesh).realised is not None

    members = minimal_clash(demands, feasible)
    if [m.name for m in members] == [_BUDGET]:
        return _over_budget(task, results, cluster)
    lines = "\n".join(f"  - {m.text}" for m in members)
    return PinClashError(
        f"these {len(members)} demands cannot hold together on the mesh {mesh}:\n{lines}\n"
        "  allowed: any set of pins, restrictions and budget of which at least one plan keeps all.\n"
        f"  where: {task.pins.source}\n"
        "  next: drop or change any one of them; each one alone makes the rest possible.",
        tuple(m.text for m in members),
    )


def _demands(task: MeshTask) -> tuple[_Demand, ...]:
    demands = []
    for index, pin in enumerate(task.pins.inputs + task.pins.outputs):
        if not pin.is_free:
            shape = ",".join(map(str, pin.shape))
            demands.append(_Demand(name=f"pin {index}", text=f"pin {pin.origin!r}: {pin.path} [{shape}] is {pin}"))
    if task.options.forbid:
        demands.append(_Demand(name=_FORBID, text=f"PlanOptions.forbid={task.options.forbid}"))
    if task.options.require_sharded_contractions:
        demands.append(_Demand(name=_CONTRACTIONS, text="PlanOptions.require_sharded_contractions=True"))
    if math.isfinite(task.budget):
        demands.append(_Demand(name=_BUDGET, text=f"the memory budget of {format_bytes(task.budget)} per device"))
    return tuple(demands)


def _restricted(task: MeshTask, names: set[str]) -> MeshTask:
    """The task with only some of the demands."""

    def keep(pins: tuple[PinnedDims, ...], first: int) -> tuple[PinnedDims, ...]:
        return tuple(
            p if f"pin {first + i}" in names else replace(p, dims=(None,) * len(p.dims)) for i, p in enumerate(pins)
        )

    pins = task.pins
    pins = replace(pins, inputs=keep(pins.inputs, 0), outputs=keep(pins.outputs, len(pins.inputs)))
    options = replace(
        task.options,
        forbid=task.options.forbid if _FORBID in names else (),
        require_sharded_contractions=task.options.require_sharded_contractions and _CONTRACTIONS in names,
    )
    return replace(task, pins=pins, options=options, budget=task.budget if _BUDGET in names else math.inf)


def _over_budget(task: MeshTask, results: Sequence[MeshResult], cluster: Cluster) -> MemoryBudgetError:
    """Smallest possible peak, largest tensors, what would help."""
    from alpa_lite.intraop.solve import minimum_peak

    floors = [(minimum_peak(r.problem), r) for r in results if r.problem is not None]
    floor, result = min(floors, key=lambda pair: pair[0])
    program = task.program
    sized = sorted(
        ((program.values[v].size_bytes, path) for path, v in zip(program.input_paths, program.inputs, strict=True)),
        reverse=True,
    )
    largest = ", ".join(f"{path} {format_bytes(size)}" for size, path in sized[:3])
    return MemoryBudgetError(
        f"no plan fits: smallest possible peak {format_bytes(floor)} > budget {format_bytes(task.budget)} per device "
        f"(mesh {result.mesh} of {cluster}).\n"
        f"  largest arguments, unsharded: {largest}\n"
        f"  where: {task.pins.source}\n"
        "  next: donate the state (donate_argnums), wrap layers in jax.checkpoint, use a smaller batch or more devices, "
        "or raise PlanOptions.memory_budget_bytes."
    )
