"""Calibration records: text form, how they join a cluster, nearest group size."""

from __future__ import annotations

import pytest

from alpa_lite.cluster import Calibration, Cluster, MeasuredCollective
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.errors import ClusterError

KIND = CollectiveKind.ALL_REDUCE
RECORD = Calibration(
    device_kind="cpu",
    num_devices=8,
    matmul_flops_per_s=(("f32", 2e10),),
    ramp_s=3e-6,
    memory_bandwidth_bytes_per_s=2e9,
    launch_s=2e-6,
    collectives=(
        MeasuredCollective(kind=KIND, num_devices=2, alpha_s=1e-5, beta_s_per_byte=1e-9),
        MeasuredCollective(kind=KIND, num_devices=8, alpha_s=4e-5, beta_s_per_byte=3e-9),
    ),
    date="2026-11-20",
    jax_version="0.10.2",
)


def test_text_round_trips():
    assert Calibration.from_text(RECORD.to_text()) == RECORD
    assert "\n" not in RECORD.to_text()


@pytest.mark.parametrize("text", ["", "{}", "[1]", RECORD.to_text()[:-20], RECORD.to_text().replace("ramp_s", "ramp")])
def test_damaged_text_is_refused(text):
    with pytest.raises(ClusterError, match=r"calibration record cannot be read.*Calibration.to_text.*Measure again"):
        Calibration.from_text(text)


def test_measured_figures_replace_the_table():
    cluster = Cluster.of("cpu", devices_per_host=8, calibration=RECORD)
    assert cluster.device.peak_flops_per_s("float32", True) == 2e10
    assert cluster.device.matmul_efficiency == cluster.device.memory_efficiency == 1
    assert cluster.device.ramp_s == 3e-6
    assert str(cluster) == "1x8:cpu"
    assert cluster != Cluster.parse("1x8:cpu")
    assert "measured 2026-11-20" in cluster.describe()


def test_float32_measurement_lands_on_tf32_where_matmuls_use_it():
    cluster = Cluster.of("h200", devices_per_host=1, calibration=RECORD)
    assert cluster.device.peak_flops_per_s("float32", True) == 2e10
    table = Cluster.parse("1x1:h200").device
    reached = table.peak_flops_per_s("bfloat16", True) * table.matmul_efficiency
    assert cluster.device.peak_flops_per_s("bfloat16", True) == pytest.approx(reached)


@pytest.mark.parametrize(("asked", "found"), [(2, 2), (3, 2), (4, 2), (6, 8), (8, 8), (64, 8)])
def test_nearest_group_size_by_ratio(asked, found):
    entry = RECORD.collective(KIND, asked)
    assert entry is not None and entry.num_devices == found


def test_kind_that_was_not_measured():
    assert RECORD.collective(CollectiveKind.ALL_TO_ALL, 8) is None
    assert RECORD.collective(KIND, 8, inner=True) is None


def test_records_without_inner_collectives_are_read():
    assert Calibration.from_text(RECORD.to_text().replace(', "inner": false', "")) == RECORD
