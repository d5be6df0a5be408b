"""Programs whose explicit collectives XLA:GPU rewrites, with the collectives that a plan would list for them.

``hlo/NAME.txt`` is what XLA:GPU of jaxlib 0.10.2 made of them for eight H100 on the mesh (x=2, y=4), without most
``backend_config`` and without ``scheduling_name``. The verification test compiles them afresh where the extra ``aot``
is installed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from alpa_lite.core.collective import Collective, CollectiveKind

AR, AG, RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
X = jax.ShapeDtypeStruct((16, 32), jnp.float32)
SIZE = 16 * 32 * 4
LAYERS, WIDTH, ROWS = 7, 64, 128


def scope(index: int) -> jax.named_scope:
    return jax.named_scope(f"al_c{index}")


def joined(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
    """One buffer for the all-reduces over y, x then y folded into x+y, sums of equal collectives joined."""
    with scope(0):
        r0 = jax.lax.psum(a, "x")
    with scope(1):
        r0 = jax.lax.psum(r0, "y")
    with scope(2):
        r1 = jax.lax.all_gather(b, "x", axis=0, tiled=True)
    with scope(3):
        r1 = jax.lax.all_gather(r1, "y", axis=0, tiled=True)
    with scope(4):
        r2 = jax.lax.psum_scatter(b, "x", scatter_dimension=0, tiled=True)
    with scope(5):
        r2 = jax.lax.psum_scatter(r2, "y", scatter_dimension=0, tiled=True)
    with scope(6):
        r3 = jax.lax.psum(jnp.sin(a), "y")
    with scope(7):
        r4 = jax.lax.psum(jnp.tan(a)[:5], "y")
    with scope(8):
        r5 = jax.lax.psum(jnp.exp(a), "y")
    with scope(9):
        r5 = r5 + jax.lax.psum(jnp.exp(b), "y")
    with scope(10):
        r6 = jax.lax.psum_scatter(jnp.exp(b), "x", scatter_dimension=1, tiled=True)
    with scope(11):
        r6 = r6 + jax.lax.psum_scatter(jnp.tan(b), "x", scatter_dimension=1, tiled=True)
    with scope(12):
        r7 = jax.lax.all_gather(a.astype(jnp.bfloat16).astype(jnp.float32), "x", axis=0, tiled=True)
    return r0, r1, r2, r3, r4, r5, r6, r7


def peeled(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loss and gradient of a scan over rematerialised layers: loops are peeled and pipelined."""

    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        with scope(0):
            full = jax.lax.all_gather(w, "x", axis=0, tiled=True)
        with scope(1):
            return jnp.tanh(jax.lax.psum(h @ full, "y"))

    def loss(weights: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), x, weights)
        return (h**2).sum()

    value, gradient = jax.value_and_grad(loss)(weights)
    with scope(6):
        return value, jax.lax.psum(gradient, "y")


def _plan(kind: CollectiveKind, axis: str, size_bytes: int, count: int = 1) -> Collective:
    return Collective(kind=kind, axes=(axis,), size_bytes=size_bytes, count=count)


JOINED_PLAN = (
    _plan(AR, "x", SIZE),
    _plan(AR, "y", SIZE),
    _plan(AG, "x", 2 * SIZE),
    _plan(AG, "y", 8 * SIZE),
    _plan(RS, "x", SIZE),
    _plan(RS, "y", SIZE // 2),
    _plan(AR, "y", SIZE),
    _plan(AR, "y", SIZE // 16 * 5),
    _plan(AR, "y", SIZE),
    _plan(AR, "y", SIZE),
    _plan(RS, "x", SIZE),
    _plan(RS, "x", SIZE),
    _plan(AG, "x", 2 * SIZE),
)
WEIGHT, HIDDEN = WIDTH * WIDTH * 2, ROWS * WIDTH * 2
PEELED_PLAN = (
    _plan(AG, "x", WEIGHT, LAYERS),
    _plan(AR, "y", HIDDEN, LAYERS),
    _plan(AG, "x", WEIGHT, LAYERS),  # recomputed in the backward pass
    _plan(AR, "y", HIDDEN, LAYERS),
    _plan(AR, "y", HIDDEN, LAYERS),  # transposed
    _plan(RS, "x", WEIGHT, LAYERS),
    _plan(AR, "y", LAYERS * WEIGHT // 2),
)
PEELED_ARGS = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH // 2, WIDTH), jnp.bfloat16),
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16),
)

PROGRAMS: dict[str, tuple[Callable[..., object], tuple[jax.ShapeDtypeStruct, ...], tuple[Collective, ...]]] = {
    "gpu_joined": (joined, (X, X), JOINED_PLAN),
    "gpu_peeled": (peeled, PEELED_ARGS, PEELED_PLAN),
}
