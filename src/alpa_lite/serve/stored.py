"""Parameters that lie in a checkpoint, brought straight into the layout in which they are served.

A checkpoint that any plan wrote is read leaf by leaf, of each only what this process's devices hold; a leaf is on its devices
before the next one is read. Host memory beyond what devices hold stays below one parameter and the reader's buffers.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.errors import CheckpointError, ServeError, user_line
from alpa_lite.executor.host_tiles import raw_values, whole_tiles
from alpa_lite.executor.item_reader import check_wanted, read_leaves
from alpa_lite.executor.places import Place, whole_tree
from alpa_lite.executor.state_rows import rows_of
from alpa_lite.numeric import whole
from alpa_lite.plan.checkpoint import MANIFEST, ROOT_LEAF, CheckpointManifest, check_files, read_manifest
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from alpa_lite.plan.files import as_path
from alpa_lite.plan.leaf_rows import rows_path
from alpa_lite.trace.paths import leaf_paths

_CALL = 'al.serve.StoredParams("checkpoints", shapes)'


@dataclass(frozen=True, slots=True)
class StoredParams:
    """In place of parameters: ``al.serve.Engine(model, al.serve.StoredParams("checkpoints", shapes))``.

    Attributes:
        dir: folder of checkpoints, as ``step.save`` and ``al.fit`` write them.
        shapes: the parameters as a pytree of ``jax.ShapeDtypeStruct``, as ``model`` takes them.
        path: of the parameters in the state that was saved, e.g. "params" for ``state.params``; "" if they were all of it.
        step: which checkpoint; None for the newest when an engine starts.
        verify: compare the files' digests first, which reads them once more.
        names: paths of the leaves in the saved state; () = their own, below ``path``.
        place: folder of the checkpoint itself, see ``found``; "" = that of ``step`` when it is read.

    Raises:
        CheckpointError: ``dir``, ``path`` or ``step`` is of another type.
    """

    dir: str | PathLike[str]
    shapes: Any
    path: str = "params"
    step: int | None = None
    verify: bool = True
    names: tuple[str, ...] = ()
    place: str = ""

    def __post_init__(self) -> None:
        as_path(self.dir, _CALL, CheckpointError)
        step = whole(self.step)
        for name, fits, allowed in (
            ("path", isinstance(self.path, str), "a str"),
            ("step", self.step is None or (step is not None and step >= 0), "a whole number from 0, or None"),
        ):
            if not fits:
                raise CheckpointError(
                    f"StoredParams: {name}={getattr(self, name)!r:.60} was given; it must be {allowed}. At {user_line()}. Write "
                    f"for example {_CALL[:-1]}, path='params', step=200)."
                )
        object.__setattr__(self, "step", step)

    def found(self) -> StoredParams:
        """The same, of a checkpoint that is settled: whoever reads a part of it later, elsewhere too, reads of the same one.

        Another one is looked for where that has been removed meanwhile.

        Raises:
            CheckpointError: there is none, or it holds other parameters.
        """
        if self.place and (Path(self.place) / MANIFEST).is_file():
            return self
        place = self._newest().absolute()
        self._check_leaves(read_manifest(place), place)
        # Absolute: others that read of it may run elsewhere.
        return replace(self, dir=Path(self.dir).absolute(), place=str(place))

    def _newest(self) -> Path:
        return CheckpointFolder(Path(self.dir)).path(self.step)

    def picked(self, pick: Callable[[Any], Any]) -> StoredParams:
        """Those of them that a function picks out of all, wherever it puts them.

        Raises:
            ValueError: it returns something else than what it is given.
        """
        leaves, tree = jax.tree_util.tree_flatten(self.shapes)
        copies = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]  # each an object of its own
        names = dict(zip(map(id, copies), self._names(), strict=True))
        shapes = pick(jax.tree_util.tree_unflatten(tree, copies))
        if made := [path for path, leaf in leaf_paths(shapes, "") if id(leaf) not in names]:
            raise ValueError(f"{made[0]!r} is none of the parameters, but something made of them")
        found = tuple(names[id(leaf)] for leaf in jax.tree_util.tree_leaves(shapes))
        return replace(self, shapes=shapes, names=found)

    def _names(self) -> tuple[str, ...]:
        return self.names or tuple(name or ROOT_LEAF for name, _ in leaf_paths(self.shapes, self.path))

    def load(self, shardings: Any) -> Any:
        """The parameters in a pytree of shardings; raises as ``read``."""
        return self.read([(i, None, own) for i, own in enumerate(jax.tree_util.tree_leaves(shardings))])

    def read(self, places: Sequence[Place]) -> Any:
        """The parameters where they shall lie; raises as ``read_parts``."""
        return whole_tree(jax.tree_util.tree_structure(self.shapes), places, self.read_parts(places))

    def read_parts(self, places: Sequence[Place]) -> list[jax.Array]:
        """Those parameters, or rows of them, that lie in places, in their order.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or holds other parameters.
        """
        place = Path(self.place) if self.place else self._newest()
        manifest = read_manifest(place)
        shapes = jax.tree_util.tree_leaves(self.shapes)
        names = self._names()
        self._check_leaves(manifest, place)
        wanted = dict.fromkeys(names[number] for number, _, _ in places)
        items = {piece.item for name in wanted for piece in manifest.leaf(name, place).pieces}
        if self.verify:
            check_files(place, manifest, sorted(items))
        made: list[jax.Array] = []
        for number, rows, sharding in places:
            name, shape = names[number], shapes[number].shape
            if rows is not None:
                name, shape = rows_path(name, *rows), (rows[1] - rows[0], *shape[1:])
            struct = jax.ShapeDtypeStruct(shape, shapes[number].dtype, sharding=sharding)
            made += read_leaves(place, manifest, {name: struct}, verified=True).values()
            jax.block_until_ready(made[-1])  # until then the host's copy stays
        return made

    def _check_leaves(self, manifest: CheckpointManifest, place: Path) -> None:
        """That all of them are there, before any of them is read."""
        self._check_path(manifest, place)
        check_wanted(place, manifest, dict(zip(self._names(), jax.tree_util.tree_leaves(self.shapes), strict=True)))

    def _check_path(self, manifest: CheckpointManifest, place: Path) -> None:
        """That ``path`` leads to something in the saved state."""
        known = [leaf.path for leaf in manifest.leaves]
        if self.names or not self.path or any(name == self.path or name.startswith(f"{self.path}/") for name in known):
            return
        first = list(dict.fromkeys(name.partition("/")[0] for name in known))
        raise CheckpointError(
            f"StoredParams: path={self.path!r} was given, and the checkpoint {str(place)!r} has nothing there, but "
            f"in {', '.join(map(repr, first[:8]))}{', ...' if first[8:] else ''}. At {user_line()}. Give the path of the "
            'parameters in that state (path=, or --checkpoint-path at the command line), "" where they are all of it.'
        )


def is_maker(params: Any) -> bool:
    """Whether it is a function that makes parameters. A tree of them may be one too that can be called, as modules are."""
    return callable(params) and jax.tree_util.all_leaves([params])


def check_maker(params: Any) -> None:
    """Refuses a function in place of parameters that cannot be called as it is.

    Raises:
        ServeError: it takes arguments.
    """
    try:
        inspect.signature(params).bind()
    except TypeError as error:
        name = getattr(params, "__qualname__", repr(params))
        raise ServeError(
            f"the parameters are the function {name:.80}, and it cannot be called without arguments: {error}. A function that "
            f"makes parameters takes nothing. At {user_line()}. Give its result, or lambda: "
            f"{'fn' if '<' in name else name}(...)."
        ) from None
    except ValueError:
        pass  # not every callable has a signature


def shapes_of(params: Any) -> Any:
    """What is planned for; of a function, what it makes.

    Raises:
        ServeError: the function takes arguments.
    """
    if isinstance(params, StoredParams):
        return params.shapes
    if not is_maker(params):
        return params
    check_maker(params)
    return jax.eval_shape(params)


def placed(params: Any, places: Sequence[Place]) -> Any:
    """Parameters where they shall lie, from wherever they are; arrays of devices that lie there already are not copied."""
    shapes = params.shapes if isinstance(params, StoredParams) else params
    return whole_tree(jax.tree_util.tree_structure(shapes), places, placed_parts(params, places))


def placed_parts(params: Any, places: Sequence[Place]) -> list[jax.Array]:
    """Those of them, or rows of them, that lie in places, in their order."""
    if isinstance(params, StoredParams):
        return params.read_parts(places)
    leaves = jax.tree_util.tree_leaves(params)
    parts = [rows_of(leaves[number], rows) for number, rows, _ in places]
    shardings = [sharding for _, _, sharding in places]
    if jax.process_count() > 1:  # all processes have the same
        return [whole_tiles(x).array(own) for x, own in zip(parts, shardings, strict=True)]
    # A copy: on CPUs an array would share memory with the caller's, who may change it (also with may_alias=False).
    return [
        _moved(x, own) if isinstance(x, jax.Array) else jax.device_put(np.array(x), own)
        for x, own in zip(parts, shardings, strict=True)
    ]


def _moved(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array itself where it lies so already, else one that shares no memory with it: the caller may donate his."""
    if x.sharding.is_equivalent_to(sharding, x.ndim):
        return jax.device_put(x, sharding)
    made = jax.device_put(x, sharding)
    here, there = ({s.data.unsafe_buffer_pointer() for s in y.addressable_shards} for y in (x, made))
    return jax.device_put(jnp.copy(x), sharding) if here & there else made


def digests(params: Any) -> dict[str, int]:
    """Of parameters on the host, by path: whether two processes made the same."""
    return {
        path: zlib.crc32(np.ascontiguousarray(raw_values(leaf)).view(np.uint8).data)
        for path, leaf in leaf_paths(params, "")
    }


def made_here(params: Any) -> tuple[Any, dict[str, int]]:
    """Parameters as a worker is given them, and their digests where a function makes them."""
    if not is_maker(params):
        return params, {}
    made = params()
    return made, digests(made)


def device_bytes(arrays: Iterable[jax.Array]) -> dict[int, int]:
    """Of this process: device -> bytes of the arrays there."""
    found: dict[int, int] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return found


def from_host(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array of the host on the devices, also where some of them are other processes'; every process has the same."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
