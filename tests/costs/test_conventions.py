"""The named conventions: Alpa's published check values, restrictions, one interface."""

from __future__ import annotations

import math

import numpy as np
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.compute import op_time_s
from alpa_lite.costs.conventions import AlpaCosts, cost_model
from alpa_lite.errors import AlpaLiteError

K = CollectiveKind
MIB = 2**20
CLUSTER = Cluster.parse("1x8:cpu")
ANY_MESH = ("roofline", "alpa", "ring")  # the conventions that know several mesh axes and all kinds of collectives


def line(n: int) -> DeviceMesh:
    return DeviceMesh(shape=(n,), axis_names=("x",))


def grid(a: int, b: int) -> DeviceMesh:
    return DeviceMesh(shape=(a, b), axis_names=("x", "y"))


@pytest.mark.parametrize(
    ("kind", "four", "two"),
    [
        (K.ALL_REDUCE, 1572865.01, 104858.61),
        (K.ALL_GATHER, 786433.1, 52429.9),
        (K.REDUCE_SCATTER, 786433.001, 52429.801),
        (K.ALL_TO_ALL, 393217.001, 26215.401),
    ],
)
def test_alpa_check_values_for_one_mebibyte(kind, four, two):
    """The full tensor is 1 MiB; an all-to-all is sized by one device's part of it."""
    share = {n: MIB / n if kind is K.ALL_TO_ALL else MIB for n in (4, 2)}
    assert AlpaCosts(mesh=line(4)).collective(kind, ("x",), share[4]) == pytest.approx(four, abs=1e-3)
    slow = AlpaCosts(mesh=line(2), beta=(0.1,))
    assert slow.collective(kind, ("x",), share[2]) == pytest.approx(two, abs=1e-2)


def test_alpa_data_parallel_and_tensor_parallel_totals():
    """6 layers of 32x32 with biases, batch 256: gradients plus P per replicated leaf; 5 all-reduces of 32 KiB."""
    costs = cost_model("alpa", CLUSTER, grid(4, 1))
    gradients = 6 * (costs.collective(K.ALL_REDUCE, ("x",), 4 * 32 * 32) + costs.collective(K.ALL_REDUCE, ("x",), 128))
    assert gradients + costs.replication_penalty * (12 + 25) == pytest.approx(38139.12)
    assert 5 * costs.collective(K.ALL_REDUCE, ("x",), 32768) == pytest.approx(245765.05)


@pytest.mark.parametrize("mesh", [line(4), grid(4, 1), grid(1, 4)])
def test_alpa_replication_penalty_is_truncated(mesh):
    assert cost_model("alpa", CLUSTER, mesh).replication_penalty == 3
    assert cost_model("alpa", CLUSTER, mesh, replication_penalty=0).replication_penalty == 0


def test_alpa_default_of_two_axes_has_a_slow_and_a_fast_one():
    costs = AlpaCosts(mesh=grid(2, 2), alpha=(1, 1), beta=(1, 0.1))
    assert costs.linear(K.ALL_GATHER, ("x",)) == pytest.approx((1.1, 0.5))
    assert costs.linear(K.ALL_GATHER, ("y",)) == pytest.approx((1.1, 0.05))


def test_alpa_gathers_axis_after_axis_with_growing_tensors():
    costs = AlpaCosts(mesh=grid(2, 4))
    whole = costs.collective(K.ALL_GATHER, ("x", "y"), 1024.0)
    assert whole == pytest.approx((1 + 3 / 4 * 512 + 0.1) + (1 + 1 / 2 * 1024 + 0.1))
    assert costs.collective(K.ALL_REDUCE, ("x", "y"), 1024.0) == pytest.approx(
        costs.collective(K.ALL_REDUCE, ("x",), 1024.0) + costs.collective(K.ALL_REDUCE, ("y",), 1024.0)
    )


