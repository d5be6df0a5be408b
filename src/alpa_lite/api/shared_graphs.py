"""What ``plan_shared`` is given, checked and brought into one form: traced graphs with their pins, weights and shared leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alpa_lite.api.request import ONE_MESH, Request
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import AlpaLiteError, LayerError, MemoryBudgetError, PinError
from alpa_lite.plan.pins import Dims
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.one_mesh import MeshTask
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import KnownTasks
from alpa_lite.trace.paths import below, is_glob, select
from alpa_lite.trace.program import Rules, Traced

Globs = str | Sequence[str]
Graphs = Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]
Settings = tuple[
    PlanOptions, int | Sequence[int], str | Sequence[str], int | Sequence[int], Any, Mapping[str, str] | None
]
"""Options, what is static or donated, and what is followed, as for ``plan``."""
PINNED_ELSEWHERE = "the pin of another graph"  # origin of pins that a graph has from others


@dataclass(eq=False, slots=True)
class SharedGraph:
    """One graph; ``leaves``: positions of the shared ones among its arguments, ``own`` and ``task`` of its own optimum.

    ``stages``: the options about stages, which ``request`` is without.
    """

    name: str
    request: Request
    args: tuple[Any, ...]
    traced: Traced
    weight: float
    leaves: list[int] = field(default_factory=list)
    tasks: KnownTasks = field(default_factory=KnownTasks)
    own: Plan | None = None
    task: MeshTask | None = None
    stages: dict[str, Any] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        return self.traced.program.input_paths

    @property
    def shared(self) -> tuple[str, ...]:
        return tuple(self.paths[i] for i in self.leaves)

    def best(self) -> Plan:
        assert self.own is not None
        return self.own

    def plan_own(self, cluster: Cluster) -> None:
        """Its plan alone."""
        with named(f"the graph {self.name!r}"):
            traced, self.own = self.request.plan_known(self.traced, self.args, cluster, self.tasks)
        self.task = self.tasks.last(traced.program)

    def bound(self, mesh: DeviceMesh) -> float:
        """What no plan of it on a mesh costs less than; inf where there is none."""
        for candidate in self.best().mesh_table:
            if candidate.mesh == mesh:
                unknown = math.inf if candidate.objective is None else -math.inf
                return unknown if candidate.lower_bound is None else candidate.lower_bound
        return math.inf

    def planned(self, cluster: Cluster, mesh: DeviceMesh, specs: Sequence[ShardingSpec]) -> Plan:
        """Its plan with the shared leaves in a layout."""
        own = self.best()
        dims = {path: spec.dims for path, spec in zip(self.shared, specs, strict=True)}
        if own.mesh == mesh and all(own.inputs[i].spec == spec for i, spec in zip(self.leaves, specs, strict=True)):
            return own
        options = replace(self.request.options, mesh_shape=mesh.shape, axis_names=mesh.axis_names)
        request = replace(self.request, options=options, fixed=(dims, "the shared layout", mesh))
        with named(f"the graph {self.name!r} in the layout that it would share"):
            return request.plan_known(self.traced, self.args, cluster, self.tasks)[1]


class named:
    """Errors about the budget, about pins and about layers say which graph they are about."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, LayerError | MemoryBudgetError | PinError):
            raise type(error)(f"{self.what}: {error}") from error


def given_graphs(
    graphs: Graphs, shared: Any, weights: Any, pins: Any, settings: Settings, cluster: Cluster, source: str
) -> list[SharedGraph]:
    """The graphs, traced; arguments as of ``plan_shared``, ``source`` is the user's line."""
    check_graphs(graphs, source)
    counted = weights_of(graphs, weights, source)
    check_options(settings[0], source)
    own_pins = pins_by_graph(graphs, pins, source)
    found: list[SharedGraph] = []
    rules: Rules = {}  # of ops that graphs have in common, asked for once
    for name, (fn, args) in graphs.items():
        request = Request.of(fn, None, None, *settings).following(cluster)
        stages = {
            word: getattr(request.options, word) for word in ONE_MESH
        }  # what is shared is found in the whole graph
        request = replace(request, options=replace(request.options, **ONE_MESH))
        traced = request.trace(tuple(args), {}, known=rules)
        found.append(SharedGraph(name, request, tuple(args), traced, counted[name], stages=stages))
    take_pins(found, own_pins, source)
    match(found, shared, source)
    share_pins(found, source)
    return found


