"""What ``plan_shared`` is given, checked and brought into one form: traced graphs with their pins, weights and shared leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from alpa_lite.api.request import ONE_MESH, Request
from alpa_lite.api.shared_graph import SharedGraph, named
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import AlpaLiteError, PinError
from alpa_lite.numeric import real
from alpa_lite.plan.identity import close_matches, some
from alpa_lite.plan.pins import Dims, PinnedDims, without_single
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import axis_names_of
from alpa_lite.planner.stage_cut import one_stage
from alpa_lite.trace.paths import below, is_glob, select
from alpa_lite.trace.program import Rules

Globs = str | Sequence[str]
Graphs = Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]
Settings = tuple[
    PlanOptions | None, int | Sequence[int], str | Sequence[str], int | Sequence[int], Any, Mapping[str, str] | None
]
"""Options, what is static or donated, and what is followed, as for ``plan``."""
# Begins origins of pins that a graph has from others: their own origins, and the graphs.
PINNED_ELSEWHERE = "the shared pin"
_LARGEST_WEIGHT, _WEIGHTS_APART = 1e30, 1e9


def given_graphs(
    graphs: Graphs, shared: Any, weights: Any, pins: Any, settings: Settings, cluster: Cluster, source: str
) -> list[SharedGraph]:
    """The graphs, traced; arguments as of ``plan_shared``, ``source`` is the user's line."""
    check_graphs(graphs, source)
    counted = weights_of(graphs, weights, source)
    own_pins = pins_by_graph(graphs, pins, source)
    if _is_nested(like := settings[-1]):
        check_names("follow_like", like or (), graphs, source, PinError)
    found: list[SharedGraph] = []
    rules: Rules = {}  # of ops that graphs have in common, asked for once
    for name, (fn, args) in graphs.items():
        with named(f"the graph {name!r}"):
            options, static_argnums, static_argnames, donate_argnums, follow, like = settings
            request = Request.of(
                fn, None, None, options, static_argnums, static_argnames, donate_argnums, follow, like_of(like, name)
            )
            check_options(request.options, source)
            request = request.following(cluster)
            if not request.options.has_stages:
                request = replace(request, options=one_stage(request.options, cluster, source))
            # What is shared is found in the whole graph.
            stages = {word: getattr(request.options, word) for word in ONE_MESH}
            request = replace(request, options=replace(request.options, **ONE_MESH))
            traced = request.trace(tuple(args), {}, known=rules)
        found.append(SharedGraph(name, request, tuple(args), traced, counted[name], stages=stages))
    one_set_of_options(found, source)
    take_pins(found, own_pins, source)
    match(found, shared, source)
    share_pins(found, source)
    return found


def like_of(like: Any, name: str) -> Any:
    """``follow_like`` of one graph: it is for all, or graph -> its own."""
    return like.get(name) if _is_nested(like) else like


def _is_nested(given: Any) -> bool:
    """Whether something is given by graph; None is nothing for one of them."""
    if not isinstance(given, Mapping) or not all(own is None or isinstance(own, Mapping) for own in given.values()):
        return False
    return any(own is not None for own in given.values())


def check_names(
    what: str, names: Iterable[Any], graphs: Collection[str], source: str, error: type[AlpaLiteError] = AlpaLiteError
) -> None:
    """Refuses names of no graph."""
    for name in names:
        if name not in graphs:
            raise error(
                f"{what} has {name!r:.60}, which is no graph. There are {', '.join(map(repr, graphs))}."
                f"{close_matches(str(name), list(graphs))} At {source}. Correct the name."
            )


