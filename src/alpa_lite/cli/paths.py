"""Paths at the command line: each argument or option that is one has one of these as its ``parser=``.

``Path("")`` is the current folder, so that an empty text, as of a shell's variable that is not set, is refused.
"""

from __future__ import annotations

from pathlib import Path

import typer


def a_file(text: str) -> Path:
    """Raises ``typer.BadParameter`` if it is empty; whether the file is there, each command says itself."""
    return _path(text, "a file")


def a_folder(text: str) -> Path:
    """The same of a folder."""
    return _path(text, "a folder; . is the current one")


def _path(text: str, kind: str) -> Path:
    if not text:
        raise typer.BadParameter(
            f"an empty path was given. It must be the path of {kind}. Write one; an option can also be left out."
        )
    return Path(text)
