"""``al.conversion`` and ``al.reshard``: what users see, and bad input with its four parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import AlpaLiteError, SpecError

CLUSTER = al.Cluster.parse("1x8:h100-sxm")
SIZES = {"x": 2, "y": 4}


def mesh(types: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(types,) * 2)


def test_text_of_a_conversion():
    c = al.conversion(P(None, "x"), "[y.x,_]", (1024, 1024), mesh=SIZES, cluster=CLUSTER, costs="ring")
    assert str(c).splitlines() == [
        "float32[1024,1024] on (x=2, y=4): [_,x] -> [y.x,_]",
        "step        over  then     size     sent     cost",
        "slice       y     [y,x]    -        -        0 bytes",
        "all-to-all  x     [y.x,_]  512 KiB  256 KiB  262144 bytes",
        "total                               256 KiB  262144 bytes",
    ]
    assert str(al.conversion(P("x"), P("x", None), (8, 8), mesh=SIZES, cluster=CLUSTER)).endswith("\nnothing to do\n")


def test_specs_may_be_given_in_three_forms_and_axes_of_size_one_do_nothing():
    sizes = {"x": 2, "one": 1, "y": 4}
    texts = {
        str(al.conversion(before, P("y"), (8, 8), mesh=sizes, cluster=CLUSTER))
        for before in (P(("x", "one"), None, unreduced={"y"}), "[x.one,_]+{y}", "[x,_]+{y}")
    }
    assert len(texts) == 1
    assert al.conversion("[one,_]", P(), (8, 8), mesh=sizes, cluster=CLUSTER).steps == ()
    device_mesh = DeviceMesh(shape=(2, 1, 4), axis_names=("x", "one", "y"))
    assert texts == {str(al.conversion("[x,_]+{y}", P("y"), (8, 8), mesh=device_mesh, cluster=CLUSTER))}


def test_prices_follow_the_dtype_and_the_cluster():
    def c(dtype, cluster):
        return al.conversion("[x,_]", "[_,_]", (1024, 1024), dtype, mesh={"x": 8}, cluster=cluster)

    assert c("float32", CLUSTER).sent_bytes == 2 * c(jnp.bfloat16, CLUSTER).sent_bytes
    assert c("float32", al.Cluster.parse("8x1:h100-sxm")).cost > c("float32", CLUSTER).cost


def test_a_real_mesh_is_its_own_cluster():
    assert al.conversion(P("x"), P(), (8, 8), mesh=mesh()).steps[0].name == "all-gather"


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_])
def test_reshard_keeps_the_numbers(types, dtype):
    grid = mesh(types)
    whole = (np.arange(64).reshape(8, 8) % 7).astype(dtype)
    x = jax.device_put(whole, NamedSharding(grid, P("x", "y")))
    wanted = NamedSharding(grid, P(("y", "x"), None))
    y = al.reshard(x, wanted)
    assert y.sharding.is_equivalent_to(wanted, 2)
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def test_the_second_reshard_does_nothing():
    x = jax.device_put(np.ones((8, 8)), NamedSharding(mesh(), P("x", "y")))
    wanted = NamedSharding(mesh(), P("y", "x"))
    once = al.reshard(x, wanted)
    assert al.conversion(once.sharding.spec, wanted.spec, x.shape, mesh=mesh()).steps == ()
    np.testing.assert_array_equal(al.reshard(once, wanted), x)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "[x,_]",
            "[q,_]",
            r"shape \(10, 8\).*dim 0 names the axis 'q'.*the axes 'x', 'y'.*\(after\); correct the name",
        ),
        (P("x", "x"), P(), r"axis 'x' twice: dim 0 and dim 1.*once per tensor.*\(before\); keep one"),
        ("[x,x]", P(), r"'\[x,x\]'.*once per tensor.*\(before\); write one entry per dim"),
        ("[x", P(), r"cannot read the sharding spec '\[x'.*\(before\); write one entry per dim"),
        (P(), P(None, None, "x"), r"3 dims; the tensor has 2.*\(after\); drop 1"),
        (P(), P("y"), r"dim 0 of size 10 does not divide over axis 'y' \(n=4\), 4 parts.*\(after\); pad the dim to 12"),
        (P(), P(("y", "x")), r"over axis 'y' \(n=4\) and axis 'x' \(n=2\), 8 parts.*pad the dim to 16"),
        (P(), P(P.UNCONSTRAINED), r"free dim.*two known layouts.*\(after\); write None"),
        (P(), "[_,_]+{x}", r"turns \[_,_\] into \[_,_\]\+\{x\}.*unreduced only where.*without x"),
    ],
)
def test_bad_specs(before, after, words):
    with pytest.raises(SpecError, match=words):
        al.conversion(before, after, (10, 8), mesh=SIZES, cluster=CLUSTER)


def test_bad_meshes_and_conventions():
    with pytest.raises(SpecError, match=r"the mesh \{'x': 0\}.*size 1 or more.*al.conversion \(mesh\); correct it"):
        al.conversion(P(), P("x"), (8,), mesh={"x": 0}, cluster=CLUSTER)
    with pytest.raises(
        SpecError, match=r"the mesh 'x=8' was given. It is a jax.sharding.Mesh, or axis names with their sizes"
    ):
        al.conversion("[x,_]", "[_,x]", (8, 8), mesh="x=8")
    with pytest.raises(SpecError, match=r"no cluster. Prices need links.*cluster=al.Cluster.parse\('1x8:h100-sxm'\)"):
        al.conversion(P(), P("x"), (8,), mesh=SIZES)
    with pytest.raises(AlpaLiteError, match="is not a cost convention"):
        al.conversion(P(), P("x"), (8,), mesh=SIZES, cluster=CLUSTER, costs="guess")


def test_reshard_refuses_what_it_cannot_see():
    wanted = NamedSharding(mesh(), P("x"))
    line = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    elsewhere = jax.device_put(np.ones((8, 8)), NamedSharding(line, P("x")))
    words = r"shape \(8, 8\).*on the mesh of the new sharding.*Between meshes, and inside jit, use jax.device_put"
    with pytest.raises(SpecError, match=words):
        al.reshard(elsewhere, wanted)
    with pytest.raises(SpecError, match=words):
        jax.jit(lambda x: al.reshard(x, wanted))(np.ones((8, 8)))
    with pytest.raises(SpecError, match=r"dim 0 of size 9 does not divide"):
        al.reshard(jax.device_put(np.ones(9), NamedSharding(mesh(), P())), wanted)
