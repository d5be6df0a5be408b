"""State that is made where it lies: an init function, exported once per stage, runs on the workers of the stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from alpa_lite.executor.export import lowered_for
from alpa_lite.executor.ray.remote_step import RemoteStep
from alpa_lite.executor.serialize import serialize_step
from alpa_lite.executor.state_rows import leaf_rows, rows_of, whole_leaves
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.records import Leaf


def created(
    step: RemoteStep, init_fn: Callable[..., Any], init_args: tuple[Any, ...], leaves: Sequence[Leaf]
) -> list[Any]:
    """Leaves of ``init_fn``'s result in the layout of a step's arguments.

    Args:
        step: whose workers make them.
        init_args: on the host; every worker gets them whole.
        leaves: arguments of the step's plan, in the order of the result's leaves.
    """
    of_leaf = leaf_rows(leaves)
    position = {leaf.path: i for i, leaf in enumerate(step.plan.inputs)}
    made: dict[int, Any] = {}
    for number in sorted({leaf.stage for leaf in leaves}):
        own = [i for i, leaf in enumerate(leaves) if leaf.stage == number]
        logical = step.plan.stages[number].mesh
        auto = (AxisType.Auto,) * len(logical.shape)
        mesh = AbstractMesh(logical.shape, logical.axis_names, axis_types=auto)
        whole = NamedSharding(mesh, PartitionSpec())
        # First a number, whose devices are those that the program runs on: an init function may have no arguments.
        shapes = jax.tree.map(lambda x, s=whole: _struct(x, s), (np.int32(0), *init_args))

        def part(_: Any, *args: Any, own: list[int] = own) -> list[Any]:
            found = jax.tree_util.tree_leaves(init_fn(*args))
            return [rows_of(found[of_leaf[i][0]], of_leaf[i][1]) for i in own]

        function = jax.jit(part, out_shardings=[NamedSharding(mesh, partition_spec(leaves[i].spec)) for i in own])
        platform = step.parcel.platform
        program = lowered_for(step.plan, lambda p, f=function, s=shapes: serialize_step(f, s, p), (platform,))[platform]
        given = [np.int32(0), *jax.tree_util.tree_leaves(init_args)]
        made.update(
            zip(own, step.created(number, program, given, [position[leaves[i].path] for i in own]), strict=True)
        )
    return whole_leaves(of_leaf, made)


def _struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    x = jax.eval_shape(lambda: x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
