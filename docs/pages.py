"""What the scripts beside the pages share: a page's example and its output, text between marks, saved pictures.

Run a script as a module from the root of the repository: ``python -m docs.sameness``.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"


def python_blocks(text: str) -> list[str]:
    """The Python of a page, in order."""
    return [part.split("```", 1)[0] for part in text.split("```python\n")[1:]]


def example_output(text: str, page: Path) -> str:
    """What the first Python block of a page prints, as a block of the page."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(python_blocks(text)[0], page.name, "exec"), {})
    lines = [line.rstrip() for line in printed.getvalue().rstrip().splitlines()]
    return "\n".join(["```text", *lines, "```", ""])


def fill(text: str, generated: Mapping[str, str]) -> str:
    """A page's text with everything generated in its place: between ``<!-- MARK -->`` and ``<!-- end -->``."""
    for mark, content in generated.items():
        head, rest = text.split(f"<!-- {mark} -->\n")
        _, tail = rest.split("<!-- end -->\n", 1)
        text = f"{head}<!-- {mark} -->\n{content}<!-- end -->\n{tail}"
    return text


def rewrite(page: Path, filled: Callable[[str], str]) -> None:
    """Writes the page anew."""
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def pyplot():
    """Matplotlib, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure, picture: Path) -> None:
    """Writes a picture."""
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=110)
    pyplot().close(figure)