def one_set_of_options(graphs: Sequence[SharedGraph], source: str) -> None:
    """Refuses parallelized steps that were made with different options, where none are given for all."""
    first = graphs[0]
    for graph in graphs:
        if (graph.request.options, graph.stages) != (first.request.options, first.stages):
            follow = (graph.request.follow is None) != (first.request.follow is None)
            raise AlpaLiteError(
                f"the graphs {first.name!r} and {graph.name!r} are parallelized with different "
                f"{'follow= (one has none)' if follow else 'options'}. Graphs that share a layout are planned with one set. At "
                f"{source}. Give {'follow' if follow else 'options'}= for all."
            )


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
            f"weights={weights!r:.60} was given. Weights are a dict of graph -> number above 0. At {source}. Write for example "
            f"weights={{{next(iter(graphs))!r}: 10}}."
        )
    check_names("weights", given, graphs, source)
    for name, weight in given.items():
        if not 1 / _LARGEST_WEIGHT <= real(weight) <= _LARGEST_WEIGHT:
            raise AlpaLiteError(
                f"the weight of {name!r} is {weight!r:.60}. It must be a number above 0, from {1 / _LARGEST_WEIGHT:g} to "
                f"{_LARGEST_WEIGHT:g}, e.g. how often the graph runs. At {source}. Give a small one where it hardly runs."
            )
    found = {name: real(given.get(name, 1.0)) for name in graphs}
    least, most = min(found, key=lambda name: found[name]), max(found, key=lambda name: found[name])
    if found[most] > _WEIGHTS_APART * found[least]:
        raise AlpaLiteError(
            f"the weights of {most!r} and {least!r} are {found[most]:g} and {found[least]:g}. They may be {_WEIGHTS_APART:g} "
            f"times apart: with more between them, what {least!r} costs is lost to rounding. At {source}. Give {least!r} a "
            "larger weight, or plan the others and let it follow them (follow=)."
        )
    return found


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


def pins_by_graph(graphs: Mapping[str, Any], pins: Any, source: str) -> dict[str, dict[str, Any] | None]:
    """None: as a parallelized graph has them."""
    if pins is None:
        return dict.fromkeys(graphs)
    if _is_nested(pins):
        check_names("pins", pins, graphs, source, PinError)
        given = {name: own for name, own in pins.items() if own is not None}
    else:
        given = dict.fromkeys(graphs, pins)
    if not all(isinstance(own, Mapping) and all(isinstance(key, str) for key in own) for own in given.values()):
        raise PinError(
            f"pins={pins!r:.80} was given. For several graphs pins are a dict of path or glob -> PartitionSpec, or graph -> "
            f"such. At {source}. Write for example pins={{'0/**/kernel': P(None, 'model')}}."
        )
    return {name: dict(given[name]) if name in given else None for name in graphs}


def take_pins(graphs: Sequence[SharedGraph], pins: Mapping[str, dict[str, Any] | None], source: str) -> None:
    """Every graph gets the pins that match in it; a pin that matches in none goes to the first, which refuses it."""
    everywhere = [(*g.paths, *g.traced.program.output_paths) for g in graphs]
    names: list[str] = []
    for number, graph in enumerate(graphs):
        given, own = pins[graph.name], {}
        for key, spec in (given or {}).items():
            given_to = [i for i, g in enumerate(graphs) if key in (pins[g.name] or {})]
            matched = [i for i in given_to if select(key, everywhere[i])]
            if number in matched or (not matched and number == given_to[0]):
                own[key] = spec
        kept = graph.request.pins if given is None else own or None
        graph.request = replace(graph.request, pins=kept, source=source)
        with named(f"the graph {graph.name!r}"):
            names += graph.request.pins_of(graph.traced, graph.args).axis_names
    if names and graphs[0].request.options.axis_names is None:  # all graphs try the same meshes
        for graph in graphs:
            options, own = graph.request.options, tuple(dict.fromkeys(names))
            own = own if options.mesh_shape is None else axis_names_of(options, own)
            graph.request = replace(graph.request, options=replace(options, axis_names=own))


