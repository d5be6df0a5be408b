"""Matmuls that XLA:GPU splits along the contracted dim, and where it adds the parts up."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.costs import split_matmul
from alpa_lite.costs.fusion import fused_values
from alpa_lite.costs.split_matmul import Matmul, kernels_that_read, number_of_parts, readers_of, sum_is_repeated
from tests.costs.test_gpu_memory import program_of


@pytest.mark.parametrize(
    ("rows", "columns", "contracted", "parts"),
    [  # as the H100 compiler splits them
        (64, 128, 128, 8),
        (64, 128, 32, 1),
        (64, 16, 128, 1),
        (128, 128, 64, 4),
        (64, 64, 512, 16),
        (256, 512, 4096, 16),
        (256, 4096, 512, 1),
        (256, 1024, 2048, 8),
        (2048, 512, 2048, 2),
        (2048, 16, 512, 1),
        (512, 16, 2048, 16),
    ],
)
def test_matmuls_with_few_tiles_and_long_contractions_are_split(
    rows: int, columns: int, contracted: int, parts: int
) -> None:
    product = Matmul(batch=1, rows=rows, columns=columns, contracted=contracted, operand_bytes=(4, 4), result_bytes=4)
    assert number_of_parts(product) == parts


def test_products_that_keep_all_cores_busy_stay_whole() -> None:
    """What is not asked for many parts has none that are cheaper."""
    rng, split = random.Random(0), 0
    for _ in range(2000):
        rows, columns, contracted = (round(2 ** rng.uniform(0, 15)) for _ in range(3))
        sizes = {"batch": rng.choice((1, 2, 96)), "rows": rows, "columns": columns, "contracted": contracted}
        product = Matmul(**sizes, operand_bytes=(rng.choice((2, 4, 8)),) * 2, result_bytes=rng.choice((2, 4, 8)))
        parts = min(split_matmul._CANDIDATES, key=lambda parts, p=product: split_matmul._cost(p, parts))
        assert number_of_parts(product) == parts, product
        split += parts > 1
    assert 200 < split < 1800


def test_partial_products_are_added_where_they_are_read_if_that_is_elementwise() -> None:
    def fn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x @ w
        z = w @ w
        return jnp.tanh(y + 1).reshape(-1), z @ w

    program = program_of(fn, (64, 128), (128, 128))
    fused = fused_values(program, gpu=True)
    products = [op.outputs[0] for op in program.ops if op.primitive == "dot_general"]
    first, second = (
        [program.ops[k] for k in kernels_that_read(program, fused, readers_of(program), value)]
        for value in products[:2]
    )
    assert [op.primitive for op in second] == ["dot_general"]
    product = Matmul(batch=1, rows=64, columns=128, contracted=128, operand_bytes=(4, 4), result_bytes=4)
    assert sum_is_repeated(product, 8, first)
    assert not sum_is_repeated(product, 8, second)
    large = Matmul(batch=1, rows=4096, columns=4096, contracted=128, operand_bytes=(4, 4), result_bytes=4)
    assert not sum_is_repeated(large, 8, first * 2)
