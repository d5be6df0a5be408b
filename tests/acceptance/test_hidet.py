"""hidet 335: the rows of its table on layouts, costs and the ILP, each a test of that name.

``docs/conventions.md`` lists them; the rows on probing stand in ``test_hidet_probing.py``.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec, layouts
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.decisions import build_graph
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.intraop.repeats import node_classes
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.report.device_map import device_picture, device_slices
from alpa_lite.trace.program import trace
from tests.acceptance.models import (
    bert_layer,
    layer_args,
    random_like,
    resnet18,
    resnet18_shapes,
    tensor,
)

MIB = 2**20
GRID = DeviceMesh(shape=(4, 4), axis_names=("x", "y"))


def line(n: int) -> DeviceMesh:
    return DeviceMesh(shape=(n,), axis_names=("x",))


# -- layouts ------------------------------------------------------------------------------------------------------


def test_spec_enumeration_aligned_with_hardware():
    """(rank + 1) ** axes layouts, rank ** axes of them over all devices; no axis is cut into parts."""
    specs = layouts(GRID, 2)
    assert len(specs) == len(set(specs)) == 9
    full = {str(s) for s in specs if s.num_shards(GRID) == 16}
    assert full == {"[x.y,_]", "[x,y]", "[y,x]", "[_,x.y]"}
    tiles = {tuple(GRID.axes_size(axes) for axes in s.dims) for s in specs}
    assert tiles.isdisjoint({(2, 8), (8, 2)})


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_spec_enumeration_counts(rank, num_axes):
    mesh = DeviceMesh(shape=(4,) * num_axes, axis_names=("x", "y", "z")[:num_axes])
    specs = layouts(mesh, rank)
    assert len(set(specs)) == (rank + 1) ** num_axes
    assert sum(s.num_shards(mesh) == mesh.num_devices for s in specs) == rank**num_axes
    assert len(layouts(line(4), rank)) == rank + 1


ALL_LAYOUTS = [spec for rank in (2, 3, 4) for spec in layouts(GRID, rank)]


def test_shard_vs_mesh_axis_vocabulary_round_trip():
    assert len(ALL_LAYOUTS) == 9 + 16 + 25
    assert all(ShardingSpec.parse(str(spec)) == spec for spec in ALL_LAYOUTS)
    assert len({str(spec) for spec in ALL_LAYOUTS}) == len(ALL_LAYOUTS)


def test_shard_vs_mesh_axis_vocabulary_picture_equals_jax():
    """The tile of every device is the one of JAX's device-to-index map."""
    mesh = DeviceMesh(shape=(2, 4), axis_names=("x", "y"))
    devices = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for rank in (2, 3, 4):
        shape = (8, 16, 24, 32)[:rank]
        for spec in layouts(mesh, rank):
            sharding = jax.sharding.NamedSharding(devices, partition_spec(spec))
            theirs = sharding.devices_indices_map(shape)
            ours = device_slices(spec, shape, mesh)
            for device, tile in zip(devices.devices.flat, ours, strict=True):
                whole = [slice(*s.indices(size)[:2]) for s, size in zip(theirs[device], shape, strict=True)]
                assert whole == list(tile), spec


def test_shard_vs_mesh_axis_vocabulary_picture_reads():
    lines = device_picture(ShardingSpec.parse("[y,x]"), (4, 6), DeviceMesh(shape=(2, 2), axis_names=("x", "y")))
    assert lines.splitlines() == [
        "[y,x] of [4, 6] on (x=2, y=2)",
        "  device 0 (x=0, y=0)  [0:2, 0:3]",
        "  device 1 (x=0, y=1)  [2:4, 0:3]",
        "  device 2 (x=1, y=0)  [0:2, 3:6]",
        "  device 3 (x=1, y=1)  [2:4, 3:6]",
    ]


def test_mesh_axes_per_dim_view_is_the_inverse_of_the_other():
    for spec in ALL_LAYOUTS:
        assert ShardingSpec.from_axes(spec.rank, spec.dim_of_axis) == spec
        assert all(axis in spec.dims[dim] for axis, dim in spec.dim_of_axis.items())
        assert len(spec.dim_of_axis) == sum(map(len, spec.dims))


# -- connect ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
def test_connect_kind_and_cost_of_every_pair(n):
    """Bytes per device: a slice moves nothing, a gather V(n-1)/n, an all-to-all V(n-1)/n^2; results: slapo's reshards."""
    mesh, shape, volume = line(n), (16, 32), 4 * 16 * 32
    conversions = Conversions(mesh=mesh, costs=cost_model("ring", al.Cluster.parse(f"1x{n}:cpu"), mesh))
    for before, after in itertools.product(layouts(mesh, 2), repeat=2):
        kinds = [step.kind for step in conversions.steps(before, after, shape, 4)]
        cost = conversions.time_s(before, after, shape, 4)
        if before == after:
            assert (kinds, cost) == ([], 0)
        elif before.is_replicated:
            assert (kinds, cost) == ([None], 0)
        elif after.is_replicated:
            assert kinds == [CollectiveKind.ALL_GATHER]
            assert cost == pytest.approx(volume * (n - 1) / n, rel=1e-7)
        else:
            assert kinds == [CollectiveKind.ALL_TO_ALL]
            assert cost == pytest.approx(volume * (n - 1) / n**2, rel=1e-7)


