"""Why there is no plan: the smallest clashing set of pins, restrictions and budget, or how far the budget is off.

So too where several graphs cannot share a layout, each of which has plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.counted import ALWAYS_SHARDED
from alpa_lite.costs.roles import has_gradient
from alpa_lite.errors import AlpaLiteError, BudgetClashError, MemoryBudgetError, PinClashError
from alpa_lite.intraop.clash import minimal_clash
from alpa_lite.intraop.solve import minimum_peak
from alpa_lite.plan.pins import PinnedDims, parse_dims
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.joint import solve_jointly
from alpa_lite.planner.one_mesh import plan_on_mesh
from alpa_lite.planner.posing import MeshTask
from alpa_lite.units import format_bytes

_PIN, _TIE, _PIN_OP, _BUDGET, _FORBID, _CONTRACTIONS = "pin", "pin_like", "al.pin", "budget", "forbid", "contractions"
_CLOSE = 1.01
_TRY_S = 5.0  # per attempt; an explanation is no reason to wait for long
_OUT_OF_TIME = 3  # attempts that may end so; nothing is tried after them
_PROVEN = "infeasible"  # of a result's statuses the only one that rules plans out

_Id = tuple[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """One thing that the user asked for: ``kind`` and, where there are several, which one; ``origin`` is a pin's."""

    kind: str
    key: int | str = ""
    text: str
    origin: str = ""

    @property
    def id(self) -> _Id:
        return self.kind, self.key


def explain_infeasible(task: MeshTask, results: Sequence[MeshResult], cluster: Cluster) -> AlpaLiteError:
    """The error to raise when no mesh has a plan, and each either cannot have one or has plans over the budget alone.

    It explains the first mesh. What it calls impossible is proven: a try that ran out of time drops no demand from the clash,
    so that a slow machine names more of them, never too few.
    """
    first = results[0]
    # Not the user's own limit: what is said to be impossible must not come from a search that was cut short.
    quick = replace(task, options=replace(task.options, time_limit_s=_TRY_S))
    tries = _Tries(quick, cluster, first)
    members = minimal_clash(tries.demands, tries.may_hold)
    if [m.kind for m in members] == [_BUDGET]:
        return _over_budget(quick, results, cluster)
    if not members:
        return PinClashError(
            f"no plan was found on the mesh {first.mesh}, not even without pins, restrictions and budget. At {task.pins.source}. "
            "Take another mesh; please report this."
        )
    unsettled = [not tries.holds_without(m, members) for m in members]
    lines = "\n".join(f"  - {m.text}{' [not settled]' if u else ''}" for m, u in zip(members, unsettled, strict=True))
    these = f"these {len(members)} demands" if len(members) > 1 else "this demand"
    claim = f"{these} cannot hold{' together' if len(members) > 1 else ''}"
    proven = tries.status[_ids(members)] == _PROVEN
    if not proven:
        claim = f"no plan was found that keeps {these}"
    advice = "drop or change any one of them; each one alone makes the rest possible"
    if any(unsettled):
        advice += f", but for those not settled: without one of these no plan was found in {_TRY_S:g} s, and none is ruled out"
    text = (
        f"{claim} on the mesh {first.mesh}:\n{lines}\n"
        "  allowed: any set of pins, restrictions and budget of which at least one plan keeps all.\n"
        f"  where: {task.pins.source}\n"
        f"  next: {advice}."
    )
    named = tuple(m.text for m in members)
    if any(m.kind == _BUDGET for m in members):
        return BudgetClashError(text, named, proven)
    return PinClashError(text, named)


def explain_sharing(
    tasks: Mapping[str, MeshTask], leaves: Sequence[Sequence[int]], cluster: Cluster, mesh: DeviceMesh, copied: str
) -> PinClashError | None:
    """The error to raise where graphs that each have plans cannot share a layout of leaves; None where that is not proven.

    Args:
        tasks: graph -> its task.
        leaves: as for ``solve_jointly``.
        cluster, mesh: the devices.
        copied: how origins of pins begin that are another graph's own.
    """
    alone = [
        replace(task, budget=math.inf, options=replace(task.options, time_limit_s=_TRY_S)) for task in tasks.values()
    ]
    demands = [
        (number, demand)
        for number, task in enumerate(alone)
        for demand in _demands(task)
        if demand.kind != _PIN or not demand.origin.startswith(copied)
    ]

    def may_hold(chosen: Sequence[tuple[int, _Demand]]) -> bool:
        kept = [
            _restricted(task, _ids([demand for number, demand in chosen if number == own]))
            for own, task in enumerate(alone)
        ]
        return solve_jointly(kept, [1.0] * len(kept), leaves, cluster, mesh).status != _PROVEN

    members = () if may_hold(demands) else minimal_clash(demands, may_hold)
    if not members:
        return None
    names = list(tasks)
    lines = "\n".join(f"  - of {names[number]!r}: {demand.text}" for number, demand in members)
    return PinClashError(
        f"no layout of the shared leaves on the mesh {mesh} keeps these {len(members)} demands together:\n{lines}\n"
        "  allowed: any set of pins and restrictions of which at least one layout for all graphs keeps all.\n"
        f"  where: {alone[0].pins.source}\n"
        "  next: drop or change any one of them, or share fewer leaves.",
        tuple(demand.text for _, demand in members),
    )


