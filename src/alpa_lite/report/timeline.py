"""Timelines of a pipeline as a picture: a bar per action, a row per submesh, a panel per timeline. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from alpa_lite.errors import AlpaLiteError, user_line
from alpa_lite.report.picture import save_picture
from alpa_lite.schedule import Action, ActionKind, Timeline
from alpa_lite.units import format_time

_COLOURS = {
    ActionKind.F: ("#5fa8d3", "forward"),
    ActionKind.B: ("#edae49", "backward"),
    ActionKind.I: ("#e07a5f", "backward, inputs"),
    ActionKind.W: ("#8fbc5a", "backward, weights"),
    ActionKind.RECOMPUTE: ("#c9d6df", "recompute"),
    ActionKind.GRADSYNC: ("#8d6a9f", "gradients"),
    ActionKind.UPDATE: ("#8d6a9f", "update"),
}
_UNITS = ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"))
_HATCH = "///"
_CHARACTER = 0.011  # of the width of the picture: narrower bars have no number


def draw_timelines(timelines: Mapping[str, Timeline], path: str | PathLike[str]) -> None:
    """Draws timelines below each other on one axis of time.

    Bars carry their microbatch; those of further stages of a submesh are hatched.

    Args:
        timelines: by title; transfers are left out.
        path: of the picture, PNG, SVG or PDF by the name's ending.

    Raises:
        AlpaLiteError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise AlpaLiteError(
            "draw_timelines needs matplotlib, which is not installed. The extra 'plots' has it. At "
            f"{user_line()}. Run: pip install 'alpa-lite[plots]'."
        ) from None
    rows = [len(line.busy_s) for line in timelines.values()]
    figure = Figure(figsize=(10, 0.9 + sum(0.75 + 0.3 * n for n in rows)), layout="constrained")
    axes = figure.subplots(
        len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [n + 1 for n in rows]}
    )[:, 0]
    width = max(line.makespan_s for line in timelines.values())
    unit_s, word = next((unit for unit in _UNITS if width >= unit[0]), _UNITS[-1])
    shown: set[ActionKind] = set()
    shared = False
    for panel, (title, line) in zip(axes, timelines.items(), strict=True):
        kinds, further = _panel(panel, line, width, unit_s)
        shown, shared = shown | kinds, shared or further
        panel.set_title(
            f"{title}: {format_time(line.makespan_s)}, bubble {line.bubble_share:.1%}", loc="left", fontsize=10
        )
    axes[-1].set_xlabel(word)
    handles = [Patch(color=colour, label=word) for kind, (colour, word) in _COLOURS.items() if kind in shown]
    if shared:
        handles.append(Patch(facecolor="#999999", edgecolor="white", hatch=_HATCH, label="another stage there"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    save_picture(figure, path, 110, 'draw_timelines(timelines, "pipeline.png")')


def _panel(panel: Any, line: Timeline, width_s: float, unit_s: float) -> tuple[set[ActionKind], bool]:
    """Draws one timeline; returns the kinds of its actions, and whether a submesh has several stages."""
    first: dict[int, int] = {}
    found, further = set(), False
    for event in line.events:
        length = event.end_s - event.start_s
        if event.lane or length <= 0:
            continue
        action = Action.parse(event.label)
        first[event.mesh] = min(first.get(event.mesh, action.stage), action.stage)
        found.add(action.kind)
        colour = _COLOURS[action.kind][0]
        hatch = _HATCH if action.stage != first[event.mesh] else None
        further = further or hatch is not None
        style = {"color": colour, "edgecolor": "white", "linewidth": 0.6, "hatch": hatch}
        panel.barh(event.mesh, length / unit_s, left=event.start_s / unit_s, height=0.86, **style)
        if action.microbatch is not None and length > _CHARACTER * width_s * len(str(action.microbatch)):
            middle = (event.start_s + length / 2) / unit_s
            behind = (
                {"facecolor": colour, "edgecolor": "none", "pad": 0.8} if hatch else None
            )  # hatching crosses numbers
            text = {"ha": "center", "va": "center", "fontsize": 8, "bbox": behind}
            panel.text(middle, event.mesh, str(action.microbatch), **text)
    panel.set_yticks(range(len(line.busy_s)), [f"submesh {mesh}" for mesh in range(len(line.busy_s))], fontsize=8)
    panel.set_ylim(len(line.busy_s) - 0.5, -0.5)
    panel.set_xlim(0, width_s / unit_s)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    return found, further
