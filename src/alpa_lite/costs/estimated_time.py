"""How long XLA:GPU believes that ops and collectives take, from which its scheduler decides what hides what.

The estimator for Hopper (``SolLatencyEstimator`` in ``xla/service/gpu/model``) rates a matmul with a table of measured ones,
any other kernel by the bytes that it moves, a call of the convolution library with a constant, and a collective inside a host
with a table of NCCL's. The closed forms here are fitted to what it says: within a fifth for matmuls of 256 to 4096 rows,
columns and contracted elements, within a quarter for most collectives of 4 to 256 MB over 2 to 8 devices. They are not the
prices of plans: the estimator charges small matmuls and collectives several times as much. Collectives between hosts are
rated here like those inside of one.
"""

from __future__ import annotations

import math

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.costs.split_matmul import Matmul, number_of_parts

_MATMUL_START = 6e-6
_FLOPS, _FLOPS_HALF = 400e12, 800e12
_OPERAND_BANDWIDTH = 5e12  # partly from caches
_SMALLEST, _LARGEST, _MOST_BATCHES = 256, 4096, 4  # the table's range: beyond it, time goes with the volume
_FLOPS_MIXED = 8e12  # the table has no half precision operands with single precision results: partial products
LATENCY_SECONDS = 1e-6  # between a kernel and the one that reads its result
_BANDWIDTH = 3.35e12
LIBRARY_CALL_SECONDS = 1e-5  # whatever its size
_COLLECTIVE_START = 1.3e-5  # each time that the number of devices doubles
_LINK_BANDWIDTH = 390e9
_ALL_REDUCE_PHASES = 1.7


def kernel_seconds(moved_bytes: float) -> float:
    """Of a kernel that reads and writes so many bytes."""
    return LATENCY_SECONDS + moved_bytes / _BANDWIDTH


def matmul_seconds(product: Matmul) -> float:
    """Of one device's share of a product, split along its contraction as XLA:GPU does."""
    parts = number_of_parts(product)
    half = max(product.operand_bytes) <= 2
    flops = 2.0 * product.elements * product.contracted
    if parts > 1 and half:
        return flops / _FLOPS_MIXED
    sizes = (product.rows, product.columns, math.ceil(product.contracted / parts))
    rows, columns, contracted = (min(max(size, _SMALLEST), _LARGEST) for size in sizes)
    batch = min(product.batch * parts, _MOST_BATCHES)
    rated = 2.0 * batch * rows * columns * contracted
    left, right = product.operand_bytes
    moved = rows * contracted * left + contracted * columns * right + rows * columns * product.result_bytes
    seconds = _MATMUL_START + rated / (_FLOPS_HALF if half else _FLOPS) + batch * moved / _OPERAND_BANDWIDTH
    return seconds * flops / rated


def collective_seconds(kind: CollectiveKind, num_devices: int, size_bytes: float) -> float:
    """Of a collective; ``size_bytes``: as in ``core/collective.py``."""
    once = _COLLECTIVE_START * math.log2(num_devices) + size_bytes / _LINK_BANDWIDTH
    return _ALL_REDUCE_PHASES * once if kind is CollectiveKind.ALL_REDUCE else once
