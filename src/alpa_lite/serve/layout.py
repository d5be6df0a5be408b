"""One layout for all graphs of an engine: planned where the user gives none, completed where the user's leaves the cache open.

A layout of ``plan_shared(shared="0")`` has the parameters in one place, and the cache where it suits each graph. Then the cache
lies as ``decode`` has it, which runs most, and the other graphs are planned again with both where they lie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax

from alpa_lite.api.request import Request
from alpa_lite.api.shared import plan_shared
from alpa_lite.api.shared_layout import SharedLayout
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.errors import AlpaLiteError, ServeError, user_line
from alpa_lite.executor.calibrate import local_cluster
from alpa_lite.executor.state_rows import whole_types
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.identity import some
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.serve.kept_layouts import keep, kept_files, read_kept
from alpa_lite.serve.model_graphs import DECODE, Graph, prefill_name
from alpa_lite.serve.programs import arguments, check_types, traced_graphs
from alpa_lite.trace.paths import argument_paths
from alpa_lite.trace.program import Traced

# So many steps of all slots for each prompt; who knows better plans with weights of their own.
_TOKENS_PER_PROMPT = 64.0
_PREFILL = re.compile(prefill_name(0).replace("0", r"([1-9]\d*)"))


def buckets_of(layout: Any, max_length: int) -> tuple[int, ...]:
    """Where the user gives none: those for which the layout (or that of the first stage) has plans, by their names; without one,
    powers of four from 32 below ``max_length``, and ``max_length``.

    Raises:
        ServeError: the layout has none, or a longer one than a request may be.
    """
    first = next(iter(layout), None) if isinstance(layout, Sequence) else layout
    if first is None:
        return _default_buckets(max_length)
    plans = first.plans
    found = sorted(int(match[1]) for match in map(_PREFILL.fullmatch, plans) if match)
    fault = ""
    if not found:
        fault = f"the layout has plans for {', '.join(map(repr, plans)) or 'no graph'}, and none to take a prompt in"
    elif found[-1] > max_length:
        fault = f"the layout has a plan for {prefill_name(found[-1])!r}, and max_length={max_length} was given"
    if fault:
        raise ServeError(
            f"{fault}. Without buckets=, an engine takes them from the names of the layout's plans, prefill_<tokens>, of at most "
            f"max_length. At {user_line()}. Plan the graphs of al.serve.graphs(...) with these sizes, or give buckets=."
        )
    return tuple(found)


def _default_buckets(max_length: int) -> tuple[int, ...]:
    found, size = [max_length], 32
    while size < max_length:
        found.append(size)
        size *= 4
    return tuple(sorted(found))


def plans_of(
    graphs: Mapping[str, Graph], plans: Mapping[str, Plan] | None, cluster: Cluster | None = None, folder: str = ""
) -> tuple[Mapping[str, Plan], Mapping[str, Traced] | None]:
    """Plans of all graphs, on one mesh: those of the user's layout, those that were kept, or new ones for a cluster.

    Args:
        cluster: None = the devices of this process.
        folder: where layouts are kept for the next start; "" = nowhere.

    Returns:
        The plans, and the graphs as they are run where they had to be traced for that.

    Raises:
        ServeError: the layout is not of these graphs, or one cannot have the cache where it lies.
    """
    if plans is not None:
        return _with_one_cache(graphs, plans), None
    cluster = cluster or local_cluster(False)
    if not folder:
        return plan_graphs(graphs, cluster).plans, None
    kept = read_kept(kept_files(folder, graphs, cluster), graphs)
    if not isinstance(kept, Path):
        return kept
    layout = plan_graphs(graphs, cluster)
    keep(layout, kept)
    return layout.plans, None


def plan_graphs(graphs: Mapping[str, Graph], cluster: Cluster | None = None) -> SharedLayout:
    """Plans of all graphs with one layout of parameters and cache, the best for a prompt now and then between many tokens.

    Args:
        cluster: None = the devices of this process.
    """
    prompts = {name: 1.0 / (len(graphs) - 1) for name in graphs if name != DECODE}
    weights = prompts | {DECODE: _TOKENS_PER_PROMPT}
    params, cache = graphs[DECODE][1][:2]
    held = {"0": params, "1": cache}  # a model may have no parameters, or no cache
    shared = tuple(place for place, tree in held.items() if jax.tree_util.tree_leaves(tree))
    if not shared:
        raise ServeError(
            f"the model has neither parameters nor a cache. An engine serves a model that has one of them. At {user_line()}. "
            "Give it what its answers depend on as params= or in init_cache."
        )
    return plan_shared(
        graphs, shared=shared, cluster=cluster or local_cluster(False), weights=weights, donate_argnums=1
    )


def _with_one_cache(graphs: Mapping[str, Graph], plans: Mapping[str, Plan]) -> Mapping[str, Plan]:
    """The plans, made again where they have the cache elsewhere than ``decode``. With stages it may be on another one, which
    only planning together can help: what is not made again is refused where it is checked."""
    check_sizes(graphs, plans)
    check_types(graphs, plans)
    decode = plans[DECODE]
    params, cache = (_layout(decode, number) for number in "01")
    again = [
        name
        for name in graphs
        if (len(plans[name].stages), plans[name].mesh) == (1, decode.mesh)
        and _layout(plans[name], "0") == params
        and _layout(plans[name], "1") != cache
    ]
    if again:
        traced_graphs(graphs, plans)  # new plans would hide that the layout is another model's
    made = {name: _planned_again(name, graphs[name], plans[name], params | cache) for name in again}
    return {**plans, **made}


def check_sizes(graphs: Mapping[str, Graph], plans: Mapping[str, Plan]) -> None:
    """That plans are of these leaves and sizes, as ``check_types``, which knows no paths: what differs is named.

    Raises:
        ServeError: they are not.
    """
    for name in (DECODE, *graphs):  # of decode the tokens say how many slots there are
        if name not in plans:
            continue
        planned = whole_types(plans[name].inputs)
        here = {path: (tuple(x.shape), str(x.dtype)) for path, x in argument_paths(graphs[name][1], {})}
        if fault := _difference(name, planned, here):
            raise ServeError(
                f"the layout is of another model or other sizes: {fault}. Parameters, slots, max_length and buckets must be "
                f"those that were planned. At {user_line()}. Give those, or plan the graphs of this model with these sizes."
            )


def _difference(name: str, planned: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Between the leaves of a plan and those of a graph; "" if there is none."""
    gone, new = (sorted(set(one) - set(other)) for one, other in ((planned, here), (here, planned)))
    if gone or new:
        parts = [f"has {some(gone)}, missing here"] * bool(gone) + [f"lacks {some(new)}, given here"] * bool(new)
        return f"its plan of {name!r} {' and '.join(parts)}"
    changed = [path for path in planned if planned[path] != here[path]]
    if not changed:
        return ""
    tokens = list(planned)[-1]
    slots = [types[tokens][0][:1] for types in (planned, here)]
    if name == DECODE and all(slots) and slots[0] != slots[1]:
        return f"it was planned for slots={slots[0][0]}, and is used for {slots[1][0]}"
    path = changed[0]
    (was, was_type), (now, now_type) = planned[path], here[path]
    # Where nothing changed but the cache, and of it one number alone, that is another length.
    sizes = {pair for p in changed for pair in zip(planned[p][0], here[p][0], strict=False) if pair[0] != pair[1]}
    why = ""
    if len(sizes) == 1 and all(p.startswith("1/") and len(planned[p][0]) == len(here[p][0]) for p in changed):
        ((length, other),) = sizes
        why = f", as it was planned for max_length={length} and is used for {other}"
    types = [f"{kind}{list(shape)}" for shape, kind in ((was, was_type), (now, now_type))]
    return f"in its plan of {name!r} the leaf {path!r} is {types[0]} there and {types[1]} here{why}"


