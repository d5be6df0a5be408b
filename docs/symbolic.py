"""Writes what is generated on the page ``symbolic.md``, the output of its example, and draws its picture.

``python -m docs.symbolic`` rewrites the page between its marks and draws ``images/symbolic.png``.
"""

from __future__ import annotations

import alpa_lite as al
from docs import pages
from examples import seven_b

PAGE = pages.DOCS / "symbolic.md"
PICTURE = pages.IMAGES / "symbolic.png"
VALUES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def filled(text: str) -> str:
    """The page's text with everything generated in its place."""
    return pages.fill(text, {"output": pages.example_output(text, PAGE)})


def draw() -> None:
    """Memory and traffic of the 7B step over the number of workers."""
    cluster = al.Cluster.symbolic("n", device="v100-sxm2-16gb", devices_per_host=8, values=VALUES)
    options = al.PlanOptions(mesh_shape=("n",))
    plan = al.plan(seven_b.step, *seven_b.ARGS, cluster=cluster, donate_argnums=0, options=options)
    PICTURE.parent.mkdir(exist_ok=True)
    plan.plot(PICTURE, budget=0.9 * cluster.host.device.memory_bytes)


if __name__ == "__main__":
    pages.rewrite(PAGE, filled)
    draw()
