"""What ``al.plan`` answers for a symbolic cluster."""

from __future__ import annotations

from os import PathLike

from alpa_lite.planner.symbolic import SymbolicPlan as PlansByNumber


class SymbolicPlan(PlansByNumber):
    __doc__ = PlansByNumber.__doc__

    def plot(self, path: str | PathLike[str], **budgets: float) -> None:
        """Draws memory and traffic per device over the number of workers, as PNG, SVG or PDF by the name's ending.

        Args:
            path: of the picture.
            budgets: lines of memory to compare with, e.g. ``budget_bytes=16e9``.
        """
        from alpa_lite.report.symbolic import draw_symbolic

        draw_symbolic(self, path, **budgets)
