"""Runs a plan on the local devices: one jitted function over a mesh, in the plan's layouts, with donation.

Dispatch is left to ``jax.jit``'s own cache: a call costs what a jitted call costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import ClusterError
from alpa_lite.lowering.audit import AuditReport, audit
from alpa_lite.lowering.lower import Lowering, named_shardings
from alpa_lite.plan.plan import Plan
from alpa_lite.trace.program import Traced


class SignatureChanged(Exception):
    """The arguments are not those of the plan; raised while ``jax.jit`` traces, before anything runs."""


def leaf_type(x: Any) -> tuple[tuple[int, ...], str]:
    """Shape and type of an argument as a plan has them; of what is neither array nor number, its Python type."""
    dtype = getattr(x, "dtype", None)
    if isinstance(x, jax.Array):  # which has a type of JAX's already: a step of many leaves asks for each, each time
        return x.shape, _name(dtype)
    if dtype is None and not isinstance(x, int | float | complex):  # a text may be the name of a type
        return (), type(x).__qualname__
    if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jnp.result_type(x if dtype is None else dtype)
    return tuple(np.shape(x)), str(dtype)


def positional_tree(in_tree: Any) -> Any:
    """Structure of a step's arguments as its executor takes them: positional ones, then keyword ones sorted by name.

    Args:
        in_tree: of (positional, keyword) arguments, as ``Traced`` has it.
    """
    args, kwargs = jax.tree_util.tree_unflatten(in_tree, [0] * in_tree.num_leaves)
    return jax.tree_util.tree_structure((*args, *(kwargs[k] for k in sorted(kwargs))))


@cache
def _name(dtype: Any) -> str:
    return str(dtype)


def own_mesh() -> AbstractContextManager[Any]:
    """Within it the mesh of a user's ``jax.set_mesh`` is not there: a plan brings its own, and JAX refuses two of them."""
    return nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(None)


def local_mesh(mesh: DeviceMesh, devices: Sequence[Any] | None = None) -> Mesh:
    """The first devices of this process, or of its job, as a mesh, row-major.

    Raises:
        ClusterError: there are fewer devices than the mesh has.
    """
    devices = jax.devices() if devices is None else devices
    _check_enough(f"mesh {mesh} needs", mesh.num_devices, devices)
    return Mesh(np.array(devices[: mesh.num_devices]).reshape(mesh.shape), mesh.axis_names)


def _check_enough(need: str, count: int, devices: Sequence[Any]) -> None:
    if len(devices) < count:
        platform = f" ({devices[0].platform})" if devices else ""
        raise ClusterError(
            f"the plan's {need} {count} devices, this process has {len(devices)}{platform}. A plan runs on exactly its mesh. To "
            f"try it on virtual CPU devices, call jax.config.update('jax_num_cpu_devices', {count}) before JAX is used, or plan "
            f"for Cluster.parse('1x{len(devices)}:...')."
        )


def stage_meshes(plan: Plan, devices: Sequence[Any] | None = None) -> list[Mesh]:
    """The devices of each stage, of these or of this process; one mesh where there are no stages.

    Raises:
        ClusterError: there are fewer devices than the plan has.
    """
    devices = jax.devices() if devices is None else devices
    needed = max(stage.first_device + stage.mesh.num_devices for stage in plan.stages)
    if len(plan.stages) > 1:
        _check_enough(f"{len(plan.stages)} stages need", needed, devices)
    return [local_mesh(stage.mesh, devices[stage.first_device :]) for stage in plan.stages]


@dataclass(frozen=True, slots=True, eq=False)
class RunnableStep:
    """A planned step over positional dynamic arguments (keyword arguments follow, sorted by name).

    Attributes:
        plan: what runs.
        run: the jitted function.
        in_shardings: one tree per argument.
        mesh: the devices.
    """

    plan: Plan
    run: Any
    in_shardings: tuple[Any, ...]
    out_shardings: Any
    mesh: Any

    def place(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments in the plan's layouts."""
        return tuple(jax.device_put(a, s) for a, s in zip(args, self.in_shardings, strict=True))

    def compile(self, *shapes: Any) -> CompiledStep:
        """Compile for arguments of these shapes without running."""
        return CompiledStep(self.plan, self.run.lower(*shapes).compile())


def runnable(traced: Traced, plan: Plan, donate: tuple[int, ...], mesh: Mesh | AbstractMesh) -> RunnableStep:
    """Lower ``plan`` for ``mesh``.

    Args:
        traced: the traced function; its in_tree is a tuple of (positional, keyword) dynamic arguments.
        donate: positions among the dynamic positional arguments.
    """
    stage = plan.stages[0]
    lowering = Lowering.of(stage.mesh, stage.decisions, stage.conversions, stage.collectives)
    sharded = lowering.sharded_function(traced.flat, plan.input_specs, plan.output_specs, mesh)
    expected = [(leaf.value.shape, leaf.value.dtype) for leaf in plan.inputs]
    in_tree, out_tree = traced.in_tree, traced.out_tree
    expected_tree = positional_tree(in_tree)

    def step(*args: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(args)
        # jax.jit takes any subtree where the shardings have a leaf or None.
        if tree != expected_tree or [(tuple(x.shape), str(x.dtype)) for x in leaves] != expected:
            raise SignatureChanged
        return jax.tree_util.tree_unflatten(out_tree, sharded(*leaves))

    in_args, in_kwargs = jax.tree_util.tree_unflatten(in_tree, named_shardings(plan.input_specs, mesh))
    in_shardings = (*in_args, *(in_kwargs[k] for k in sorted(in_kwargs)))
    out_shardings = jax.tree_util.tree_unflatten(out_tree, named_shardings(plan.output_specs, mesh))
    run = jax.jit(step, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate)
    return RunnableStep(plan, run, in_shardings, out_shardings, mesh)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledStep:
    """An ahead-of-time compiled step; ``compiled`` is JAX's own object."""

    plan: Plan
    compiled: Any

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)

    def as_text(self) -> str:
        """The optimised HLO."""
        return self.compiled.as_text()

    def audit(self) -> AuditReport:
        """Every planned collective against every compiled one, both ways, by kind, axes and bytes."""
        return audit(self.plan.collectives, self.compiled.as_text(), self.plan.mesh)

    def peak_bytes(self) -> int:
        """XLA's own figure per device: arguments + results + temporaries - aliased."""
        stats = self.compiled.memory_analysis()
        return int(
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            + stats.temp_size_in_bytes
            - stats.alias_size_in_bytes
        )
