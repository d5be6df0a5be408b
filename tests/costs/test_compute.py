"""Roofline of single ops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.cluster.hardware import device_names, read_device
from alpa_lite.costs.compute import matmul_efficiency, op_time_s

devices = st.sampled_from(device_names()).map(lambda name: read_device(name)[0])
flops = st.floats(0, 1e18)
sizes = st.floats(0, 1e13)
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int32"])
op_kinds = st.sampled_from(["matmul", "convolution", "other"])


@pytest.mark.medium
@given(devices, flops, flops, sizes, dtypes, op_kinds)
def test_monotone_in_flops_and_bytes(device, a, b, size, dtype, kind):
    low, high = sorted((a, b))
    assert op_time_s(device, low, size, dtype, kind) <= op_time_s(device, high, size, dtype, kind)
    assert op_time_s(device, size, low, dtype, kind) <= op_time_s(device, size, high, dtype, kind)


@pytest.mark.medium
@given(devices, flops, sizes, dtypes, op_kinds)
def test_never_beats_the_peaks(device, work, size, dtype, kind):
    time = op_time_s(device, work, size, dtype, kind)
    assert time >= work / device.peak_flops_per_s(dtype, kind != "other") * (1 - 1e-12)
    assert time >= size / device.memory_bandwidth_bytes_per_s * (1 - 1e-12)
    assert time >= device.launch_s or work == size == 0


@pytest.mark.medium
@given(devices, st.floats(1e3, 1e16), dtypes)
def test_splitting_a_matmul_costs_efficiency(device, work, dtype):
    whole, half = (op_time_s(device, f, 0.0, dtype, "matmul") for f in (work, work / 2))
    assert half <= whole <= 2 * half * (1 + 1e-12)
    assert matmul_efficiency(device, work / 2, dtype) <= matmul_efficiency(device, work, dtype)
    assert matmul_efficiency(device, work, dtype) <= device.matmul_efficiency


def test_half_of_the_efficiency_at_rate_times_ramp():
    device = read_device("h100-sxm")[0]
    work = device.matmul_efficiency * device.peak_flops_per_s("bfloat16", True) * device.ramp_s
    assert matmul_efficiency(device, work, "bfloat16") == pytest.approx(device.matmul_efficiency / 2)
    time = op_time_s(device, work, 0.0, "bfloat16", "matmul")
    assert work / time / device.peak_flops_per_s("bfloat16", True) == pytest.approx(device.matmul_efficiency / 2)


def test_large_matmul_is_bound_by_flops_and_an_add_by_bytes():
    device = read_device("h100-sxm")[0]
    n = 8192
    matmul = op_time_s(device, 2.0 * n**3, 3.0 * 2 * n**2, "bfloat16", "matmul")
    assert matmul == pytest.approx(2 * n**3 / (0.83 * 989.4e12), rel=0.01)
    add = op_time_s(device, float(n**2), 3.0 * 2 * n**2, "bfloat16", "other")
    assert add == pytest.approx(3 * 2 * n**2 / (0.9 * 3352.32e9))


def test_arrays_agree_with_single_prices_and_views_are_free():
    device = read_device("a100-80gb")[0]
    work, moved = np.array([0.0, 0.0, 1e6, 1e12]), np.array([0.0, 1e3, 1e3, 1e9])
    found = op_time_s(device, work, moved, "float32", "matmul")
    assert found.shape == work.shape
    assert found.tolist() == [op_time_s(device, f, b, "float32", "matmul") for f, b in zip(work, moved, strict=True)]
    assert found[0] == 0
    assert found[1] == device.launch_s