class _Tries:
    """Which sets of the demands hold on one mesh, where ``first`` is what came of all of them.

    Attributes:
        demands: those that may be to blame.
        status: of the sets for which no plan was found, see ``MeshResult``.
    """

    def __init__(self, task: MeshTask, cluster: Cluster, first: MeshResult) -> None:
        self.task, self.cluster, self.mesh = task, cluster, first.mesh
        limited = first.limit is not None  # else there is no plan without the budget either
        self.demands = tuple(d for d in _demands(task) if limited or d.kind != _BUDGET)
        everything = _ids(self.demands)
        self.status = {everything: first.status}
        self.held = [everything - {(_BUDGET, "")}] if limited else []  # sets that a plan keeps
        self.out_of_time = 0

    def may_hold(self, chosen: Sequence[_Demand]) -> bool:
        """Whether a plan keeps these; also True if that could not be told in the time."""
        ids = _ids(chosen)
        if ids in self.status:
            return False
        if any(ids <= held for held in self.held) or self.out_of_time >= _OUT_OF_TIME:
            return True
        result = plan_on_mesh(_restricted(self.task, ids), self.cluster, self.mesh)
        if result.realised is not None:
            self.held.append(ids)
        elif result.status == "no-solution":
            self.out_of_time += 1
        else:
            self.status[ids] = result.status
        return ids not in self.status

    def holds_without(self, member: _Demand, members: Sequence[_Demand]) -> bool:
        """Whether a plan is known that keeps the other members."""
        others = _ids(members) - {member.id}
        return any(others <= held for held in self.held)


def _ids(demands: Sequence[_Demand]) -> frozenset[_Id]:
    return frozenset(d.id for d in demands)


def _demands(task: MeshTask) -> tuple[_Demand, ...]:
    pins, options, program = task.pins, task.options, task.program
    demands = []
    carried = {len(pins.inputs) + o: pins.inputs[i].path for i, o in program.aliases}
    for index, pin in enumerate(pins.inputs + pins.outputs):
        if not pin.is_free:
            shape = ",".join(map(str, pin.shape))
            same = f" (the next value of {carried[index]}, so of one layout with it)" if index in carried else ""
            text = f"pin {pin.origin!r}: {pin.path} [{shape}] is {pin}{same}"
            demands.append(_Demand(kind=_PIN, key=index, text=text, origin=pin.origin))
    for index, (a, b) in enumerate(pins.ties):
        text = f"pin_like: {pins.inputs[b].path} has the layout of {pins.inputs[a].path}"
        demands.append(_Demand(kind=_TIE, key=index, text=text))
    for path, _, op in program.walk():
        if op.primitive == "pin" and set(parse_dims(op.pinned)) != {None}:
            demands.append(_Demand(kind=_PIN_OP, key=path, text=f"al.pin at {op.source}: the tensor is {op.pinned}"))
    if options.forbid:
        demands.append(_Demand(kind=_FORBID, text=f"PlanOptions.forbid={options.forbid}"))
    if options.require_sharded_contractions:
        demands.append(_Demand(kind=_CONTRACTIONS, text="PlanOptions.require_sharded_contractions=True"))
    elif options.require_sharded_contractions is None and options.costs in ALWAYS_SHARDED:
        text = f"PlanOptions.costs={options.costs!r}, which splits every contraction"
        demands.append(_Demand(kind=_CONTRACTIONS, text=text))
    if math.isfinite(task.budget):
        text = f"the memory budget of {format_bytes(task.budget)} per device"
        demands.append(_Demand(kind=_BUDGET, text=text))
    return tuple(demands)


