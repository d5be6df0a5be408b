"""The public surface: ``plan``, ``parallelize``, ``graph``, ``Cluster``, ``PlanTarget``, ``Checkpoint``, ``load_plan``,
``load_export``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, overload

from alpa_lite.api.bound import Trees, plain, traced_for
from alpa_lite.api.checkpoint import Checkpoint
from alpa_lite.api.elastic import Elastic
from alpa_lite.api.fit import FitResult, StepReport, fit
from alpa_lite.api.given import (
    argnames,
    argnums,
    check_function,
    check_keywords,
    checked_executor,
    checked_options,
    checked_plan,
)
from alpa_lite.api.request import Request
from alpa_lite.api.step import ParallelStep
from alpa_lite.api.symbolic import SymbolicPlan
from alpa_lite.cluster.cluster import Cluster as ClusterData
from alpa_lite.cluster.symbolic import SymbolicCluster
from alpa_lite.costs.roles import roles_of
from alpa_lite.errors import AlpaLiteError, ExportError, user_line
from alpa_lite.executor.calibrate import local_cluster
from alpa_lite.executor.host_data import HostData
from alpa_lite.executor.load_export import ExportedPart, load_part
from alpa_lite.executor.load_stages import ExportedStages
from alpa_lite.executor.ray.settings import RayExecutor
from alpa_lite.intraop.restrict import weight_positions
from alpa_lite.plan.files import as_path
from alpa_lite.plan.load import load_plan as read_plan
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.report.graph import Graph, graph_of
from alpa_lite.trace.program import trace


class Cluster(ClusterData):
    """Hosts, devices and links to plan for; pure data. ``parse`` reads a text, ``local`` looks at this process or job."""

    @staticmethod
    def local(calibrate: bool = False) -> ClusterData:
        """The devices of this process as one host; in a ``jax.distributed`` job those of all processes, each process a host.

        Args:
            calibrate: measure matmuls, memory and collectives for some seconds instead of taking the hardware table's
                figures; the record joins the identity of plans made with it. In one process only.
        """
        return local_cluster(calibrate)

    @staticmethod
    def from_ray(
        devices_per_host: int | None = None, *, address: str | None = None, device: str | None = None
    ) -> ClusterData:
        """The hosts of a running Ray cluster.

        Args:
            devices_per_host: GPUs of every host, or virtual CPU devices where there are no GPUs; None = all that it has.
            address: as for ``parallelize``.
            device: of the hardware table; None = by the name that Ray knows the GPUs by.

        Raises:
            ClusterError: there is no such cluster, or its hosts differ.
        """
        from alpa_lite.executor.ray.cluster import ray_cluster

        return ray_cluster(address, devices_per_host, device)

    @staticmethod
    def symbolic(name: str, *, device: str, devices_per_host: int = 8, values: Iterable[int]) -> SymbolicCluster:
        """A cluster whose number of devices along one mesh axis stays open, for plans as functions of it.

        Args:
            name: of the number; ``PlanOptions.mesh_shape`` holds it in place of one size, e.g. ("n", 2).
            device: of the hardware table.
            devices_per_host: how many devices share a host.
            values: the numbers that are considered.

        Raises:
            ClusterError: for a name, device or value that is none.
        """
        return SymbolicCluster.make(name, device=device, devices_per_host=devices_per_host, values=values)


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """A step as the command line takes it.

    Attributes:
        fn: the step.
        args: arrays or ``jax.ShapeDtypeStruct`` pytrees.
        pins, pin_like, donate_argnums: as for ``plan``.
        init: ``init(key) -> first argument``.
        data: ``data(index) -> batch``.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    pins: Any = None
    pin_like: Mapping[str, str] | None = None
    donate_argnums: tuple[int, ...] = ()
    init: Callable[..., Any] | None = None
    data: Callable[..., Any] | None = None


_SETTINGS = (
    "cluster",
    "pins",
    "pin_like",
    "follow",
    "follow_like",
    "options",
    "static_argnums",
    "static_argnames",
    "donate_argnums",
)  # of plan


