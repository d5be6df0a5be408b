"""A symbolic plan as a picture: memory and traffic per device over the number of workers. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from os import PathLike
from typing import Any, Protocol

from alpa_lite.errors import AlpaLiteError, user_line
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.report.picture import save_picture

_COLOURS = ("#1f6f8b", "#d1495b", "#2e933c", "#8d6a9f", "#edae49", "#5c6b73", "#00798c", "#a44a3f")
_PARTS = (  # of memory at the peak, bottom up: categories, label, colour
    (("parameters",), "parameters", "#1f6f8b"),
    (("optimizer_state",), "optimizer state", "#5fa8d3"),
    (("inputs", "outputs", "constants"), "arguments, results", "#c9d6df"),
    (("gradients",), "gradients", "#edae49"),
    (("activations",), "activations", "#d1495b"),
    (("temporaries",), "temporaries", "#8d6a9f"),
)


class Numbers(Protocol):
    """Some numbers of workers."""

    @property
    def values(self) -> tuple[int, ...]: ...


class PlansByNumber(Protocol):
    """What is drawn of a ``planner.symbolic.SymbolicPlan``."""

    @property
    def name(self) -> str: ...

    @property
    def values(self) -> tuple[int, ...]: ...

    @property
    def without_plan(self) -> tuple[int, ...]: ...

    @property
    def breakpoints(self) -> tuple[int, ...]: ...

    @property
    def regimes(self) -> Sequence[Numbers]: ...

    def memory(self, n: int) -> MemoryProfile: ...

    def traffic(self, n: int) -> Fraction: ...


def draw_symbolic(plan: PlansByNumber, path: str | PathLike[str], **budgets: float) -> None:
    """Draws the picture; every number with a plan is a bar, numbers with the same plan share a colour below.

    Args:
        plan: whose numbers are all planned for it.
        path: of the picture; its ending says whether it is PNG, SVG or PDF.
        budgets: label -> bytes, lines across the memory.

    Raises:
        AlpaLiteError: matplotlib is not installed, no number has a plan, or a budget is no number.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AlpaLiteError(
            "plan.plot needs matplotlib, which is not installed. Everything it shows is also in plan.memory(n) and "
            f"plan.traffic(n). It was asked to draw {path}. Install it with: pip install 'alpa-lite[plots]'."
        ) from error
    shown = [n for n in plan.values if n not in plan.without_plan]
    if not shown:
        raise AlpaLiteError(
            f"no {plan.name} of {plan.values} has a plan, so there is nothing to plot at {path}. At least one must fit the "
            "memory. Raise PlanOptions.memory_budget_bytes or give larger values to Cluster.symbolic."
        )
    for label, size in budgets.items():
        if not isinstance(size, Real) or isinstance(size, bool) or not 0 < size < math.inf:
            raise AlpaLiteError(
                f"plan.plot got {label}={size!r}. Allowed is a positive number of bytes for every line. At {user_line()}. "
                f"Write for example plan.plot({str(path)!r}, {label}=16e9)."
            )
    figure = Figure(figsize=(8.5, 6.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_memory(above, plan, shown, budgets)
    _draw_traffic(below, plan, shown)
    save_picture(figure, path, 140, 'plan.plot("memory.png")')


def _draw_memory(axes: Any, plan: PlansByNumber, shown: list[int], budgets: dict[str, float]) -> None:
    places = range(len(plan.values))
    at = dict(zip(plan.values, places, strict=True))
    floor = [0.0] * len(shown)
    for words, label, colour in _PARTS:
        heights = [sum(getattr(plan.memory(n), word) for word in words) / 1e9 for n in shown]
        if any(heights):
            axes.bar([at[n] for n in shown], heights, bottom=floor, color=colour, label=label, width=0.8)
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
    for label, size in budgets.items():
        axes.axhline(size / 1e9, color="#333333", linestyle="--", linewidth=1)
        axes.text(
            len(plan.values) - 0.5, size / 1e9, f" {label.replace('_', ' ')}", ha="right", va="bottom", fontsize=8
        )
    for n in plan.without_plan:
        above_axis = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        axes.annotate("no plan", (at[n], 0), **above_axis, rotation=90, fontsize=8, color="#777777")
    axes.set_xlim(-0.6, len(plan.values) - 0.4)
    axes.set_ylim(top=1.08 * max([*floor, *(size / 1e9 for size in budgets.values())]))
    axes.set_ylabel("GB per device at the peak")
    axes.legend(fontsize=8, frameon=False)


def _draw_traffic(axes: Any, plan: PlansByNumber, shown: list[int]) -> None:
    at = {n: place for place, n in enumerate(plan.values)}
    for number, regime in enumerate(plan.regimes):
        values = [n for n in regime.values if n in shown]
        heights = [float(plan.traffic(n)) / 1e9 for n in values]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot([at[n] for n in values], heights, "o", color=colour, label=f"plan {number + 1}")
    for n in plan.breakpoints:
        axes.axvline(at[n] - 0.5, color="#cccccc", linewidth=0.8, zorder=0)
    axes.set_ylabel("GB sent per device in a step")
    axes.set_xlabel(f"{plan.name} (a line where the best plan changes)")
    axes.set_ylim(bottom=0, top=1.08 * axes.get_ylim()[1])
    axes.set_xticks(list(at.values()), [str(n) for n in at])
    axes.legend(fontsize=8, frameon=False, ncols=2)