def test_connect_under_hidet_gathers_and_slices():
    """hidet has no all-to-all: a gather of V bytes, then a slice."""
    mesh = line(4)
    conversions = Conversions(mesh=mesh, costs=cost_model("hidet", al.Cluster.parse("1x4:cpu"), mesh))
    before, after = ShardingSpec((("x",), ())), ShardingSpec(((), ("x",)))
    kinds = [step.kind for step in conversions.steps(before, after, (16, 32), 4)]
    assert kinds == [CollectiveKind.ALL_GATHER, None]
    assert int(conversions.time_s(before, after, (16, 32), 4)) == 4 * 16 * 32


def test_costs_of_hidet_are_the_published_ones():
    costs = cost_model("hidet", al.Cluster.parse("1x4:cpu"), line(4))
    kinds = {kind: float(costs.collective(kind, ("x",), 1000.0)) for kind in CollectiveKind}
    assert (kinds[CollectiveKind.ALL_REDUCE], kinds[CollectiveKind.REDUCE_SCATTER]) == (2000, 1000)
    assert (kinds[CollectiveKind.ALL_GATHER], kinds[CollectiveKind.ALL_TO_ALL]) == (1000, np.inf)
    assert (costs.slice_price, costs.unit) == (0, "bytes")
    assert costs.compute(1e12, 1e9, "float32", True) == 0


# -- the ILP ------------------------------------------------------------------------------------------------------

SHAPES, IMAGES = resnet18_shapes(), tensor(8, 224, 224, 3)
TOTAL = sum(4 * leaf.size for leaf in jax.tree.leaves(SHAPES))


def resnet_options() -> al.PlanOptions:
    return al.PlanOptions(costs="hidet", memory_budget_bytes=24 * MIB)


def test_ilp_with_memory_budget_the_model_is_the_published_one():
    assert TOTAL == 4 * 11_689_512
    assert round(TOTAL / MIB, 1) == 44.6


@pytest.mark.medium
@pytest.mark.parametrize(("num_devices", "least"), [(2, 0.924), (4, 0.616)])
def test_ilp_with_memory_budget(num_devices, least):
    plan = al.plan(resnet18, SHAPES, IMAGES, cluster=al.Cluster.parse(f"1x{num_devices}:cpu"), options=resnet_options())
    assert plan.status == "optimal" and plan.gap == 0 and plan.unit == "bytes"
    weights = [leaf for leaf in plan.inputs if leaf.path.startswith("0/")]
    split = sum(leaf.value.size_bytes for leaf in weights if not leaf.spec.is_replicated)
    # 44.6 - share * 44.6 * (1 - 1/n) <= 24
    assert least == pytest.approx((1 - 24 * MIB / TOTAL) / (1 - 1 / num_devices), abs=1e-3)
    assert split / TOTAL >= (1 - 24 * MIB / TOTAL) / (1 - 1 / num_devices)
    kept = sum(leaf.spec.local_size_bytes(leaf.value.shape, 4, plan.mesh) for leaf in weights)
    assert kept <= 24 * MIB
    assert plan.outputs[0].spec.is_replicated
    assert plan.cost_table().total == plan.objective


def test_ilp_with_memory_budget_one_device_names_the_deficit():
    with pytest.raises(al.AlpaLiteError) as error:
        al.plan(resnet18, SHAPES, IMAGES, cluster=al.Cluster.parse("1x1:cpu"), options=resnet_options())
    message = str(error.value)
    assert "bytes of the weights 44.6 MiB > budget 24.0 MiB per device, 20.6 MiB too much" in message
    assert "next: use more devices" in message


