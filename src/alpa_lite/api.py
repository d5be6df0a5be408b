"""The public surface: ``plan``, ``parallelize``, ``Cluster``, ``PlanTarget``, ``load_plan``."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, overload

import jax

from alpa_lite import __version__
from alpa_lite.cluster.cluster import Cluster as ClusterData
from alpa_lite.cluster.symbolic import SymbolicCluster
from alpa_lite.core.program import Program
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.profile import roles_of
from alpa_lite.errors import AlpaLiteError, ArgumentsError, TraceError
from alpa_lite.executor.calibrate import local_cluster
from alpa_lite.executor.export import check_target, write_export
from alpa_lite.executor.load_export import ExportedPart, load_part
from alpa_lite.executor.local import CompiledStep, RunnableStep, SignatureChanged, local_mesh, runnable
from alpa_lite.executor.verify_plan import VerifyReport, verify_plan
from alpa_lite.intraop.restrict import weight_positions
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.identity import verify_identity
from alpa_lite.plan.load import load_plan as read_plan
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.padded import padded_like, plan_with_padding
from alpa_lite.planner.plan_step import Versions, mesh_task, plan_step
from alpa_lite.planner.symbolic import SymbolicPlan as PlansByNumber
from alpa_lite.planner.symbolic import SymbolicTask
from alpa_lite.report.graph import Graph, graph_of
from alpa_lite.trace.annotations import annotation_note, annotations_from_args
from alpa_lite.trace.paths import leaf_paths
from alpa_lite.trace.pins import resolve_pins
from alpa_lite.trace.program import Traced, trace


class Cluster(ClusterData):
    """Hosts, devices and links to plan for; pure data. ``parse`` reads a text, ``local`` looks at this process."""

    @staticmethod
    def local(calibrate: bool = False) -> ClusterData:
        """The devices of this process as one host.

        Args:
            calibrate: measure matmuls, memory and collectives for some seconds instead of taking the hardware table's
                figures; the record joins the identity of plans made with it.
        """
        return local_cluster(calibrate)

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


@dataclass(frozen=True, slots=True)
class _Trees:
    """Joins a plan to JAX; see ``plan.plan.PlanTrees``."""

    in_tree: Any = None
    out_tree: Any = None
    in_shapes: tuple[jax.ShapeDtypeStruct, ...] = ()

    @classmethod
    def of(cls, traced: Traced) -> _Trees:
        avals = [traced.flat.avals[v] for v in traced.flat.inputs]
        shapes = (jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals)
        return cls(traced.in_tree, traced.out_tree, tuple(shapes))

    def partition_spec(self, spec: ShardingSpec) -> Any:
        return partition_spec(spec)

    def in_specs(self, plan: Plan) -> Any:
        args, kwargs = jax.tree_util.tree_unflatten(self._known(self.in_tree), self._specs(plan.input_specs))
        return (args, kwargs) if kwargs else args

    def out_specs(self, plan: Plan) -> Any:
        return jax.tree_util.tree_unflatten(self._known(self.out_tree), self._specs(plan.output_specs))

    def _specs(self, specs: Sequence[ShardingSpec]) -> list[Any]:
        return [partition_spec(s) for s in specs]

    def _known(self, tree: Any) -> Any:
        if tree is None:
            raise AlpaLiteError(
                "this plan was read from a file, which holds paths but no pytrees. Its in_specs and out_specs, and an export "
                "without arguments, exist once it is bound. Use `plan.specs_by_path`, or `plan = plan.bind(fn, *args)` first."
            )
        return tree

    def bind(self, plan: Plan, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        traced = _traced_for(plan, fn, args, kwargs)
        return replace(plan, trees=_Trees.of(traced))

    def verify(self, plan: Plan, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VerifyReport:
        return verify_plan(plan, _traced_for(plan, fn, args, kwargs))

    def export(
        self, plan: Plan, fn: Any, out_dir: Path, args: tuple[Any, ...], kwargs: dict[str, Any], overwrite: bool
    ) -> None:
        check_target(out_dir, overwrite=overwrite)
        settings = dict(plan.options)
        static: Any = settings.get("static_argnums", ())
        names: Any = settings.get("static_argnames", ())
        if not args and not kwargs and not static and not names:
            args, kwargs = jax.tree_util.tree_unflatten(self._known(self.in_tree), self.in_shapes)
        traced = _traced_for(plan, fn, args, kwargs)
        dynamic = [a for i, a in enumerate(args) if i not in static]
        dynamic += [kwargs[k] for k in sorted(kwargs) if k not in names]
        write_export(plan, traced, jax.tree_util.tree_leaves(dynamic), out_dir, overwrite=overwrite)


_VERSIONS = Versions(jax=jax.__version__, alpa_lite=__version__)
_JIT_SETTINGS = ("static_argnums", "static_argnames", "donate_argnums")


def _traced_for(plan: Plan, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """The traced function, checked to be the plan's; how to trace it is recorded with the plan."""
    settings: dict[str, Any] = {name: value for name, value in plan.options if name in _JIT_SETTINGS}
    try:
        traced = trace(_plain(fn), args, kwargs, rules=_rules_of(plan), **settings)
    except TraceError as error:
        static = settings.get("static_argnums", ()), settings.get("static_argnames", ())
        raise _other_arguments(plan, args, kwargs, *static) or error from error
    traced = padded_like(traced, plan.paddings, _rules_of(plan))
    check_identity(plan, traced)
    return traced


