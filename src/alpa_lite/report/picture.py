"""Pictures as files, whole or not at all."""

from __future__ import annotations

from os import PathLike
from typing import Any

from alpa_lite.errors import AlpaLiteError, user_line
from alpa_lite.plan.files import as_path, saved_file

_KINDS = ("png", "svg", "pdf")


def save_picture(figure: Any, path: str | PathLike[str], dpi: int, call: str) -> None:
    """Writes a Matplotlib figure.

    Args:
        figure: to be written.
        path: whose ending says whether it becomes PNG, SVG or PDF.
        dpi: dots per inch, where the picture is of dots.
        call: how the user asks for the picture, for messages.

    Raises:
        AlpaLiteError: the path is none, has another ending, or cannot be written.
    """
    target = as_path(path, call, AlpaLiteError)
    kind = target.suffix[1:].lower()
    if kind not in _KINDS:
        raise AlpaLiteError(
            f"{call.partition('(')[0]} got the path {str(target)!r}. Allowed are names that end in "
            f"{', '.join('.' + word for word in _KINDS)}. At {user_line()}. Write for example {call}."
        )
    with saved_file("the picture", target, AlpaLiteError) as file:
        figure.savefig(file, format=kind, dpi=dpi)
