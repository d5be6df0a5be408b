"""Estimates against what the H100 compiler's own estimator says (its log of node costs and latencies), in microseconds."""

from __future__ import annotations

import pytest

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.costs.estimated_time import collective_seconds, kernel_seconds, matmul_seconds
from alpa_lite.costs.split_matmul import Matmul


@pytest.mark.parametrize(
    ("batch", "rows", "contracted", "columns", "itemsize", "microseconds"),
    [
        (1, 4096, 4096, 4096, 4, 340.9),
        (1, 4096, 512, 256, 4, 13.1),
        (1, 4096, 64, 512, 4, 3.3),
        (1, 2048, 256, 1024, 4, 12.9),
        (16, 256, 64, 256, 4, 7.8),
        (1, 512, 4096, 256, 4, 32.4),  # in 16 parts
        (1, 4096, 4096, 4096, 2, 176.2),
        (1, 1024, 256, 4096, 2, 9.8),
    ],
)
def test_matmuls(batch: int, rows: int, contracted: int, columns: int, itemsize: int, microseconds: float) -> None:
    product = Matmul(
        batch=batch,
        rows=rows,
        columns=columns,
        contracted=contracted,
        operand_bytes=(itemsize, itemsize),
        result_bytes=itemsize,
    )
    assert matmul_seconds(product) * 1e6 == pytest.approx(microseconds, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "num_devices", "size_bytes", "microseconds"),
    [
        (CollectiveKind.ALL_REDUCE, 8, 2**23, 104.7),
        (CollectiveKind.ALL_REDUCE, 8, 2**28, 1262),
        (CollectiveKind.ALL_REDUCE, 2, 2**26, 330),
        (CollectiveKind.ALL_GATHER, 8, 2**23, 65.1),
        (CollectiveKind.ALL_GATHER, 4, 2**26, 195.8),
        (CollectiveKind.REDUCE_SCATTER, 8, 2**26, 218.6),
        (CollectiveKind.REDUCE_SCATTER, 4, 2**23, 42.4),
    ],
)
def test_collectives(kind: CollectiveKind, num_devices: int, size_bytes: int, microseconds: float) -> None:
    assert collective_seconds(kind, num_devices, size_bytes) * 1e6 == pytest.approx(microseconds, rel=0.25)


def test_kernels_are_bound_by_memory() -> None:
    assert kernel_seconds(2**24) * 1e6 == pytest.approx(5.4, rel=0.15)
