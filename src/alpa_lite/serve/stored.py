"""Parameters that lie in a checkpoint, brought straight into the layout in which they are served.

A checkpoint that any plan wrote is read leaf by leaf, of each only what this process's devices hold; a leaf is on its devices
before the next one is read. Host memory beyond what devices hold stays below one parameter and the reader's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax
import numpy as np

from alpa_lite.errors import CheckpointError
from alpa_lite.executor.checkpoint_item import read_leaves
from alpa_lite.plan.checkpoint import ROOT_LEAF, check_files
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from alpa_lite.plan.files import as_path
from alpa_lite.trace.paths import leaf_paths


@dataclass(frozen=True, slots=True)
class StoredParams:
    """In place of parameters: ``al.serve.Engine(model, al.serve.StoredParams("checkpoints", shapes))``.

    Attributes:
        dir: folder of checkpoints, as ``step.save`` and ``al.fit`` write them.
        shapes: the parameters as a pytree of ``jax.ShapeDtypeStruct``, as ``model`` takes them.
        path: of the parameters in the state that was saved, e.g. "params" for ``state.params``; "" if they were all of it.
        step: which checkpoint; None for the newest.
        verify: compare the files' digests first, which reads them once more.
    """

    dir: str | PathLike[str]
    shapes: Any
    path: str = "params"
    step: int | None = None
    verify: bool = True

    def load(self, shardings: Any) -> Any:
        """The parameters in a pytree of shardings.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or holds other parameters.
        """
        folder = CheckpointFolder(as_path(self.dir, 'al.serve.StoredParams("checkpoints", shapes)', CheckpointError))
        manifest, place = folder.read(self.step), folder.path(self.step)
        shapes, tree = jax.tree_util.tree_flatten(self.shapes)
        names = [name or ROOT_LEAF for name, _ in leaf_paths(self.shapes, self.path)]
        items = {piece.item for name in names for piece in manifest.leaf(name, place).pieces}
        if self.verify:
            check_files(place, manifest, sorted(items))
        made = []
        for name, shape, sharding in zip(names, shapes, jax.tree_util.tree_leaves(shardings), strict=True):
            struct = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
            made += read_leaves(place, manifest, {name: struct}, verified=True).values()
            jax.block_until_ready(made[-1])  # until then the host's copy stays
        return jax.tree_util.tree_unflatten(tree, made)


def shapes_of(params: Any) -> Any:
    """What is planned for; of a function, what it makes."""
    if isinstance(params, StoredParams):
        return params.shapes
    return jax.eval_shape(params) if callable(params) else params


def placed(params: Any, shardings: Any) -> Any:
    """Parameters in their layout, from wherever they are; those that lie there already are not copied."""
    if isinstance(params, StoredParams):
        return params.load(shardings)
    if jax.process_count() > 1:  # all processes have the same
        return jax.tree.map(from_host, params, shardings)
    return jax.device_put(params, shardings)


def from_host(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array of the host on the devices, also where some of them are other processes'; every process has the same."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
