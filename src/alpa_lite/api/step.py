"""A step that runs under a plan: planned, lowered and compiled on first use, once per signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from alpa_lite._jax_compat import deleted_arrays_crash
from alpa_lite.api.asked import check_donated
from alpa_lite.api.bound import JIT_SETTINGS, Parallelized, Trees, staged_for, traced_for, verified
from alpa_lite.api.checkpoint import argument_tree, check_saved, checked_step, checkpoint_folder
from alpa_lite.api.given import refuse_deleted
from alpa_lite.api.request import Request
from alpa_lite.cluster.cluster import Cluster as ClusterData
from alpa_lite.errors import AlpaLiteError, ArgumentsError, user_line
from alpa_lite.executor.calibrate import local_cluster
from alpa_lite.executor.local import (
    CompiledStep,
    RunnableStep,
    SignatureChanged,
    leaf_type,
    local_mesh,
    own_mesh,
    runnable,
    stage_meshes,
)
from alpa_lite.executor.pipeline import CompiledPipeline, RunnablePipeline, runnable_pipeline
from alpa_lite.executor.places import creator, places_of
from alpa_lite.executor.processes import JobStep, check_job
from alpa_lite.executor.save_restore import Saving, restored
from alpa_lite.executor.state_rows import whole_types
from alpa_lite.executor.verify_plan import VerifyReport
from alpa_lite.executor.verify_stages import StagesReport
from alpa_lite.plan.checkpoint import CheckpointManifest
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.trace.program import Traced

if TYPE_CHECKING:
    from alpa_lite.executor.ray.checkpoints import RemoteSaving
    from alpa_lite.executor.ray.remote_step import RemoteStep
    from alpa_lite.executor.ray.settings import RayExecutor

    Runnable = RunnableStep | RunnablePipeline | RemoteStep


class ParallelStep(Parallelized):
    """A step that runs under a plan. Make one with ``parallelize``."""

    def __init__(
        self, request: Request, cluster: ClusterData | None, given: Plan | None, ray: RayExecutor | None = None
    ) -> None:
        self._request, self._cluster, self._given, self._ray = request, cluster, given, ray
        self._steps: dict[Any, tuple[Traced, Runnable]] = {}
        self._planned: dict[Any, tuple[Traced, Plan]] = {}
        self._last: Runnable | None = None
        self._last_key: Any = None
        self._remotes: list[RemoteStep] = []
        self.timed_every = 0  # of so many steps on workers, one waits for every program, to tell how busy they were
        self.__wrapped__ = request.fn
        self.__name__ = getattr(request.fn, "__name__", "step")
        self.__doc__ = request.fn.__doc__

    def __repr__(self) -> str:
        return f"<al.parallelize of {getattr(self._request.fn, '__qualname__', self._request.fn)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._ray is None and deleted_arrays_crash():  # workers know more of their arrays
            refuse_deleted(args, kwargs)
        # The fast path leaves every other check to jit's own cache; static and keyword arguments need sorting out first.
        if self._last is not None and not kwargs and not self._request.static_argnums:
            try:
                with own_mesh():
                    return self._last.run(*args)
            except SignatureChanged:
                pass
            except AlpaLiteError:  # ours is no complaint of jit's about layouts
                raise
            except RuntimeError as error:
                self._told_if_deleted(args, kwargs, error)
                raise
            except (ValueError, TypeError):  # the latter of what is no array
                if self._key(args, kwargs) == self._last_key:
                    if self._ray is not None:  # of a function on a worker, no complaint about layouts
                        raise
                    return self._run(self._last, args, kwargs)
        check_donated(args, self._request.static_argnums, self._request.donate_argnums)
        step = self._step(args, kwargs)
        return self._run(step, args, kwargs)

    def _run(self, step: Runnable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._run_moved(step, self._dynamic(args, kwargs))
        except AlpaLiteError:
            raise
        except (ValueError, RuntimeError) as error:
            self._told_if_deleted(args, kwargs, error)
            raise

    def _told_if_deleted(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        if self._ray is None:
            refuse_deleted(args, kwargs, error)

    def _run_moved(self, step: Runnable, dynamic: tuple[Any, ...]) -> Any:
        try:
            with own_mesh():
                return step.run(*dynamic)
        except AlpaLiteError:
            raise
        except ValueError as error:
            committed = any(isinstance(x, jax.Array) and x.committed for x in jax.tree_util.tree_leaves(dynamic))
            if self._ray is not None or not committed:
                raise
            del error  # arrays committed to another layout: move them, as jit does with uncommitted ones
        with own_mesh():
            return step.run(*step.place(dynamic))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ``jax.ShapeDtypeStruct``), made on first use."""
        return self._traced_plan(args, kwargs)[1]

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep | CompiledPipeline:
        """Compile for these arguments without running; ``.audit()`` compares the result with the plan."""
        traced, planned = self._traced_plan(args, kwargs)
        step = self._step(args, kwargs) if self._ray is None else self._local(traced, planned, args)
        if isinstance(step, RunnablePipeline):
            with own_mesh():
                return step.compile()
        assert isinstance(step, RunnableStep)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), _dtype(x)), self._dynamic(args, kwargs)
        )
        with own_mesh():
            return step.compile(*shapes)

    def verify(self, *args: Any, **kwargs: Any) -> VerifyReport | StagesReport:
        """Compile the planned step with the cluster's own compiler, without its devices; see ``Plan.verify``."""
        traced, planned = self._traced_plan(args, kwargs)
        return verified(planned, traced)

    def init(self, init_fn: Callable[..., Any], *init_args: Any, argnum: int = 0) -> Any:
        """``init_fn(*init_args)``, computed directly in the planned layout of argument ``argnum``.

        Raises:
            ArgumentsError: there is no plan yet, or the result is not shaped like that argument.
        """
        planned = self._known_plan("step.init")
        shape = jax.eval_shape(init_fn, *init_args)
        leaves, tree = jax.tree_util.tree_flatten(shape)
        prefix = f"{argnum}"
        chosen = [leaf for leaf in planned.inputs if leaf.path == prefix or leaf.path.startswith(prefix + "/")]
        want = whole_types(chosen)
        got = [(tuple(x.shape), str(x.dtype)) for x in leaves]
        if list(want.values()) != got:
            pairs = enumerate(zip(want.values(), got, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(want), len(got)))
            path = list(want)[first] if first < len(want) else "(no such leaf)"
            raise ArgumentsError(
                f"init_fn returns {len(got)} leaves, argument {argnum} of the plan has {len(want)}; first difference at "
                f"{path}. It must return exactly what the step takes there. At {user_line()}. Check init_fn and argnum."
            )
        if self._ray is None:
            if jax.process_count() > 1:
                check_job(planned, self.__name__)
            with own_mesh():
                return creator(init_fn, places_of(chosen, stage_meshes(planned)))(*init_args)
        from alpa_lite.executor.ray.create import created

        return jax.tree_util.tree_unflatten(tree, created(self._remote(), init_fn, init_args, chosen))

    def save(self, dir: str | PathLike[str], state: Any, *, step: int = 0, argnum: int = 0) -> Path:
        """Write ``state`` as the checkpoint of a number of steps, to be restored under this plan or any other.

        Args:
            dir: folder of all checkpoints; none of them is removed (``al.Checkpoint`` keeps the last few).
            state: a value of argument ``argnum``, e.g. as the step returned it.
            step: how many steps it has seen.

        Returns:
            The checkpoint's own folder, which is there whole or not at all.

        Raises:
            ArgumentsError: there is no plan yet.
            CheckpointError: ``state`` is not what the step takes, or it cannot be written.
            WorkerLost: a worker that keeps it was lost.

        Example:
            >>> step.save("checkpoints", state, step=200)
            >>> state = al.parallelize(train_step, plan=other_plan).restore("checkpoints")  # after .plan(*shapes)
        """
        planned = self._known_plan("step.save")
        folder = checkpoint_folder(dir, "step.save(dir, state)")
        check_saved(state, planned, argnum)
        saving = self.begin_save(folder, checked_step(step, "step.save(dir, state"), state)
        try:
            return saving.wait()
        except KeyboardInterrupt:
            saving.leave()
            raise

    def begin_save(
        self,
        folder: CheckpointFolder,
        number: int,
        state: Any,
        *,
        position: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> Saving | RemoteSaving:
        """Begin to write a checkpoint; what is returned tells when it is complete. The state may be donated at once."""
        if self._ray is None:
            planned = self._known_plan("step.save")
            return Saving(folder, number, state, planned, position=position, extra=extra)
        from alpa_lite.executor.ray.checkpoints import RemoteSaving

        return RemoteSaving(self._keeper(state), folder, number, state, position=position, extra=extra)

    def restore(self, dir: str | PathLike[str], step: int | None = None, argnum: int = 0) -> Any:
        """The state of a checkpoint in the planned layout of argument ``argnum``, each leaf on the devices of its stage alone.

        Args:
            dir: folder of all checkpoints.
            step: which one; None for the newest.

        Raises:
            ArgumentsError: there is no plan yet.
            CheckpointError: there is no such checkpoint, it is damaged, or holds another state.
        """
        planned = self._known_plan("step.restore")
        if self._ray is None and jax.process_count() > 1:
            check_job(planned, self.__name__)
        tree = argument_tree(planned, argnum)
        folder = checkpoint_folder(dir, "step.restore(dir)")
        number = None if step is None else checked_step(step, "step.restore(dir")
        leaves, _ = self._restored(folder, number, planned, argnum)
        return jax.tree_util.tree_unflatten(tree, leaves)

    def _restored(
        self, folder: CheckpointFolder, number: int | None, planned: Plan, argnum: int
    ) -> tuple[list[Any], CheckpointManifest]:
        if self._ray is None:
            with own_mesh():
                return restored(folder, number, planned, argnum)
        from alpa_lite.executor.ray.checkpoints import remote_restored

        return remote_restored(self._remote(), folder, number, argnum)

    def restore_newest(self, folder: CheckpointFolder) -> tuple[Any, CheckpointManifest] | None:
        """The state of the newest complete checkpoint with what came along; None if there is none."""
        if folder.newest() is None:
            return None
        planned = self._known_plan("step.restore")
        leaves, manifest = self._restored(folder, None, planned, 0)
        return jax.tree_util.tree_unflatten(argument_tree(planned, 0), leaves), manifest

    def known_plan(self) -> Plan | None:
        """The plan that was made first, or given; None if there is none yet."""
        known = next(iter(self._planned.values()), None)
        return known[1] if known else self._given

    def _known_plan(self, call: str) -> Plan:
        planned = self.known_plan()
        if planned is None:
            raise ArgumentsError(
                f"{call} needs a plan to know the layout, and there is none yet. A plan exists after step.plan(...), a "
                f"call, or with parallelize(plan=...). At {user_line()}. Call step.plan(*shapes) first."
            )
        return planned

    # -- planning and lowering, once per signature ------------------------------------------------------------------

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        static = tuple((i, args[i]) for i in self._request.static_argnums if i < len(args))
        named = tuple((k, kwargs[k]) for k in self._request.static_argnames if k in kwargs)
        dynamic = self._dynamic(args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten(dynamic)
        return static, named, tuple(sorted(k for k in kwargs)), tree, tuple(map(leaf_type, leaves))

    def _dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        positional = (a for i, a in enumerate(args) if i not in self._request.static_argnums)
        return (*positional, *(kwargs[k] for k in sorted(kwargs) if k not in self._request.static_argnames))

    def _traced_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Traced, Plan]:
        key = self._key(args, kwargs)
        if key not in self._planned:
            args, kwargs = jax.tree.map(_shape_of_remote, (args, kwargs))
            if self._given is not None:
                own = {name: getattr(self._request, name) for name in JIT_SETTINGS}
                traced = traced_for(self._given, self._request.fn, args, kwargs, own)
                given = replace(self._given, trees=Trees.of(traced))
                self._planned[key] = (traced, given)
            else:
                cluster = self._cluster or self._found_cluster()
                self._planned[key] = self._request.plan(args, kwargs, cluster)
        return self._planned[key]

    def _found_cluster(self) -> ClusterData:
        """What is planned for unless the user says so: the devices of this process or job, or those of the Ray cluster."""
        if self._ray is None:
            return local_cluster(False)
        from alpa_lite.executor.ray.cluster import ray_cluster

        return ray_cluster(self._ray.address)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runnable:
        key = self._key(args, kwargs)
        if key not in self._steps:
            traced, planned = self._traced_plan(args, kwargs)
            made = self._remote(key) if self._ray is not None else self._local(traced, planned, args)
            self._steps[key] = (traced, made)
        self._last, self._last_key = self._steps[key][1], key
        return self._last

    def _local(self, traced: Traced, planned: Plan, args: tuple[Any, ...]) -> RunnableStep | RunnablePipeline:
        positions = [i for i in range(len(args)) if i not in self._request.static_argnums]
        donate = tuple(positions.index(i) for i in self._request.donate_argnums if i in positions)
        return _runnable(traced, planned, donate, self.__name__)

    def _remote(self, key: Any = None) -> RemoteStep:
        """The step on workers, once per plan; they are started by what first needs them.

        Args:
            key: of the signature; None = the first that was planned.
        """
        from alpa_lite.executor.parcel import make_parcel
        from alpa_lite.executor.ray.remote_step import RemoteStep

        assert self._ray is not None
        known = self._planned.get(key) if key is not None else next(iter(self._planned.values()), None)
        if known is None:
            raise ArgumentsError(
                f"the layout of the state is known from a plan file, and executor='ray' also needs the step itself to start its "
                f"workers. At {user_line()}. Call step.plan(*shapes) first."
            )
        traced, planned = known
        for step in self._remotes:
            if step.plan is planned:
                return step
        staged = None if planned.pipeline is None else staged_for(planned, traced)
        made = RemoteStep(planned, traced, make_parcel(planned, traced, staged), self._ray)
        made.timed_every = self.timed_every
        self._remotes.append(made)
        return made

    def _keeper(self, state: Any) -> RemoteStep:
        """Of the steps on workers, one per signature, that whose workers keep a state; the first one if none does."""
        from alpa_lite.executor.ray.remote_array import RemoteArray

        leaves = (part for leaf in jax.tree.leaves(state) for part in getattr(leaf, "parts", (leaf,)))
        groups = {id(part._values) for part in leaves if isinstance(part, RemoteArray)}
        return next((x for x in self._remotes if id(x.values) in groups), None) or self._remote()

    @property
    def options(self) -> PlanOptions:
        """What it is planned with."""
        return self._request.options

    @property
    def ray(self) -> RayExecutor | None:
        """Settings of the Ray executor; None for the local one."""
        return self._ray

    def planned_for(self, args: tuple[Any, ...], cluster: ClusterData, options: PlanOptions) -> Plan:
        """A plan of this step for another cluster, with other options; the step itself stays as it is."""
        args = jax.tree.map(_shape_of_remote, args)
        return replace(self._request, options=options).plan(args, {}, cluster)[1]

    def with_plan(self, plan: Plan, cluster: ClusterData, options: PlanOptions) -> ParallelStep:
        """This step under another plan."""
        made = ParallelStep(replace(self._request, options=options), cluster, plan, self._ray)
        made.timed_every = self.timed_every
        return made

    def restart(self) -> None:
        """New workers in place of lost ones, without the state that they kept.

        Raises:
            ClusterError: the cluster has no room for them any more.
        """
        if not self._remotes and self._planned and self._ray is not None:
            self._remote()
        for step in self._remotes:
            step.restart()

    def busy(self) -> tuple[float, ...]:
        """Per submesh the share of the last step in which its programs ran; empty where that was not measured."""
        shares = [step.busy() for step in self._remotes]
        return shares[0] if shares else ()

    def close(self) -> None:
        """Stop what runs elsewhere for this step; a later call starts it again, without the state that lay there."""
        for step in self._remotes:
            step.close()

    def __enter__(self) -> ParallelStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _runnable(traced: Traced, plan: Plan, donate: tuple[int, ...], name: str) -> RunnableStep | RunnablePipeline:
    if jax.process_count() > 1:
        check_job(plan, name)
        return JobStep.of(runnable(traced, plan, donate, local_mesh(plan.mesh)))
    if plan.pipeline is None:
        return runnable(traced, plan, donate, local_mesh(plan.mesh))
    return runnable_pipeline(traced, staged_for(plan, traced), plan, jax.devices())


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x))


def _shape_of_remote(x: Any) -> Any:
    """What is traced in place of an array that no ``jax.Array`` can be."""
    foreign = hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, (jax.Array, np.ndarray, np.generic))
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if foreign else x
