"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from alpa_lite.errors import AlpaLiteError, user_line


def as_path(path: object, call: str, error: type[AlpaLiteError]) -> Path:
    """What a user gave as a path; ``call`` is how it should have been given, for the message."""
    # Path("") would be the current folder.
    if isinstance(path, str | PathLike) and path != "" and "\0" not in str(path):
        return Path(path)
    shown = getattr(path, "__qualname__", repr(path))
    raise error(
        f"{call.partition('(')[0]} got {shown:.80} of type {type(path).__name__} as a path. Allowed is a str or an "
        f"os.PathLike, and not an empty one, nor one with a null character. At {user_line()}. Write {call}."
    )


def write_atomically(path: str | PathLike[str], data: bytes) -> None:
    """Writes ``data``; see ``whole_file``."""
    with whole_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def whole_file(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write into, so that a crash or an error leaves the old file or the new one, never a part.

    The temporary file lies in the same folder because a rename is atomic only within one file system; the folder is
    synced too because the rename itself is an entry of the folder. A link goes on to link to the file. What is no file, such as
    a pipe or ``/dev/null``, is written to as it is: a rename would put a file in its place.

    Raises:
        OSError: if the folder is missing or not writable; no temporary file is left behind.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    target = target.resolve() if target.is_symlink() else target
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _mode_of(target))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(target.parent)


@contextlib.contextmanager
def saved_file(what: str, path: Path, error: type[AlpaLiteError]) -> Iterator[BinaryIO]:
    """``whole_file`` for what a user saves: raises ``error``, which says ``what`` could not be written."""
    try:
        with whole_file(path) as file:
            yield file
    except OSError as reason:
        way = "" if path.parent.is_dir() else f"Make the folder {str(path.parent)!r}, or give"
        raise error(
            f"{what} cannot be saved as {str(path)!r}: {reason.strerror or reason}. Allowed is a file in an existing folder "
            f"that you may write to, on a disk with room. At {user_line()}. {way or 'Give'} another path."
        ) from reason


def _mode_of(target: Path) -> int:
    """Mode of the file that is replaced, else an ordinary one (mkstemp's files are private to the user)."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        return 0o644


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