def test_alpa_refuses_what_alpa_cannot_do():
    assert math.isinf(AlpaCosts(mesh=line(4)).collective(K.COLLECTIVE_PERMUTE, ("x",), 1.0))
    assert math.isinf(AlpaCosts(mesh=grid(2, 2)).collective(K.ALL_TO_ALL, ("x",), 1.0))
    assert math.isfinite(AlpaCosts(mesh=grid(2, 2), mixed=True).collective(K.ALL_TO_ALL, ("x",), 1.0))
    assert math.isfinite(AlpaCosts(mesh=grid(1, 4)).collective(K.ALL_TO_ALL, ("y",), 1.0))


def test_alpa_compute_is_free_and_repeated_contractions_are_refused_or_charged():
    strict = AlpaCosts(mesh=line(4))
    assert strict.compute(1e12, 1e9, "float32", True) == 0
    assert math.isinf(strict.heavy_replication(("x",), 1024.0))
    loose = AlpaCosts(mesh=line(4), require_sharded_contractions=False)
    assert loose.heavy_replication(("x",), 1024.0) == loose.collective(K.ALL_REDUCE, ("x",), 1024.0)
    assert AlpaCosts(mesh=grid(1, 4)).heavy_replication(("x",), 1024.0) == 0


def test_alpa_wrong_number_of_axes():
    with pytest.raises(AlpaLiteError, match=r"beta=\(1, 0.1\) for the mesh \(x=4\).*one number >= 0 per.*leave it"):
        AlpaCosts(mesh=line(4), beta=(1, 0.1))


def test_roofline_prices_ops_by_the_device():
    costs = cost_model("roofline", CLUSTER, line(8))
    device = CLUSTER.device
    assert costs.compute(1e9, 1e6, "float32", True) == op_time_s(device, 1e9, 1e6, "float32", "matmul")
    assert costs.compute(1e9, 1e6, "float32", False) == op_time_s(device, 1e9, 1e6, "float32", "other")
    assert costs.replication_penalty == 0
    assert costs.unit == "s"


@pytest.mark.parametrize("name", ANY_MESH)
def test_the_interface_is_one(name):
    costs = cost_model(name, CLUSTER, grid(2, 4))
    assert costs.name == name
    many = np.array([1.0, 2.0, 1e6])
    alpha, beta = costs.linear(K.ALL_REDUCE, ("x", "y"))
    assert np.allclose(costs.collective(K.ALL_REDUCE, ("x", "y"), many), alpha + beta * many)
    assert costs.compute(many, many, "float32", True).shape == many.shape
    assert costs.heavy_replication(("x",), many).shape == many.shape


@pytest.mark.parametrize("name", ANY_MESH)
def test_forbidden_kinds_cost_infinity_and_others_do_not(name):
    costs = cost_model(name, CLUSTER, line(8), forbid=("all-gather", "all-to-all"))
    for kind in (K.ALL_GATHER, K.ALL_TO_ALL):
        assert math.isinf(costs.collective(kind, ("x",), 0.0))
        assert costs.linear(kind, ("x",)) == (math.inf, 0.0)
        assert np.isinf(costs.collective(kind, ("x",), np.zeros(3))).all()
    assert math.isfinite(costs.collective(K.REDUCE_SCATTER, ("x",), 1e6))
    alone = cost_model(name, CLUSTER, grid(1, 8), forbid=("all-gather",))
    assert alone.collective(K.ALL_GATHER, ("x",), 1e6) == 0


@pytest.mark.parametrize("name", ANY_MESH)
def test_required_sharding_of_contractions(name):
    strict = cost_model(name, CLUSTER, grid(1, 8), require_sharded_contractions=True)
    assert math.isinf(strict.heavy_replication(("y",), 1024.0))
    assert strict.heavy_replication(("x",), 1024.0) == 0
    assert math.isfinite(cost_model(name, CLUSTER, line(8)).heavy_replication(("x",), 1024.0))


def test_unknown_convention_and_unknown_kind():
    with pytest.raises(
        AlpaLiteError, match=r"costs='magic' is not a cost convention.*'roofline', .*'alpa'.*PlanOptions"
    ):
        cost_model("magic", CLUSTER, line(8))
    with pytest.raises(AlpaLiteError, match=r"forbid contains 'allgather'.*all-gather.*PlanOptions.forbid"):
        cost_model("roofline", CLUSTER, line(8), forbid=("allgather",))
