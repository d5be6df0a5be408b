"""A one-mesh plan in a plain job of several JAX processes: every process makes the same call, its devices do their part.

Comes in: arguments as each process holds them. Goes out: global arrays in the plan's layouts. A host value, and an array on
devices of this process alone, mean the same value in every process, as for ``jax.jit``; each process copies its own tiles of
them to its devices. A global array that already lies as planned is used as it is.

Before a step runs for the first time the processes compare what they are about to run, by the job's key-value store: devices of
processes that run different programs would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite._jax_compat import JobStore
from alpa_lite.errors import ArgumentsError, ClusterError, LayerError, user_line
from alpa_lite.executor.local import CompiledStep, RunnableStep, SignatureChanged, leaf_type
from alpa_lite.plan.encode import encode_plan
from alpa_lite.plan.plan import Plan

_WAIT_S = 600.0  # for processes that plan more slowly; one that died ends the job earlier


def check_job(plan: Plan, name: str) -> None:
    """See that this job can run the plan, and that all its processes are about to.

    Args:
        name: of the step.

    Raises:
        LayerError: it has several stages.
        ClusterError: its mesh is not of as many devices as the job has.
        ArgumentsError: a process has other arguments or another plan, or did not come.
    """
    count, processes = jax.device_count(), jax.process_count()
    if plan.pipeline is not None:
        raise LayerError(
            f"a plan with {len(plan.stages)} stages was to run in a jax.distributed job of {processes} processes. In such a "
            f"job a step runs on one mesh of all devices. At {user_line()}. Plan with PlanOptions(num_stages=1), or run the "
            "pipeline in one process, or from one process with executor='ray'."
        )
    if plan.mesh.num_devices != count:
        raise ClusterError(
            f"the plan's mesh {plan.mesh} has {plan.mesh.num_devices} devices, this jax.distributed job has {count} in "
            f"{processes} processes. A plan runs on all devices of its job, no fewer. At {user_line()}. Start the job with "
            f"{plan.mesh.num_devices} devices, or plan for this one: leave the cluster out, or name one of {count} devices."
        )
    _check_agreement(plan, name)


def _check_agreement(plan: Plan, name: str) -> None:
    """Wait for all processes, and compare what they say."""
    me, store = jax.process_index(), JobStore()
    prefix = f"alpa_lite/steps/{store.increment(f'alpa_lite/steps/{me}')}"
    own = "\n".join(_statement(plan, name))
    store.set(f"{prefix}/{me}", own)
    if me == 0:
        statements, end = {0: own}, time.monotonic() + _WAIT_S
        for process in range(1, jax.process_count()):
            found = store.get(f"{prefix}/{process}", max(end - time.monotonic(), 1.0))
            if found is None:
                break
            statements[process] = found
        store.set(f"{prefix}/verdict", _verdict(statements))
    verdict = store.get(f"{prefix}/verdict", 2 * _WAIT_S)  # process 0 may itself wait that long
    if verdict != "":
        raise ArgumentsError(
            f"the processes of this jax.distributed job do not run the same step: {verdict or _absent(0)}. All must make the "
            f"same calls of parallelized steps in the same order, with arguments of the same shapes and types. At {user_line()}. "
            "Correct the calls; if only the plans differ, save one and give it to every process: plan=al.load_plan(file)."
        )


def _statement(plan: Plan, name: str) -> list[str]:
    """What a process is about to run, the more telling lines first."""
    arguments = [f"argument {leaf.path} {leaf.value}" for leaf in plan.inputs]
    digest = hashlib.sha256(encode_plan(plan)).hexdigest()
    return [f"step {name}", *arguments, f"mesh {plan.mesh}", f"objective {plan.objective!r}", f"plan sha256:{digest}"]


def _verdict(statements: dict[int, str]) -> str:
    """Empty if all of them came and say the same, else the first difference."""
    for process, text in statements.items():
        if text != statements[0]:
            lines = zip(text.split("\n"), statements[0].split("\n"), strict=False)
            other, first = next(pair for pair in lines if pair[0] != pair[1])
            return f"process {process} has {other}, process 0 {first}"
    return _absent(len(statements)) if len(statements) < jax.process_count() else ""


def _absent(process: int) -> str:
    return f"process {process} made no such call within {_WAIT_S:g} s"


def replicated(args: Any, mesh: Any) -> Any:
    """A pytree of arguments of ``jax.jit``; what is bound to devices of this process, whole on every device of the mesh."""
    whole = NamedSharding(mesh, PartitionSpec())

    def one(x: Any) -> Any:
        return placed(x, whole) if isinstance(x, jax.Array) and x.committed and x.is_fully_addressable else x

    return jax.tree.map(one, args)


def placed(value: Any, sharding: NamedSharding) -> Any:
    """A value as a global array.

    Also what ``jax.jit`` would place itself: it compiles anew for every choice of arguments that it has to place (JAX 0.10.2).
    """
    if isinstance(value, jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        if not value.is_fully_addressable:
            if value.sharding.is_equivalent_to(sharding, value.ndim):
                return value
            # jax.device_put does not know keys on devices of other processes (JAX 0.10.2).
            return _moved(value, sharding) if is_key else jax.device_put(value, sharding)
        if is_key:
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    whole = np.asarray(value)
    whole = whole.astype(jax.dtypes.canonicalize_dtype(whole.dtype), copy=False)
    # A copy: on CPUs the array would share memory with the caller's, who may write the next batch into it.
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.array(whole[index]))


def _moved(value: Any, sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Placing:
    """Calls a jitted or compiled step with arguments as each process holds them.

    Attributes:
        function: takes global arrays in the planned layouts.
        tree: of the arguments.
        shardings: per leaf.
        types: per leaf, its planned shape and type.
    """

    function: Any
    tree: Any
    shardings: list[NamedSharding]
    types: list[tuple[tuple[int, ...], str]]

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(args)
        if tree != self.tree:
            raise SignatureChanged
        found = [getattr(leaf, "sharding", None) for leaf in leaves]
        if found == self.shardings:  # jax.jit sees other types
            return self.function(*args)
        for i, (own, planned) in enumerate(zip(found, self.shardings, strict=True)):
            if own != planned:
                if leaf_type(leaves[i]) != self.types[i]:
                    raise SignatureChanged
                leaves[i] = placed(leaves[i], planned)
        return self.function(*jax.tree_util.tree_unflatten(tree, leaves))


@dataclass(frozen=True, slots=True, eq=False)
class JobStep(RunnableStep):
    """A planned step of which every process runs its part; ``run`` places its arguments itself."""

    @classmethod
    def of(cls, step: RunnableStep) -> JobStep:
        shardings, tree = jax.tree_util.tree_flatten(step.in_shardings)
        types = [(leaf.value.shape, leaf.value.dtype) for leaf in step.plan.inputs]
        run = _Placing(step.run, tree, shardings, types)
        return cls(step.plan, run, step.in_shardings, step.out_shardings, step.mesh)

    def place(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(args)

    def compile(self, *shapes: Any) -> CompiledStep:
        compiled = self.run.function.lower(*shapes).compile()
        return JobCompiledStep(self.plan, compiled, replace(self.run, function=compiled))


@dataclass(frozen=True, slots=True, eq=False)
class JobCompiledStep(CompiledStep):
    """An ahead-of-time compiled step, ``compiled``, whose arguments ``run`` places."""

    run: Any

    def __call__(self, *args: Any) -> Any:
        try:
            return self.run(*args)
        except SignatureChanged:
            return self.compiled(*args)  # JAX says how they differ
