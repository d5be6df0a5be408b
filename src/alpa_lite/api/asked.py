"""What a user asked for beside a function: options that do not fit the cluster are refused before anything is traced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.cluster.symbolic import SymbolicCluster
from alpa_lite.errors import AlpaLiteError, ArgumentsError, LayerError, user_line
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.searched import SEARCHED_SCHEDULES, is_searched
from alpa_lite.planner.stage_cut import given_submeshes
from alpa_lite.trace.paths import leaf_paths


def check_cluster(options: PlanOptions, cluster: Any, source: str) -> None:
    """Refuses what is no cluster, and names where devices are needed."""
    if isinstance(cluster, SymbolicCluster):
        raise AlpaLiteError(
            f"the cluster '{cluster}' is symbolic, and this needs devices. A number of workers must be chosen before a "
            f"step runs. At {source}. Plan with al.plan(..., cluster=...), choose with "
            f"plan.specialize({cluster.name}=8), and run that with al.parallelize(fn, plan=...)."
        )
    if not isinstance(cluster, Cluster):
        raise AlpaLiteError(
            f"cluster={cluster!r:.60} is no cluster. It must be an al.Cluster. At {source}. Give "
            "al.Cluster.parse('1x8:h100-sxm'), or al.Cluster.local() for the devices of this process."
        )
    if options.symbol is not None:
        raise AlpaLiteError(
            f"mesh_shape={options.mesh_shape} holds the name {options.symbol!r}, and the cluster {cluster} has a "
            f"known number of devices. Sizes must be numbers there. At {source}. Give numbers, e.g. "
            f"mesh_shape=({cluster.num_devices},), or a cluster=al.Cluster.symbolic({options.symbol!r}, ...)."
        )


def check_symbolic(options: PlanOptions, follow: Any, cluster: SymbolicCluster, source: str) -> None:
    """Refuses what plans for a number of workers that is not known yet cannot have."""
    if options.symbol != cluster.name:
        raise AlpaLiteError(
            f"mesh_shape={options.mesh_shape} was given for the symbolic cluster '{cluster}'. One of its sizes must be "
            f"the name {cluster.name!r}. At {source}. Give PlanOptions(mesh_shape=({cluster.name!r},)), or "
            f"({cluster.name!r}, 2) with an axis of fixed size beside it."
        )
    if follow is not None:
        raise AlpaLiteError(
            f"follow was given for the symbolic cluster '{cluster}'. What is followed lies on a mesh of known size. At "
            f"{source}. Give a cluster of devices, or pins in place of follow."
        )
    if options.remat not in ("auto", "none"):
        raise AlpaLiteError(
            f"remat={options.remat!r} was given for the symbolic cluster '{cluster}'. There the plan recomputes what "
            f"jax.checkpoint says. At {source}. Leave remat out, and wrap layers in jax.checkpoint."
        )


def check_stages_asked(options: PlanOptions, cluster: Cluster, source: str) -> None:
    """Refuses stages that the cluster cannot have, or that are not known well enough."""
    if options.has_stages and options.num_microbatches == "auto":
        raise AlpaLiteError(
            f"num_stages={options.num_stages} and num_microbatches='auto' were given. With several stages the number "
            f"must be known. At {source}. Give num_microbatches, e.g. 4 times the number of stages."
        )
    if options.has_stages and options.submeshes == "auto":
        check_stage_count(options, cluster, source)
        if not is_searched(options, cluster):
            raise AlpaLiteError(
                f"submeshes='auto' was given with num_microbatches={options.num_microbatches}, schedule={options.schedule!r} and "
                f"costs={options.costs!r}. The search needs at least 2 microbatches, a schedule of "
                f"{', '.join(map(repr, SEARCHED_SCHEDULES))}, and costs in seconds. At {source}. Change these, or give "
                "submeshes=((hosts, devices per host), ...). For a function without a gradient, which has one microbatch, "
                "al.plan_shared searches them, also for one graph."
            )
    elif options.stage_count is not None:
        given_submeshes(options, cluster, source)
    elif options.schedule not in SEARCHED_SCHEDULES:
        raise AlpaLiteError(
            f"schedule={options.schedule!r} was given without a number of stages. The search for one knows "
            f"{', '.join(map(repr, SEARCHED_SCHEDULES))}. At {source}. Give num_stages=... beside it."
        )


def check_stage_count(options: PlanOptions, cluster: Cluster, source: str) -> None:
    """Refuses more stages than devices."""
    count = options.stage_count
    assert count is not None
    if count > cluster.num_devices:
        raise LayerError(
            f"num_stages={count} was given for the {cluster.num_devices} devices of {cluster}. A stage has at least one. At "
            f"{source}. Ask for at most {cluster.num_devices} stages."
        )


def check_donated(args: Sequence[Any], static: Collection[int], donated: Collection[int]) -> None:
    """Refuses an array that is given away twice, or given away and used: on several devices XLA ends the process there.

    Args:
        args: positional arguments.
        static, donated: positions of those that are.
    """
    arrays = [id(leaf) for leaf in jax.tree_util.tree_leaves(args) if isinstance(leaf, jax.Array)] if donated else []
    if len(set(arrays)) == len(arrays):
        return
    seen: dict[int, tuple[str, bool]] = {}
    for number, tree in enumerate(args):
        for path, leaf in leaf_paths(tree, str(number)) if number not in static else ():
            if isinstance(leaf, jax.Array):
                before, given_away = seen.setdefault(id(leaf), (path, number in donated))
                if before != path and (given_away or number in donated):
                    raise ArgumentsError(
                        f"the leaves {before!r} and {path!r} of the arguments are one array, which is donated. Its buffer can be "
                        f"given away once, and is then gone. At {user_line()}. Give each leaf an array of its own, as jnp.copy "
                        "makes it, or leave donate_argnums out."
                    )