def _rules_of(plan: Plan) -> tuple[NamedRule, ...]:
    """The user's rules by primitive that a plan was made with."""
    texts: Any = dict(plan.options).get("rules", ())
    return tuple(map(NamedRule.read, texts))


def _other_arguments(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], static_argnums: Any, static_argnames: Any
) -> ArgumentsError | None:
    """If the arguments have other leaves than the plan's, that is why the function cannot be traced with them."""
    trees = {str(i): a for i, a in enumerate(args) if i not in static_argnums}
    trees |= {name: a for name, a in kwargs.items() if name not in static_argnames}
    given = [path for name, tree in trees.items() for path, _ in leaf_paths(tree, name)]
    missing = [path for path in plan.input_paths if path not in given]
    new = [path for path in given if path not in plan.input_paths]
    if not missing and not new:
        return None
    facts = [f"they lack {', '.join(map(repr, missing[:3]))}"] if missing else []
    facts += [f"the plan does not know {', '.join(map(repr, new[:3]))}"] if new else []
    return ArgumentsError(
        f"the arguments do not fit the plan: {'; '.join(facts)} ({len(given)} leaves given, {len(plan.inputs)} planned). "
        f"A plan holds for exactly the argument tree it was made for. At {user_line()}. Pass such arguments, or make a "
        "new plan for these with al.plan."
    )


def _plain(fn: Any) -> Callable[..., Any]:
    """The user's function, also of an already parallelized one."""
    return fn._request.fn if isinstance(fn, ParallelStep) else fn


def check_identity(plan: Plan, traced: Traced) -> None:
    """Refuse a plan of another program; warn about another JAX version."""
    import warnings

    for text in verify_identity(plan, traced.program, jax_version=jax.__version__):
        warnings.warn(text, stacklevel=3)


def user_line() -> str:
    """``file:line (function)`` of the innermost frame outside of this package and JAX."""
    for frame in reversed(traceback.extract_stack()):
        if "/alpa_lite/" not in frame.filename and "/jax/" not in frame.filename and "contextlib" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return "unknown"


class SymbolicPlan(PlansByNumber):
    __doc__ = PlansByNumber.__doc__

    def plot(self, path: str | PathLike[str], **budgets: float) -> None:
        """Draws memory and traffic per device over the number of workers, as PNG, SVG or PDF by the name's ending.

        Args:
            path: of the picture.
            budgets: lines of memory to compare with, e.g. ``budget_bytes=16e9``.
        """
        from alpa_lite.report.symbolic import draw_symbolic

        draw_symbolic(self, path, **budgets)


