"""Folders that are whole or not there.

``folder_at_once`` writes beside the target and renames. A process that is killed leaves ``.NAME.*.partial`` (not whole, the
next one removes it) or, between two renames, ``.NAME.*.replaced`` (what stood there before, the next one puts it back).
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from alpa_lite.plan.files import sync
from alpa_lite.plan.manifest import listed_files

_PARTIAL, _REPLACED = "partial", "replaced"


@contextlib.contextmanager
def folder_at_once(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name ``target`` when the block has ended well, and else is removed.

    Of a folder that stands there, the files of an earlier export go, and those that the new one replaces; others stay.

    Raises:
        OSError: the parent folder is missing or not writable.
    """
    target = target.resolve()
    _clear_leftovers(target)
    folder = _sibling(target, _PARTIAL)
    with locked(folder) as mine:
        assert mine, f"{folder} is new"
        try:
            folder.chmod(0o755)  # mkdtemp's folders are private to the user
            yield folder
            sync_tree(folder)
            _swap(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    sync(target.parent)


def _sibling(target: Path, kind: str) -> Path:
    return Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=f".{kind}"))


def _swap(folder: Path, target: Path) -> None:
    if not target.exists():
        os.rename(folder, target)
        return
    old = _sibling(target, _REPLACED)
    os.rename(target, old)
    try:
        os.rename(folder, target)
    except OSError:
        os.rename(old, target)
        raise
    _finish_swap(old, target)


def _finish_swap(old: Path, target: Path) -> None:
    """Moves what is not of an export from the old folder to the new one, and removes the rest."""
    ours = listed_files(old)
    for entry in list(old.iterdir()):
        if entry.name not in ours and not (target / entry.name).exists():
            os.rename(entry, target / entry.name)
    shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(target: Path) -> None:
    for kind in (_REPLACED, _PARTIAL):
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.{kind}"):
            with locked(left) as free:
                if free and kind == _PARTIAL:
                    shutil.rmtree(left, ignore_errors=True)
                elif free and target.exists():
                    _finish_swap(left, target)
                elif free:
                    os.rename(left, target)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether this process now holds the folder; the lock ends with the block, or with the process."""
    import fcntl  # not on Windows, where everything else can be imported

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except BlockingIOError:
        held = False
    try:
        yield held
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))