def match(graphs: Sequence[SharedGraph], shared: Any, source: str) -> None:
    """Finds the shared leaves of every graph, in one order.

    Raises:
        AlpaLiteError: they differ; the message names the leaf.
    """
    by_graph = shared if isinstance(shared, Mapping) else {g.name: shared for g in graphs}
    check_names("shared", by_graph, [g.name for g in graphs], source)
    if set(by_graph) != {g.name for g in graphs}:
        raise AlpaLiteError(
            f"shared is of the graphs {', '.join(map(repr, by_graph)) or '(none)'}. There are "
            f"{', '.join(repr(g.name) for g in graphs)}, and each needs an entry. At {source}. Correct it, "
            "or give one glob for all."
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
                    f"the leaf {path!r} of {has.name!r} is shared, and {lacks.name!r} has none {_place(name, by_graph, lacks)}. "
                    f"Shared leaves must be the same in all graphs. At {source}. Give both the same tree, or narrow `shared`."
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


def _place(name: str, by_graph: Mapping[str, Any], graph: SharedGraph) -> str:
    """Where a graph would have the leaf of this name (as of ``_selected``)."""
    number, _, tail = name.partition(":")
    given = by_graph[graph.name]
    globs = [given] if isinstance(given, str) else given
    if int(number) >= len(globs):
        return f"of its own: it has {len(globs)} of the globs"
    return f"at {'/'.join([*_beginning(globs[int(number)]), *([tail] if tail else [])])!r}"


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
                f"or keyword; * is one segment, ** any number.{_there(text, graph.paths)} At {source}. Correct it."
            )
        fixed = len(_beginning(text))
        for position in positions:
            if position not in found.values():
                found[f"{number}:{'/'.join(graph.paths[position].split('/')[fixed:])}"] = position
    return found


def _there(glob: str, paths: Sequence[str]) -> str:
    """What leaves there are: those that look like a path or glob, or else the first ones; trees of them are named, too."""
    trees = ["/".join(path.split("/")[:depth]) for path in paths for depth in range(2, path.count("/") + 2)]
    close = close_matches(glob.rstrip("/*"), list(dict.fromkeys(trees)))
    return close or f" There are {some(paths)}."


def _beginning(glob: str) -> list[str]:
    """The segments of a path or glob before its first wildcard."""
    return list(takewhile(lambda segment: not is_glob(segment), glob.split("/")))


def _given_mesh(graph: SharedGraph) -> DeviceMesh | None:
    """The one mesh that all graphs are planned on, if options say which."""
    options = graph.request.options
    if options.mesh_shape is None or options.symbol is not None or replace(options, **graph.stages).has_stages:
        return None
    return DeviceMesh(shape=options.mesh_sizes, axis_names=axis_names_of(options, ()))


def share_pins(graphs: Sequence[SharedGraph], source: str) -> None:
    """A shared leaf that is pinned in one graph is so in all. On a mesh that is given, axes of one device make no difference.

    Raises:
        PinError: two graphs pin it differently.
    """
    mesh = _given_mesh(graphs[0])
    pinned = [g.request.pins_of(g.traced, g.args).inputs for g in graphs]
    joined: list[tuple[Dims, str]] = []
    for number in range(len(graphs[0].leaves)):
        dims: Dims = (None,) * len(pinned[0][graphs[0].leaves[number]].dims)
        by: dict[str, PinnedDims] = {}  # graph -> its pin
        for graph, own in zip(graphs, pinned, strict=True):
            other = own[graph.leaves[number]]
            if other.is_free:
                continue
            both = other.joined(dims, mesh)
            both = both and without_single(both, mesh)
            axes = [axis for part in both or () for axis in part or ()]
            if both is None or len(set(axes)) < len(axes):
                before = " and ".join(f"that of {name!r} as {pin}" for name, pin in by.items())
                raise PinError(
                    f"the pin {other.origin!r} of {graph.name!r} fixes the shared leaf {other.path!r} as {other}, and {before}. "
                    f"A shared leaf has one layout, in which an axis splits one dim. At {source}. Give both the same spec."
                )
            dims = both
            by[graph.name] = other
        of = " and ".join(f"{pin.origin!r} of the graph {name!r}" for name, pin in by.items())
        joined.append((dims, f"{PINNED_ELSEWHERE} {of}"))
    for graph, own in zip(graphs, pinned, strict=True):
        given = zip(graph.shared, graph.leaves, joined, strict=True)
        # As the graph's own pin says it, which then agrees also without the mesh.
        fixed = {path: own[i].joined(dims, mesh) or () for path, i, (dims, _) in given}
        origins = {path: origin for path, (_, origin) in zip(graph.shared, joined, strict=True)}
        graph.request = replace(graph.request, fixed=(fixed, origins, None))
