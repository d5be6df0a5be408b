"""Plans for every number of workers at once.

What does not depend on the number is made once: the trace, the sharding rules, liveness, roles. Each number is then planned
by the same code as a plan for that number alone, on what is shared, so that specialising late and planning early are the
same. Numbers under which no size of the program divides leave every op a single choice; they are planned once.

Numbers with the same decisions form a *regime* (``regime.py``), whose memory and traffic are formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.cluster.symbolic import SymbolicCluster
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import AlpaLiteError, MemoryBudgetError
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.collector import collector_paused
from alpa_lite.planner.one_mesh import Begun, begin_together, plan_on_mesh
from alpa_lite.planner.plan_step import Versions, axis_names_of, plan_of_result
from alpa_lite.planner.posing import MeshTask, task_costs
from alpa_lite.planner.regime import Regime, ranges, regime_of

if TYPE_CHECKING:
    from alpa_lite.planner.realise import Realised


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolicTask:
    """What is to be planned for every number of workers.

    Attributes:
        task: everything that does not depend on the number; the mesh shape of its options holds the name.
        cluster: its devices, as many as there are workers.
        versions, notes: for the plans.
        finish: what the public layer adds to a plan.
        source: the user's line, for messages.
    """

    task: MeshTask
    cluster: SymbolicCluster
    versions: Versions
    notes: tuple[str, ...]
    finish: Callable[[Plan], Plan]
    source: str
    _known: dict[int, tuple[MeshTask, DeviceMesh]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def axis(self) -> str:
        """The mesh axis whose size is the number."""
        shape = self.task.options.mesh_shape
        assert shape is not None
        return axis_names_of(self.task.options, self.task.pins.axis_names)[shape.index(self.cluster.name)]

    def at(self, n: int) -> tuple[MeshTask, DeviceMesh]:
        """The task and the mesh for ``n`` workers."""
        if n not in self._known:
            self._known[n] = self._made(n)
        return self._known[n]

    def _made(self, n: int) -> tuple[MeshTask, DeviceMesh]:
        options = self.task.options
        assert options.mesh_shape is not None
        shape = tuple(n if isinstance(size, str) else size for size in options.mesh_shape)
        mesh = DeviceMesh(shape=shape, axis_names=axis_names_of(options, self.task.pins.axis_names))
        return replace(self.task, options=replace(options, mesh_shape=shape)), mesh


class SymbolicPlan:
    """Plans for all values of a symbolic cluster. Made by ``al.plan(fn, *args, cluster=al.Cluster.symbolic(...))``.

    Every number is planned when it is first asked for; ``regime``, ``regimes``, ``breakpoints`` and printing ask for all of them.

    Example:
        >>> cluster = al.Cluster.symbolic("n", device="h100-sxm", devices_per_host=8, values=range(1, 65))
        >>> plan = al.plan(step, state, batch, cluster=cluster, options=al.PlanOptions(mesh_shape=("n",)))
        >>> plan.memory(8).peak, plan.breakpoints, plan.smallest(memory_budget_bytes=16e9)
        >>> plan.specialize(8).save("plan-for-8.json")
    """

    def __init__(self, task: SymbolicTask) -> None:
        self._task = task
        self._results: dict[int, MeshResult | AlpaLiteError] = {}
        self._regimes: tuple[Regime, ...] | None = None
        self._free = _is_free(task.task)
        mesh = task.at(max(task.cluster.values))[1]  # with one worker, rules are not enumerated anew for the other axes
        task.task.shared.strategies.over = tuple(a for a in mesh.axis_names if mesh.axis_size(a) > 1)
        self._begun: dict[int, Begun] = {}
        self._prices: dict[int, list[float | tuple[float, float]] | None] = {}

    @property
    def name(self) -> str:
        """Of the number of workers."""
        return self._task.cluster.name

    @property
    def values(self) -> tuple[int, ...]:
        """The numbers that are considered, rising."""
        return self._task.cluster.values

    @collector_paused()
    def specialize(self, number: int | None = None, /, **named: int) -> Plan:
        """The plan for one number of workers: ``plan.specialize(8)`` or, by the number's name, ``plan.specialize(n=8)``.

        It is the plan that ``al.plan`` makes for that mesh on ``cluster.specialize(8)`` with ``padding="off"`` and
        ``remat="none"``, byte for byte, and it is refused in the same words.

        Raises:
            AlpaLiteError: the number is not among the values, or there is no plan for it (as ``al.plan`` says it).
        """
        chosen = self._number(number, named)
        task, mesh = self._task.at(chosen)
        result = self._result(chosen)
        cluster = self._task.cluster.specialize(chosen, others=mesh.num_devices // chosen)
        plan = plan_of_result(task, cluster, result, self._task.versions, self._task.notes)
        return self._task.finish(plan)

    @property
    @collector_paused()
    def regimes(self) -> tuple[Regime, ...]:
        """The different plans, each with its numbers and its formulas, by smallest number."""
        if self._regimes is None:
            alike: list[tuple[Realised, list[int]]] = []
            in_step = self._in_step()
            for n in self.values:
                if n in in_step:
                    self._begin(in_step[n])
                written = self._written(n)
                if written is not None:
                    numbers = next((found for other, found in alike if _same_decisions(written, other)), None)
                    if numbers is None:
                        alike.append((written, [n]))
                    else:
                        numbers.append(n)
            planned = tuple(n for _, numbers in alike for n in numbers)
            self._regimes = tuple(self._regime(tuple(numbers), planned) for _, numbers in alike)
        return self._regimes

    def _in_step(self) -> dict[int, list[int]]:
        """Numbers without a plan so far that have one decision graph, by the first of each set."""
        alike: dict[Hashable, list[int]] = {}
        for n in self.values:
            if n not in self._results and not self._indivisible(n):
                alike.setdefault(self._task.task.shared.mesh_class_of(self._task.at(n)[1]), []).append(n)
        return {numbers[0]: numbers for numbers in alike.values() if len(numbers) > 1}

    def _begin(self, numbers: Sequence[int]) -> None:
        """Begins them together."""
        if self._task.task.rent is None:
            with suppress(AlpaLiteError):  # which is said of each number by itself
                self._begun.update(zip(numbers, begin_together([self._at(n) for n in numbers]), strict=True))

    def _at(self, n: int) -> tuple[MeshTask, Cluster, DeviceMesh]:
        task, mesh = self._task.at(n)
        return task, self._task.cluster.specialize(n, others=mesh.num_devices // n), mesh

    def _regime(self, numbers: tuple[int, ...], planned: tuple[int, ...]) -> Regime:
        largest = numbers[-1]
        task, _ = self._task.at(largest)
        profiles = {n: self._found(n).peak_profile for n in numbers}
        return regime_of(task, self._result(largest), self._task.axis, self.name, profiles, planned)

    def regime(self, n: int) -> Regime:
        """The regime of one number.

        Raises:
            AlpaLiteError: as for ``specialize``.
        """
        self._found(n)
        return next(r for r in self.regimes if n in r.values)

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """The numbers whose best plan is another one than that of the number before them."""
        of = {n: i for i, regime in enumerate(self.regimes) for n in regime.values}
        return tuple(n for before, n in pairwise(self.values) if of.get(before) != of.get(n))

    @property
    def without_plan(self) -> tuple[int, ...]:
        """The numbers for which there is no plan, mostly because nothing fits the memory."""
        return tuple(n for n in self.values if self._written(n) is None)

    def memory(self, n: int) -> MemoryProfile:
        """Bytes per device with ``n`` workers."""
        return self._found(n).peak_profile

    def traffic(self, n: int) -> Fraction:
        """Bytes that each device sends in one step with ``n`` workers."""
        self._found(n)
        return self._regime((n,), ()).traffic_at(n)

    def objective(self, n: int) -> float:
        """What one step costs with ``n`` workers, in the cost convention's unit (seconds by default)."""
        return self._found(n).objective

    def _found(self, n: int) -> MeshResult:
        """The result for a number that has a plan; raises as ``specialize`` does."""
        result = self._result(self._number(n, {}))
        if result.realised is None:
            self.specialize(n)  # says why there is no plan
        return result

    def smallest(self, *, memory_budget_bytes: float) -> int:
        """The smallest number of workers for which there is a plan within a budget, found as ``al.plan`` would with it.

        Raises:
            MemoryBudgetError: there is none among the values.
        """
        budgeted = self.with_budget(memory_budget_bytes)
        found = next((n for n in self.values if budgeted._written(n) is not None), None)
        if found is None:
            raise MemoryBudgetError(
                f"memory_budget_bytes={memory_budget_bytes:,.0f} is too little for every {self.name} in {ranges(self.values)}. "
                f"Some {self.name} must have a plan that fits. At {self._task.source}. Give more values to Cluster.symbolic, "
                f"a larger budget, or read plan.memory({self.name}).peak to see how memory falls."
            )
        return found

    def with_budget(self, memory_budget_bytes: float) -> SymbolicPlan:
        """The same for another ``PlanOptions.memory_budget_bytes``; what was traced is shared."""
        task = self._task.task
        options = replace(task.options, memory_budget_bytes=memory_budget_bytes)
        return type(self)(replace(self._task, task=replace(task, options=options, budget=memory_budget_bytes)))

    def _number(self, number: int | None, named: Mapping[str, int]) -> int:
        """The number that was asked for, checked."""
        known = [self.name] if number is None else []
        chosen = named.get(self.name) if number is None else number
        given = ", ".join([*([repr(number)] if number is not None else []), *(f"{k}={v!r}" for k, v in named.items())])
        if sorted(named) != known or not isinstance(chosen, int) or chosen is True or chosen not in self.values:
            raise AlpaLiteError(
                f"plan.specialize({given}) names no number of workers of this plan. Allowed is one {self.name} of "
                f"{ranges(self.values)}, as in plan.specialize({self.name}={self.values[-1]}). The values were given to "
                f"Cluster.symbolic, the plan was made at {self._task.source}. Choose one of them, or plan with more values."
            )
        return chosen

    def _written(self, n: int) -> Realised | None:
        try:
            return self._result(n).realised
        except AlpaLiteError:
            return None

    def _result(self, n: int) -> MeshResult:
        """The best plan for one number, made on first use."""
        if n not in self._results:
            self._results[n] = self._planned(n)
        found = self._results[n]
        if isinstance(found, AlpaLiteError):
            raise found
        return found

    @collector_paused()
    def _planned(self, n: int) -> MeshResult | AlpaLiteError:
        task, cluster, mesh = self._at(n)
        try:
            forced = self._forced(n)
            if forced is not None:
                return replace(forced, mesh=mesh)
            result = plan_on_mesh(task, cluster, mesh, begun=self._begun.pop(n, None))
        except AlpaLiteError as error:
            return error
        # Only the reason why there is no plan is sought in the problem later on, and problems are large.
        return result if result.realised is None else replace(result, problem=None)

    def _forced(self, n: int) -> MeshResult | None:
        """The result of another number if under both the axis can split nothing, so that the rest is the same problem.

        Partial sums arise only where a size is split, so with no such size every op and every tensor stays whole along the
        axis, and what is left is priced by the other axes alone. An axis of one device differs from one that divides nothing by
        the layouts of partial sums over it. No op makes these, so that arc consistency, with which presolve begins, takes out
        all of them; it leaves the same choices in the same order. Pins and the user's own shard_maps name axes and are
        checked for each number.
        """
        if not self._free or not self._indivisible(n):
            return None
        known = [m for m, r in self._results.items() if isinstance(r, MeshResult) and self._indivisible(m)]
        for m in (n, *known) if known else ():
            if m not in self._prices:
                self._prices[m] = self._unsplit_prices(m)
        prices = self._prices.get(n)
        found = next((self._results[m] for m in known if prices is not None and self._prices[m] == prices), None)
        return found if isinstance(found, MeshResult) else None

    def _unsplit_prices(self, n: int) -> list[float | tuple[float, float]] | None:
        """All prices with ``n`` workers that matter where their axis splits nothing; None if it must split something.

        Those of collectives over the other axes, and what repeating a contraction along the axis costs.
        """
        task, mesh = self._task.at(n)
        costs = task_costs(task, self._task.cluster.specialize(n, others=mesh.num_devices // n), mesh)
        if costs.rules.sharded_contractions:
            return None
        others = [a for a in mesh.axis_names if a != self._task.axis]
        groups = [axes for count in range(len(others) + 1) for axes in combinations(others, count)]
        kinds = [(kind, axes) for kind in CollectiveKind for axes in groups if axes]
        moved = [price(kind, axes) for price in (costs.linear, costs.inner_extra) for kind, axes in kinds]
        idle = [(self._task.axis, *axes) if n > 1 else axes for axes in groups]
        return [*moved, *(costs.heavy_replication(axes, 1.0) if axes else 0.0 for axes in idle)]

    def _indivisible(self, n: int) -> bool:
        return n == 1 or all(size % n for size in self._task.task.shared.sizes)

    def __str__(self) -> str:
        breaks = ", ".join(map(str, self.breakpoints))
        lines = [
            f"plans for {self._task.cluster}, mesh ({', '.join(map(str, self._task.task.options.mesh_shape or ()))}), "
            f"{self.name} in {ranges(self.values)}",
        ]
        if breaks:
            lines.append(f"the best plan changes at {self.name} = {breaks}")
        elif self.regimes:
            lines.append(f"one plan is the best for every {self.name}")
        if self.without_plan:
            lines.append(f"no plan for {self.name} in {ranges(self.without_plan)}")
        return "\n".join([*lines, *(f"\n{regime}" for regime in self.regimes)])


def _same_decisions(a: Realised, b: Realised) -> bool:
    """Whether two written-out plans agree in everything that is a decision: two numbers with one plan do."""
    if a is b:  # numbers that split nothing share one written-out plan
        return True
    if (a.in_specs, a.out_specs) != (b.in_specs, b.out_specs) or len(a.conversions) != len(b.conversions):
        return False
    choices = zip(a.decisions, b.decisions, strict=True)
    steps = zip(a.conversions, b.conversions, strict=True)
    return all(
        (c.op, c.value, c.steps, c.made_by, c.readers) == (d.op, d.value, d.steps, d.made_by, d.readers)
        for c, d in steps
    ) and all((c.path, c.operands, c.results) == (d.path, d.operands, d.results) for c, d in choices)


def _is_free(task: MeshTask) -> bool:
    """Whether nothing in pins or program names a mesh axis."""
    named = (op.primitive == "pin" or op.layout is not None for _, _, op in task.program.walk())
    return not task.pins.axis_names and not any(named)
