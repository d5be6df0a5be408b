"""The state of a step on this process's devices to a checkpoint, and back in the layouts of any plan.

In: a pytree of arrays, of which some may be ``StagedArray``s, whose parts lie on several submeshes. Out: one item per submesh.
Back: each leaf, or its rows, read by the devices of its stage alone. In a ``jax.distributed`` job of several processes all of
them save and restore together; the first one begins and completes checkpoints, and tells the others by the job's key-value store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite._jax_compat import JobStore
from alpa_lite.errors import CheckpointError
from alpa_lite.executor.checkpoint_item import ItemWriter, in_thread
from alpa_lite.executor.host_tiles import dtype_of
from alpa_lite.executor.item_reader import read_leaves
from alpa_lite.executor.local import stage_meshes
from alpa_lite.executor.processes import placed
from alpa_lite.executor.staged_array import StagedArray
from alpa_lite.executor.state_rows import leaf_rows, whole_leaves, whole_types
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.checkpoint import ROOT_LEAF, CheckpointManifest, check_files, check_state, read_manifest
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from alpa_lite.plan.encode import encode_plan
from alpa_lite.plan.leaf_rows import rows_path, split_path
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf
from alpa_lite.trace.paths import leaf_paths

_WAIT_S = 1200.0  # for processes of a job that are busy
_written: tuple[Plan | None, str] = (None, "")  # the plan that was saved last, and its text


def plan_text(plan: Plan) -> str:
    """The plan as its checkpoints have it. Made once per run: a run saves one plan, between steps, many times."""
    global _written
    found, text = _written
    if found is not plan:
        text = encode_plan(plan).decode()
        _written = plan, text
    return text


class Saving:
    """A checkpoint that is being written while the program goes on.

    Args:
        state: its arrays may be donated once this is made.
        folder, step: where to.
        plan, position, extra: what goes along; see ``CheckpointManifest``.

    Raises:
        CheckpointError: it cannot be begun; nothing of it is left.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        step: int,
        state: Any,
        plan: Plan,
        *,
        position: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._step, self._plan, self._position, self._extra = folder, step, plan, position, extra
        self._writers: list[ItemWriter] = []
        self._first = _FirstProcess()
        unfinished = Path(self._first.tells("folder", lambda: str(folder.begin(step))))
        try:
            for number, leaves in enumerate(_by_submesh(state)):
                writer = ItemWriter()
                writer.start(unfinished / f"submesh_{number}", leaves)
                self._writers.append(writer)
        except BaseException:
            self._give_up()
            raise
        self._running = in_thread(self._complete)

    def poll(self) -> Path | None:
        """The checkpoint's folder; None while it is being written.

        Raises:
            CheckpointError: it could not be written; nothing of it is left, and older checkpoints stay.
        """
        return self.wait() if self._running.done() else None

    def wait(self) -> Path:
        """The checkpoint's folder, when it is complete; raises as ``poll``."""
        return self._running.result()

    def leave(self) -> None:
        """Nobody will wait again: it is completed all the same."""

    def _complete(self) -> Path:
        """In a thread: until all that was begun is written and the first process has made a checkpoint of it."""
        try:
            if not self._first.mine:
                for writer in self._writers:
                    writer.wait()
            return Path(self._first.tells("path", self._commit))
        except BaseException:
            self._give_up()
            raise

    def _commit(self) -> str:
        path = self._folder.commit(
            self._step,
            [writer.wait() for writer in self._writers],
            plan_text=plan_text(self._plan),
            identity=self._plan.identity,
            position=self._position,
            extra=self._extra,
        )
        return str(path)

    def _give_up(self) -> None:
        for writer in self._writers:  # none must still be writing when the folder goes
            writer.end()
        self._folder.abandon(self._step)