def _restricted(task: MeshTask, chosen: frozenset[_Id]) -> MeshTask:
    """The task with only some of the demands."""

    def keep(pins: tuple[PinnedDims, ...], first: int) -> tuple[PinnedDims, ...]:
        return tuple(
            p if (_PIN, first + i) in chosen else replace(p, dims=(None,) * len(p.dims)) for i, p in enumerate(pins)
        )

    pins = task.pins
    pins = replace(
        pins,
        inputs=keep(pins.inputs, 0),
        outputs=keep(pins.outputs, len(pins.inputs)),
        ties=tuple(tie for i, tie in enumerate(pins.ties) if (_TIE, i) in chosen),
    )
    strict = task.options.require_sharded_contractions if (_CONTRACTIONS, "") in chosen else False
    forbid = task.options.forbid if (_FORBID, "") in chosen else ()
    options = replace(task.options, forbid=forbid, require_sharded_contractions=strict)
    pin_ops = [path for path, _, op in task.program.walk() if op.primitive == "pin"]
    return replace(
        task,
        pins=pins,
        options=options,
        budget=task.budget if (_BUDGET, "") in chosen else math.inf,
        ignored_pin_ops=frozenset(path for path in pin_ops if (_PIN_OP, path) not in chosen),
    )


def _over_budget(task: MeshTask, results: Sequence[MeshResult], cluster: Cluster) -> MemoryBudgetError:
    """Smallest possible peak, largest tensors, what would help."""
    limited = [(minimum_peak(r.problem), r) for r in results if r.problem and r.problem.usage_limit is not None]
    floor, result = min(limited, key=lambda pair: pair[0])
    low, high = _smallest_peak(task, result.mesh, cluster, floor)
    budget = f"budget {format_bytes(task.budget)} per device"
    program = task.program
    word = "peak"
    advice = "donate the state (donate_argnums), wrap layers in jax.checkpoint, use a smaller batch or more devices"
    if not has_gradient(program):
        advice = (
            "donate what is replaced, like caches (donate_argnums), use smaller inputs (batch, slots) or more devices"
        )
    if result.budgeted == "weights":
        word, advice = "bytes of the weights", "use more devices, pin fewer weights"
    sized = sorted(
        ((program.values[v].size_bytes, path) for path, v in zip(program.input_paths, program.inputs, strict=True)),
        reverse=True,
    )
    largest = ", ".join(f"{path} {format_bytes(size)}" for size, path in sized[:3])
    # Where the search was cut short the truth lies between what is proven and what was found.
    peak, excess = format_bytes(high), format_bytes(high - task.budget)
    if math.isinf(high):
        found = f"no plan was found that fits the {budget}, nor the smallest {word} in {_TRY_S:g} s"
    elif low <= task.budget:  # nothing rules out a plan that fits
        found = f"no plan was found that fits: smallest {word} found {peak} > {budget}, {excess} too much"
    elif high <= _CLOSE * low:
        found = f"no plan fits: smallest possible {word} {peak} > {budget}, {excess} too much"
    else:
        excess = f"at least {format_bytes(low - task.budget)}"
        possible = f"smallest possible {word} at least {format_bytes(low)}, smallest found {peak}"
        found = f"no plan fits: {possible} > {budget}, {excess} too much"
    return MemoryBudgetError(
        f"{found} (mesh {result.mesh} of {cluster}).\n"
        f"  largest arguments, unsharded: {largest}\n"
        f"  where: {task.pins.source}\n"
        f"  next: {advice}, or raise PlanOptions.memory_budget_bytes.",
        proven=low > task.budget,
    )


def _smallest_peak(task: MeshTask, mesh: DeviceMesh, cluster: Cluster, floor: int) -> tuple[float, float]:
    """(ruled out, enough): the smallest budget with a plan lies between; found by bisection, within 1 % if time allows.

    The first is the task's budget if nothing above it is ruled out, the second ``inf`` if no plan was found without a budget.
    ``floor``, the least that any plan takes by the solver's count, is where the search begins.
    """
    begin = time.perf_counter()
    unlimited = plan_on_mesh(replace(task, budget=math.inf, proof=False), cluster, mesh)
    ruled_out = failed = task.budget
    if unlimited.peak is None:
        return ruled_out, math.inf
    high = float(unlimited.used_bytes)
    middle = min(float(floor), high) / math.sqrt(_CLOSE)
    while high > _CLOSE * failed and time.perf_counter() - begin < task.options.time_limit_s:
        if middle > failed:
            result = plan_on_mesh(replace(task, budget=middle, proof=False), cluster, mesh)
            if result.realised is not None:
                high = float(result.used_bytes)
            else:
                failed = middle
                ruled_out = middle if result.status == _PROVEN else ruled_out
        middle = (failed + high) / 2
    return ruled_out, high
