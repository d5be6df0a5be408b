"""Which elements of a result each block of an operand dim reaches, as probing sees it.

``python -m docs.probing`` draws ``images/probing.png``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.trace.influence import Influence, influence
from alpa_lite.trace.samples import Sampler
from docs import pages

PICTURE = pages.IMAGES / "probing.png"
SHARDS = 4


def seen(fn, *shapes) -> Influence:
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    result = jax.eval_shape(fn, *structs)
    return influence(jax.jit(lambda *args: [fn(*args)]), Sampler(structs, 0), [result.shape], SHARDS)


def verdict(found: Influence, place: tuple[int, int], rank: int) -> str:
    for dim in range(rank):
        if found.follows(place, (0, dim)):
            return f"follows result dim {dim}"
    return "mixes: partial results" if found.mixes(place) else "stays whole"


def panels():
    """(title, mask of every block) of the four panels."""
    reshape = seen(lambda x: x.reshape(4, 32), (4, 8, 4))
    matmul = seen(jnp.matmul, (4, 16), (16, 32))
    cases = [(reshape, "reshape (4,8,4) to (4,32)", (0, dim)) for dim in range(3)]
    for found, name, place in [*cases, (matmul, "matmul (4,16) by (16,32)", (0, 1))]:
        yield f"{name}, dim {place[1]}: {verdict(found, place, 2)}", found.masks[place][0]


def draw() -> None:
    pyplot = pages.pyplot()
    colours = pyplot.get_cmap("tab10")
    figure, axes = pyplot.subplots(4, 1, figsize=(8, 6.4), layout="constrained")
    for panel, (title, masks) in zip(axes, panels(), strict=True):
        reached = masks.sum(axis=0)
        image = np.where((reached == 1)[..., None], colours(masks.argmax(axis=0)), (0.75, 0.75, 0.75, 1.0))
        panel.imshow(image, aspect="equal")
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xticks(np.arange(-0.5, masks.shape[2]), labels=[])
        panel.set_yticks(np.arange(-0.5, masks.shape[1]), labels=[])
        panel.grid(color="white", linewidth=0.5)
        panel.tick_params(length=0)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours(s)) for s in range(SHARDS)]
    handles.append(pyplot.Rectangle((0, 0), 1, 1, color=(0.75, 0.75, 0.75)))
    labels = [*(f"block {s}" for s in range(SHARDS)), "all blocks"]
    figure.legend(handles, labels, loc="outside lower center", ncols=SHARDS + 1, frameon=False)
    figure.suptitle("Elements of the result that a block of an operand dim reaches", fontsize=11)
    pages.save(figure, PICTURE)


if __name__ == "__main__":
    draw()
