"""Functions of one op and the verdicts of their pairs, shared by the tests of the sameness analysis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.analysis import Verdicts, needs_resharding, trace
from tests.harness import device_mesh

MESH = device_mesh((2, 2))
N = 8
SQUARE = (N, N)
CUBE = (N, N, N)


def shapes(*all_shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in all_shapes]


def judge(fn: Callable[..., Any], ins: list[tuple[int, ...]], specs: list[str], out: str) -> Verdicts:
    """Verdicts of a function of one op."""
    program = trace(fn, *shapes(*ins))
    assert len(program.ops) == 1, program
    return needs_resharding(program, {str(i): s for i, s in enumerate(specs)} | {"out": out}, MESH)


def identity(x: jax.Array) -> jax.Array:
    return lax.optimization_barrier(x)
