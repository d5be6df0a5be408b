"""Symbolic clusters and everything around them refuse what makes no sense, in four parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, ClusterError

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
N = al.Cluster.symbolic("n", device="h100-sxm", devices_per_host=8, values=range(1, 5))


def step(x):
    return x @ x


def test_values_are_sorted_and_hosts_are_as_many_as_needed():
    cluster = al.Cluster.symbolic("n", device="h100-sxm", devices_per_host=8, values=(8, 2, 2, 16))
    assert cluster.values == (2, 8, 16)
    assert [str(cluster.specialize(n)) for n in cluster.values] == ["1x8:h100-sxm", "1x8:h100-sxm", "2x8:h100-sxm"]
    assert cluster.specialize(8).describe() == al.Cluster.parse("1x8:h100-sxm").describe()
    assert str(cluster.specialize(8, others=4)) == "4x8:h100-sxm"
    assert str(cluster) == "n x h100-sxm, 8 per host"
    assert al.Cluster.symbolic("n", device="h100-sxm", values=8).values == (8,)


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("2n", {}, ["'2n'", "A name like 'n'", "Cluster.symbolic", "al.Cluster.parse"]),
        (3, {}, ["called 3"]),
        ("n", {"device": "h900"}, ["'h900'", "h100-sxm"]),
        ("n", {"devices_per_host": "n"}, ["devices_per_host='n'", "whole number of at least 1", "devices_per_host=8"]),
        ("n", {"values": ()}, ["values=()", "no number", "values=range(1, 65)"]),
        ("n", {"values": (0, 1)}, ["holds 0", "at least 1"]),
        ("n", {"values": (1, 2.5)}, ["holds 2.5", "whole numbers"]),
        ("n", {"values": (True,)}, ["holds True"]),
        ("n", {"values": "n"}, ["holds 'n'"]),
    ],
)
def test_bad_cluster(name, change, parts):
    with pytest.raises(ClusterError) as error:
        al.Cluster.symbolic(name, **{"device": "h100-sxm", "values": range(1, 5), **change})
    assert not [part for part in parts if part not in str(error.value)], str(error.value)


def refused(call, *parts):
    with pytest.raises(AlpaLiteError) as error:
        call()
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, f"the message lacks {missing}:\n{error.value}"


def test_name_where_sizes_must_be_numbers():
    cluster, options = al.Cluster.parse("1x8:cpu"), al.PlanOptions(mesh_shape=("n",))
    parts = "('n',)", "Sizes must be numbers", "test_symbolic.py", "mesh_shape=(8,)", "Cluster.symbolic('n'"
    refused(lambda: al.plan(step, X, cluster=cluster, options=options), *parts)
    refused(lambda: al.parallelize(step, cluster=cluster, options=options).plan(X), *parts)


@pytest.mark.parametrize(
    "field", ["memory_budget_bytes", "num_microbatches", "max_axes", "time_limit_s", "seed", "replication_penalty"]
)
def test_name_in_an_option_that_needs_a_number(field):
    refused(
        lambda: al.PlanOptions(**{field: "n"}), f"{field}='n'", "must be a number", "mesh_shape", "plan.specialize(n="
    )


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        (("n", "m"), ["('n', 'm')", "at most one size", "Give numbers"]),
        (("n", "n"), ["at most one size"]),
        (("2n",), ["('2n',)", "name of a symbolic cluster's number"]),
        (("n", 0), ["sizes of at least 1"]),
    ],
)
def test_bad_symbolic_mesh_shape(shape, parts):
    refused(lambda: al.PlanOptions(mesh_shape=shape), *parts)


@pytest.mark.parametrize("shape", [None, (2, 4), ("m",)])
def test_symbolic_cluster_without_its_name_in_the_mesh(shape):
    options = al.PlanOptions(mesh_shape=shape)
    refused(
        lambda: al.plan(step, X, cluster=N, options=options), str(shape), "the name 'n'", "test_symbolic.py", "('n', 2)"
    )


def test_symbolic_cluster_where_a_step_runs():
    options = al.PlanOptions(mesh_shape=("n",))
    run = al.parallelize(step, cluster=N, options=options)
    refused(
        lambda: run.plan(X), "is symbolic", "must be chosen", "test_symbolic.py", "plan.specialize(n=8)", "plan=..."
    )


@pytest.mark.parametrize(
    ("args", "named"),
    [((), {}), ((5,), {}), ((0,), {}), ((2.5,), {}), (("n",), {}), ((True,), {}), ((), {"m": 2}), ((2,), {"n": 2})],
)
def test_bad_number_of_workers(args, named):
    plan = al.plan(step, X, cluster=N, options=al.PlanOptions(mesh_shape=("n",)))
    parts = "names no number of workers", "Allowed is one n of 1-4", "test_symbolic.py", "plan with more values"
    refused(lambda: plan.specialize(*args, **named), *parts)


def test_an_already_parallelized_step_keeps_its_pins():
    from jax.sharding import PartitionSpec as P

    run = al.parallelize(step, pins={"0": P("data", None)})
    options = al.PlanOptions(mesh_shape=("n",), axis_names=("data",))
    plan = al.plan(run, X, cluster=N, options=options)
    assert [str(size) for size in plan.regime(4).local_shapes["0"]] == ["8/n", "8"]
    refused(lambda: plan.specialize(3), "'0'", "dim 0 of size 8", "axis 'data' of 3")
    assert plan.without_plan == (3,)
