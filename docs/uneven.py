"""Writes the output of the example on the page ``uneven.md``, and draws ``images/uneven.png``: an array, padded and split."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
PAGE = HERE / "uneven.md"
PICTURE = HERE / "images" / "uneven.png"
ROWS, PADDED, COLUMNS, DEVICES = 10, 12, 8, 4


def run_example() -> str:
    """What the page's Python block prints."""
    code = PAGE.read_text(encoding="utf-8").split("```python\n", 1)[1].split("```", 1)[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "uneven.md", "exec"), {})
    return printed.getvalue()


def filled(text: str) -> str:
    """The page's text with the output in its place."""
    head, rest = text.split("<!-- output -->\n")
    return f"{head}<!-- output -->\n```text\n{run_example()}```\n<!-- end -->\n{rest.split('<!-- end -->' + chr(10), 1)[1]}"


def panels() -> list[tuple[str, np.ndarray]]:
    """(title, device of every element, -1 for padding added to it) of the three panels."""
    by_column = np.tile(np.arange(COLUMNS) * DEVICES // COLUMNS, (PADDED, 1))
    by_row = np.tile((np.arange(PADDED) * DEVICES // PADDED)[:, None], (1, COLUMNS))
    return [
        ("the argument, (10, 8) as [_,x]", by_column[:ROWS]),
        ("padded: (12, 8) as [_,x]", by_column),
        ("after one all-to-all: [x,_]", by_row),
    ]


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(9, 4.2), layout="constrained")
    colours = pyplot.get_cmap("tab10")
    for panel, (title, devices) in zip(axes, panels(), strict=True):
        panel.imshow(colours(devices), extent=(0, COLUMNS, devices.shape[0], 0))
        if devices.shape[0] > ROWS:
            added = pyplot.Rectangle((0, ROWS), COLUMNS, PADDED - ROWS, fill=False, hatch="///", edgecolor="white")
            panel.add_patch(added)
        panel.set_title(title, fontsize=10)
        panel.set_xlim(0, COLUMNS)
        panel.set_ylim(PADDED, 0)
        panel.set_xticks([])
        panel.set_yticks([0, ROWS, PADDED])
        panel.spines[:].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours(d)) for d in range(DEVICES)]
    handles.append(pyplot.Rectangle((0, 0), 1, 1, facecolor="0.6", hatch="///", edgecolor="white"))
    labels = [*(f"device {d}" for d in range(DEVICES)), "padding"]
    figure.legend(handles, labels, loc="outside lower center", ncols=DEVICES + 1, frameon=False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    pyplot.close(figure)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw()


if __name__ == "__main__":
    main()
