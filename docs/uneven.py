"""Writes the output of the example on the page ``uneven.md``, and draws its picture: an array, padded and split.

``python -m docs.uneven`` rewrites the page between its marks and draws ``images/uneven.png``.
"""

from __future__ import annotations

import numpy as np

from docs import pages

PAGE = pages.DOCS / "uneven.md"
PICTURE = pages.IMAGES / "uneven.png"
ROWS, PADDED, COLUMNS, DEVICES = 10, 12, 8, 4


def filled(text: str) -> str:
    """The page's text with everything generated in its place."""
    return pages.fill(text, {"output": pages.example_output(text, PAGE)})


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
    pyplot = pages.pyplot()
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
    pages.save(figure, PICTURE)


def main() -> None:
    pages.rewrite(PAGE, filled)
    draw()


if __name__ == "__main__":
    main()