def _planned_again(name: str, graph: Graph, plan: Plan, layout: Mapping[str, Any]) -> Plan:
    """The plan of a graph with parameters and cache where ``decode`` has them; what else was pinned stays as it is."""
    fixed = {leaf.path: leaf.spec.dims for leaf in plan.inputs if leaf.pin} | dict(layout)
    pins = {
        leaf.path: partition_spec(leaf.spec)
        for leaf in plan.outputs
        if leaf.pin and leaf.path.removeprefix("out/") not in layout
    }
    try:
        options = replace(_options(plan), mesh_shape=plan.mesh.shape, axis_names=plan.mesh.axis_names)
        request = Request.of(graph[0], pins or None, None, options, (), (), 1)
        request = replace(request, fixed=(fixed, f"the layout of {DECODE!r}", plan.mesh))
        made = request.plan(graph[1], {}, Cluster.parse(plan.identity.cluster))[1]
    except AlpaLiteError as error:
        raise ServeError(
            f"the cache lies otherwise for {name!r} than for {DECODE!r}, and where {DECODE!r} has it there is no plan of "
            f"{name!r}: {error} All graphs must have it in one layout. At {user_line()}. Plan them together: "
            'al.plan_shared(graphs, shared=("0", "1"), ...).'
        ) from error
    note = (
        f"{name!r} was planned again, with the parameters where the layout has them and the cache where {DECODE!r} has it; "
        'al.plan_shared(graphs, shared=("0", "1"), ...) plans both jointly'
    )
    return replace(made, notes=(*made.notes, note))


def _layout(plan: Plan, number: str) -> dict[str, Any]:
    """Path -> how each leaf of an argument lies."""
    return {leaf.path: leaf.spec.dims for leaf in arguments(plan, number)}


def _options(plan: Plan) -> PlanOptions:
    """With which it was made, as far as they matter on one mesh."""
    given: dict[str, Any] = dict(plan.options)
    rules = tuple(map(NamedRule.read, given.get("rules", ())))
    known = {field.name for field in fields(PlanOptions)} - {"schedule", "rules"}
    return PlanOptions(**{name: value for name, value in given.items() if name in known}, rules=rules)
