"""A planned step as a ``jax.export`` artefact, lowered on an abstract mesh: no device of any kind is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from alpa_lite.executor.local import runnable
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.plan import Plan
from alpa_lite.trace.program import Traced


def abstract_step(traced: Traced, plan: Plan) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The lowered step over an abstract mesh, and its abstract arguments (keyword arguments follow, sorted by name)."""
    # Explicit is the default of abstract meshes from JAX 0.12 on; the step is fully manual either way.
    auto = (AxisType.Auto,) * len(plan.mesh.shape)
    mesh = AbstractMesh(plan.mesh.shape, plan.mesh.axis_names, axis_types=auto)
    leaves = [
        jax.ShapeDtypeStruct(
            leaf.value.shape, traced.flat.avals[v].dtype, sharding=NamedSharding(mesh, partition_spec(leaf.spec))
        )
        for leaf, v in zip(plan.inputs, traced.flat.inputs, strict=True)
    ]
    args, kwargs = jax.tree_util.tree_unflatten(traced.in_tree, leaves)
    return runnable(traced, plan, (), mesh).run, (*args, *(kwargs[k] for k in sorted(kwargs)))


class NotExportable(Exception):
    """jax.export refuses the step; the message is its own."""


def serialize_step(step: Callable[..., Any], args: tuple[Any, ...], platform: str) -> bytes:
    """A serialized ``jax.export`` artefact from the leaves of ``args`` to the leaves of the result.

    Trees stay outside, so that any pytree type works.

    Raises:
        NotExportable: the step holds what cannot be exported for this platform.
        ImportError: ``flatbuffers`` is missing.
    """
    from jax import export

    leaves, tree = jax.tree.flatten(args)

    def flat(*values: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(step(*jax.tree.unflatten(tree, values))))

    try:
        return bytes(export.export(jax.jit(flat, keep_unused=True), platforms=[platform])(*leaves).serialize())
    except NotImplementedError as error:  # a primitive without a rule for the platform, or a host callback (JAX 0.10)
        raise NotExportable(str(error)) from error
    except ValueError as error:
        # Custom calls and effects that JAX does not promise to keep. Nothing of the user's runs here that could raise one: the
        # step evaluates equations that were traced before, with arguments of the very types.
        raise NotExportable(str(error)) from error
