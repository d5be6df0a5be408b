"""The state of a step on workers to a checkpoint and back: every submesh writes an item of its own, the driver the manifest.

Workers read and write the folder themselves, so all hosts must see it under one path; nothing of a state goes through the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from alpa_lite.errors import CheckpointError
from alpa_lite.executor.checkpoint_item import in_thread
from alpa_lite.executor.ray.remote_array import RemoteArray
from alpa_lite.executor.ray.remote_step import RemoteStep
from alpa_lite.executor.save_restore import named_parts, paths_of, plan_text, state_leaves, whole_types
from alpa_lite.executor.sites import Site
from alpa_lite.executor.staged_array import StagedArray
from alpa_lite.executor.worker import RestoredLeaf
from alpa_lite.plan.checkpoint import CheckpointManifest, ItemRecord, check_state, read_manifest
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from alpa_lite.plan.leaf_rows import split_path


class RemoteSaving:
    """A checkpoint that workers write while the steps go on; as ``save_restore.Saving``.

    Args:
        step: whose workers keep the state.
        folder, number, state, position, extra: as there.

    Raises:
        CheckpointError: it cannot be begun; nothing of it is left.
        WorkerLost: a worker was lost meanwhile.
    """

    def __init__(
        self,
        step: RemoteStep,
        folder: CheckpointFolder,
        number: int,
        state: Any,
        *,
        position: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._step, self._folder, self._number = step, folder, number
        self._position, self._extra = position, extra
        self._committing: Future[Path] | None = None
        self._given_up = False
        leaves = _by_submesh(step, state)
        self._group = step.group  # also where the step is closed, or has others, meanwhile
        self._submeshes = frozenset(leaves)
        unfinished = folder.begin(number).resolve()

        def args(site: Site) -> tuple[Any, ...] | None:
            found = leaves.get(site.submesh)
            return None if found is None else (str(unfinished / f"submesh_{site.submesh}"), found)

        try:
            self._group.each("save", args)
        except BaseException:
            self._give_up()
            raise

    def poll(self) -> Path | None:
        """The checkpoint's folder; None while it is being written, as the last step told.

        Raises:
            CheckpointError: it could not be written; nothing of it is left, and older checkpoints stay.
            WorkerLost: a worker was lost meanwhile; as above.
        """
        if self._committing is None and self._step.saving:
            return None
        committing = self._commit()
        return committing.result() if committing.done() else None

    def wait(self) -> Path:
        """The checkpoint's folder, when it is complete; raises as ``poll``."""
        return self._commit().result()

    def leave(self) -> None:
        """Nobody will wait again: gives it up, unless all is written."""
        if self._committing is None:
            self._give_up()

    def _commit(self) -> Future[Path]:
        """Waits until all items are written, and makes a checkpoint of them in a thread."""
        if self._given_up:  # and whoever waited first saw why
            raise CheckpointError(
                f"the checkpoint of step {self._number} was given up. It could not be written, as was told. Nothing of it is "
                "left, older checkpoints are untouched. Save the state again."
            )
        if self._committing is None:
            try:
                items: list[ItemRecord] = self._group.each("finish_save", self._asked)
            except Exception:  # whoever is interrupted may wait again
                self._give_up()
                raise
            first = {site.number for site in self._step.parcel.sites if site.process == 0}
            numbers = [site.number for site in self._step.parcel.sites if self._asked(site) is not None]
            records = [item for number, item in zip(numbers, items, strict=True) if number in first]
            self._committing = in_thread(partial(self._committed, records))
        return self._committing

    def _committed(self, items: list[ItemRecord]) -> Path:
        plan = self._step.plan
        return self._folder.commit(
            self._number,
            items,
            plan_text=plan_text(plan),
            identity=plan.identity,
            position=self._position,
            extra=self._extra,
        )

    def _asked(self, site: Site) -> tuple[()] | None:
        return () if site.submesh in self._submeshes else None

    def _give_up(self) -> None:
        self._given_up = True
        try:
            if not self._group.lost:  # none must still be writing when the folder goes
                self._group.each("end_save", self._asked)
        finally:
            self._folder.abandon(self._number)


def _by_submesh(step: RemoteStep, state: Any) -> dict[int, dict[str, int]]:
    """Submesh -> path, with rows -> the name under which its workers keep it."""
    found: dict[int, dict[str, int]] = {}
    for path, leaf in paths_of(state):
        for name, part in named_parts(path, leaf):
            if not isinstance(part, RemoteArray):
                raise CheckpointError(
                    f"the leaf {path!r} of the state to be saved is no RemoteArray: it lies in this process. Workers write what "
                    "they keep. Pass the state that the step returned, or save it with a step of the local executor."
                )
            part._values.group.check()
            if part._values is not step.values:  # names are those of one group of workers
                raise CheckpointError(
                    f"the leaf {path!r} of the state to be saved is a RemoteArray of another step. Workers write what they keep. "
                    "Save it with the step that returned it."
                )
            if part.is_deleted():
                raise CheckpointError(
                    f"the leaf {path!r} of the state to be saved was donated to a later call, so its value is gone. Save the "
                    "state that the last call returned."
                )
            found.setdefault(part.submesh, {})[name] = part.name
    return found


def remote_restored(
    step: RemoteStep, folder: CheckpointFolder, number: int | None, argnum: int = 0
) -> tuple[list[Any], CheckpointManifest]:
    """The leaves of an argument on the workers of a step, and what came along; ``step.read_bytes`` is what workers read.

    Args:
        number: of the checkpoint; None for the newest.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or holds another state.
        WorkerLost: a worker was lost meanwhile.
    """
    path = folder.path(number)
    manifest = read_manifest(path)  # of this one, also where another is complete meanwhile
    leaves = state_leaves(step.plan, argnum)
    check_state(manifest, path, whole_types(leaves))
    values = step.start()
    positions = [i for i, leaf in enumerate(step.plan.inputs) if leaf.path.partition("/")[0] == f"{argnum}"]
    submesh_of = {stage: s.submesh for s in step.parcel.sites for stage in s.stages}
    made: dict[str, list[Any]] = {}
    wanted: dict[int, list[RestoredLeaf]] = {}
    for leaf, at in zip(leaves, positions, strict=True):
        name, submesh = values.new(), submesh_of[leaf.stage]
        wanted.setdefault(submesh, []).append(RestoredLeaf(path=leaf.path, name=name, kind=step.parcel.inputs[at]))
        made.setdefault(split_path(leaf.path)[0], []).append(step.argument(values, at, name, submesh))

    def args(site: Site) -> tuple[Any, ...] | None:
        found = wanted.get(site.submesh)
        return None if found is None else (str(path.resolve()), found)

    step.read_bytes = sum(values.group.each("restore", args))
    whole = [found[0] if len(found) == 1 else StagedArray(found) for found in made.values()]
    return whole, manifest