@overload
def plan(
    fn: Callable[..., Any],
    *args: Any,
    cluster: ClusterData,
    pins: Any = None,
    pin_like: Mapping[str, str] | None = None,
    options: PlanOptions | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> Plan: ...


@overload
def plan(
    fn: Callable[..., Any],
    *args: Any,
    cluster: SymbolicCluster,
    pins: Any = None,
    pin_like: Mapping[str, str] | None = None,
    options: PlanOptions | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> SymbolicPlan: ...


def plan(
    fn: Callable[..., Any],
    *args: Any,
    cluster: ClusterData | SymbolicCluster,
    pins: Any = None,
    pin_like: Mapping[str, str] | None = None,
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
    if isinstance(fn, ParallelStep):
        if not isinstance(cluster, SymbolicCluster):
            return fn._plan_for(args, kwargs, cluster, pins, pin_like, options)[1]
        request = fn._request_with(pins, pin_like, options)
    else:
        settings = _ints(static_argnums), _names(static_argnames), _ints(donate_argnums)
        request = _Request(fn, pins, pin_like, options or PlanOptions(), *settings)
    if isinstance(cluster, SymbolicCluster):
        return request.symbolic_plan(args, kwargs, cluster, user_line())
    return request.plan(args, kwargs, cluster, user_line())[1]


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
        static = {"static_argnums": _ints(static_argnums), "static_argnames": _names(static_argnames)}
        traced = trace(_plain(fn), args, kwargs, **static)
    else:
        traced = _traced_for(plan, fn, args, kwargs)
    return graph_of(traced.program, weight_positions(traced.program, roles_of(traced.program)), plan)


def _ints(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, slots=True)
class _Request:
    """What a user asked for, whatever the arguments."""

    fn: Callable[..., Any]
    pins: Any
    pin_like: Mapping[str, str] | None
    options: PlanOptions
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        return trace(
            self.fn,
            args,
            kwargs,
            static_argnums=self.static_argnums,
            static_argnames=self.static_argnames,
            donate_argnums=self.donate_argnums,
            rules=self.options.rules,
        )

    def plan(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cluster: ClusterData,
        source: str,
        progress: Callable[[str], None] | None = None,
    ) -> tuple[Traced, Plan]:
        self._check(cluster, source)
        if self.options.verbose:
            progress = _tell
        traced = self.trace(args, kwargs)
        pins, notes = self._pins_and_notes(traced, args, kwargs, source)

        def plan_program(program: Program, pins: ResolvedPins) -> Plan:
            return plan_step(program, cluster, pins, self.options, _VERSIONS, notes=notes, progress=progress)

        if self.options.padding == "off":
            made = plan_program(traced.program, pins)
        else:
            traced, made = plan_with_padding(traced, cluster, pins, plan_program, self.options.rules)
        return traced, self._finished(made, traced)

    def symbolic_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], cluster: SymbolicCluster, source: str
    ) -> SymbolicPlan:
        if self.options.symbol != cluster.name:
            raise AlpaLiteError(
                f"mesh_shape={self.options.mesh_shape} was given for the symbolic cluster '{cluster}'. One of its sizes must be "
                f"the name {cluster.name!r}. At {source}. Give PlanOptions(mesh_shape=({cluster.name!r},)), or "
                f"({cluster.name!r}, 2) with an axis of fixed size beside it."
            )
        traced = self.trace(args, kwargs)
        pins, notes = self._pins_and_notes(traced, args, kwargs, source)
        task = SymbolicTask(
            task=mesh_task(traced.program, cluster.host, pins, replace(self.options, padding="off")),
            cluster=cluster,
            versions=_VERSIONS,
            notes=notes,
            finish=lambda made: self._finished(made, traced),
            source=source,
        )
        return SymbolicPlan(task)

    def _check(self, cluster: ClusterData, source: str) -> None:
        """Refuse what is no cluster, and names where devices are needed."""
        if isinstance(cluster, SymbolicCluster):
            raise AlpaLiteError(
                f"the cluster '{cluster}' is symbolic, and this needs devices. A number of workers must be chosen before a step "
                f"runs. At {source}. Plan with al.plan(..., cluster=...), choose with plan.specialize({cluster.name}=8), and "
                "run that with al.parallelize(fn, plan=...)."
            )
        if not isinstance(cluster, ClusterData):
            raise AlpaLiteError(
                f"cluster={cluster!r} is no cluster. It must be an al.Cluster. At {source}. Give "
                "al.Cluster.parse('1x8:h100-sxm'), or al.Cluster.local() for the devices of this process."
            )
        if self.options.symbol is not None:
            raise AlpaLiteError(
                f"mesh_shape={self.options.mesh_shape} holds the name {self.options.symbol!r}, and the cluster {cluster} has a "
                f"known number of devices. Sizes must be numbers there. At {source}. Give numbers, e.g. "
                f"mesh_shape=({cluster.num_devices},), or a cluster=al.Cluster.symbolic({self.options.symbol!r}, ...)."
            )

    def _pins_and_notes(
        self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], source: str
    ) -> tuple[ResolvedPins, tuple[str, ...]]:
        found = annotations_from_args(args, kwargs)
        binding = self.options.annotations == "pin"
        pins = self.resolve(traced, source, {a.path: a.spec for a in found} if binding else None)
        return pins, annotation_note(found, binding=binding)

    def _finished(self, made: Plan, traced: Traced) -> Plan:
        settings = tuple((name, getattr(self, name)) for name in _JIT_SETTINGS if getattr(self, name))
        made = replace(made, options=(*made.options, *settings))
        return replace(made, trees=_Trees.of(traced))

    def resolve(self, traced: Traced, source: str, annotations: Mapping[str, Any] | None) -> ResolvedPins:
        program = traced.program
        return resolve_pins(
            self.pins,
            self.pin_like,
            program.input_paths,
            [program.values[v].shape for v in program.inputs],
            program.output_paths,
            [program.values[v].shape if v >= 0 else () for v in program.outputs],
            mesh=None,
            source=source,
            annotations=annotations,
        )


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: ClusterData | None = None,
    pins: Any = None,
    pin_like: Mapping[str, str] | None = None,
    num_microbatches: int | None = None,
    options: PlanOptions | None = None,
    plan: Plan | None = None,
    executor: str = "local",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Any:
    """Plan, compile and run a step on the devices of this process; usable as a bare decorator.

    Args:
        fn: an ordinary JAX function; any pytrees in and out.
        cluster: what to plan for; None = the devices of this process.
        plan: a plan to run instead of making one (e.g. from ``load_plan``).
        executor: "local".
        pins, pin_like, options, static_argnums, static_argnames, donate_argnums: as for ``plan``.
        num_microbatches: as in ``PlanOptions``; giving both, and different, is an error.

    Returns:
        A ``ParallelStep``: calling it plans and compiles on first use, then runs; donated arrays are gone afterwards.

    Example:
        >>> @al.parallelize(pins={"0/params/*/kernel": P(None, "model")}, donate_argnums=0)
        ... def train_step(state, batch): ...
    """
    if executor != "local":
        raise AlpaLiteError(f"executor={executor!r} is not known; allowed is 'local'. Leave it out.")
    options = options or PlanOptions()
    if num_microbatches is not None and num_microbatches != options.num_microbatches:
        if options.num_microbatches != 1:
            raise AlpaLiteError(
                f"num_microbatches={num_microbatches} and PlanOptions(num_microbatches={options.num_microbatches}) "
                "differ. Give it in one place, or the same number in both."
            )
        options = replace(options, num_microbatches=num_microbatches)

    def wrap(function: Callable[..., Any]) -> ParallelStep:
        request = _Request(
            function, pins, pin_like, options, _ints(static_argnums), _names(static_argnames), _ints(donate_argnums)
        )
        return ParallelStep(request, cluster, plan, user_line())

    return wrap if fn is None else wrap(fn)


