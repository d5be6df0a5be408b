"""Writes what is generated on the page ``sameness.md``: the table of patterns, the output of the example, and the picture.

``python -m docs.sameness`` rewrites the page between its marks and draws ``images/device_index_map.png``.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import alpa_lite as al
from docs import pages

PAGE = pages.DOCS / "sameness.md"
PICTURE = pages.IMAGES / "device_index_map.png"
SHAPE = (8, 8)
PANELS = (
    ("[x,y]", PartitionSpec("x", "y"), "each axis splits one dim"),
    ("[x.y,_]", PartitionSpec(("x", "y"), None), "both split dim 0, x is major"),
    ("[y.x,_]", PartitionSpec(("y", "x"), None), "the same tiles, other devices"),
    ("[x,_]", PartitionSpec("x", None), "whole along y: 4 devices per tile"),
    ("[_,x]", PartitionSpec(None, "x"), "transpose of [x,_]: the same elements stay"),
    ("[y,_]", PartitionSpec("y", None), "from [x,_]: resharding on x and on y"),
)


def filled(text: str) -> str:
    """The page's text with everything generated in its place."""
    return pages.fill(text, {"patterns": al.analysis.patterns().markdown(), "output": pages.example_output(text, PAGE)})


def holders(spec: PartitionSpec) -> dict[tuple[int, int], list[int]]:
    """Devices that hold each element of a tensor of ``SHAPE`` on a mesh (x=2, y=4), as JAX says."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    found: dict[tuple[int, int], list[int]] = {}
    for device, index in NamedSharding(mesh, spec).devices_indices_map(SHAPE).items():
        for row in range(*index[0].indices(SHAPE[0])):
            for column in range(*index[1].indices(SHAPE[1])):
                found.setdefault((row, column), []).append(device.id)
    return found


def draw() -> None:
    """One panel per spec: which devices hold which element of an 8 x 8 tensor."""
    pyplot = pages.pyplot()
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 8.8), layout="constrained")
    figure.get_layout_engine().set(hspace=0.08, wspace=0.04)
    colours = pyplot.get_cmap("tab10")
    for panel, (text, spec, note) in zip(axes.flat, PANELS, strict=True):
        found = holders(spec)
        first = np.array([[min(found[row, column]) for column in range(SHAPE[1])] for row in range(SHAPE[0])])
        panel.imshow(colours(first), aspect="equal")
        for devices in sorted({tuple(sorted(d)) for d in found.values()}):
            place = np.array([element for element, held in found.items() if tuple(sorted(held)) == devices])
            (top, left), (bottom, right) = place.min(axis=0), place.max(axis=0)
            outline = pyplot.Rectangle(
                (left - 0.5, top - 0.5), right - left + 1, bottom - top + 1, fill=False, edgecolor="white", linewidth=3
            )
            panel.add_patch(outline)
            label = ", ".join(map(str, devices))
            panel.text(
                *place.mean(axis=0)[::-1], label, ha="center", va="center", color="white", weight="bold", size=13
            )
        panel.set_title(f"{text}\n{note}", fontsize=11)
        panel.set_xticks(range(SHAPE[1]))
        panel.set_yticks(range(SHAPE[0]))
    for panel in axes[-1]:
        panel.set_xlabel("dim 1")
    for panel in axes[:, 0]:
        panel.set_ylabel("dim 0")
    figure.suptitle("Devices that hold each element of a tensor (8, 8) on the mesh (x=2, y=4); device = 4 x + y")
    pages.save(figure, PICTURE)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    pages.rewrite(PAGE, filled)
    draw()


if __name__ == "__main__":
    main()
