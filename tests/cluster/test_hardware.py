"""The hardware table: complete, in the stated units, plausible, and every number has an origin."""

from __future__ import annotations

import pytest

from alpa_lite.cluster.hardware import BASES, device_name_of_kind, device_names, figures, read_device
from alpa_lite.errors import ClusterError

ALL = device_names()


def test_the_promised_devices_are_there():
    promised = {
        "cpu", "v100-sxm2-16gb", "v100-sxm2-32gb", "a100-40gb", "a100-80gb", "h100-sxm", "h200", "b200", "l4",
        "tpu-v5e", "tpu-v5p", "tpu-v6e",
    }  # fmt: skip
    assert promised <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_figure_has_unit_basis_source_and_date(name):
    found = {figure.name: figure for figure in figures(name)}
    needed = {"f32", "memory", "memory_bandwidth", "matmul_efficiency", "ramp", "launch"}
    needed |= {f"{link}.{part}" for link in ("inside", "between") for part in ("bandwidth", "efficiency", "latency")}
    assert needed <= set(found)
    for figure in found.values():
        assert figure.value > 0
        assert figure.basis in BASES
        assert figure.source and figure.date
        if figure.unit == "1":
            assert figure.value <= 1


@pytest.mark.parametrize("name", ALL)
def test_figures_are_plausible(name):
    device, inside, between = read_device(name)
    rates = dict(device.flops_per_s)
    assert 1e9 < rates["f32"] < 1e15
    assert rates.get("bf16", rates["f32"]) >= rates["f32"]
    assert 1e9 <= device.memory_bytes < 1e12
    if device.platform != "cpu":  # virtual devices copy small shards through a cache that is faster than memory
        assert device.memory_bandwidth_bytes_per_s > inside.bandwidth_bytes_per_s
    assert between.latency_s >= inside.latency_s


def test_datasheet_figures_that_everybody_knows():
    h100, nvlink, port = read_device("h100-sxm")
    assert dict(h100.flops_per_s)["bf16"] == pytest.approx(989e12, rel=1e-3)
    assert nvlink.bandwidth_bytes_per_s <= 450e9
    assert port.bandwidth_bytes_per_s <= 50e9
    assert read_device("v100-sxm2-16gb")[2].per_host
    assert read_device("tpu-v5e")[0].memory_bytes == 16e9


@pytest.mark.parametrize(
    ("dtype", "matmul", "rate"),
    [
        ("bfloat16", True, "bf16"),
        ("float16", True, "f16"),
        ("float8_e4m3fn", True, "f8"),
        ("float32", True, "tf32"),
        ("float32", False, "f32"),
        ("bfloat16", False, "f32"),
        ("float64", True, "f64"),
        ("int32", True, "f32"),
    ],
)
def test_rate_of_a_dtype(dtype, matmul, rate):
    device = read_device("h100-sxm")[0]
    assert device.peak_flops_per_s(dtype, matmul) == dict(device.flops_per_s)[rate]


def test_a_dtype_without_figure_runs_at_the_f32_rate():
    v100 = read_device("v100-sxm2-16gb")[0]
    assert v100.peak_flops_per_s("bfloat16", True) == v100.peak_flops_per_s("float32", True) == 15.7e12


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("tpu", "TPU v5 lite", "tpu-v5e"),
        ("cpu", "anything", "cpu"),
    ],
)
def test_name_of_a_jax_device_kind(platform, kind, name):
    assert device_name_of_kind(platform, kind) == name


def test_unknown_device_kind_names_the_table_and_the_way_out():
    with pytest.raises(ClusterError, match=r"'Quantum 9000' on platform 'gpu'.*NVIDIA L4.*Cluster.parse"):
        device_name_of_kind("gpu", "Quantum 9000")