class ParallelStep:
    """A step that runs under a plan. Make one with ``parallelize``."""

    def __init__(self, request: _Request, cluster: ClusterData | None, given: Plan | None, source: str) -> None:
        self._request, self._cluster, self._given, self._source = request, cluster, given, source
        self._steps: dict[Any, tuple[Traced, RunnableStep]] = {}
        self._planned: dict[Any, tuple[Traced, Plan]] = {}
        self._last: RunnableStep | None = None
        self.__wrapped__ = request.fn
        self.__name__ = getattr(request.fn, "__name__", "step")
        self.__doc__ = request.fn.__doc__

    def __repr__(self) -> str:
        return f"<al.parallelize of {getattr(self._request.fn, '__qualname__', self._request.fn)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The fast path leaves every check to jit's own cache; static and keyword arguments need sorting out first.
        if self._last is not None and not kwargs and not self._request.static_argnums:
            try:
                return self._last.run(*args)
            except SignatureChanged:
                pass
            except ValueError:
                if self._key(args, kwargs) == self._last_key:
                    return self._run_placed(args)
        step = self._step(args, kwargs)
        return self._run(step, self._dynamic(args, kwargs))

    def _run(self, step: RunnableStep, dynamic: tuple[Any, ...]) -> Any:
        try:
            return step.run(*dynamic)
        except ValueError as error:
            if not any(isinstance(x, jax.Array) and x.committed for x in jax.tree_util.tree_leaves(dynamic)):
                raise
            del error  # arrays committed to another layout: move them, as jit does with uncommitted ones
        return step.run(*step.place(dynamic))

    def _run_placed(self, args: tuple[Any, ...]) -> Any:
        assert self._last is not None
        return self._run(self._last, args)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ``jax.ShapeDtypeStruct``), made on first use."""
        return self._traced_plan(args, kwargs)[1]

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep:
        """Compile for these arguments without running; ``.audit()`` compares the result with the plan."""
        traced, planned = self._traced_plan(args, kwargs)
        step = self._step(args, kwargs)
        del traced
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), _dtype(x)), self._dynamic(args, kwargs)
        )
        return CompiledStep(planned, step.run.lower(*shapes).compile())

    def verify(self, *args: Any, **kwargs: Any) -> VerifyReport:
        """Compile the planned step with the cluster's own compiler, without its devices; see ``Plan.verify``."""
        traced, planned = self._traced_plan(args, kwargs)
        return verify_plan(planned, traced)

    def init(self, init_fn: Callable[..., Any], *init_args: Any, argnum: int = 0) -> Any:
        """``init_fn(*init_args)``, computed directly in the planned layout of argument ``argnum``.

        Raises:
            ArgumentsError: there is no plan yet, or the result is not shaped like that argument.
        """
        known = next(iter(self._planned.values()), None)
        planned = known[1] if known else self._given
        if planned is None:
            raise ArgumentsError(
                "step.init needs a plan to know the layout, and there is none yet. A plan exists after step.plan(...), a "
                f"call, or with parallelize(plan=...). At {user_line()}. Call step.plan(*shapes) first."
            )
        shape = jax.eval_shape(init_fn, *init_args)
        leaves, tree = jax.tree_util.tree_flatten(shape)
        prefix = f"{argnum}"
        chosen = [leaf for leaf in planned.inputs if leaf.path == prefix or leaf.path.startswith(prefix + "/")]
        want = [(leaf.value.shape, leaf.value.dtype) for leaf in chosen]
        got = [(tuple(x.shape), str(x.dtype)) for x in leaves]
        if want != got:
            first = next(
                (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got))
            )
            path = chosen[first].path if first < len(chosen) else "(no such leaf)"
            raise ArgumentsError(
                f"init_fn returns {len(got)} leaves, argument {argnum} of the plan has {len(want)}; first difference at "
                f"{path}. It must return exactly what the step takes there. At {user_line()}. Check init_fn and argnum."
            )
        mesh = local_mesh(planned.mesh)
        shardings = [jax.sharding.NamedSharding(mesh, partition_spec(leaf.spec)) for leaf in chosen]
        return jax.jit(init_fn, out_shardings=jax.tree_util.tree_unflatten(tree, shardings))(*init_args)

    # -- planning and lowering, once per signature ------------------------------------------------------------------

    _last_key: Any = None

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        static = tuple((i, args[i]) for i in self._request.static_argnums if i < len(args))
        named = tuple((k, kwargs[k]) for k in self._request.static_argnames if k in kwargs)
        dynamic = self._dynamic(args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten(dynamic)
        shapes = tuple((jax.numpy.shape(x), str(_dtype(x))) for x in leaves)
        return static, named, tuple(sorted(k for k in kwargs)), tree, shapes

    def _dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        positional = (a for i, a in enumerate(args) if i not in self._request.static_argnums)
        return (*positional, *(kwargs[k] for k in sorted(kwargs) if k not in self._request.static_argnames))

    def _traced_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Traced, Plan]:
        key = self._key(args, kwargs)
        if key not in self._planned:
            if self._given is not None:
                traced = self._trace_given(self._given, args, kwargs)
                given = replace(self._given, trees=_Trees.of(traced))
                self._planned[key] = (traced, given)
            else:
                self._planned[key] = self._plan_for(args, kwargs, None, None, None, None)
        return self._planned[key]

    def _trace_given(self, given: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """Trace for a plan that the user brought; the step's own settings count, and must be those of the plan."""
        request = replace(self._request, options=replace(self._request.options, rules=_rules_of(given)))
        try:
            traced = request.trace(args, kwargs)
        except TraceError as error:
            static = request.static_argnums, request.static_argnames
            raise _other_arguments(given, args, kwargs, *static) or error from error
        traced = padded_like(traced, given.paddings, request.options.rules)
        check_identity(given, traced)
        return traced

    def _request_with(self, pins: Any, pin_like: Mapping[str, str] | None, options: PlanOptions | None) -> _Request:
        return replace(
            self._request,
            pins=self._request.pins if pins is None else pins,
            pin_like=self._request.pin_like if pin_like is None else pin_like,
            options=options or self._request.options,
        )

    def _plan_for(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cluster: ClusterData | None,
        pins: Any,
        pin_like: Mapping[str, str] | None,
        options: PlanOptions | None,
    ) -> tuple[Traced, Plan]:
        request = self._request_with(pins, pin_like, options)
        chosen = cluster or self._cluster or local_cluster(False)
        with _progress_line(request.options.verbose) as progress:
            return request.plan(args, kwargs, chosen, self._source, progress)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunnableStep:
        key = self._key(args, kwargs)
        if key not in self._steps:
            traced, planned = self._traced_plan(args, kwargs)
            positions = [i for i in range(len(args)) if i not in self._request.static_argnums]
            donate = tuple(positions.index(i) for i in self._request.donate_argnums if i in positions)
            self._steps[key] = (traced, runnable(traced, planned, donate, local_mesh(planned.mesh)))
        self._last, self._last_key = self._steps[key][1], key
        return self._last


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x))


