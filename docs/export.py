"""Draws ``images/export.png``: which slices of the two weights of ``export.md`` each rank's folder holds."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import jax

import alpa_lite as al

DOCS = Path(__file__).resolve().parent
PICTURE = DOCS / "images" / "export.png"
PATHS = ("0/up", "0/down")


def blocks() -> list[str]:
    """The Python of the page, in order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / "export.md").read_text(encoding="utf-8"), re.DOTALL)


def export(folder: Path) -> Path:
    """What the first block of the page exports."""
    exec(blocks()[0].replace('"out"', repr(str(folder / "out"))), {"__name__": "page"})
    return folder / "out"


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
