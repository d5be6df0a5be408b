"""Measuring the local devices: the fit is right, the record is complete, and it changes what a cluster costs."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.cluster import Calibration, Cluster
from alpa_lite.cluster.calibration import MeasuredCollective
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.collectives import MeshCosts
from alpa_lite.errors import ClusterError
from alpa_lite.executor import calibrate
from alpa_lite.executor.calibrate import Sizes, fit_line, local_cluster, measure

TINY = Sizes(matmul=(16, 64), copy_bytes=2**14, collective_bytes=(2**10, 2**16), run_s=1e-3, repeats=2)


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7))
def test_fit_recovers_an_exact_line(alpha, beta):
    found = fit_line([(size, alpha + beta * size) for size in (1e3, 1e5, 1e7)])
    assert found == pytest.approx((alpha, beta), rel=1e-5)


@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3))
def test_fit_is_never_negative(times):
    alpha, beta = fit_line(list(zip((1e3, 1e5, 1e7), times, strict=True)))
    assert alpha >= 0 and beta >= 0
    assert alpha + beta * 1e5 > 0


@pytest.fixture(scope="module")
def record() -> Calibration:
    return measure(TINY)


@pytest.mark.medium
def test_record_covers_every_kind_and_group_size(record):
    assert record.num_devices == 8
    along_a_dim = {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL}
    assert {(entry.kind, entry.num_devices, entry.inner) for entry in record.collectives} == {
        (kind, group, inner)
        for kind in CollectiveKind
        for group in (2, 4, 8)
        for inner in (False, True)
        if kind in along_a_dim or not inner
    }
    assert dict(record.matmul_flops_per_s)["f32"] > 1e6
    assert record.memory_bandwidth_bytes_per_s > 1e6
    assert record.launch_s > 0
    assert 0 <= record.across_s_per_byte < 1e-6
    assert record.jax_version == jax.__version__
    assert Calibration.from_text(record.to_text()) == record


@pytest.mark.medium
def test_record_prices_collectives_of_the_local_cluster(record):
    cluster = Cluster.of("cpu", devices_per_host=8, calibration=record)
    costs = MeshCosts(cluster=cluster, mesh=DeviceMesh(shape=(2, 4), axis_names=("x", "y")))
    for kind in CollectiveKind:
        measured = record.collective(kind, 4)
        assert measured is not None
        assert costs.linear(kind, ("y",)) == pytest.approx((measured.alpha_s, measured.beta_s_per_byte))
        assert costs.time_s(kind, ("y",), 2**16) > 0


def test_the_best_of_all_repeats_counts_and_they_come_in_turn(monkeypatch):
    ran: list[str] = []
    clock = itertools.accumulate(itertools.chain([0.0], itertools.repeat(1e-2, 18), itertools.repeat(1e-3)))
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(clock))  # a slow moment, then quiet

    def run(name: str) -> Callable[[jax.Array, int], jax.Array]:
        return lambda x, rounds: ran.append(name) or x

    operand = jax.numpy.zeros(1)
    probes = calibrate._Probes(devices=[], sizes=dataclasses.replace(TINY, repeats=8))
    probes.made = [calibrate._Probe(run(name), lambda: operand) for name in "abc"]
    probes.repeat()
    assert ran[6:] == list("abc") * 7  # after compiling and filling each
    assert all(probe.round_s == pytest.approx(1e-3) for probe in probes.made)


def test_rounds_of_one_iteration_follow_one_another_and_share_its_time(monkeypatch):
    clock = itertools.accumulate(itertools.chain([0.0], itertools.repeat(1e-2)))
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(clock))
    probes = calibrate._Probes(devices=jax.devices()[:1], sizes=dataclasses.replace(TINY, at_once=4, run_s=0.0))
    probe = probes.add(lambda x: 2 * x, (3,))
    assert probe.run(jax.numpy.ones((1, 3)), 2).tolist() == [[2.0**8] * 3]
    probes.repeat()
    assert probe.round_s == pytest.approx(1e-2 / (probe.iterations * 4))


def test_reading_across_rows_is_what_the_flops_leave_of_the_time():
    probe = types.SimpleNamespace(round_s=3e-3)
    sizes = dataclasses.replace(TINY, tall=(100, 50))
    flops_s, ramp_s = 2 * 100 * 50 * 50 / 1e9, 1e-4
    assert calibrate._across(sizes, probe, 1e9, ramp_s) == pytest.approx((3e-3 - ramp_s - flops_s) / (4 * 100 * 50))
    assert calibrate._across(sizes, types.SimpleNamespace(round_s=1e-4), 1e9, ramp_s) == 0.0


def test_kinds_of_one_group_size_start_alike_but_permutes_and_inner_dims():
    def took(kind: CollectiveKind, num_devices: int, alpha_us: float, *, inner: bool = False) -> MeasuredCollective:
        return MeasuredCollective(
            kind=kind, num_devices=num_devices, alpha_s=alpha_us * 1e-6, beta_s_per_byte=alpha_us * 1e-12, inner=inner
        )

    gather, reduce, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER
    kept = (took(CollectiveKind.COLLECTIVE_PERMUTE, 4, 120), took(gather, 4, 0, inner=True))
    found = calibrate._alike(
        (took(gather, 2, 9), took(gather, 4, 46), took(reduce, 4, 79), took(scatter, 4, 50), *kept)
    )
    assert [c.alpha_s for c in found] == pytest.approx([9e-6, 50e-6, 50e-6, 50e-6, 120e-6, 0])
    assert [c.beta_s_per_byte for c in found] == pytest.approx([9e-12, 46e-12, 79e-12, 50e-12, 120e-12, 0])


def test_local_cluster_is_this_process():
    assert local_cluster() == Cluster.parse("1x8:cpu")


@pytest.mark.medium
def test_hosts_with_different_numbers_of_devices_are_refused(monkeypatch):
    devices = [types.SimpleNamespace(process_index=process) for process in (0, 0, 1)]
    monkeypatch.setattr(calibrate.jax, "devices", lambda: devices)
    with pytest.raises(ClusterError, match=r"hosts of this job have \[1, 2\] devices.*same number"):
        local_cluster()


@pytest.mark.medium
def test_calibrated_local_cluster_carries_the_record(record, monkeypatch):
    monkeypatch.setattr(calibrate, "measure", lambda: record)
    assert local_cluster(calibrate=True).calibration == record


def test_hosts_of_different_size_are_refused(monkeypatch):
    devices = [types.SimpleNamespace(process_index=i, platform="cpu", device_kind="cpu") for i in (0, 0, 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ClusterError, match=r"have \[1, 2\] devices.*equal make.*jax.devices\(\).*same number"):
        local_cluster()


@pytest.mark.medium
def test_a_group_size_that_does_not_halve_ends_the_series():
    three = calibrate._Probes(devices=jax.devices()[:3], sizes=TINY).collectives()
    assert {entry.num_devices for entry in three} == {3}
