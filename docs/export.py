"""Which slices of the two weights of ``export.md`` each rank's folder holds.

``python -m docs.export`` draws ``images/export.png``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax

import alpa_lite as al
from docs import pages

PAGE = pages.DOCS / "export.md"
PICTURE = pages.IMAGES / "export.png"
PATHS = ("0/up", "0/down")


def export(folder: Path) -> Path:
    """What the first block of the page exports."""
    block = pages.python_blocks(PAGE.read_text(encoding="utf-8"))[0]
    exec(block.replace('"out"', repr(str(folder / "out"))), {"__name__": "page"})
    return folder / "out"


def draw() -> None:
    pyplot = pages.pyplot()
    with tempfile.TemporaryDirectory() as name:
        out = export(Path(name))
        parts = [al.load_export(out, rank) for rank in range(4)]
    shapes = {leaf.path: leaf.value.shape for leaf in parts[0].plan.inputs}
    colours = pyplot.get_cmap("tab10")
    figure, axes = pyplot.subplots(len(PATHS), len(parts), figsize=(8, 5.2), layout="constrained")
    for row, path in zip(axes, PATHS, strict=True):
        number = parts[0].plan.input_paths.index(path)
        for panel, part in zip(row, parts, strict=True):
            (top, bottom), (left, right) = part.slices[path]
            rows, columns = shapes[path]
            panel.add_patch(pyplot.Rectangle((left, top), right - left, bottom - top, color=colours(part.rank)))
            panel.set(xlim=(0, columns), ylim=(rows, 0), xticks=[0, columns], yticks=[0, rows])
            panel.set_aspect("equal")
            panel.set_title(f"rank_{part.rank}/{number}.npy\n[{top}:{bottom}, {left}:{right}]", fontsize=9)
        row[0].set_ylabel(f"{path}  {part.plan.inputs[number].spec}")
    figure.suptitle(f"Slices of the weights on the mesh {parts[0].plan.mesh}", fontsize=11)
    pages.save(figure, PICTURE)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    draw()
