"""``plan_shared`` with stages: the same layers, stages and submeshes for all graphs, and one layout of what they share on each.

1. Every graph is planned alone, with a cut, and where they are searched submeshes, of its own: its own optimum.
2. The graph that counts most is cut into layers; the others are cut so that each layer reads the same shared leaves.
3. Layers are joined to stages, on submeshes that are given or searched, by what they cost all graphs together
   (``planner/joint_stages.py``).
4. Stage by stage, the joint problem of all graphs gives mesh and layout of the shared leaves.
5. Every graph is planned as a pipeline with these meshes and layouts fixed. Unless the bound says that nothing is better, so are,
   as far as they can win, the layouts of each graph's own plan for these stages.
6. Where the plan of a graph alone has the shared leaves on other stages, all graphs are planned with that plan's stages and
   layouts, and if this is cheaper, 4 and 5 follow there: sharing never costs more than with any graph's own plan as pins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from alpa_lite.api.asked import check_stage_count
from alpa_lite.api.bound import LAYER_STARTS
from alpa_lite.api.request import VERSIONS
from alpa_lite.api.shared_graphs import SharedGraph, named
from alpa_lite.api.shared_layout import SharedLayout
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, LayerError, MemoryBudgetError, PinError
from alpa_lite.interop import admissible_submeshes
from alpa_lite.intraop.strategies import KnownStrategies
from alpa_lite.plan.leaf_rows import rows_path, split_path
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.joint_stages import (
    GraphStages,
    LeafKey,
    StageLayout,
    best_cut,
    layer_bytes,
    layer_prices,
    stage_layout,
)
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.pinned_stages import check_stage_pins
from alpa_lite.planner.pipeline import plan_pipeline
from alpa_lite.planner.plan_step import budget_bytes
from alpa_lite.planner.stage_cut import StageCut, given_mesh_shapes, given_submeshes
from alpa_lite.planner.stage_layers import layer_cuts, searched_layers
from alpa_lite.trace.auto_layers import LayerCuts
from alpa_lite.trace.layers import Layered
from alpa_lite.trace.program import Traced
from alpa_lite.trace.staged import StagedStep, layers_of, layers_reading, staged_step
from alpa_lite.units import format_bytes

_ORIGIN = "the shared layout"
_CLOSE = 1e-3  # of the sum: nothing so much better is looked for where the bound says that there is nothing
_LIMITS = (1.25, 1.0, 0.85, 0.7)  # of the budget, by the solver's own count


@dataclass(eq=False, slots=True)
class _LayeredGraph:
    """A graph and its layers.

    Attributes:
        graph: as it was given; its request asks for the stages.
        starts: the ops that start layers; () where the function has boundaries.
        traced, pins, notes, layered: the step as a function of parts of leaves.
        keys: position of a shared leaf, or part of one, among its arguments -> its key.
        strategies: of its ops, found so far.
    """

    graph: SharedGraph
    starts: tuple[int, ...]
    traced: Traced
    pins: ResolvedPins
    notes: tuple[str, ...]
    layered: Layered
    keys: dict[int, LeafKey]
    strategies: KnownStrategies = field(default_factory=KnownStrategies)

    @classmethod
    def of(cls, graph: SharedGraph, layers: LayerCuts, homes: Mapping[str, int]) -> _LayeredGraph:
        starts: list[int] = []
        traced, pins, notes = graph.request.layered(graph.args, {}, layers, homes, starts)
        assert traced.layered is not None
        keys = _leaf_keys(graph, traced.program.input_paths)
        layered = layers_of(traced.layered)
        return cls(graph, tuple(starts), traced, pins, notes, layered, keys)

    @property
    def paths(self) -> dict[LeafKey, str]:
        return {key: self.traced.program.input_paths[i] for i, key in self.keys.items()}

    def readers(self) -> dict[LeafKey, tuple[int, ...]]:
        """The layers that read each shared leaf."""
        assert self.traced.layered is not None
        found = layers_reading(self.traced.layered, self.layered)
        return {key: found[i] for i, key in self.keys.items()}

    def staged(self, stage_of_layer: Sequence[int], owner: Mapping[LeafKey, int]) -> StagedStep:
        """Cut into stages; ``owner``: layer with which each shared leaf lies."""
        assert self.traced.layered is not None
        owners = {i: stage_of_layer[owner[key]] for i, key in self.keys.items() if key in owner}
        rules = self.graph.request.options.rules
        known = self.traced.known
        return staged_step(
            self.traced.program, self.traced.layered, self.layered, stage_of_layer, rules, known=known, owners=owners
        )

    def stages(self, step: StagedStep) -> GraphStages:
        options = replace(self.graph.request.options, submeshes=None, stage_mesh_shapes=None)
        return GraphStages(
            step=step,
            pins=self.pins,
            options=options,
            weight=self.graph.weight,
            leaves=self.keys,
            strategies=self.strategies,
        )

    def layout_of(self, plan: Plan) -> list[StageLayout]:
        """How a plan of this graph has the shared leaves on each of its stages."""
        keys = _leaf_keys(self.graph, [leaf.path for leaf in plan.inputs])
        made = []
        for number, stage in enumerate(plan.stages):
            specs = {key: plan.inputs[i].spec for i, key in keys.items() if plan.inputs[i].stage == number}
            made.append(StageLayout(mesh=stage.mesh, specs=specs, objective=math.nan, lower_bound=-math.inf))
        return made

    def plan(self, step: StagedStep, cut: StageCut, cluster: Cluster, layout: Sequence[StageLayout] = ()) -> Plan:
        """As a pipeline, the shared leaves where the layout has them."""
        specs = {key: spec for stage in layout for key, spec in stage.specs.items()}
        fixed = {i: (specs[key].dims, _ORIGIN) for i, key in self.keys.items() if key in specs and specs[key].rank}
        if layout:
            cut = replace(cut, mesh_shapes=tuple(stage.mesh.shape for stage in layout))
        request = self.graph.request
        options = request.options
        if options.submeshes == "auto":
            options = replace(options, submeshes=cut.submeshes)
        if layout:
            options = replace(options, mesh_shape=None, stage_mesh_shapes=cut.mesh_shapes)
        with named(f"the graph {self.graph.name!r} in the stages that it would share"):
            made = plan_pipeline(
                step, cut, cluster, self.pins.with_fixed(fixed), options, VERSIONS, notes=self.notes,
                strategies=self.strategies,
            )  # fmt: skip
        starts = ((LAYER_STARTS, self.starts),) if self.starts else ()
        return request.finished(replace(made, options=(*made.options, *starts)), self.traced)


def plan_shared_stages(
    graphs: Sequence[SharedGraph], cluster: Cluster, options: PlanOptions, source: str
) -> SharedLayout:
    """The layout of several graphs on stages; arguments as of ``plan_shared``, checked, requests with the stages asked for."""
    if options.submeshes == "auto":
        check_stage_count(options, cluster, source)
    return _StagedSearch(graphs, cluster, options, source).run()


class _StagedSearch:
    """``homes``: the stage of each shared leaf, where that is given; it goes before what is followed."""

    def __init__(
        self,
        graphs: Sequence[SharedGraph],
        cluster: Cluster,
        options: PlanOptions,
        source: str,
        homes: Mapping[LeafKey, int] | None = None,
    ) -> None:
        self.graphs, self.cluster, self.options, self.source = graphs, cluster, options, source
        self.given = homes or {}
        self.total, self.plans = math.inf, list[Plan]()
        self.refused: AlpaLiteError | None = None

    def run(self) -> SharedLayout:
        for graph in self.graphs:
            with named(f"the graph {graph.name!r}"):
                graph.own = self.own(graph)
        lower = self.search()
        for graph, other in self.own_cuts():
            with suppress(LayerError, MemoryBudgetError, PinError):  # not all graphs can be cut so
                other.total = self.total
                bound = other.search(graph)
                if other.plans:
                    lower, self.total, self.plans, self.layered = bound, other.total, other.plans, other.layered
        costs = [plan.objective for plan in self.plans]
        order = sorted(self.layered[0].paths, key=lambda key: (key[0], key[1] or (0, 0)))
        return SharedLayout(
            plans={g.name: plan for g, plan in zip(self.graphs, self.plans, strict=True)},
            weights={g.name: g.weight for g in self.graphs},
            own={g.name: min(g.best().objective, cost) for g, cost in zip(self.graphs, costs, strict=True)},
            lower_bound=min(lower, self.total),
            shared={g.graph.name: tuple(g.paths[key] for key in order) for g in self.layered},
        )

    def own(self, graph: SharedGraph) -> Plan:
        """The plan of a graph alone."""
        if self.options.submeshes != "auto":
            return graph.request.plan(graph.args, {}, self.cluster)[1]
        alone = _StagedSearch([graph], self.cluster, self.options, self.source)
        alone.search()
        return alone.plans[0]

    def importance(self, graph: SharedGraph) -> float:
        """How much of the sum a graph is; of one that is planned alone nothing is known."""
        return graph.weight * graph.best().objective if len(self.graphs) > 1 else graph.weight

    def own_cuts(self) -> Iterator[tuple[SharedGraph, _StagedSearch]]:
        """Graphs whose own plans have the shared leaves on other stages, what counts most first, and searches with these."""
        if self.options.stage_layers is not None or any(g.request.follow is not None for g in self.graphs):
            return
        seen = [_stages_of(self.graphs[0], self.plans[0])]
        for graph in sorted(self.graphs, key=self.importance, reverse=True):
            found = _stages_of(graph, graph.best())
            if found not in seen:
                seen.append(found)
                homes, submeshes = found
                options = self.options
                if options.submeshes == "auto":
                    options = replace(options, submeshes=submeshes)
                yield graph, _StagedSearch(self.graphs, self.cluster, options, self.source, homes)

    def homes(self, graph: SharedGraph) -> dict[str, int]:
        """Path of a shared leaf of a graph, or of rows of it, -> the stage on which it must lie."""
        if not self.given:
            return graph.request.homes(graph.args, {})
        return {_leaf_path(graph, key): stage for key, stage in self.given.items()}

    def search(self, own: SharedGraph | None = None) -> float:
        """Finds the plans; returns what no layout of their stages costs less than.

        With ``own`` that graph's own layout is planned first; unless it is cheaper than what is known, there are no plans.
        """
        self.layered = self.layers()
        self.owner = self.owners()
        cut = self.cut()
        self.steps = [graph.staged(cut.stage_of_layer, self.owner) for graph in self.layered]
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
            raise self.refused or PinError(
                f"no layout of the shared leaves keeps all pins on these stages. At {self.source}. Take pins away."
            )
        return lower + self.sent()

    # -- the cut -------------------------------------------------------------------------------------------------------

    def layers(self) -> list[_LayeredGraph]:
        """The graphs in layers that read the same shared leaves, in their order.

        Raises:
            LayerError: they cannot be cut so.
        """
        lead = max(self.graphs, key=lambda g: (self.importance(g), -self.graphs.index(g)))
        count = self.options.stage_count
        assert count is not None
        known = self.homes(lead)  # where parameters lie, if they are followed
        if self.options.stage_layers is not None:
            first = _LayeredGraph.of(lead, layer_cuts(sum(self.options.stage_layers)), {})
        elif known:
            first = _LayeredGraph.of(lead, layer_cuts(count), known)
        else:
            first = _LayeredGraph.of(lead, searched_layers(self.cluster, count, self.source), {})
        homes = _single(first)
        kept = sorted({0, *homes.values()})
        if first.starts and len(kept) < first.layered.num_layers and self.options.stage_layers is None and not known:
            starts = [first.starts[layer - 1] for layer in kept if layer]
            first = _LayeredGraph.of(lead, lambda *given: starts, {})
            homes = _single(first)
        number = first.layered.num_layers
        if number < count:
            raise LayerError(
                f"num_stages={count} was given, and the graph {lead.name!r} has {number} layers with shared leaves of their own. "
                f"A stage has at least one. At {self.source}. Ask for fewer stages, or mark more layers with al.layer_boundary."
            )
        found = []
        for graph in self.graphs:
            if graph is lead:
                found.append(first)
                continue
            here = {_leaf_path(graph, key): layer for key, layer in homes.items()}
            with named(f"the graph {graph.name!r}, cut as {lead.name!r}"):
                own = _LayeredGraph.of(graph, layer_cuts(number), here)
                pins = layers_of(
                    _flat(own), [(here[p], p) if p in here else None for p in own.traced.program.input_paths]
                )
                if own.layered.num_layers != number or set(own.paths) != set(first.paths):
                    raise LayerError(
                        f"it has {own.layered.num_layers} layers and {lead.name!r} has {number}, or shared leaves lie in other "
                        f"rows there. Graphs on one set of stages have the same layers. At {self.source}. Mark them alike with "
                        "al.layer_boundary, or leave all boundaries out."
                    )
                check_stage_pins([pin for pin in pins.pins if pin.leaf], number, number)
            found.append(own)
        return found

    def owners(self) -> dict[LeafKey, int]:
        """The layer with which each shared leaf lies: the first that reads it, in the first graph in which one does."""
        found: dict[LeafKey, int] = {}
        for graph in self.layered:
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

        if on is not None and options.stage_layers is not None:
            return made([s for s, n in enumerate(options.stage_layers) for _ in range(n)], on)
        pinned = self.pinned()
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
        raise PinError(
            f"{what} keeps the pins of all graphs. At {self.source}. Take pins away, or give other submeshes or another number "
            "of stages."
        )

    def pinned(self) -> dict[int, int]:
        """Layers that ``al.pin_stage``, or parameters that are followed, put on stages."""
        found = {}
        for graph in self.layered:
            homes = self.homes(graph.graph)
            paths = graph.traced.program.input_paths
            layered = layers_of(_flat(graph), [(homes[p], p) if p in homes else None for p in paths])
            count = self.options.stage_count
            assert count is not None
            with named(f"the graph {graph.graph.name!r}"):
                check_stage_pins(layered.pins, layered.num_layers, count)
            found |= {pin.place: pin.stage for pin in layered.pins}
        return found

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

    def sent(self) -> float:
        """What is sent between stages, weighted: one works after the other, and it has its size in any layout."""
        costs = [plan.objective - math.fsum(stage.forward_s for stage in plan.stages) for plan in self.plans]
        return self.weighted(costs) if costs else 0.0

    def own_layouts(self, cut: StageCut) -> None:
        """Offers how each graph alone would have the shared leaves on these stages."""
        alone = [g.plan(step, cut, self.cluster) for g, step in zip(self.layered, self.steps, strict=True)]
        for graph, plan in zip(self.layered, alone, strict=True):
            self.offer(cut, graph.layout_of(plan), [p.objective for p in alone])

    def offer(self, cut: StageCut, layout: Sequence[StageLayout], least: Sequence[float] = ()) -> bool:
        """Plans all graphs in a layout, unless it cannot win; whether all have plans, as far as that was looked at.

        ``least``: what the graphs cost at least on these stages.
        """
        costs = list(least or [-math.inf] * len(self.graphs))
        plans: dict[int, Plan] = {}
        for number in sorted(range(len(costs)), key=lambda i: -self.importance(self.graphs[i])):
            if not self.weighted(costs) < self.total:
                return True
            try:
                plans[number] = self.layered[number].plan(self.steps[number], cut, self.cluster, layout)
            except (MemoryBudgetError, PinError) as error:
                self.refused = error
                return False
            costs[number] = plans[number].objective
        if self.weighted(costs) < self.total:
            self.total, self.plans = self.weighted(costs), [plans[number] for number in range(len(costs))]
        return True

    def weighted(self, costs: Sequence[float]) -> float:
        return math.fsum(g.weight * cost for g, cost in zip(self.graphs, costs, strict=True))


def _leaf_keys(graph: SharedGraph, paths: Sequence[str]) -> dict[int, LeafKey]:
    """Position of a shared leaf, or part of one, among arguments with these paths -> its key."""
    number = {graph.paths[leaf]: i for i, leaf in enumerate(graph.leaves)}
    parts = [split_path(path) if path not in number else (path, None) for path in paths]
    return {i: (number[path], rows) for i, (path, rows) in enumerate(parts) if path in number}


def _leaf_path(graph: SharedGraph, key: LeafKey) -> str:
    """The inverse of ``_leaf_keys``."""
    leaf, rows = key
    path = graph.shared[leaf]
    return path if rows is None else rows_path(path, *rows)


def _stages_of(graph: SharedGraph, plan: Plan) -> tuple[dict[LeafKey, int], tuple[tuple[int, int], ...]]:
    """The stage of each shared leaf in a plan of a graph, neighbouring rows on one stage together, and the stages' submeshes."""
    keys = _leaf_keys(graph, [leaf.path for leaf in plan.inputs])
    rows = sorted((key[0], key[1] or (0, 0), key[1] is None, plan.inputs[i].stage) for i, key in keys.items())
    found: list[tuple[LeafKey, int]] = []
    for leaf, (start, stop), whole, stage in rows:
        (last, before), its = found[-1] if found else ((-1, None), -1)
        if not whole and before is not None and (last, before[1], its) == (leaf, start, stage):
            found[-1] = (leaf, (before[0], stop)), stage
        else:
            found.append(((leaf, None if whole else (start, stop)), stage))
    return dict(found), tuple(stage.submesh for stage in plan.stages)


def _flat(graph: _LayeredGraph) -> Any:
    assert graph.traced.layered is not None
    return graph.traced.layered


def _single(graph: _LayeredGraph) -> dict[LeafKey, int]:
    """Of shared leaves that one layer reads, which."""
    return {key: layers[0] for key, layers in graph.readers().items() if len(layers) == 1}