def check_graphs(graphs: Any, source: str) -> None:
    fits = isinstance(graphs, Mapping) and graphs and all(isinstance(name, str) for name in graphs)
    entries = graphs.items() if fits else [("?", graphs)]
    for name, entry in entries:
        pair = isinstance(entry, tuple | list) and len(entry) == 2
        if not fits or not pair or not callable(entry[0]) or not isinstance(entry[1], tuple | list):
            shown = f"{entry!r:.80} for {name!r}" if fits else f"{graphs!r:.80}"
            raise AlpaLiteError(
                f"al.plan_shared was given {shown}. Graphs are a dict of name -> (function, arguments), at least one. At "
                f'{source}. Write for example {{"prefill": (prefill, (params, tokens)), "decode": (decode, (params, token))}}.'
            )


def weights_of(graphs: Mapping[str, Any], weights: Any, source: str) -> dict[str, float]:
    given = {} if weights is None else weights
    if not isinstance(given, Mapping):
        raise AlpaLiteError(
            f"weights={weights!r} was given. Weights are a dict of graph -> number above 0. At {source}. Write for example "
            f"weights={{{next(iter(graphs))!r}: 10}}."
        )
    for name, weight in given.items():
        if name not in graphs:
            raise AlpaLiteError(
                f"weights has {name!r}, which is no graph. There are {', '.join(map(repr, graphs))}. At {source}. Correct "
                "the name."
            )
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
            raise AlpaLiteError(
                f"the weight of {name!r} is {weight!r}. It must be a number above 0, e.g. how often the graph runs. At {source}. "
                "Give a small one where it hardly runs."
            )
    return {name: float(given.get(name, 1.0)) for name in graphs}


def check_options(options: PlanOptions, source: str) -> None:
    what = ""
    if options.has_stages and (options.num_microbatches != 1 or options.num_chunks > 1):
        what = "stages with several microbatches or chunks"
    elif options.symbol is not None:
        what = "a symbolic mesh"
    elif options.num_microbatches == "auto":
        what = "num_microbatches='auto'"
    if what:
        raise AlpaLiteError(
            f"al.plan_shared was given {what}. It plans graphs on one mesh of known size, all with the same number of "
            f"microbatches, or on a known number of stages, with one. At {source}. Leave that option out."
        )


def pins_by_graph(graphs: Mapping[str, Any], pins: Any, source: str) -> dict[str, dict[str, Any]]:
    if pins is None:
        return {name: {} for name in graphs}
    nested = isinstance(pins, Mapping) and pins and all(isinstance(v, Mapping) for v in pins.values())
    if nested:
        for name in pins:
            if name not in graphs:
                raise PinError(
                    f"pins has {name!r}, which is no graph. There are {', '.join(map(repr, graphs))}. At {source}. Correct the "
                    "name."
                )
        return {name: dict(pins.get(name, {})) for name in graphs}
    if not isinstance(pins, Mapping) or not all(isinstance(key, str) for key in pins):
        raise PinError(
            f"pins={pins!r:.80} was given. For several graphs pins are a dict of path or glob -> PartitionSpec, or graph -> "
            f"such. At {source}. Write for example pins={{'0/**/kernel': P(None, 'model')}}."
        )
    return {name: dict(pins) for name in graphs}


def take_pins(graphs: Sequence[SharedGraph], pins: Mapping[str, dict[str, Any]], source: str) -> None:
    """Every graph gets the pins that match in it; a pin that matches in none goes to the first, which refuses it."""
    everywhere = [(*g.paths, *g.traced.program.output_paths) for g in graphs]
    names: list[str] = []
    for number, graph in enumerate(graphs):
        own = {}
        for key, spec in pins[graph.name].items():
            given_to = [i for i, g in enumerate(graphs) if key in pins[g.name]]
            matched = [i for i in given_to if select(key, everywhere[i])]
            if number in matched or (not matched and number == given_to[0]):
                own[key] = spec
        graph.request = replace(graph.request, pins=own or None, source=source)
        with named(f"the graph {graph.name!r}"):
            names += graph.request.pins_of(graph.traced, graph.args).axis_names
    if names and graphs[0].request.options.axis_names is None:  # all graphs try the same meshes
        for graph in graphs:
            options = replace(graph.request.options, axis_names=tuple(dict.fromkeys(names)))
            if options.mesh_shape is None:
                graph.request = replace(graph.request, options=options)