def _tell(text: str) -> None:
    sys.stderr.write(f"alpa_lite: {text}\n")


@contextlib.contextmanager
def _progress_line(verbose: bool) -> Iterator[Callable[[str], None] | None]:
    """A line on a terminal while planning; nothing elsewhere, nor where every line is told anyway."""
    if verbose or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("alpa_lite: tracing") as status:
        yield lambda text: status.update(f"alpa_lite: {text}")


def load_plan(path: str | PathLike[str]) -> Plan:
    """Read a plan that ``plan.save`` wrote. ``plan.bind(fn, *args)`` gives its pytrees back.

    Raises:
        PlanFileError: the file is missing, cut short, of another format version, or inconsistent.
    """
    return replace(read_plan(path), trees=_Trees())


def load_export(out_dir: str | PathLike[str], rank: int) -> ExportedPart:
    """Read one rank's part of a folder that ``plan.export`` wrote: the step, this rank's slices, the layouts.

    Raises:
        ExportError: there is no export, a file is missing or changed, it is of another version, or has no such rank.

    Example:
        >>> part = al.load_export("out", rank=jax.process_index())
        >>> step = part.step(part.mesh())  # leaves in, leaves out, in the order of part.plan.input_paths
    """
    part = load_part(Path(out_dir), rank)
    return replace(part, plan=replace(part.plan, trees=_Trees()))


__all__ = ["Cluster", "ParallelStep", "PlanTarget", "load_export", "load_plan", "parallelize", "plan"]
