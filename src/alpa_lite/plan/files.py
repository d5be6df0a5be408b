"""Files and folders that are whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

_PARTIAL, _REPLACED = "partial", "replaced"


def write_atomically(path: str | PathLike[str], data: bytes) -> None:
    """Writes ``data`` so that a crash leaves the old file or the new one, never a part.

    The temporary file lies in the same folder because a rename is atomic only within one file system; the folder is
    synced too because the rename itself is an entry of the folder.

    Raises:
        OSError: if the folder is missing or not writable; no temporary file is left behind.
    """
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _mode_of(target))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync(target.parent)


def _mode_of(target: Path) -> int:
    """Mode of the file that is replaced, else an ordinary one (mkstemp's files are private to the user)."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        return 0o644


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_at_once(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name ``target`` when the block has ended well, and else is removed.

    What stood at ``target`` (nothing, or a folder) is replaced. A process that is killed leaves ``.NAME.*.partial``
    beside it; the next one removes it, which the lock on a folder in use keeps it from doing too early.

    Raises:
        OSError: the parent folder is missing or not writable.
    """
    target = target.resolve()
    _clear_leftovers(target)
    folder = _sibling(target, _PARTIAL)
    with _lock(folder) as mine:
        assert mine, f"{folder} is new"
        try:
            folder.chmod(0o755)  # mkdtemp's folders are private to the user
            yield folder
            _sync_tree(folder)
            _swap(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    _sync(target.parent)


def _sibling(target: Path, kind: str) -> Path:
    return Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=f".{kind}"))


def _swap(folder: Path, target: Path) -> None:
    """Two renames; a process that is killed between them leaves the old folder as ``.replaced``, to be put back."""
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
    shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(target: Path) -> None:
    for kind in (_REPLACED, _PARTIAL):
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.{kind}"):
            with _lock(left) as free:
                if free and kind == _REPLACED and not target.exists():
                    os.rename(left, target)
                elif free:
                    shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Whether this process now holds the folder; the lock ends with the block, or with the process."""
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


def _sync_tree(folder: Path) -> None:
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(place, name))
        _sync(Path(place))