# What is planned depends on the cluster; the other settings are those of the definition below.
@overload
def plan(fn: Callable[..., Any], *args: Any, cluster: ClusterData, **settings: Any) -> Plan: ...
@overload
def plan(fn: Callable[..., Any], *args: Any, cluster: SymbolicCluster, **settings: Any) -> SymbolicPlan: ...
def plan(
    fn: Callable[..., Any],
    *args: Any,
    cluster: ClusterData | SymbolicCluster,
    pins: Any = None,
    pin_like: Mapping[str, str] | None = None,
    follow: Any = None,
    follow_like: Mapping[str, str] | None = None,
    options: PlanOptions | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> Plan | SymbolicPlan:
    """Plan ``fn(*args, **kwargs)`` for a cluster. Touches no device.

    Args:
        fn: an ordinary JAX function, e.g. a training step; one that is already parallelized gives its pins and options.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct`` pytrees.
        cluster: ``al.Cluster.parse("8x8:h100-sxm")`` or ``al.Cluster.local()``; ``al.Cluster.symbolic(...)`` with a name in
            ``options.mesh_shape`` gives plans for many numbers of workers at once.
        pins: path or glob -> ``PartitionSpec``, e.g. ``{"0/params/*/kernel": P(None, "model")}``, or a pytree of them.
        pin_like: ``{"0/opt_state": "0/params"}``: leaves under the first follow their counterparts under the second.
        follow: a parallelized step or a plan whose parameters this function takes where they are: leaves with the path of a
            parameter (for one argument also with the end of it: "0/kernel" is "0/params/kernel"), its shape and dtype keep its
            spec, and the mesh is that plan's. Or a ``plan.parameter_layout``, with the mesh in ``options``.
        follow_like: ``{"0": "0/params"}``: leaves under the first follow the plan's under the second, where paths differ.
        options: see ``PlanOptions``.
        static_argnums, static_argnames, donate_argnums: as in ``jax.jit``.

    Returns:
        The cheapest plan found, with its lower bound; ``print`` it, ``save`` it, run it with ``parallelize(plan=...)``. For a
        symbolic cluster a ``SymbolicPlan``.

    Raises:
        AlpaLiteError: or one of its subclasses, for anything wrong with what was given.

    Example:
        >>> plan = al.plan(train_step, state, batch, cluster=al.Cluster.parse("1x8:h100-sxm"), donate_argnums=0)
    """
    check_keywords(plain(fn), kwargs, _SETTINGS)
    jit_settings = static_argnums, static_argnames, donate_argnums
    request = Request.of(check_function(fn, "al.plan"), pins, pin_like, options, *jit_settings, follow, follow_like)
    if isinstance(cluster, SymbolicCluster):
        return request.symbolic_plan(args, kwargs, cluster)
    return request.plan(args, kwargs, cluster)[1]


def graph(
    fn: Callable[..., Any],
    *args: Any,
    plan: Plan | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Graph:
    """What the planner sees of ``fn(*args, **kwargs)``: ``print`` it as a table, ``dot()`` it for Graphviz.

    Args:
        fn, args, kwargs, static_argnums, static_argnames: as for ``plan``.
        plan: of this very call; with it the picture's edges carry the planned layouts.

    Raises:
        PlanFileError: the plan belongs to another program.

    Example:
        >>> print(al.graph(step, state, batch))
        >>> Path("planned.dot").write_text(al.graph(step, state, batch, plan=plan).dot())
    """
    if plan is None:
        numbers, names = argnums(plain(fn), "static_argnums", static_argnums), argnames(static_argnames)
        traced = trace(
            plain(check_function(fn, "al.graph")), args, kwargs, static_argnums=numbers, static_argnames=names
        )
    else:
        traced = traced_for(plan, fn, args, kwargs)
    return graph_of(traced.program, weight_positions(traced.program, roles_of(traced.program)), plan)


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: ClusterData | None = None,
    pins: Any = None,
    pin_like: Mapping[str, str] | None = None,
    follow: Any = None,
    follow_like: Mapping[str, str] | None = None,
    num_microbatches: int | None = None,
    options: PlanOptions | None = None,
    plan: Plan | None = None,
    executor: str | RayExecutor = "local",
    address: str | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Any:
    """Plan, compile and run a step on the devices of this process or job, or of a Ray cluster; usable as a bare decorator.

    Args:
        fn: an ordinary JAX function; any pytrees in and out.
        cluster: what to plan for; None = the devices that the executor has, e.g. ``Cluster.local()``.
        plan: a plan to run instead of making one (e.g. from ``load_plan``).
        executor: "local", or "ray" for actors on a Ray cluster, one per submesh and host; ``RayExecutor(...)`` for other settings
            than the usual ones.
        address: of the Ray cluster, "auto" for one on this host; None = RAY_ADDRESS, or a cluster of this machine's own.
        pins, pin_like, options, static_argnums, static_argnames, donate_argnums: as for ``plan``.
        follow, follow_like: as for ``plan``; a step that is followed needs its plan when this one is made.
        num_microbatches: as in ``PlanOptions``; giving both, and different, is an error.

    Returns:
        A ``ParallelStep``: calling it plans and compiles on first use, then runs; donated arrays are gone afterwards.

    Example:
        >>> @al.parallelize(pins={"0/params/*/kernel": P(None, "model")}, donate_argnums=0)
        ... def train_step(state, batch): ...
    """
    ray = checked_executor(executor, address)
    if plan is not None and follow is not None:
        raise AlpaLiteError(
            f"plan and follow were given. A plan says already where parameters lie. At {user_line()}. Give one of them."
        )
    if num_microbatches is not None:
        options = checked_options(options)
        if options.num_microbatches not in (1, num_microbatches):
            raise AlpaLiteError(
                f"num_microbatches={num_microbatches} and PlanOptions(num_microbatches={options.num_microbatches}) "
                "differ. Give it in one place, or the same number in both."
            )
        options = replace(options, num_microbatches=num_microbatches)

    def wrap(function: Callable[..., Any]) -> ParallelStep:
        settings = static_argnums, static_argnames, donate_argnums
        request = Request.of(
            check_function(function, "al.parallelize"), pins, pin_like, options, *settings, follow, follow_like
        )
        return ParallelStep(request, cluster, checked_plan(plan), ray)

    return wrap if fn is None else wrap(fn)


def load_plan(path: str | PathLike[str]) -> Plan:
    """Read a plan that ``plan.save`` wrote. ``plan.bind(fn, *args)`` gives its pytrees back.

    Raises:
        PlanFileError: the file is missing, cut short, of another format version, or inconsistent.
    """
    return replace(read_plan(path), trees=Trees())


def load_export(out_dir: str | PathLike[str], rank: int) -> ExportedPart | ExportedStages:
    """Read one rank's part of a folder that ``plan.export`` wrote: the step, this rank's slices, the layouts.

    Of a plan with several stages: the programs of this rank's stages, and what is done with those of all in one step.

    Raises:
        ExportError: there is no export, a file is missing or changed, it is of another version, or has no such rank.

    Example:
        >>> part = al.load_export("out", rank=jax.process_index())
        >>> step = part.step(part.mesh())  # leaves in, leaves out, in the order of part.plan.input_paths
    """
    part = load_part(as_path(out_dir, 'al.load_export("folder", rank=0)', ExportError), rank)
    return replace(part, plan=replace(part.plan, trees=Trees()))


__all__ = [
    "Checkpoint",
    "Cluster",
    "Elastic",
    "FitResult",
    "HostData",
    "ParallelStep",
    "PlanTarget",
    "RayExecutor",
    "StepReport",
    "fit",
    "graph",
    "load_export",
    "load_plan",
    "parallelize",
    "plan",
]
