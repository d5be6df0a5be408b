"""``plan_shared`` with stages: the same layers, stages and submeshes for all graphs, and one layout of what they share on each.

1. Every graph is planned alone, with a cut, and where they are searched submeshes, of its own: its own optimum.
2. The graph that counts most is cut into layers; the others are cut so that each layer reads the same shared leaves. What
   ``al.pin_stage`` says of a layer in one graph, it says in all.
3. Layers are joined to stages, on submeshes that are given or searched, by what they cost all graphs together
   (``planner/joint_stages.py``).
4. Stage by stage, the joint problem of all graphs gives mesh and layout of the shared leaves.
5. Every graph is planned as a pipeline with these meshes and layouts fixed. Unless the bound says that nothing is better, so are,
   as far as they can win, the layouts of each graph's own plan for these stages.
6. Where the plan of a graph alone has the shared leaves on other stages, all graphs are planned with that plan's stages and
   layouts, and if this is cheaper, 4 and 5 follow there: sharing never costs more than with a graph's own plan as pins, where
   that can be followed (a row of a cache that is made with another layer than reads it, cannot).
7. Every graph is planned as one that follows the layout, which cuts it where that costs least between the same leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

from alpa_lite.api.asked import check_stage_count
from alpa_lite.api.followers import LeafHomes, check_stages
from alpa_lite.api.shared_graph import SharedGraph, named
from alpa_lite.api.shared_graphs import PINNED_ELSEWHERE
from alpa_lite.api.shared_layers import (
    LayeredGraph,
    Places,
    check_given_stages,
    cuts_by_layers,
    every_cut,
    has_layers,
    leaf_path,
    leaves_read,
    other_rows,
    places_of,
    planned_as_following,
)
from alpa_lite.api.shared_layout import SharedLayout
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, LayerError, MemoryBudgetError, PinError, layers_asked_at
from alpa_lite.interop import admissible_submeshes
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.explain import explain_sharing
from alpa_lite.planner.joint_stages import (
    GraphStages,
    LeafKey,
    StageLayout,
    best_cut,
    layer_bytes,
    layer_prices,
    stage_layout,
    stage_tasks,
)
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.pinned_stages import check_stage_pins
from alpa_lite.planner.plan_step import budget_bytes, mesh_candidates
from alpa_lite.planner.stage_cut import StageCut, given_mesh_shapes, given_submeshes
from alpa_lite.planner.stage_layers import layer_cuts, searched_layers
from alpa_lite.trace.auto_layers import LayerCuts
from alpa_lite.units import format_bytes

_CLOSE = 1e-3  # of the sum: nothing so much better is looked for where the bound says that there is nothing
_LIMITS = (1.25, 1.0, 0.85, 0.7)  # of the budget, by the solver's own count


def plan_shared_stages(
    graphs: Sequence[SharedGraph], cluster: Cluster, options: PlanOptions, source: str
) -> SharedLayout:
    """The layout of several graphs on stages; arguments as of ``plan_shared``, checked, requests with the stages asked for."""
    if options.submeshes == "auto":
        check_stage_count(options, cluster, source)
    with layers_asked_at(source):
        return _StagedSearch(graphs, cluster, options, source).run()


class _StagedSearch:
    """``places``: where the shared leaves lie, where that is given; it goes before what is followed."""

    def __init__(
        self,
        graphs: Sequence[SharedGraph],
        cluster: Cluster,
        options: PlanOptions,
        source: str,
        places: Places | None = None,
    ) -> None:
        self.graphs, self.cluster, self.options, self.source = graphs, cluster, options, source
        self.given = places
        self.followed: dict[str, LeafHomes] = {}
        self.total, self.plans = math.inf, list[Plan]()
        self.refused: AlpaLiteError | None = None

    def run(self) -> SharedLayout:
        # What has no layers, as it copies slots of a cache, has no plan alone: it works where the leaves lie.
        for graph in list(filter(has_layers, self.graphs)) or self.graphs:
            graph.own = self.own_or_unlimited(graph)
        try:
            lower = self.search()
        except MemoryBudgetError:
            for graph in self.graphs:
                if graph.refused is not None:  # which says more
                    raise graph.refused from None
            raise
        for graph, other in self.own_cuts():
            with suppress(LayerError, MemoryBudgetError, PinError):  # not all graphs can be cut so
                other.total = self.total
                bound = other.search(graph)
                if other.plans:
                    lower, self.total, self.plans, self.layered = bound, other.total, other.plans, other.layered
        for graph, plan in zip(self.graphs, self.plans, strict=True):
            with named(f"the graph {graph.name!r}"):
                check_stages(plan, self.homes(graph).stages, self.source)
        found = self.found(lower)
        if all(graph.request.follow is None for graph in self.graphs):
            self.plans = [planned_as_following(found, graph, self.cluster) for graph in self.graphs]
            self.total = self.weighted([plan.objective for plan in self.plans])
            found = self.found(lower)
        return found

    def found(self, lower: float) -> SharedLayout:
        """What the plans are."""
        costs = [plan.objective for plan in self.plans]
        order = sorted(self.layered[0].paths, key=lambda key: (key[0], key[1] or (0, 0)))
        return SharedLayout(
            plans={g.name: plan for g, plan in zip(self.graphs, self.plans, strict=True)},
            weights={g.name: g.weight for g in self.graphs},
            own={
                g.name: cost if g.refused or g.own is None else min(g.own.objective, cost)
                for g, cost in zip(self.graphs, costs, strict=True)
            },
            lower_bound=min(lower, self.total),
            shared={g.graph.name: tuple(g.paths[key] for key in order) for g in self.layered},
        )

    def own_or_unlimited(self, graph: SharedGraph) -> Plan:
        """The plan of a graph alone; without the budget where none is found within it, and none is ruled out."""
        try:
            with named(f"the graph {graph.name!r}"):
                return self.own(graph)
        except MemoryBudgetError as error:
            if error.proven:
                raise
            self.refused = graph.refused = error
            free = replace(graph.request, options=replace(graph.request.options, memory_budget_bytes=math.inf))
            options = replace(self.options, memory_budget_bytes=math.inf)
            unlimited = replace(graph, request=free)
            return _StagedSearch([unlimited], self.cluster, options, self.source).own(unlimited)

    def own(self, graph: SharedGraph) -> Plan:
        """The plan of a graph alone."""
        if self.options.submeshes != "auto":
            return graph.request.plan(graph.args, {}, self.cluster)[1]
        alone = _StagedSearch([graph], self.cluster, self.options, self.source)
        alone.search()
        return alone.plans[0]

    def importance(self, graph: SharedGraph) -> float:
        """How much of the sum a graph is; of one planned alone nothing is known. One without a plan alone leads no other."""
        if len(self.graphs) == 1:
            return graph.weight
        return 0.0 if graph.own is None else graph.weight * graph.own.objective

    def own_cuts(self) -> Iterator[tuple[SharedGraph, _StagedSearch]]:
        """Graphs whose own plans have or read the shared leaves on other stages, what counts most first, and searches so."""
        if any(g.request.follow is not None for g in self.graphs):
            return
        seen = [places_of(list(zip(self.graphs, self.plans, strict=True)))]
        for graph in sorted(self.graphs, key=self.importance, reverse=True):
            found = seen[0] if graph.own is None else places_of([(graph, graph.own)])
            if found not in seen:
                seen.append(found)
                options = self.options
                if options.submeshes == "auto":
                    options = replace(options, submeshes=found[-1])
                yield graph, _StagedSearch(self.graphs, self.cluster, options, self.source, found)

    def homes(self, graph: SharedGraph) -> LeafHomes:
        """Where leaves of a graph must lie."""
        if self.given is not None:
            homes, elsewhere, _ = self.given
            stages = {leaf_path(graph, key): stage for key, stage in homes.items()}
            readers = {leaf_path(graph, key): stage for key, stage in homes.items() if key not in elsewhere}
            return LeafHomes(stages=stages, readers=readers)
        if graph.name not in self.followed:  # it is traced for that
            self.followed[graph.name] = graph.request.homes(graph.args, {})
        return self.followed[graph.name]

    def search(self, own: SharedGraph | None = None) -> float:
        """Finds the plans; returns what no layout of their stages costs less than.

        With ``own`` that graph's own layout is planned first; unless it is cheaper than what is known, there are no plans.
        """
        self.layered = self.layers()
        self.owner = self.owners()
        cut = self.cut()
        self.steps = [g.staged(cut.stage_of_layer, self.owner, self.homes(g.graph).stages) for g in self.layered]
        if own is not None:
            layered = self.layered[self.graphs.index(own)]
            self.offer(cut, layered.layout_of(own.best()), [0.0] * len(self.graphs))
            if not self.plans:
                return -math.inf
        stages = [graph.stages(step) for graph, step in zip(self.layered, self.steps, strict=True)]
        lower = self.joint(stages, cut)
        if lower + self.sent() < (1 - _CLOSE) * self.total:
            self.own_layouts(cut)
        if not self.plans:
            raise self.no_layout(stages, cut)
        return lower + self.sent()

    # -- the cut -------------------------------------------------------------------------------------------------------

    def layers(self) -> list[LayeredGraph]:
        """The graphs in layers that read the same shared leaves, in their order, such that the pins of all can hold.

        Layers are those of the graph that counts most. That may leave no way: another graph does not read a layer's leaves, or
        pins a part of a layer to a stage. Then they are as small as leaves that all graphs read allow, or those of another graph;
        graphs with boundaries are asked for no others.

        Raises:
            LayerError: they cannot be cut so.
        """
        assert self.options.stage_count is not None
        order = sorted(self.graphs, key=lambda graph: -self.importance(graph))
        few = searched_layers(self.cluster, self.options.stage_count, self.source)
        every = set(range(len(order[0].leaves)))
        try:
            return self.cut_as(order[0], few, every)
        except LayerError as error:
            refused = error
        if any(self.homes(graph).sometimes for graph in self.graphs):
            self.followed = {graph.name: self.homes(graph).loosened() for graph in self.graphs}
            return self.layers()
        read = set.intersection(*map(leaves_read, self.graphs))
        for cuts, leaves in ((every_cut, read), (few, every)):
            for lead in order:
                with suppress(LayerError):
                    return self.cut_as(lead, cuts, leaves, bounded=False)
        raise refused

    def cut_as(
        self, lead: SharedGraph, cuts: LayerCuts, leaves: Set[int], *, bounded: bool = True
    ) -> list[LayeredGraph]:
        """The graphs, cut as one of them.

        Args:
            lead: that graph.
            cuts: where it is cut, if neither its boundaries, ``stage_layers``, nor followed parameters say that.
            leaves: the shared leaves that tell layers apart.
            bounded: whether it may have boundaries.

        Raises:
            LayerError: they cannot be cut so, or not so that all pins hold.
        """
        count, given = self.options.stage_count, self.options.stage_layers
        assert count is not None
        known = self.homes(lead).readers  # where parameters lie, if they are followed
        if given is not None:
            cuts = layer_cuts(sum(given), given)
        elif known:
            cuts = layer_cuts(count)
        rows = self.homes(lead).cuts if given is None else {}
        first = LayeredGraph.of(lead, cuts, rows)
        if not (bounded or first.starts):
            raise LayerError(f"the graph {lead.name!r} has boundaries of its own.")
        homes = first.told_apart(leaves, self.homes(lead).elsewhere)
        # A layer that no leaf tells apart is joined with the one before it, but there are never fewer layers than stages.
        kept = sorted({*first.beginning(homes), *homes.values()})
        if first.starts and count <= len(kept) < first.layered.num_layers and given is None and not known:
            starts = [first.starts[layer - 1] for layer in kept[1:]]
            first = LayeredGraph.of(lead, lambda *given, **settings: starts, rows)
            homes = first.told_apart(leaves, self.homes(lead).elsewhere)
        number = first.layered.num_layers
        if number < count:
            raise LayerError(
                f"num_stages={count} was given, and the graph {lead.name!r} has {number} layers. A stage has at least one. At "
                f"{self.source}. Ask for fewer stages, or mark more layers with al.layer_boundary."
            )
        found = []
        for graph in self.graphs:
            if graph is lead:
                found.append(first)
                continue
            here = {leaf_path(graph, key): layer for key, layer in homes.items()}
            same = layer_cuts(number) if number == count else cuts_by_layers(number)  # is layer k stage k?
            with named(f"the graph {graph.name!r}, cut as {lead.name!r} with its {number} layers as stages"):
                own = LayeredGraph.of(graph, same, here).filled_up_to(number)
                if own.layered.num_layers != number:
                    raise LayerError(
                        f"it has {own.layered.num_layers} layers and {lead.name!r} has {number}. Graphs on one set of stages "
                        f"have the same layers. At {self.source}. Mark them alike with al.layer_boundary, or in none of them."
                    )
                if own.paths.keys() != first.paths.keys():
                    raise LayerError(other_rows(first, own, self.source))
                check_stage_pins([pin for pin in own.stage_pins(here) if pin.leaf], number, number)
            found.append(own)
        self.pinned(found)
        return found

    def owners(self) -> dict[LeafKey, int]:
        """The layer with which each shared leaf lies: the first that reads it, in the graph that counts most of those that do."""
        found: dict[LeafKey, int] = {}
        for graph in sorted(self.layered, key=lambda layered: -self.importance(layered.graph)):
            for key, layers in graph.readers().items():
                if layers:
                    found.setdefault(key, layers[0])
        return {key: found.get(key, 0) for key in self.layered[0].paths}

    def cut(self) -> StageCut:
        """Layers to stages on submeshes.

        Raises:
            PinError, MemoryBudgetError: no cut keeps the pins, or the budget.
        """
        options, cluster = self.options, self.cluster
        count, number = options.stage_count, self.layered[0].layered.num_layers
        assert count is not None
        on: list[int] | None = None  # per stage the number of its submesh
        if options.submeshes == "auto":
            every = admissible_submeshes(cluster.num_hosts, cluster.devices_per_host)
            choices: list[tuple[tuple[int, int], tuple[int, ...] | None]] = [(submesh, None) for submesh in every]
        else:
            submeshes = given_submeshes(options, cluster, self.source)
            stages = list(zip(submeshes, given_mesh_shapes(options, submeshes, self.source), strict=True))
            choices = list(dict.fromkeys(stages))
            on = [choices.index(stage) for stage in stages]

        def made(stage_of_layer: Sequence[int], on: Sequence[int]) -> StageCut:
            submeshes, shapes = zip(*(choices[i] for i in on), strict=True)
            return StageCut(stage_of_layer=tuple(stage_of_layer), submeshes=submeshes, mesh_shapes=shapes)

        pinned = self.pinned(self.layered)
        if on is not None and options.stage_layers is not None:
            return made([s for s, n in enumerate(options.stage_layers) for _ in range(n)], on)
        if on is not None and number == count:
            return made(range(number), on)
        single = [graph.stages(graph.staged(range(number), self.owner)) for graph in self.layered]
        clusters = [replace(cluster, num_hosts=hosts, devices_per_host=devices) for (hosts, devices), _ in choices]
        prices = layer_prices(single, clusters, [shape for _, shape in choices])
        sizes = [part.num_devices for part in clusters]
        settings: Any = {"num_stages": count, "submeshes": on}
        budget, holds = budget_bytes(cluster, options), layer_bytes(single)
        found = best_cut(prices, sizes, cluster.num_devices, pinned, **settings, holds=holds, budget=budget)
        if found is not None:
            return made(*found)
        what = f"no cut of {number} layers into {count} stages of {cluster}"
        if best_cut(prices, sizes, cluster.num_devices, pinned, **settings) is not None:
            raise MemoryBudgetError(
                f"{what} has room for the shared leaves of each stage within {format_bytes(budget)} per device. At "
                f"{self.source}. Raise memory_budget_bytes, take more devices, or fewer stages."
            )
        most = max(range(len(sizes)), key=sizes.__getitem__)
        raise self.clash(single, [clusters[most]] * number, [choices[most][1]] * number) or PinError(
            f"{what} keeps the pins of all graphs. At {self.source}. Take pins away, or give other submeshes or another number "
            "of stages."
        )

    def pinned(self, layered: Sequence[LayeredGraph]) -> dict[int, int]:
        """Layers that ``al.pin_stage``, or parameters that are followed, put on stages, in any of the graphs.

        Raises:
            LayerError: no cut, or not the one that ``stage_layers`` asks for, keeps the pins of a graph, or of two together. As
                each clash is of two pins, these suffice.
        """
        count, number = self.options.stage_count, layered[0].layered.num_layers
        assert count is not None
        pins = {graph.graph.name: graph.stage_pins(self.homes(graph.graph).readers) for graph in layered}
        for name, own in pins.items():
            with named(f"the graph {name!r}"):
                check_stage_pins(own, number, count)
                check_given_stages(self.options.stage_layers, own, self.source)
        for (name, own), (other, others) in combinations(pins.items(), 2):
            with named(f"the graphs {name!r} and {other!r}, which have the same layers"):
                check_stage_pins([*own, *others], number, count)
        return {pin.place: pin.stage for own in pins.values() for pin in own}

    # -- layouts -------------------------------------------------------------------------------------------------------

    def joint(self, stages: Sequence[GraphStages], cut: StageCut) -> float:
        """Plans what the joint problems propose; returns what no layout of these stages costs less than, but for what is sent."""
        budget, lower = budget_bytes(self.cluster, self.options), -math.inf
        for limit in (None, *(int(share * budget) for share in _LIMITS if math.isfinite(budget))):
            layout = []
            for stage in range(cut.num_stages):
                submesh = cut.cluster_of(stage, self.cluster)
                layout.append(stage_layout(stages, stage, submesh, cut.mesh_shapes[stage], limit))
            if limit is None:
                lower = math.fsum(found.lower_bound for found in layout if found)
            known = [found for found in layout if found is not None]
            if len(known) < len(layout):
                break
            if self.offer(cut, known):
                break
        return lower

    def no_layout(self, stages: Sequence[GraphStages], cut: StageCut) -> AlpaLiteError:
        """Why no graphs have plans: a clash of several graphs' pins on a stage, or what a layout was refused for."""
        refused = self.refused or PinError(
            f"no layout of the shared leaves keeps all pins on these stages. At {self.source}. Take pins away."
        )
        if not isinstance(refused, PinError):
            return refused
        parts = [cut.cluster_of(stage, self.cluster) for stage in range(cut.num_stages)]
        return self.clash(stages, parts, cut.mesh_shapes) or refused

    def clash(
        self, stages: Sequence[GraphStages], parts: Sequence[Cluster], shapes: Sequence[tuple[int, ...] | None]
    ) -> AlpaLiteError | None:
        """Which pins cannot hold together on one of the stages, on these submeshes and meshes."""
        for stage, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
            _, positions, tasks = stage_tasks(stages, stage, part, shape)
            of_graphs = {graph.name: task for graph, task in zip(self.graphs, tasks, strict=True)}
            mesh = next(mesh_candidates(part, tasks[0].pins, tasks[0].options))
            if found := explain_sharing(of_graphs, positions, part, mesh, PINNED_ELSEWHERE):
                return found
        return None

    def sent(self) -> float:
        """What is sent between stages, weighted: one works after the other, and it has its size in any layout."""
        costs = [plan.objective - math.fsum(stage.forward_s for stage in plan.stages) for plan in self.plans]
        return self.weighted(costs) if costs else 0.0

    def own_layouts(self, cut: StageCut) -> None:
        """Offers how each graph alone would have the shared leaves on these stages."""
        alone: list[Plan | None] = []
        for graph, step in zip(self.layered, self.steps, strict=True):
            try:
                alone.append(graph.plan(step, cut, self.cluster))
            except (MemoryBudgetError, PinError) as error:  # in a layout that is fixed the search may find one
                self.refused = self.refused or error
                alone.append(None)
        least = [-math.inf if plan is None else plan.lower_bound for plan in alone]
        for graph, plan in zip(self.layered, alone, strict=True):
            if plan is not None:
                self.offer(cut, graph.layout_of(plan), least)

    def offer(self, cut: StageCut, layout: Sequence[StageLayout], least: Sequence[float] = ()) -> bool:
        """Plans all graphs in a layout, unless it cannot win; whether all have plans, as far as that was looked at.

        ``least``: what the graphs cost at least on these stages.
        """
        costs = list(least or [-math.inf] * len(self.graphs))
        plans: dict[int, Plan] = {}
        fixed = list(layout)
        for number in sorted(range(len(costs)), key=lambda i: -self.importance(self.graphs[i])):
            if not self.weighted(costs) < self.total:
                return True
            try:
                plans[number] = self.layered[number].plan(self.steps[number], cut, self.cluster, fixed)
            except (MemoryBudgetError, PinError) as error:
                self.refused = error
                return False
            # Of what the layout does not have, as rows that its graph has in one, the first graph says how it lies.
            made = self.layered[number].layout_of(plans[number])
            fixed = [replace(one, specs={**other.specs, **one.specs}) for one, other in zip(fixed, made, strict=True)]
            costs[number] = plans[number].objective
        if self.weighted(costs) < self.total:
            self.total, self.plans = self.weighted(costs), [plans[number] for number in range(len(costs))]
        return True

    def weighted(self, costs: Sequence[float]) -> float:
        return math.fsum(g.weight * cost for g, cost in zip(self.graphs, costs, strict=True))
