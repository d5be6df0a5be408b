"""Which runner an engine gets: a model as it is, in parts, or as it was planned, in this process or on hosts.

In: a model, parameters, a layout or several, and where they shall run. What does not go together is refused here, before anything
is placed or started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import jax

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import ServeError, user_line
from alpa_lite.executor.ray.settings import RayExecutor
from alpa_lite.plan.plan import Plan
from alpa_lite.serve.pipeline import (
    Pipeline,
    cut_as_planned,
    cut_by_model,
    groups_of,
    parts_of,
    planned_part,
    programs_of,
)
from alpa_lite.serve.programs import Programs
from alpa_lite.serve.stored import StoredParams, check_maker, is_maker
from alpa_lite.trace.paths import leaf_paths

if TYPE_CHECKING:
    from alpa_lite.serve.hosts import Hosts

SHOWN = 80  # characters of a value in a message


class Layout(Protocol):
    """Plans by graph, as ``al.plan_shared`` makes them."""

    @property
    def plans(self) -> Mapping[str, Plan]: ...


def check_layout(layout: Any) -> None:
    """Raises ``ServeError`` if it is neither plans by graph, nor a list of such per stage."""
    for one in layout if isinstance(layout, (tuple, list)) else () if layout is None else (layout,):
        if not isinstance(getattr(one, "plans", None), Mapping):
            shown = repr(one)
            given = f"layout={shown}" if len(shown) <= SHOWN else f"a layout of type {type(one).__name__}"
            given = "a Plan, which is of one graph," if isinstance(one, Plan) else given
            raise ServeError(
                f"{given} was given; it must be an al.SharedLayout, which has plans of all graphs, or a list of one "
                f"per stage. At {user_line()}. Make one with al.plan_shared, or read it from its file: "
                "al.SharedLayout.load(path)."
            )


def _check_values(params: Any) -> None:
    """Refuses shapes in place of arrays, and arrays that are gone; those of a checkpoint, or made by a function elsewhere, are
    read later."""
    for path, leaf in () if isinstance(params, StoredParams) else leaf_paths(params, "params"):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ServeError(
                f"the parameter {path!r} is the shape {leaf.dtype}{list(leaf.shape)} without values. An engine needs arrays, "
                "a function that makes them, or those of a checkpoint; al.serve.graphs takes shapes alone. At "
                f"{user_line()}. Give the arrays; for a checkpoint write al.serve.StoredParams(dir, shapes)."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ServeError(
                f"the parameter {path!r} was deleted, or donated to a step that ran since. An engine needs arrays with values. "
                f"At {user_line()}. Give the parameters as the last step returned them, and donate them to none."
            )


def runner_of(
    model: Any,
    params: Any,
    layout: Any,
    cluster: Cluster | None,
    num_stages: int,
    settings: RayExecutor | None,
    folder: str,
    **sizes: Any,
) -> Programs | Pipeline | Hosts:
    """The runner; arguments as of ``Engine``, ``settings`` of an executor on hosts or None, ``folder`` where layouts are kept.

    Raises:
        ServeError: they do not go together, or the plans are not for this model.
    """
    if is_maker(params):
        check_maker(params)
        params = params() if settings is None else params
    if isinstance(params, StoredParams):
        params = params.found()  # stages and hosts read their parts one after the other
    _check_values(params)
    planned = 1
    if layout is not None and not isinstance(layout, Sequence):
        planned = _stages_of(layout)
        _check_cluster(layout, cluster)
    if planned > 1:
        if num_stages not in (1, planned):
            raise ServeError(
                f"a layout of {planned} stages was given with num_stages={num_stages}. Its stages are those that were planned. "
                f"At {user_line()}. Leave num_stages out, or plan with al.PlanOptions(num_stages={num_stages})."
            )
        if settings is None:
            return cut_as_planned(model, params, layout.plans, **sizes)
        from alpa_lite.serve.hosts import Hosts

        part, sizes["slots"], groups = planned_part(model, params, layout.plans, **sizes)
        return Hosts([part], settings, **sizes, num_groups=groups)
    if num_stages > 1 and layout is not None and not isinstance(layout, Sequence):
        raise ServeError(
            f"num_stages={num_stages} was given with a layout of one mesh. A model that is cut takes one layout per stage. "
            f"At {user_line()}. Give a list of them, or plan with al.PlanOptions(num_stages={num_stages})."
        )
    layouts = None if layout is None else [one.plans for one in (layout if isinstance(layout, Sequence) else [layout])]
    if layouts is not None and len(layouts) != num_stages:
        raise ServeError(
            f"{len(layouts)} layouts were given for num_stages={num_stages}; each stage has one. At {user_line()}. Correct one "
            "of them."
        )
    if isinstance(layout, Sequence) and (settings is not None or num_stages == 1):
        for number, one in enumerate(layout):
            _check_cluster(one, cluster and _stage_cluster(cluster, num_stages))
            if settings is not None and _stages_of(one) > 1:
                raise ServeError(
                    f"layout {number} of the list has {_stages_of(one)} stages of its own. On hosts each part of a model that is "
                    f"cut has a layout of one mesh. At {user_line()}. Plan its graphs without stages, or the whole model with "
                    "al.plan_shared(..., options=al.PlanOptions(num_stages=...))."
                )
    if settings is not None:
        return _on_hosts(model, params, layouts, cluster, num_stages, settings, folder, **sizes)
    if num_stages > 1:
        if cluster is not None:
            raise ServeError(
                f"num_stages={num_stages} was given with a cluster. Without an executor stages share out the devices of this "
                f'process. At {user_line()}. Leave one of them out, or add executor="ray".'
            )
        return cut_by_model(model, params, num_stages=num_stages, layouts=layouts, folder=folder, **sizes)
    (part,) = parts_of(model, params, 1, layouts, cluster, folder, **sizes)
    return programs_of(part, **sizes)


def _stages_of(layout: Layout) -> int:
    return max(len(plan.stages) for plan in layout.plans.values())


def _check_cluster(layout: Layout, cluster: Cluster | None) -> None:
    """Plans run on what they were made for: a layout does not fit another cluster."""
    for text in {plan.identity.cluster for plan in layout.plans.values()} if cluster is not None else ():
        if str(cluster) != text:
            raise ServeError(
                f"the cluster {cluster} was given with a layout for {text}. A layout runs on the one that it was planned for. "
                f"At {user_line()}. Leave cluster= (--cluster) out, or plan for {cluster}."
            )


def _on_hosts(
    model: Any,
    params: Any,
    layouts: Sequence[Mapping[str, Plan]] | None,
    cluster: Cluster | None,
    num_stages: int,
    settings: RayExecutor,
    folder: str,
    *,
    slots: int,
    **sizes: Any,
) -> Hosts:
    from alpa_lite.executor.ray.cluster import ray_cluster
    from alpa_lite.serve.hosts import Hosts

    groups = groups_of(num_stages, slots) if num_stages > 1 else 1
    sizes["slots"] = slots // groups
    own = None if layouts is not None else _stage_cluster(cluster or ray_cluster(settings.address), num_stages)
    parts = list(parts_of(model, params, num_stages, layouts, own, folder, **sizes))
    return Hosts(parts, settings, **sizes, num_groups=groups)


def _stage_cluster(cluster: Cluster, num_stages: int) -> Cluster:
    """The part of each stage: hosts, or devices of one host."""
    hosts, devices = cluster.num_hosts, cluster.devices_per_host
    if hosts % num_stages == 0:
        return replace(cluster, num_hosts=hosts // num_stages)
    if num_stages % hosts == 0 and devices % (num_stages // hosts) == 0:
        return replace(cluster, num_hosts=1, devices_per_host=devices // (num_stages // hosts))
    raise ServeError(
        f"num_stages={num_stages} was given for the cluster {cluster}; each stage gets as many hosts, or as many devices of one. "
        f"At {user_line()}. Take a divisor."
    )
