"""A folder of checkpoints, of which only complete ones are seen.

What is being written lies in ``.step_00000200.*.partial``, which a lock marks as in use. ``commit`` writes the manifest there
last, waits until all is on disk, and renames the folder to ``step_00000200``: one atomic operation, before which the checkpoint
does not exist and after which it is whole. Only then older ones go. A process that is killed leaves a ``.partial`` folder, which
the next ``begin`` or ``clean`` removes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alpa_lite._version import __version__
from alpa_lite.errors import CheckpointError, user_line
from alpa_lite.plan.checkpoint import (
    MANIFEST,
    PLAN,
    CheckpointManifest,
    ItemRecord,
    check_files,
    encode_manifest,
    joined_leaves,
    read_manifest,
)
from alpa_lite.plan.files import sync
from alpa_lite.plan.folders import locked, sync_tree
from alpa_lite.plan.manifest import FileDigest, digest_of
from alpa_lite.plan.records import PlanIdentity

# A step that is saved again gets a further number, so that what stands there stays until the new one is complete.
_COMPLETE = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_UNFINISHED = ".step_*.partial"
_version = functools.cache(importlib.metadata.version)  # which reads files


class CheckpointFolder:
    """Checkpoints by step.

    One process begins and commits; who writes the items of a checkpoint in between, and how many at once, is up to it.

    Args:
        root: of all checkpoints; made with the first one.
        keep: how many complete checkpoints stay, those of the highest steps, and always the one just committed;
            None for all of them.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        self.root, self.keep = root, keep
        self._begun: dict[int, tuple[Path, int]] = {}  # step -> unfinished folder, descriptor that holds its lock

    # -- writing -------------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """The folder itself, so that one that cannot be is known before there is anything to lose.

        Raises:
            CheckpointError: it is something else, or not writable.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {str(self.root)!r}: {error.strerror or error}. Allowed is a folder that you "
                f"may write to, or may make. At {user_line()}. Give another folder."
            ) from error

    def begin(self, step: int) -> Path:
        """A new folder for the items of ``step``; leftovers of dead writers go.

        Raises:
            CheckpointError: the root is not writable, or this step was begun and neither committed nor given up.
        """
        assert step >= 0 and step not in self._begun, f"step {step} was begun already"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.clean()
            while (begun := self._locked_folder(step)) is None:
                pass
        except OSError as error:
            raise not_written(self.root, step, error) from error
        self._begun[step] = begun
        return begun[0]

    def _locked_folder(self, step: int) -> tuple[Path, int] | None:
        """A new folder and the descriptor that holds its lock; None if another process took it for a leftover before that."""
        import fcntl  # not on Windows, where everything else can be imported

        folder = Path(tempfile.mkdtemp(dir=self.root, prefix=f".{_name(step)}.", suffix=".partial"))
        try:
            folder.chmod(0o755)  # mkdtemp's folders are private to the user
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)
        return None

    def commit(
        self,
        step: int,
        items: Sequence[ItemRecord],
        *,
        plan_text: str,
        identity: PlanIdentity | None = None,
        position: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Makes the checkpoint of a step that was begun complete, and removes those that are too many.

        Args:
            items: all that were written, each as its first process reports it.
            plan_text: of the plan's file.
            identity: of that plan.
            position, extra: see ``CheckpointManifest``; JSON.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: it could not be written, or the items do not make up a state. Nothing of it is left, and older ones
                stay.
        """
        folder, _ = self._begun[step]
        try:
            leaves = joined_leaves(items)
            (folder / PLAN).write_text(plan_text, encoding="utf-8")
            manifest = CheckpointManifest(
                step=step,
                position=position,
                leaves=leaves,
                identity=identity or PlanIdentity(),
                extra=dict(extra or {}),
                files=_files(items) | {PLAN: digest_of(folder / PLAN)},
                jax_version=_version("jax"),
                alpa_lite_version=__version__,
            )
            sync_tree(folder)
            (folder / MANIFEST).write_bytes(encode_manifest(manifest))
            sync(folder / MANIFEST)
            sync(folder)
            target = self._free_name(step)
            os.rename(folder, target)
            self._sync_root(target)
        except OSError as error:
            raise not_written(self.root, step, error) from error
        finally:
            self.abandon(step)
        self._prune(step)
        return target

    def _sync_root(self, new: Path) -> None:
        try:
            sync(self.root)
        except OSError:
            self._remove(new)  # it might be gone after a power cut, so it must not count now
            raise

    def abandon(self, step: int) -> None:
        """Gives up what was begun: its folder goes, unless it was committed. For when a writer failed."""
        if step in self._begun:
            folder, descriptor = self._begun.pop(step)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)

    def clean(self) -> None:
        """Removes what writers that are no more left unfinished."""
        for left in self.root.glob(_UNFINISHED):
            with contextlib.suppress(FileNotFoundError), locked(left) as free:
                if free:
                    shutil.rmtree(left, ignore_errors=True)

    # -- reading -------------------------------------------------------------------------------------------------------

    def steps(self) -> tuple[int, ...]:
        """Steps with a complete checkpoint, rising."""
        return tuple(sorted(self._complete()))

    def newest(self) -> int | None:
        """The highest step with a complete checkpoint."""
        return max(self.steps(), default=None)

    def path(self, step: int | None = None) -> Path:
        """The folder of a complete checkpoint; of the newest, for None.

        Raises:
            CheckpointError: there is none.
        """
        complete = self._complete()
        if not complete or step not in {None, *complete}:
            have = f"steps {', '.join(map(str, sorted(complete)))}" if complete else "none"
            asked = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            remedy = "Check the folder, or take a step that is there."
            place = self.root.absolute()
            if (own := _COMPLETE.fullmatch(place.name)) and (place / MANIFEST).is_file():
                remedy = f"It is one itself: give the folder {str(place.parent)!r}, and step={int(own[1])}."
            raise CheckpointError(
                f"there is {asked} in {str(self.root)!r}; complete ones: {have}. Checkpoints are written by `step.save` and "
                f"`al.fit`. {remedy}"
            )
        return complete[max(complete) if step is None else step]

    def read(self, step: int | None = None, *, verify: bool = False) -> CheckpointManifest:
        """The manifest of a step, or of the newest; ``verify`` reads all files and compares their digests.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        folder = self.path(step)
        manifest = read_manifest(folder)
        if verify:
            check_files(folder, manifest)
        return manifest

    # -- names ---------------------------------------------------------------------------------------------------------

    def _versions(self) -> dict[int, dict[int, Path]]:
        """Step -> how often it was saved again -> folder."""
        found: dict[int, dict[int, Path]] = {}
        for path in self.root.glob("step_*"):
            if (match := _COMPLETE.fullmatch(path.name)) and (path / MANIFEST).is_file():
                found.setdefault(int(match[1]), {})[int(match[2] or 0)] = path
        return found

    def _complete(self) -> dict[int, Path]:
        return {step: versions[max(versions)] for step, versions in self._versions().items()}

    def _free_name(self, step: int) -> Path:
        taken = self._versions().get(step, {})
        number = max(taken, default=-1) + 1
        while (target := self.root / (_name(step) + (f".{number}" if number else ""))).exists():
            number += 1  # a folder of that name which is no checkpoint
        return target

    def _prune(self, new: int) -> None:
        """Removes all but the last ``keep``; what cannot be removed now is tried again after the next commit."""
        versions = self._versions()
        kept = [new, *(step for step in sorted(versions, reverse=True) if step != new)][: self.keep]
        for step, folders in versions.items():
            for number, folder in folders.items():
                if step not in kept or number != max(folders):
                    self._remove(folder)

    def _remove(self, folder: Path) -> None:
        # Renamed first: a checkpoint that is being removed must not be seen.
        try:
            gone = Path(tempfile.mkdtemp(dir=self.root, prefix=f".{folder.name}.", suffix=".partial"))
            os.rename(folder, gone)
        except OSError:
            return
        shutil.rmtree(gone, ignore_errors=True)


def not_written(root: Path, step: int, error: BaseException) -> CheckpointError:
    """What is said when a checkpoint cannot be written."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    fact = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
    advice = "Free space there, or keep fewer checkpoints." if full else "Correct the cause, or save elsewhere."
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {str(root)!r}: {fact}. The folder must be writable and have room "
        f"for one more checkpoint than are kept. Nothing of it is left, older checkpoints are untouched. {advice}"
    )


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _files(items: Sequence[ItemRecord]) -> dict[str, FileDigest]:
    return {f"{item.name}/{name}": digest for item in items for name, digest in item.files.items()}