class _FirstProcess:
    """What the first process of a job does for all, and tells them; alone, a process does it for itself.

    Attributes:
        mine: whether this is the first process.
    """

    def __init__(self) -> None:
        self.mine, self._store = jax.process_index() == 0, None
        if jax.process_count() > 1:
            self._store = JobStore()
            number = self._store.increment(f"alpa_lite/saves/{jax.process_index()}")
            self._prefix = f"alpa_lite/saves/told/{number}"

    def tells(self, what: str, do: Callable[[], str]) -> str:
        """The result of ``do`` in the first process, in all of them; also when it raises."""
        if self._store is None:
            return do()
        key = f"{self._prefix}/{what}"
        if self.mine:
            try:
                found = do()
            except Exception as error:
                self._store.set(key, f"!{error}")
                raise
            self._store.set(key, f"={found}")
            return found
        text = self._store.get(key, _WAIT_S)
        if text is None:
            raise CheckpointError(
                f"process 0 of this jax.distributed job did not say within {_WAIT_S:g} s what became of a checkpoint. All "
                "processes must save the same state at the same step. Correct the calls, and see what process 0 says."
            )
        if text.startswith("!"):
            raise CheckpointError(text[1:])
        return text[1:]


def _by_submesh(state: Any) -> list[dict[str, jax.Array]]:
    """Leaves, or parts of them, by their paths, one dict per set of devices, by first device."""
    groups: dict[tuple[int, ...], dict[str, jax.Array]] = {}
    for path, leaf in paths_of(state):
        for name, array in named_parts(path, leaf if isinstance(leaf, StagedArray) else _as_array(leaf)):
            devices = tuple(sorted(device.id for device in array.devices()))
            groups.setdefault(devices, {})[name] = array
    if not groups:
        raise CheckpointError(
            "a state without any leaf was given to be saved. A checkpoint holds at least one array. Pass the state that the step "
            "returned."
        )
    return [groups[devices] for devices in sorted(groups)]


def _on_all_devices() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("devices",)), PartitionSpec())


def _as_array(leaf: Any) -> jax.Array:
    if jax.process_count() > 1 and not (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        leaf = placed(leaf, _on_all_devices())  # the same value in every process
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def named_parts(path: str, leaf: Any) -> list[tuple[str, Any]]:
    """A leaf by its path, or the parts of a ``StagedArray`` by paths with their rows."""
    if not isinstance(leaf, StagedArray):
        return [(path, leaf)]
    parts, start = [], 0
    for part in leaf.parts:
        parts.append((rows_path(path, start, start + len(part)), part))
        start += len(part)
    return parts


def paths_of(state: Any) -> list[tuple[str, Any]]:
    """(path, leaf) pairs of a state; paths as checkpoints name them, "params/w"."""
    return [(path or ROOT_LEAF, leaf) for path, leaf in leaf_paths(state, "")]


def type_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    """(global shape, dtype) of an array or a number, as a checkpoint has them; of what is neither, its Python type."""
    if isinstance(leaf, str | bytes):  # which may be the name of a type
        return (), type(leaf).__qualname__
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return tuple(jnp.shape(leaf)), str(dtype)


def state_leaves(plan: Plan, argnum: int) -> list[Leaf]:
    """The leaves of argument ``argnum`` of a plan, in order, with paths as checkpoints name them."""
    prefix = f"{argnum}"
    found = []
    for leaf in plan.inputs:
        whole, rows = split_path(leaf.path)
        if whole == prefix or whole.startswith(prefix + "/"):
            path = whole[len(prefix) + 1 :] or ROOT_LEAF
            found.append(replace(leaf, path=path if rows is None else rows_path(path, *rows)))
    return found


def wanted_struct(leaf: Leaf, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """How a leaf of a plan is asked of ``read_leaves``, on the mesh of its stage."""
    return jax.ShapeDtypeStruct(
        leaf.value.shape, dtype_of(leaf.value.dtype), sharding=NamedSharding(mesh, partition_spec(leaf.spec))
    )


def restored(
    folder: CheckpointFolder, step: int | None, plan: Plan, argnum: int = 0
) -> tuple[list[Any], CheckpointManifest]:
    """The leaves of argument ``argnum`` in the layouts of ``plan``, on this process's devices, and what came along.

    Args:
        step: None for the newest.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or holds another state.
        ClusterError: there are fewer devices than the plan has.
    """
    path = folder.path(step)
    manifest = read_manifest(path)  # of this one, also where another is complete meanwhile
    leaves = state_leaves(plan, argnum)
    check_state(manifest, path, whole_types(leaves))
    check_files(path, manifest)
    meshes = stage_meshes(plan)
    made = read_leaves(path, manifest, {x.path: wanted_struct(x, meshes[x.stage]) for x in leaves}, verified=True)
    return whole_leaves(leaf_rows(leaves), {i: made[leaf.path] for i, leaf in enumerate(leaves)}), manifest
