"""What a user sees while a plan is made."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str], None] | None
"""Called with a line of text now and then."""


def _tell(text: str) -> None:
    sys.stderr.write(f"alpa_lite: {text}\n")


@contextlib.contextmanager
def told(verbose: bool) -> Iterator[Callable[[str], None] | None]:
    """Every line on stderr if ``verbose``; else one line that changes on a terminal, and nothing elsewhere."""
    if verbose:
        yield _tell
        return
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("alpa_lite: tracing") as status:
        yield lambda text: status.update(f"alpa_lite: {text}")
