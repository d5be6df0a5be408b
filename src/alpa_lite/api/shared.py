"""``plan_shared``: several graphs planned together, so that what they share lies in one layout.

1. Every graph is traced and planned alone: its own optimum, with padding and recomputation where they pay.
2. Mesh by mesh, the joint problem of all graphs (``planner/joint.py``) gives the layout of the shared leaves.
3. Every graph is planned again with that layout fixed, which gives ordinary plans, their exact prices and memory.

The layouts of the graphs' own optima go through step 3 too, that of the graph which counts most before step 2, the others after
it and as far as they can win: sharing never costs more than under the best.

Where the memory budget refuses a layout or makes it dearer, the joint problem, which knows nothing of that, is asked for further
ones: by limits of its own count of memory, then for the next best, with a cap.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from alpa_lite.api.progress import told
from alpa_lite.api.shared_graph import SharedGraph
from alpa_lite.api.shared_graphs import PINNED_ELSEWHERE, Globs, Graphs, given_graphs
from alpa_lite.api.shared_layout import SharedLayout
from alpa_lite.api.shared_stages import plan_shared_stages
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import AlpaLiteError, MemoryBudgetError, PinError, SolverError, UnevenPinError, user_line
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.collector import collector_paused
from alpa_lite.planner.explain import explain_sharing
from alpa_lite.planner.joint import EVERYWHERE, JointAnswer, Region, solve_jointly
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import budget_bytes, mesh_candidates

_CLOSE = 4e-4  # of the best sum so far: a search on a large problem ends where no layout can be so much better
# Of the budget, by the solver's own count, which may be too high or too low.
_LIMITS = (1.5, 1.25, 1.1, 1.0, 0.95, 0.85, 0.7)
_NEAR = 1e-3  # the same for layouts that a budget asks for, each of which takes a joint problem
_TRIES = 24  # joint problems of parts of the layouts, per mesh, and as many layouts


@collector_paused()
def plan_shared(
    graphs: Graphs,
    *,
    shared: Globs | Mapping[str, Globs],
    cluster: Cluster,
    weights: Mapping[str, float] | None = None,
    pins: Mapping[str, Any] | None = None,
    options: PlanOptions | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    follow: Any = None,
    follow_like: Mapping[str, str] | None = None,
) -> SharedLayout:
    """Plans several graphs on one mesh, or on one set of stages, with one layout of what they share. Touches no device.

    Args:
        graphs: name -> (function, arguments); arguments are arrays or ``jax.ShapeDtypeStruct`` pytrees. What is not given below
            is as a parallelized function has it.
        shared: path of arguments, or glob as for pins, e.g. "0" for the whole first argument; or several; or graph -> such.
            These leaves must have one path (below the glob's fixed beginning), shape and dtype in all graphs.
        cluster: as for ``plan``.
        weights: graph -> how much its cost counts, e.g. calls per second; 1 for graphs that are not named.
        pins: path or glob -> ``PartitionSpec``, each for the graphs where it matches; or graph -> such. A pin of a shared leaf
            holds in all graphs.
        options, static_argnums, static_argnames, donate_argnums: as for ``plan``, of all graphs. The memory budget is each
            graph's, shared leaves counted in each. With stages (``num_stages``; ``submeshes`` given or "auto") all graphs have
            the same ones.
        follow, follow_like: as for ``plan``: what all graphs take where it lies, e.g. the parameters of a training step;
            ``follow_like`` also as graph -> such.

    Returns:
        The layout with the smallest weighted sum of costs that was found, and a bound of what can be.

    Raises:
        AlpaLiteError: or one of its subclasses, for anything wrong with what was given; messages name the graph.

    Example:
        >>> layout = al.plan_shared(
        ...     {"prefill": (prefill, (params, prompt)), "decode": (decode, (params, token))},
        ...     shared="0", weights={"decode": 100}, cluster=al.Cluster.parse("1x8:h100-sxm"),
        ... )
        >>> print(layout)
    """
    source = user_line()
    settings = options, static_argnums, static_argnames, donate_argnums, follow, follow_like
    found = given_graphs(graphs, shared, weights, pins, settings, cluster, source)
    for graph in found:
        graph.request = replace(graph.request, options=replace(graph.request.options, **graph.stages))
    on_stages = found[0].request.options
    if on_stages.has_stages:
        layout = plan_shared_stages(found, cluster, on_stages, source)
    elif on_stages.padding == "auto" and (meshes := _pinned_apart(found, cluster)):
        layout = _mesh_by_mesh(found, cluster, on_stages, source, meshes)
    else:
        layout = _Search(found, cluster, on_stages, source).run()
    faults = list(layout.faults())
    assert not faults, faults
    return layout


def _pinned_apart(graphs: Sequence[SharedGraph], cluster: Cluster) -> list[DeviceMesh]:
    """The meshes, if a pin divides on some of them and is kept by padding on others, so that programs differ by mesh."""
    pins = [pin for graph in graphs for pin in graph.pinned()]
    if not pins:
        return []
    first = graphs[0].request
    meshes = list(mesh_candidates(cluster, first.pins_of(graphs[0].traced, graphs[0].args), first.options))
    uneven = {tuple(pin.is_uneven(mesh) for pin in pins) for mesh in meshes}
    return meshes if len(uneven) > 1 else []


def _mesh_by_mesh(
    graphs: Sequence[SharedGraph], cluster: Cluster, options: PlanOptions, source: str, meshes: Sequence[DeviceMesh]
) -> SharedLayout:
    """The best of the layouts that are searched for on each of the meshes alone.

    Raises:
        PinError, MemoryBudgetError, SolverError: if none has any: of a graph alone, or of the first mesh that can keep the pins.
    """
    found: list[SharedLayout] = []
    refused: list[AlpaLiteError] = []
    bounds: list[float] = []
    for mesh in meshes:
        search = _Search([g.on_mesh(mesh) for g in graphs], cluster, options, source)
        try:
            found.append(search.run())
            bounds.append(found[-1].lower_bound)
        except (MemoryBudgetError, PinError, SolverError) as error:
            refused.append(error)
            bounds.append(search.refused_bound(error))
    if not found:
        for graph in graphs:
            graph.plan_own(cluster)  # raises what one is refused for on all meshes
        raise next(
            (error for error in refused if not isinstance(error, UnevenPinError)), _not_shared(graphs, cluster, source)
        )
    for graph in graphs:
        with suppress(MemoryBudgetError, PinError, SolverError):  # the layouts say what it costs
            graph.plan_own(cluster)
    best = min(found, key=lambda layout: layout.objective)
    own = {g.name: min(g.cost_alone, *(layout.own[g.name] for layout in found)) for g in graphs}
    return replace(best, own=own, lower_bound=min(*bounds, best.objective))


@dataclass(eq=False, slots=True)
class _Search:
    """The layout with the smallest weighted sum, over meshes and over what was proposed for each."""

    graphs: list[SharedGraph]
    cluster: Cluster
    options: PlanOptions
    source: str
    total: float = math.inf
    plans: list[Plan] = field(default_factory=list)
    refused: tuple[SharedGraph, DeviceMesh, tuple[ShardingSpec, ...]] | None = None  # the last layout, by whom
    fits: dict[tuple[DeviceMesh, tuple[ShardingSpec, ...]], bool] = field(default_factory=dict)  # of what was tried
    tight: set[DeviceMesh] = field(default_factory=set)  # where the budget refused a layout, or made one dearer
    lower: float | None = None  # what no layout costs less than, once that is known

    def run(self) -> SharedLayout:
        for graph in self.graphs:
            self.tell(f"the graph {graph.name!r} alone")
            graph.plan_own(self.cluster)
        first, *others = sorted(self.graphs, key=self.importance)
        self.offer_own(first)
        meshes = [c.mesh for c in self.graphs[0].optimum.mesh_table]
        bounds = {mesh: self.weighted([g.bound(mesh) for g in self.graphs]) for mesh in meshes}
        for mesh in sorted(meshes, key=lambda mesh: (bounds[mesh], meshes.index(mesh))):
            if bounds[mesh] < self.total:
                bounds[mesh] = max(bounds[mesh], self.joint(mesh))
        self.lower = lower = min(bounds.values())
        for graph in others:
            if lower < (1 - _CLOSE) * self.total:
                self.offer_own(graph)
        if not self.plans:
            raise self.no_layout()
        return SharedLayout(
            plans={g.name: plan for g, plan in zip(self.graphs, self.plans, strict=True)},
            weights={g.name: g.weight for g in self.graphs},
            own={g.name: g.cost_alone for g in self.graphs},
            lower_bound=min(lower, self.total),
            shared={g.name: g.shared for g in self.graphs},
        )

    def refused_bound(self, error: AlpaLiteError) -> float:
        """What no layout costs less than, where ``run`` raised this error: of a graph alone, or after all was tried."""
        if self.lower is not None:
            return self.lower
        proven = not isinstance(error, SolverError) and getattr(error, "proven", True)
        return math.inf if proven else 0.0

    def tell(self, what: str) -> None:
        """What comes next, for people who watch; plans of single graphs tell more of themselves, on any terminal."""
        if self.options.verbose:
            with told(True) as progress:
                assert progress is not None
                progress(f"planning {what}")

    def offer_own(self, graph: SharedGraph) -> None:
        """The layout of a graph's own optimum."""
        self.offer(graph.optimum.mesh, graph.own_layout())

    def weighted(self, costs: Sequence[float]) -> float:
        return math.fsum(g.weight * cost for g, cost in zip(self.graphs, costs, strict=True))

    def importance(self, graph: SharedGraph) -> float:
        """Sorts graphs that count most first."""
        return -graph.weight * graph.optimum.objective

    def joint(self, mesh: DeviceMesh) -> float:
        """Tries what the joint problem proposes on a mesh; what no layout there costs less than."""
        self.tell(f"one layout of all {len(self.graphs)} graphs on mesh {mesh}")
        # In another layout a graph that recomputes layers alone need not.
        kept = [False, True] if any(g.kept is not None for g in self.graphs) else [False]
        return min(self.proposed(mesh, self.solved(mesh, kept=each)) for each in kept)

    def proposed(self, mesh: DeviceMesh, answer: JointAnswer) -> float:
        """Tries a proposal and, where the budget binds, others; what no layout costs less than, by the answer."""
        if answer.specs:
            # A search that ended early may propose what is dearer by its own prices than what was found.
            dearer = answer.objective > self.total and not any(g.recomputes for g in self.graphs)
            fits = dearer or self.offer(mesh, answer.specs)
            if mesh in self.tight:
                if not fits:
                    self.below(mesh)
                self.next_best(mesh, answer)
        if answer.status != "infeasible":
            return answer.lower_bound
        # The joint problem and plans in a layout follow the same rules. Should they ever not, a plan is the proof.
        return -math.inf if any(fits and known == mesh for (known, _), fits in self.fits.items()) else math.inf

    def solved(
        self, mesh: DeviceMesh, limit: int | None = None, region: Region = EVERYWHERE, *, kept: bool = False
    ) -> JointAnswer:
        """The joint problem's answer; ``limit`` and ``region`` as of ``solve_jointly``; ``kept``: nothing is recomputed."""
        tasks = [task for g in self.graphs if (task := (kept and g.kept) or g.task) is not None]
        weights, leaves = [g.weight for g in self.graphs], [g.leaves for g in self.graphs]
        cutoff = (1 - _CLOSE) * self.total
        return solve_jointly(
            tasks, weights, leaves, self.cluster, mesh, limit, region=region, cutoff=cutoff, large_gap=_CLOSE
        )

    def below(self, mesh: DeviceMesh) -> None:
        """Tries layouts that need less memory, until one fits."""
        self.tell("layouts that need less memory")
        budget = budget_bytes(self.cluster, self.options)
        for share in _LIMITS if math.isfinite(budget) else ():
            answer = self.solved(mesh, int(share * budget))
            if not answer.specs or self.offer(mesh, answer.specs):
                break

    def next_best(self, mesh: DeviceMesh, best: JointAnswer) -> None:
        """Tries the layouts after the best by the joint problem, which knows nothing of the budget, as far as they can win."""
        self.tell("the next best layouts, as the memory budget makes the best one dearer or refuses it")
        parts = [(best.lower_bound, 0, EVERYWHERE, best.specs)]
        tries = 0
        for _ in range(_TRIES):
            if not parts or not parts[0][0] < (1 - _NEAR) * self.total:
                break
            _, _, region, specs = heapq.heappop(parts)
            self.offer(mesh, specs)
            for part in islice(region.without(specs), _TRIES - tries):
                answer = self.solved(mesh, region=part)
                tries += 1
                if answer.specs:
                    heapq.heappush(parts, (answer.lower_bound, tries, part, answer.specs))

    def offer(self, mesh: DeviceMesh, specs: tuple[ShardingSpec, ...]) -> bool:
        """Plans all graphs in a layout, unless it cannot win; whether all fit the budget, as far as that was looked at."""
        if (mesh, specs) not in self.fits:
            self.fits[mesh, specs] = self.planned(mesh, specs)
        return self.fits[mesh, specs]

    def planned(self, mesh: DeviceMesh, specs: tuple[ShardingSpec, ...]) -> bool:
        costs = [g.bound(mesh) for g in self.graphs]
        plans: dict[int, Plan] = {}
        # What counts most comes first: mostly it shows that the layout cannot win.
        for number in sorted(range(len(costs)), key=lambda i: self.importance(self.graphs[i])):
            if not self.weighted(costs) < self.total:
                return True
            try:
                plans[number] = self.graphs[number].planned(self.cluster, mesh, specs)
            except (MemoryBudgetError, PinError, SolverError) as error:
                self.refused = self.graphs[number], mesh, specs
                if not isinstance(error, SolverError):
                    self.tight.add(mesh)
                return False
            if SharedGraph.is_limited(plans[number]):
                self.tight.add(mesh)
            costs[number] = plans[number].objective
        if self.weighted(costs) < self.total:
            self.total, self.plans = self.weighted(costs), [plans[number] for number in range(len(costs))]
        return True

    def no_layout(self) -> AlpaLiteError:
        """Why no graphs have plans: a budget, a clash of several graphs' pins, or what a layout was refused for."""
        for graph in self.graphs:
            if graph.refused is not None:
                return graph.refused
        tasks = {g.name: g.task for g in self.graphs if g.task is not None}
        leaves = [g.leaves for g in self.graphs]
        for candidate in self.graphs[0].optimum.mesh_table:
            with suppress(PinError):  # pins that this mesh cannot hold
                if clash := explain_sharing(tasks, leaves, self.cluster, candidate.mesh, PINNED_ELSEWHERE):
                    return clash
                break
        if self.refused is not None:
            graph, mesh, specs = self.refused
            if error := graph.why(self.cluster, mesh, specs):
                return error
        return _not_shared(self.graphs, self.cluster, self.source)


def _not_shared(graphs: Sequence[SharedGraph], cluster: Cluster, source: str) -> PinError:
    names = ", ".join(repr(g.name) for g in graphs)
    return PinError(
        f"no mesh of {cluster} has a layout that all of {names} can share. Pins and options must leave one. At {source}. Take "
        "pins away, or fix PlanOptions.mesh_shape."
    )
