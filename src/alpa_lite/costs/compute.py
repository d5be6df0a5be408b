"""Roofline time of one op on one device.

Formulation: time = max(FLOP time, byte time, launch). A matmul reaches ``matmul_efficiency`` e of the peak only when it
is large: efficiency(F) = e * F / (F + F_half) with F_half = e * peak * ramp, so its FLOP time is F / (e * peak) + ramp.
Other ops are charged the vector rate; they are nearly always bound by bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.cluster.hardware import Device
from alpa_lite.costs.model import Size

HEAVY_KINDS = ("matmul", "convolution")


def op_time_s(device: Device, flops: Size, size_bytes: Size, dtype: str, kind: str) -> Size:
    """Seconds of one op, for numbers or for arrays of the same shape.

    Args:
        device: whose figures.
        flops: floating-point operations of the device's share.
        size_bytes: bytes that the device reads and writes.
        dtype: of the operands, NumPy-style, e.g. "bfloat16".
        kind: one of ``HEAVY_KINDS``, or anything else for an op without matrix units.

    Returns:
        Zero where an op has neither FLOPs nor bytes (it is a view), else at least ``device.launch_s``.
    """
    matmul = kind in HEAVY_KINDS
    peak = device.peak_flops_per_s(dtype, matmul)
    work: NDArray[Any] = np.asarray(flops, dtype=np.float64)
    moved: NDArray[Any] = np.asarray(size_bytes, dtype=np.float64)
    flop_s = work / (peak * device.matmul_efficiency) + device.ramp_s * (work > 0) if matmul else work / peak
    byte_s = moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    time = np.maximum(np.maximum(flop_s, byte_s), device.launch_s)
    time = np.where((work > 0) | (moved > 0), time, 0.0)
    return float(time) if time.ndim == 0 else time  # pyrefly: ignore[bad-return]


def matmul_efficiency(device: Device, flops: float, dtype: str) -> float:
    """The part of the peak that a matmul of that many FLOPs reaches, bytes and launch aside."""
    peak = device.peak_flops_per_s(dtype, True)
    half = device.matmul_efficiency * peak * device.ramp_s
    return device.matmul_efficiency * flops / (flops + half)