def match(graphs: Sequence[SharedGraph], shared: Any, source: str) -> None:
    """Finds the shared leaves of every graph, in one order.

    Raises:
        AlpaLiteError: they differ; the message names the leaf.
    """
    by_graph = shared if isinstance(shared, Mapping) else {g.name: shared for g in graphs}
    if set(by_graph) != {g.name for g in graphs}:
        raise AlpaLiteError(
            f"shared is of the graphs {', '.join(map(repr, by_graph))}. There are {', '.join(repr(g.name) for g in graphs)}, and "
            f"each needs an entry. At {source}. Correct it, or give one glob for all."
        )
    first: dict[str, int] = {}
    for graph in graphs:
        found = _selected(graph, by_graph[graph.name], source)
        if graph is graphs[0]:
            first = found
        for name in (*first, *found):
            if name not in found or name not in first:
                has, lacks = (graph, graphs[0]) if name in found else (graphs[0], graph)
                path = has.paths[(found if name in found else first)[name]]
                raise AlpaLiteError(
                    f"the leaf {path!r} of {has.name!r} is shared, and {lacks.name!r} has none at that path. Shared leaves "
                    f"must be the same in all graphs. At {source}. Give both the same tree, or narrow `shared`."
                )
            one, other = (
                g.traced.program.values[g.traced.program.inputs[i]]
                for g, i in ((graphs[0], first[name]), (graph, found[name]))
            )
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                raise AlpaLiteError(
                    f"the shared leaf {graph.paths[found[name]]!r} is {other} in {graph.name!r} and {one} in "
                    f"{graphs[0].name!r}. Shared leaves must have one shape and dtype. At {source}. Give all graphs the "
                    "same arrays, or narrow `shared`."
                )
        graph.leaves = [found[name] for name in first]


def _selected(graph: SharedGraph, globs: Any, source: str) -> dict[str, int]:
    """Shared leaves: path below the glob's fixed beginning -> position."""
    texts = [globs] if isinstance(globs, str) else globs
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise AlpaLiteError(
            f"shared={globs!r} was given. It is a path or glob of argument leaves, several of them, or graph -> such. At "
            f'{source}. Write for example shared="0" for the whole first argument.'
        )
    found: dict[str, int] = {}
    for number, text in enumerate(texts):
        positions = select(text, graph.paths) if is_glob(text) else below(text, graph.paths)
        if not positions:
            raise AlpaLiteError(
                f"shared={text!r} matches no argument leaf of {graph.name!r}. A path starts with an argument's position "
                f"or keyword; * is one segment, ** any number. There are {', '.join(map(repr, graph.paths[:4]))}. At "
                f"{source}. Correct it."
            )
        segments = text.split("/")
        fixed = next((i for i, segment in enumerate(segments) if is_glob(segment)), len(segments))
        for position in positions:
            if position not in found.values():
                found[f"{number}:{'/'.join(graph.paths[position].split('/')[fixed:])}"] = position
    return found


def share_pins(graphs: Sequence[SharedGraph], source: str) -> None:
    """A shared leaf that is pinned in one graph is so in all.

    Raises:
        PinError: two graphs pin it differently.
    """
    pinned = [g.request.pins_of(g.traced, g.args).inputs for g in graphs]
    joined: list[Dims] = []
    for number in range(len(graphs[0].leaves)):
        dims: Dims = pinned[0][graphs[0].leaves[number]].dims
        for graph, own in zip(graphs, pinned, strict=True):
            other = own[graph.leaves[number]]
            if any(None not in (a, b) and a != b for a, b in zip(dims, other.dims, strict=True)):
                raise PinError(
                    f"the pin {other.origin!r} of {graph.name!r} fixes the shared leaf {other.path!r} as {other}, and another "
                    f"graph's pins fix it otherwise. A shared leaf has one layout. At {source}. Give both the same spec."
                )
            dims = tuple(a if b is None else b for a, b in zip(dims, other.dims, strict=True))
        joined.append(dims)
    for graph in graphs:
        fixed = dict(zip(graph.shared, joined, strict=True))
        graph.request = replace(graph.request, fixed=(fixed, PINNED_ELSEWHERE, None))