def test_ilp_without_a_budget_keeps_everything_whole():
    options = al.PlanOptions(costs="hidet", memory_budget_bytes=float("inf"))
    plan = al.plan(resnet18, SHAPES, IMAGES, cluster=al.Cluster.parse("1x2:cpu"), options=options)
    assert plan.objective == 0 and not plan.collectives
    assert all(leaf.spec.is_replicated for leaf in plan.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
def test_ilp_with_memory_budget_output_equals_unsharded(num_devices):
    params, images = random_like(SHAPES), random_like(IMAGES, seed=1)
    step = al.parallelize(resnet18, cluster=al.Cluster.parse(f"1x{num_devices}:cpu"), options=resnet_options())
    expected = np.asarray(jax.jit(resnet18)(params, images))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(np.asarray(step(params, images)), expected, atol=1e-4)


def test_ilp_reduces_once_and_readers_pay_alone():
    """A partial sum with two readers is reduced once (2V); each reader of a split tensor gathers it for itself (V)."""

    def fn(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x @ params["a"]
        return jnp.tanh(h), jnp.sin(h)

    args = ({"a": tensor(64, 32)}, tensor(16, 64))
    volume = 4 * 16 * 32
    options = al.PlanOptions(costs="hidet")
    cluster = al.Cluster.parse("1x4:cpu")
    rows = al.plan(fn, *args, cluster=cluster, pins={"0/a": P("x")}, options=options).cost_table().rows
    assert next(row.cost for row in rows if row.name == "dot_general") in (volume, 2 * volume)
    assert sum(row.cost for row in rows) == 2 * volume
    columns = al.plan(fn, *args, cluster=cluster, pins={"0/a": P(None, "x")}, options=options)
    assert columns.objective == 2 * volume
    assert sum(row.cost for row in columns.cost_table().rows if row.kind == "conversion") == 2 * volume


# -- compute ------------------------------------------------------------------------------------------------------


def contract(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def test_should_compute_be_modelled_on_shards_a_large_contraction():
    """Much compute, little memory: with compute the contraction is split, without it nothing is worth moving."""
    args = (tensor(256, 2**20), tensor(2**20, 256))
    ends = {"0": P(None, None), "1": P(None, None), "out": P()}
    plans = {}
    for compute in (True, False):
        options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), compute=compute, memory_budget_bytes=float("inf"))
        plans[compute] = al.plan(contract, *args, cluster=al.Cluster.parse("1x4:h100-sxm"), pins=ends, options=options)
    dot = {on: next(d for d in plan.stages[0].decisions if d.op.startswith("dot")) for on, plan in plans.items()}
    assert dot[True].operands[0].dims == ((), ("x",))
    assert [c.kind for c in plans[True].collectives] == [CollectiveKind.ALL_REDUCE]
    assert dot[False].operands[0].is_replicated
    assert plans[False].objective == 0 and not plans[False].collectives


def test_should_compute_be_modelled_off_leaves_sharded_contractions_as_they_are():
    """A graph of matmuls alone, all split over every device: each way costs the same compute, so it decides nothing."""

    def fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in params:
            x = x @ weight
        return x

    args = ([tensor(4096, 4096)] * 3, tensor(8192, 4096))
    found = []
    for compute in (True, False):
        options = al.PlanOptions(
            mesh_shape=(4,), compute=compute, require_sharded_contractions=True, memory_budget_bytes=float("inf")
        )
        plan = al.plan(
            fn, *args, cluster=al.Cluster.parse("1x4:h100-sxm"), pins={"1": P(), "out": P()}, options=options
        )
        found.append((plan.input_specs, plan.output_specs, [(d.operands, d.results) for d in plan.stages[0].decisions]))
        assert (plan.compute_s > 0) == compute
    assert found[0] == found[1]


def test_should_compute_be_modelled_is_refused_where_it_has_no_price():
    with pytest.raises(al.AlpaLiteError, match=r"compute=True was given with costs='hidet'.*PlanOptions.compute"):
        al.plan(
            contract,
            tensor(8, 8),
            tensor(8, 8),
            cluster=al.Cluster.parse("1x4:cpu"),
            options=al.PlanOptions(costs="hidet", compute=True),
        )


def test_conventions_for_one_axis_refuse_a_grid():
    with pytest.raises(al.AlpaLiteError, match=r"costs='hidet' was given for the mesh \(x=2, y=2\).*mesh_shape=\(4,\)"):
        al.plan(
            contract,
            tensor(8, 8),
            tensor(8, 8),
            cluster=al.Cluster.parse("1x4:cpu"),
            options=al.PlanOptions(costs="hidet", mesh_shape=(2, 2)),
        )


# -- solver speed -------------------------------------------------------------------------------------------------


def tied_variables(num_layers: int) -> int:
    """Choices that the ILP of ``num_layers`` equal BERT layers has, copies counted once, before any presolve."""

    def model(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x = bert_layer(layer, x)
        return x

    shapes, x = layer_args(128, 256)
    program = trace(model, ([shapes] * num_layers, x), {}).program
    mesh = line(4)
    costs = cost_model("roofline", al.Cluster.parse("1x4:h100-sxm"), mesh)
    graph = build_graph(program, Conversions(mesh=mesh, costs=costs))
    problem = Pricer.of(program, graph, costs).problem()
    first = dict(zip(reversed(node_classes(problem).tolist()), reversed(problem.node_costs), strict=True))
    return sum(len(states) for states in first.values())


@pytest.mark.medium
def test_solver_speed_variables_do_not_grow_with_layers():
    few, many = tied_variables(4), tied_variables(32)
    assert 100 < few <= many <= 1.2 * few
