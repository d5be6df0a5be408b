"""One of the graphs that are planned together: its plan alone, and its plans in layouts that all could share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from alpa_lite.api.request import Request
from alpa_lite.api.shared_layout import AS_SHARED
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.roles import has_gradient
from alpa_lite.errors import AlpaLiteError, MemoryBudgetError, PinError
from alpa_lite.plan.pins import PinnedDims, parse_dims
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.plan_step import LIMITED, KnownTasks
from alpa_lite.planner.posing import MeshTask, task_costs
from alpa_lite.planner.price_step import StepPrice
from alpa_lite.trace.program import Traced


@dataclass(eq=False, slots=True)
class SharedGraph:
    """One graph; ``leaves``: positions of the shared ones among its arguments, ``own`` and ``task`` of its own optimum.

    ``price``: all that is known of its own optimum before a plan of it is asked for, where that can be.
    ``stages``: the options about stages, which ``request`` is without. ``least`` is the cost of the cheapest plan that was made.
    ``unbounded``: its own optimum bounds nothing, as in a layout fixed leaves may lie as it may not have them, or other layers be
    recomputed; ``recomputes``: whether layers may be at all; ``kept``: the task without that, where its own optimum does so.
    ``refused``: why no plan alone was found within the budget, where none is ruled out; ``own`` is without a budget then.
    """

    name: str
    request: Request
    args: tuple[Any, ...]
    traced: Traced
    weight: float
    leaves: list[int] = field(default_factory=list)
    tasks: KnownTasks = field(default_factory=partial(KnownTasks, compares=False))
    own: Plan | None = None
    price: StepPrice | None = None
    task: MeshTask | None = None
    stages: dict[str, Any] = field(default_factory=dict)
    least: float = math.inf
    unbounded: bool = False
    recomputes: bool = False
    kept: MeshTask | None = None
    refused: MemoryBudgetError | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        return self.traced.program.input_paths

    @property
    def shared(self) -> tuple[str, ...]:
        return tuple(self.paths[i] for i in self.leaves)

    def pinned(self) -> list[PinnedDims]:
        """What the user pinned of it: leaves, and values by ``al.pin``."""
        pins, program = self.request.pins_of(self.traced, self.args), self.traced.program
        inside = [
            PinnedDims(path=path, shape=owner.values[op.outputs[0]].shape, dims=parse_dims(op.pinned))
            for path, owner, op in program.walk()
            if op.primitive == "pin"
        ]
        return [pin for pin in (*pins.inputs, *pins.outputs, *inside) if not pin.is_free]

    def on_mesh(self, mesh: DeviceMesh) -> SharedGraph:
        """The graph, to be planned on one mesh, of which nothing is known yet."""
        options = replace(self.request.options, mesh_shape=mesh.shape, axis_names=mesh.axis_names)
        request = replace(self.request, options=options)
        return SharedGraph(self.name, request, self.args, self.traced, self.weight, self.leaves, stages=self.stages)

    def best(self) -> Plan:
        """Its own optimum, as a plan."""
        assert self.own is not None
        return self.own

    @property
    def cost_alone(self) -> float:
        """Of the best plan that is known of it."""
        return min(self.least, math.inf if self.price is None else self.price.objective)

    @property
    def optimum(self) -> Plan | StepPrice:
        """Its own optimum."""
        return self.price or self.best()

    def own_layout(self) -> tuple[ShardingSpec, ...]:
        """Of the shared leaves in its own optimum."""
        specs = self.price.in_specs if self.price else [leaf.spec for leaf in self.best().inputs]
        return tuple(specs[i] for i in self.leaves)

    def plan_own(self, cluster: Cluster) -> None:
        """Finds its own optimum."""
        with named(f"the graph {self.name!r}"), suppress(PinError):  # which planning raises with what else is known
            self.price = self.request.price_known(self.traced, self.args, cluster, self.tasks)
        if self.price is not None:
            self.task = self.tasks.last(self.traced.program)
        else:
            self.task = self._planned_own(cluster)
        self.recomputes = self.request.options.remat == "auto" and has_gradient(self.task.program)
        free_ends = task_costs(self.task, cluster, self.optimum.mesh).rules.replicated_ends
        if self.recomputes and self.own is not None and self.own.remat is not None:
            self.kept = self.tasks.last(self.traced.program)
        self.unbounded = free_ends or self.kept is not None

    def _planned_own(self, cluster: Cluster) -> MeshTask:
        """Makes the plan of its own optimum."""
        request, self.tasks.explains = self.request, True
        try:
            with named(f"the graph {self.name!r}"):
                traced, self.own = request.plan_known(self.traced, self.args, cluster, self.tasks)
            self.least = min(self.least, self.own.objective)
        except MemoryBudgetError as error:
            if error.proven:
                raise
            # In a layout that is fixed the search may find one.
            self.refused, self.price = error, None
            request = replace(request, options=replace(request.options, memory_budget_bytes=math.inf))
            traced, self.own = request.plan_known(self.traced, self.args, cluster, self.tasks)
        return self.tasks.last(traced.program)

    def bound(self, mesh: DeviceMesh) -> float:
        """What no plan of it on a mesh costs less than; inf where there is none."""
        found = next((c for c in self.optimum.mesh_table if c.mesh == mesh and c.status != "ruled out"), None)
        if found is None or (found.status == "infeasible" and not self.recomputes):
            return math.inf
        # Where nothing was found within the budget, there may be a plan in a layout that is fixed.
        return 0.0 if self.unbounded or found.lower_bound is None else found.lower_bound

    def planned(self, cluster: Cluster, mesh: DeviceMesh, specs: Sequence[ShardingSpec]) -> Plan:
        """Its plan with the shared leaves in a layout."""
        if self.optimum.mesh != mesh or self.own_layout() != tuple(specs):
            return self._fixed(cluster, mesh, specs)
        if self.own is None:
            self._planned_own(cluster)
        made = self.best()
        if self.refused is not None or made.mesh != mesh:  # meshes may be equal but for the last digit of a sum
            return self._fixed(cluster, mesh, specs)
        if made.gap and self.is_limited(made):  # the search may find more where it has less to choose
            with suppress(MemoryBudgetError, PinError):
                made = min(made, self._fixed(cluster, mesh, specs), key=lambda plan: plan.objective)
        return made

    @staticmethod
    def is_limited(plan: Plan) -> bool:
        """Whether the memory budget keeps a plan from being cheaper."""
        return any(c.reason == LIMITED for c in plan.mesh_table if c.mesh == plan.mesh)

    def why(self, cluster: Cluster, mesh: DeviceMesh, specs: Sequence[ShardingSpec]) -> AlpaLiteError | None:
        """Why ``planned`` found nothing."""
        try:
            self._fixed(cluster, mesh, specs, explains=True)
        except AlpaLiteError as error:
            return error
        return None

    def _fixed(
        self, cluster: Cluster, mesh: DeviceMesh, specs: Sequence[ShardingSpec], *, explains: bool = False
    ) -> Plan:
        dims = {path: spec.dims for path, spec in zip(self.shared, specs, strict=True)}
        options = replace(self.request.options, mesh_shape=mesh.shape, axis_names=mesh.axis_names)
        request = replace(self.request, options=options, fixed=(dims, AS_SHARED, mesh))
        self.tasks.explains = explains  # most layouts are refused for another to be taken
        with named(f"the graph {self.name!r} in the layout that it would share"):
            made = request.plan_known(self.traced, self.args, cluster, self.tasks)[1]
        self.least = min(self.least, made.objective)
        return made


class named:
    """Errors say which graph they are about."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, AlpaLiteError):
            told = copy(error)  # with what it says beside its text
            told.args = (f"{self.what}: {error}",)
            raise told from error
