"""The counting conventions: factors, what is counted, whole prices."""

from __future__ import annotations

import math

import numpy as np
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions

K = CollectiveKind
MESH = DeviceMesh(shape=(8,), axis_names=("x",))
CLUSTER = Cluster.parse("1x8:cpu")
V = 8 * 64 * 64


@pytest.mark.parametrize(
    ("name", "gather", "all_to_all", "reduce", "scatter"),
    [
        ("slapo-head", V / 8, V / 8 - V / 64, V, math.inf),
        ("hidet", 4 * V, math.inf, 8 * V, 4 * V),
        ("ring", 4 * V * 7 / 8, 4 * V * 7 / 64, 8 * V * 7 / 8, 4 * V * 7 / 8),
    ],
)
def test_price_of_one_step(name, gather, all_to_all, reduce, scatter):
    """For float32[8,64,64] on 8 devices; the all-to-all is sized by one device's part."""
    costs = cost_model(name, CLUSTER, MESH)
    volume = costs.volume((8, 64, 64), 4)
    assert costs.collective(K.ALL_GATHER, ("x",), volume) == gather
    assert costs.collective(K.ALL_TO_ALL, ("x",), volume / 8) == all_to_all
    assert costs.collective(K.ALL_REDUCE, ("x",), volume) == reduce
    assert costs.collective(K.REDUCE_SCATTER, ("x",), volume) == scatter


def test_what_is_counted():
    shape = (8, 64, 32)
    counts = {
        name: cost_model(name, CLUSTER, MESH).volume(shape, 2) for name in ("slapo-2023-05", "slapo-head", "hidet")
    }
    assert counts == {"slapo-2023-05": 64 * 32, "slapo-head": 8 * 64 * 32, "hidet": 2 * 8 * 64 * 32}
    assert cost_model("slapo-2023-05", CLUSTER, MESH).volume((), 4) == 1


@pytest.mark.parametrize("name", ["slapo-2023-05", "slapo-head", "hidet"])
def test_conversions_have_whole_prices(name):
    """Also where the share does not divide, and a slice adds less than a unit to anything."""
    made = Conversions(mesh=MESH, costs=cost_model(name, CLUSTER, MESH))
    table = made.table((24, 40), 4)
    finite = table[np.isfinite(table)]
    slices = 1 if name == "slapo-head" else 0.01
    assert ((finite - np.floor(finite)) < 0.01).all()
    whole, rows = ShardingSpec(((), ())), ShardingSpec((("x",), ()))
    assert 0 < made.time_s(whole, rows, (24, 40), 4) <= slices


def test_only_slapo_head_charges_slices():
    prices = {n: cost_model(n, CLUSTER, MESH).slice_price for n in ("slapo-2023-05", "slapo-head", "hidet", "ring")}
    assert prices == {"slapo-2023-05": 0, "slapo-head": 1, "hidet": 0, "ring": 0}


@pytest.mark.parametrize(("asked", "strict"), [(None, True), (True, True), (False, False)])
def test_slapo_splits_contractions_unless_told_otherwise(asked, strict):
    costs = cost_model("slapo-head", CLUSTER, MESH, require_sharded_contractions=asked)
    assert costs.rules.sharded_contractions == strict
    assert math.isinf(costs.heavy_replication(("x",), 1.0)) == strict


def test_compute_can_be_left_out_of_seconds():
    with_it, without = (cost_model("roofline", CLUSTER, MESH, compute=on) for on in (True, False))
    assert with_it.compute(1e9, 1e6, "float32", True) > 0
    assert without.compute(1e9, 1e6, "float32", True) == 0
    assert without.linear(K.ALL_GATHER, ("x",)) == with_it.linear(K.ALL_GATHER, ("x",))
