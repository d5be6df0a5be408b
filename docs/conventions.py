"""What the nine ways to split two Linears cost under slapo-2023-05, and of what.

``python -m docs.conventions`` draws ``images/conventions.png``.
"""

from __future__ import annotations

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from docs import pages

PICTURE = pages.IMAGES / "conventions.png"
WAYS = {"RRxRS": P(None, "x"), "RSxSR": P("x", None), "SRxRR": P()}
PARTS = {"fc1 reduces": "tab:red", "between": "tab:orange", "fc2 reduces": "tab:purple", "result gathered": "tab:blue"}


def mlp(params, x):
    h = jax.nn.gelu(x @ params["fc1"])
    return h @ params["fc2"]


def parts(fc1: str, fc2: str) -> tuple[al.Plan, Counter]:
    """The plan with the two weights pinned, and its price by part."""
    shapes = {
        "fc1": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
        "fc2": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
    }
    plan = al.plan(
        mlp,
        shapes,
        jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32),
        cluster=al.Cluster.parse("1x8:cpu"),
        pins={"0/fc1": WAYS[fc1], "0/fc2": WAYS[fc2]},
        options=al.PlanOptions(costs="slapo-2023-05"),
    )
    found: Counter = Counter()
    linears = 0
    for row in plan.cost_table().rows:
        if row.name == "dot_general":
            linears += 1
            found[f"fc{linears} reduces"] += row.cost
        else:
            found["result gathered" if linears == 2 else "between"] += row.cost
    return plan, found


def draw() -> None:
    pyplot = pages.pyplot()
    schemes = [(*ways, *parts(*ways)) for ways in itertools.product(WAYS, repeat=2)]
    schemes.sort(key=lambda scheme: -scheme[2].objective)
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for y, (_, _, plan, found) in enumerate(schemes):
        left = 0.0
        for part, colour in PARTS.items():
            axes.barh(y, found[part], left=left, color=colour, label=part if y == 0 else None)
            left += found[part]
        axes.text(left + 4e4, y, f"{plan.objective:,.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(schemes)), [f"{a}, {b}" for a, b, *_ in schemes])
    axes.set_xlim(0, 6.2e6)
    axes.set_xticks([n * 1e6 for n in range(7)], map(str, range(7)))
    axes.set_xlabel("millions of elements moved (slapo-2023-05, 8 devices)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    pages.save(figure, PICTURE)


if __name__ == "__main__":
    draw()
