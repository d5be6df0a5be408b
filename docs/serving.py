"""Draws the picture of the page ``serving.md``: the price of sharing as traffic goes from prompts to tokens.

``python -m docs.serving`` draws ``images/price_of_sharing.png``: two layers of Llama-3 8B on eight H100, planned and not run.
"""

from __future__ import annotations

import alpa_lite as al
from benchmarks.plan_shared import graphs
from docs import pages

PICTURE = pages.IMAGES / "price_of_sharing.png"
NUM_LAYERS = 2
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024)  # decode steps per prompt of each length


def layouts() -> dict[int, al.SharedLayout]:
    """By decode steps per prompt."""
    made, cluster = graphs(NUM_LAYERS), al.Cluster.parse("1x8:h100-sxm")
    return {
        tokens: al.plan_shared(
            made,
            shared=("0", "1"),
            weights={name: float(tokens) if name == "decode" else 1.0 for name in made},
            cluster=cluster,
            donate_argnums=1,
        )
        for tokens in TOKENS
    }


def draw() -> None:
    """What each graph pays in the layout that is best for all, beyond what it costs in its own."""
    found = layouts()
    figure, axes = pages.pyplot().subplots(figsize=(8, 4.2), layout="constrained")
    for name in next(iter(found.values())).plans:
        style = {"color": "black", "linewidth": 2} if name == "decode" else {}
        prices = [100 * layout.price[name] for layout in found.values()]
        axes.plot(list(found), prices, marker="o", label=name, **style)
    together = [
        100 * (layout.objective / sum(layout.weights[name] * layout.own[name] for name in layout.plans) - 1)
        for layout in found.values()
    ]
    axes.plot(list(found), together, linestyle="--", color="gray", label="all, by traffic")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(found), [str(tokens) for tokens in found])
    axes.minorticks_off()
    axes.set(
        xlabel="decode steps per prompt of each length",
        ylabel="price of sharing (% of the own optimum)",
        title="One layout for five graphs: the more one of them runs, the less it pays",
    )
    axes.legend()
    pages.save(figure, PICTURE)


if __name__ == "__main__":
    draw()
