"""Writes what is generated on the page ``conversions.md``: the output of its example, and the picture.

``python -m docs.conversions`` rewrites the page between its marks and draws ``images/conversion_graph.png``.
"""

from __future__ import annotations

import jax

import alpa_lite as al
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions, step_price
from docs import pages

PAGE = pages.DOCS / "conversions.md"
PICTURE = pages.IMAGES / "conversion_graph.png"

SHAPE = (1024, 1024)
MESH = DeviceMesh(shape=(8,), axis_names=("x",))
PLACES = {"[_,_]+{x}": (0.0, 1.1), "[x,_]": (-1.35, 0.0), "[_,x]": (1.35, 0.0), "[_,_]": (0.0, -1.1)}
NOTES = {"[_,_]+{x}": "partial sums", "[x,_]": "rows split", "[_,x]": "columns split", "[_,_]": "whole"}
COLOURS = {
    "slice": "0.55",
    "all-gather": "tab:blue",
    "all-to-all": "tab:purple",
    "all-reduce": "tab:red",
    "reduce-scatter": "tab:orange",
}
HIGHLIGHTED = ("[_,_]+{x}", "[_,x]")


def filled(text: str) -> str:
    """The page's text with everything generated in its place."""
    return pages.fill(text, {"output": pages.example_output(text, PAGE)})


def draw() -> None:
    """Four specs of a matrix on a line of 8 devices, every single step with its price, one shortest path thick."""
    pyplot = pages.pyplot()
    costs = cost_model("roofline", al.Cluster.parse("1x8:h100-sxm"), MESH)
    made = Conversions(mesh=MESH, costs=costs)
    path = made.steps(*(ShardingSpec.parse(text) for text in HIGHLIGHTED), SHAPE, 4)
    figure, axes = pyplot.subplots(figsize=(9.5, 6.6), layout="constrained")
    axes.set_xlim(-1.9, 1.9)
    axes.set_ylim(-1.45, 1.45)
    boxes = {text: _node(axes, text) for text in PLACES}
    figure.canvas.draw()  # so that the boxes have their sizes, at which arrows end
    for step in made.space(2).steps:
        name = str(step.kind or "slice")
        price_s = step_price(step, SHAPE, 4, MESH, costs)
        _arrow(axes, step, boxes, COLOURS[name], f"{price_s * 1e6:.1f} us" if price_s else "0", step in path)
    for name, colour in COLOURS.items():
        axes.plot([], [], color=colour, linewidth=2.5, label=name)
    axes.legend(loc="upper left", fontsize=11, frameon=False)
    axes.axis("off")
    axes.set_title(
        f"Single steps between the specs of a float32 {SHAPE} tensor on 8 H100, axis x\n"
        f"thick: the way from {HIGHLIGHTED[0]} to {HIGHLIGHTED[1]}",
        fontsize=12,
    )
    pages.save(figure, PICTURE)


def _node(axes, text: str):
    box = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": "black"}
    label = f"{text}\n{NOTES[text]}"
    return axes.text(*PLACES[text], label, ha="center", va="center", fontsize=13, zorder=3, bbox=box).get_bbox_patch()


def _arrow(axes, step: Step, boxes, colour: str, label: str, thick: bool) -> None:
    """One arc, bent so that the way back does not cover it; its label beside its middle."""
    (x0, y0), (x1, y1) = PLACES[str(step.before)], PLACES[str(step.after)]
    bend = 0.16
    axes.annotate(
        "",
        (x1, y1),
        (x0, y0),
        arrowprops={
            "arrowstyle": "-|>",
            "color": colour,
            "linewidth": 4.5 if thick else 1.8,
            "connectionstyle": f"arc3,rad={bend}",
            "patchA": boxes[str(step.before)],
            "patchB": boxes[str(step.after)],
            "shrinkA": 4,
            "shrinkB": 4,
            "mutation_scale": 18,
        },
    )
    middle = (x0 + x1) / 2 + bend / 2 * (y1 - y0), (y0 + y1) / 2 - bend / 2 * (x1 - x0)
    axes.text(
        *middle,
        label,
        ha="center",
        va="center",
        fontsize=10.5,
        color=colour if colour != "0.55" else "0.3",
        weight="bold" if thick else "normal",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
    )


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    pages.rewrite(PAGE, filled)
    draw()


if __name__ == "__main__":
    main()
