"""Paths at the command line: each argument or option that is one has one of these as its ``parser=``.

``Path("")`` is the current folder, so that an empty text, as of a shell's variable that is not set, is refused. Where a result is
to be written is looked at before the work that makes it.
"""

from __future__ import annotations

from pathlib import Path

import typer

from alpa_lite.errors import AlpaLiteError
from alpa_lite.plan.files import write_atomically


def a_file(text: str) -> Path:
    """Raises ``typer.BadParameter`` if it is empty; whether the file is there, each command says itself."""
    return _path(text, "a file")


def a_new_file(text: str) -> Path:
    """Raises ``typer.BadParameter`` also where there is no folder for it, or one of that name."""
    path = a_file(text)
    if path.is_dir() or not path.parent.is_dir():
        wrong = f"{text!r} is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        raise typer.BadParameter(
            f"{wrong}. It must be a file in an existing folder. Make the folder, or write another path."
        )
    return path


def a_folder(text: str) -> Path:
    """The same of a folder."""
    return _path(text, "a folder; . is the current one")


def _path(text: str, kind: str) -> Path:
    if not text:
        raise typer.BadParameter(
            f"an empty path was given. It must be the path of {kind}. Write one; an option can also be left out."
        )
    return Path(text)


def write_out(path: Path, text: str) -> None:
    """Writes a result, whole or not at all.

    Raises:
        AlpaLiteError: the folder is gone or not writable, or the disk is full.
    """
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise AlpaLiteError(
            f"{str(path)!r} cannot be written: {error.strerror or error}. It must be a file in an existing folder that you may "
            "write to, on a disk with room. Correct the path."
        ) from None
