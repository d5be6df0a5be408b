"""A plan's layouts as JSON, Shardy and logical axes: each read back by what it is for."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec as P

from alpa_lite._jax_compat import ir, mlir
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Value
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.answers import logical_axis_rules, mlir_type, partition_specs, shardy_text
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf, StagePlan

MESH = DeviceMesh(shape=(2, 2, 2), axis_names=("data", "model", "z"))


def leaf(path, dtype, shape, spec, itemsize=4):
    return Leaf(path=path, value=Value(shape=shape, dtype=dtype, itemsize=itemsize), spec=ShardingSpec.parse(spec))


@pytest.fixture
def plan():
    inputs = (
        leaf("0/key", "key<fry>", (), "[]"),
        leaf("0/keys", "key<rbg>", (4,), "[data]"),
        leaf("0/params/w", "bfloat16", (16, 32), "[_,model.z]"),
        leaf("0/params/v", "float32", (32, 16), "[z.model,data]"),
        leaf("1", "int32", (8, 16), "[data,_]"),
    )
    outputs = (*(replace(x, path=f"out/{x.path}") for x in inputs[:4]), leaf("out/1", "float32", (), "[]"))
    stage = StagePlan(mesh=MESH, submesh=(1, 8))
    return Plan(stages=(stage,), objective=1.0, lower_bound=1.0, status="optimal", inputs=inputs, outputs=outputs)


def test_partition_specs_are_read_with_one_expression(plan):
    tree = json.loads(partition_specs(plan))
    assert tree["mesh"] == {"shape": [2, 2, 2], "axis_names": ["data", "model", "z"]}
    for group, leaves in (("arguments", plan.inputs), ("results", plan.outputs)):
        assert list(tree[group]) == [x.path for x in leaves]
        assert all(P(*tree[group][x.path]) == partition_spec(x.spec) for x in leaves)
    assert tree["arguments"]["0/params/v"] == [["z", "model"], "data"]


def test_shardy_text_is_what_jax_lowers_to(plan):
    """The types and shardings of ``main`` in JAX's own text, argument by argument and result by result."""
    mesh = jax.make_mesh(MESH.shape, MESH.axis_names, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    shardings = [jax.sharding.NamedSharding(mesh, partition_spec(x.spec)) for x in plan.inputs]
    keys = jax.eval_shape(lambda: (jax.random.key(0), jax.random.split(jax.random.key(0, impl="rbg"), 4)))
    shapes = [*keys, *(jax.ShapeDtypeStruct(x.value.shape, x.value.dtype) for x in plan.inputs[2:])]
    lowered = jax.jit(lambda *x: x, in_shardings=shardings, out_shardings=tuple(shardings)).lower(*shapes).as_text()
    text = shardy_text(plan)
    declared = [line.strip().rstrip(",").removesuffix(") -> (") for line in text.splitlines() if "tensor<" in line]
    assert len(declared) == len(plan.inputs) + len(plan.outputs)
    axes = 'sdy.mesh @mesh = <["data"=2, "model"=2, "z"=2]>'
    assert axes in text and axes in lowered
    for line in declared[: len(plan.inputs)]:
        kind, sharding = line.split(" {sdy.sharding = ")
        assert f"{kind} {{" in lowered and sharding.removesuffix("}") in lowered, line


def test_shardy_text_is_a_valid_module(plan):
    with mlir.make_ir_context():
        module = ir.Module.parse(shardy_text(plan))
        assert module.operation.verify()
        assert str(module).count("sdy.sharding = ") == len(plan.inputs) + len(plan.outputs)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("float64", "tensor<2x3xf64>"),
        ("uint8", "tensor<2x3xui8>"),
        ("bool", "tensor<2x3xi1>"),
        ("int4", "tensor<2x3xi4>"),
        ("complex64", "tensor<2x3xcomplex<f32>>"),
        ("float8_e4m3fn", "tensor<2x3xf8E4M3FN>"),
        ("float8_e5m2", "tensor<2x3xf8E5M2>"),
    ],
)
def test_types_are_those_of_jax(dtype, text):
    assert mlir_type(Value(shape=(2, 3), dtype=dtype, itemsize=1)) == text
    with jax.enable_x64(True):
        lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((2, 3), dtype)).as_text()
    assert f"%arg0: {text}" in lowered


def test_flax_reads_the_logical_axis_rules_as_the_same_layouts(plan):
    linen = pytest.importorskip("flax.linen")
    tree = json.loads(logical_axis_rules(plan))
    assert tree["mesh_axes"] == ["data", "model", "z"]
    for ordered in (tree["logical_axis_rules"], tree["logical_axis_rules"][::-1]):
        rules = [(name, tuple(axes) or None) for name, axes in ordered]
        for x in (*plan.inputs, *plan.outputs):
            found = linen.logical_to_mesh_axes(tree["logical_axes"][x.path], rules)
            mesh = jax.sharding.AbstractMesh(MESH.shape, MESH.axis_names)
            ours, theirs = (jax.sharding.NamedSharding(mesh, s) for s in (partition_spec(x.spec), found))
            assert ours.is_equivalent_to(theirs, x.spec.rank), (x.path, found)
