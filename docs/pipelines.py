"""Draws the picture of the page ``pipelines.md``: simulated timelines, and a measured one.

``python -m docs.pipelines`` draws ``images/pipelines.png``. Every forward pass and every half of a backward pass takes 60 ms.
"""

from __future__ import annotations

import alpa_lite as al
from alpa_lite.report.timeline import draw_timelines
from benchmarks.delays import delayed_step, simulated
from docs import pages
from examples.example import use_virtual_devices

PICTURE = pages.IMAGES / "pipelines.png"
DELAY_S = 0.06
NUM_STAGES, NUM_MICROBATCHES = 4, 8


def compiled(schedule: str):
    """A step of four layers on four devices, and its arguments."""
    step, args = delayed_step(NUM_STAGES, DELAY_S, DELAY_S, DELAY_S)
    options = al.PlanOptions(
        num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, mesh_shape=(1,), schedule=schedule
    )
    cluster = al.Cluster.parse(f"1x{NUM_STAGES}:cpu")
    return al.parallelize(step, cluster=cluster, options=options).compile(*args), args


def draw() -> None:
    """1F1B simulated and measured, ZB-H1 simulated and measured."""
    timelines = {}
    for schedule in ("1f1b", "zb-h1"):
        step, args = compiled(schedule)
        timelines[f"{schedule}, simulated"] = simulated(step, DELAY_S, DELAY_S, DELAY_S)
        timelines[f"{schedule}, measured"] = step.measure(*args)
    PICTURE.parent.mkdir(exist_ok=True)
    draw_timelines(timelines, PICTURE)


if __name__ == "__main__":
    use_virtual_devices(NUM_STAGES)
    draw()
