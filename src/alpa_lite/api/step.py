"""A step that runs under a plan: planned, lowered and compiled on first use, once per signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from alpa_lite.api.bound import JIT_SETTINGS, Parallelized, Trees, staged_for, traced_for, verified
from alpa_lite.api.request import Request
from alpa_lite.cluster.cluster import Cluster as ClusterData
from alpa_lite.errors import ArgumentsError, user_line
from alpa_lite.executor.calibrate import local_cluster
from alpa_lite.executor.local import CompiledStep, RunnableStep, SignatureChanged, local_mesh, runnable
from alpa_lite.executor.pipeline import CompiledPipeline, RunnablePipeline, runnable_pipeline
from alpa_lite.executor.staged_array import StagedArray
from alpa_lite.executor.verify_plan import VerifyReport
from alpa_lite.executor.verify_stages import StagesReport
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.leaf_rows import split_path
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf
from alpa_lite.trace.program import Traced


class ParallelStep(Parallelized):
    """A step that runs under a plan. Make one with ``parallelize``."""

    def __init__(self, request: Request, cluster: ClusterData | None, given: Plan | None) -> None:
        self._request, self._cluster, self._given = request, cluster, given
        self._steps: dict[Any, tuple[Traced, RunnableStep | RunnablePipeline]] = {}
        self._planned: dict[Any, tuple[Traced, Plan]] = {}
        self._last: RunnableStep | RunnablePipeline | None = None
        self._last_key: Any = None
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
                    return self._run(self._last, args)
        step = self._step(args, kwargs)
        return self._run(step, self._dynamic(args, kwargs))

    def _run(self, step: RunnableStep | RunnablePipeline, dynamic: tuple[Any, ...]) -> Any:
        try:
            return step.run(*dynamic)
        except ValueError as error:
            if not any(isinstance(x, jax.Array) and x.committed for x in jax.tree_util.tree_leaves(dynamic)):
                raise
            del error  # arrays committed to another layout: move them, as jit does with uncommitted ones
        return step.run(*step.place(dynamic))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ``jax.ShapeDtypeStruct``), made on first use."""
        return self._traced_plan(args, kwargs)[1]

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep | CompiledPipeline:
        """Compile for these arguments without running; ``.audit()`` compares the result with the plan."""
        _, planned = self._traced_plan(args, kwargs)
        step = self._step(args, kwargs)
        if isinstance(step, RunnablePipeline):
            return step.compile()
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), _dtype(x)), self._dynamic(args, kwargs)
        )
        return CompiledStep(planned, step.run.lower(*shapes).compile())

    def verify(self, *args: Any, **kwargs: Any) -> VerifyReport | StagesReport:
        """Compile the planned step with the cluster's own compiler, without its devices; see ``Plan.verify``."""
        traced, planned = self._traced_plan(args, kwargs)
        return verified(planned, traced)

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
        want = _whole_types(chosen)
        got = [(tuple(x.shape), str(x.dtype)) for x in leaves]
        if list(want.values()) != got:
            pairs = enumerate(zip(want.values(), got, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(want), len(got)))
            path = list(want)[first] if first < len(want) else "(no such leaf)"
            raise ArgumentsError(
                f"init_fn returns {len(got)} leaves, argument {argnum} of the plan has {len(want)}; first difference at "
                f"{path}. It must return exactly what the step takes there. At {user_line()}. Check init_fn and argnum."
            )
        return jax.tree_util.tree_unflatten(tree, _created(init_fn, init_args, planned, chosen))

    # -- planning and lowering, once per signature ------------------------------------------------------------------

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
                own = {name: getattr(self._request, name) for name in JIT_SETTINGS}
                traced = traced_for(self._given, self._request.fn, args, kwargs, own)
                given = replace(self._given, trees=Trees.of(traced))
                self._planned[key] = (traced, given)
            else:
                cluster = self._cluster or local_cluster(False)
                self._planned[key] = self._request.plan(args, kwargs, cluster)
        return self._planned[key]

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunnableStep | RunnablePipeline:
        key = self._key(args, kwargs)
        if key not in self._steps:
            traced, planned = self._traced_plan(args, kwargs)
            positions = [i for i in range(len(args)) if i not in self._request.static_argnums]
            donate = tuple(positions.index(i) for i in self._request.donate_argnums if i in positions)
            self._steps[key] = (traced, _runnable(traced, planned, donate))
        self._last, self._last_key = self._steps[key][1], key
        return self._last


def _whole_types(leaves: list[Leaf]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> (shape, type) of the leaves that these are, or are parts of."""
    found = {}
    for leaf in leaves:
        path, rows = split_path(leaf.path)
        shape = leaf.value.shape if rows is None else (rows[1], *leaf.value.shape[1:])
        found[path] = shape, leaf.value.dtype
    return found


def _created(init_fn: Callable[..., Any], init_args: tuple[Any, ...], plan: Plan, leaves: list[Leaf]) -> list[Any]:
    """Leaves of ``init_fn``'s result, each (or its rows) computed on the devices of its stage alone."""
    position = {path: i for i, path in enumerate(_whole_types(leaves))}
    of_leaf = [(position[path], rows) for path, rows in (split_path(leaf.path) for leaf in leaves)]
    made: dict[int, Any] = {}
    for number in sorted({leaf.stage for leaf in leaves}):
        stage = plan.stages[number]
        mesh = local_mesh(stage.mesh, jax.devices()[stage.first_device :])
        own = [i for i, leaf in enumerate(leaves) if leaf.stage == number]
        shardings = [NamedSharding(mesh, partition_spec(leaves[i].spec)) for i in own]

        def part(*args: Any, own: list[int] = own) -> list[Any]:
            found = jax.tree_util.tree_leaves(init_fn(*args))
            return [_rows(found[of_leaf[i][0]], of_leaf[i][1]) for i in own]

        made.update(zip(own, jax.jit(part, out_shardings=shardings)(*init_args), strict=True))
    parts: list[list[Any]] = [[] for _ in position]
    for i, (leaf, _) in enumerate(of_leaf):
        parts[leaf].append(made[i])
    return [found[0] if len(found) == 1 else StagedArray(found) for found in parts]


def _rows(array: Any, rows: tuple[int, int] | None) -> Any:
    return array if rows is None else array[slice(*rows)]


def _runnable(traced: Traced, plan: Plan, donate: tuple[int, ...]) -> RunnableStep | RunnablePipeline:
    if plan.pipeline is None:
        return runnable(traced, plan, donate, local_mesh(plan.mesh))
    return runnable_pipeline(traced, staged_for(plan, traced), plan, jax.devices())


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x))
