"""Acceptance rows about converting a tensor from one sharding to another, each test named after its row.

One file, because several rows ask for the same runs: slapo (reshards, which are hidet's too) and TVM (redistribute).
"""

from __future__ import annotations

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.priced import PricedConversion
from alpa_lite.costs.tiles import Placement, check_tiles, move_tiles, plan_tiles, slices
from alpa_lite.errors import SpecError
from alpa_lite.lowering.reshard import conversion_function
from tests.conversion_runs import check_conversions
from tests.harness import device_mesh

KINDS = tuple(CollectiveKind)


@cache
def engine(mesh_shape: tuple[int, ...]) -> Conversions:
    mesh = device_mesh(mesh_shape)
    return Conversions(
        mesh=mesh, costs=cost_model("roofline", al.Cluster.parse(f"1x{mesh.num_devices}:h100-sxm"), mesh)
    )


def convert(before: str, after: str, shape: tuple[int, ...], n: int, costs: str = "roofline") -> PricedConversion:
    cluster = al.Cluster.parse(f"1x{n}:h100-sxm")
    return al.conversion(before, after, shape, mesh={"x": n}, cluster=cluster, costs=costs)


def names(c: PricedConversion) -> list[str]:
    return [step.name for step in c.steps]


def on_dim(rank: int, dim: int | None) -> str:
    return "[" + ",".join("x" if d == dim else "_" for d in range(rank)) + "]"


# slapo, table 1.2


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.medium), pytest.param(8, marks=pytest.mark.medium)])
def test_slapo_nine_pairwise_reshards(n):
    """All of R and S on two dims, at most one of them split."""
    made = engine((n,))
    specs = [ShardingSpec.parse(text) for text in ("[_,_]", "[x,_]", "[_,x]")]
    assert len(check_conversions(made, list(itertools.product(specs, specs)), (16, 24))) == 9


# TVM, table 1.4


def test_tvm_redistribute_as_its_own_step_rerunnable():
    """A conversion may expand to several steps; expanding each of them again, or converting again, changes nothing."""
    made, shape = engine((2, 2)), (4, 8, 8)
    specs = [s for s in made.space(3).specs if not s.unreduced]
    longest = 0
    for before, after in itertools.product(specs, specs):
        steps = made.steps(before, after, shape, 4)
        assert [s for step in steps for s in made.steps(step.before, step.after, shape, 4)] == list(steps)
        assert made.steps(after, after, shape, 4) == ()
        longest = max(longest, len(steps))
    assert longest > 1


def test_tvm_same_to_same_emits_nothing():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for spec in (P(), P("x"), P(None, "x")):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        x = jax.device_put(np.ones((8, 8), np.float32), sharding)
        same = al.conversion(spec, spec, (8, 8), mesh=mesh)
        assert same.steps == ()
        text = jax.jit(conversion_function(same, mesh)).lower(x).compile().as_text()
        assert not any(kind in text for kind in KINDS)
        assert al.reshard(x, sharding).sharding == sharding


def test_tvm_replicated_to_split_is_a_local_slice():
    cut = convert("[_,_]", "[_,x]", (128, 128), 2)
    assert (names(cut), cut.sent_bytes) == (["slice"], 0)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(np.arange(128.0 * 128).reshape(128, 128), jax.sharding.NamedSharding(mesh, P()))
    y = al.reshard(x, jax.sharding.NamedSharding(mesh, P(None, "x")))
    assert {shard.data.shape for shard in y.addressable_shards} == {(128, 64)}
    np.testing.assert_array_equal(y, x)


def test_tvm_split_to_replicated_is_an_all_gather():
    shape, n, volume = (8, 4, 4, 8), 4, 8 * 4 * 4 * 8 * 4
    whole = ShardingSpec.replicated(4)
    pairs = [(ShardingSpec.parse(on_dim(4, dim)), whole) for dim in range(4)]
    for c in check_conversions(engine((n,)), pairs, shape):
        assert (names(c), c.sent_bytes) == (["all-gather"], volume * (n - 1) // n)


@pytest.mark.medium
def test_tvm_split_to_another_dim_is_an_all_to_all():
    shape, n, volume = (8, 4, 4, 8), 4, 8 * 4 * 4 * 8 * 4
    splits = [ShardingSpec.parse(on_dim(4, dim)) for dim in range(4)]
    for c in check_conversions(engine((n,)), list(itertools.permutations(splits, 2)), shape):
        assert (names(c), c.sent_bytes) == (["all-to-all"], volume * (n - 1) // n**2)


def test_tvm_partial_to_replicated_and_to_split():
    shape, n, volume = (8, 8), 4, 8 * 8 * 4
    partial, whole, split = (ShardingSpec.parse(t) for t in ("[_,_]+{x}", "[_,_]", "[_,x]"))
    reduced, scattered = check_conversions(engine((n,)), [(partial, whole), (partial, split)], shape)
    assert (names(reduced), reduced.sent_bytes) == (["all-reduce"], 2 * volume * (n - 1) // n)
    assert (names(scattered), scattered.sent_bytes) == (["reduce-scatter"], volume * (n - 1) // n)


@pytest.mark.medium
@pytest.mark.parametrize(("rank", "coarse", "fine"), [(2, 81, 121), pytest.param(3, 256, 361, marks=pytest.mark.slow)])
def test_tvm_meshes_of_two_axes(rank, coarse, fine):
    """All ordered pairs on 2x2, run; ``coarse`` counts (x,y) and (y,x) on one dim as one spec."""
    made = engine((2, 2))
    specs = [s for s in made.space(rank).specs if not s.unreduced]
    assert len(specs) ** 2 == fine
    assert len({tuple(frozenset(dim) for dim in spec.dims) for spec in specs}) ** 2 == coarse
    pairs = list(itertools.permutations(specs, 2))
    priced = check_conversions(made, pairs, (4, 8, 8)[:rank], by_xla=rank == 2)  # the slow tests compare all with XLA's
    for (before, after), c in zip(pairs, priced, strict=True):
        free = all(new[: len(old)] == old for old, new in zip(before.dims, after.dims, strict=True))
        assert (c.cost == 0) == free == (not c.collectives)


@pytest.mark.parametrize(
    ("source", "target"),
    [((2, 2), (4,)), ((4,), (2, 2)), ((2,), (2, 4)), pytest.param((2, 2, 2), (4, 2), marks=pytest.mark.medium)],
)
def test_tvm_meshes_that_differ(source, target):
    """Mesh A to mesh B of another shape, on the same devices and on others: every spec of rank 2, moved as NumPy tiles."""
    one, other = engine(source).mesh, engine(target).mesh
    whole = np.arange(128).reshape(8, 16)
    for before, after in itertools.product(
        *([s for s in engine(m).space(2).specs if not s.unreduced] for m in (source, target))
    ):
        for first in (0, 8):
            a = Placement(spec=before, mesh=one, devices=tuple(range(one.num_devices)))
            b = Placement(spec=after, mesh=other, devices=tuple(range(first, first + other.num_devices)))
            plan = plan_tiles((8, 16), 4, a, b)
            check_tiles(plan)
            moved = move_tiles(plan, {d: whole[slices(box)] for d, box in a.boxes((8, 16)).items()})
            for device, box in b.boxes((8, 16)).items():
                np.testing.assert_array_equal(moved[device], whole[slices(box)])


def test_tvm_not_divisible():
    cluster = al.Cluster.parse("1x4:cpu")
    with pytest.raises(SpecError) as error:
        al.conversion(P(), P("x"), (10, 8), mesh={"x": 4}, cluster=cluster, tensor="0/params/kernel")
    for word in ("0/params/kernel", "dim 0", "size 10", "axis 'x'", "n=4", "pad the dim to 12"):
        assert word in str(error.value), word


def mlp(x, w1, w2):
    return jax.nn.gelu(x @ w1) @ w2


def test_tvm_reference_lowering_mlp():
    """TVM's MLP: x whole, w1 split over columns, w2 over rows, two workers: one all-reduce, after the second matmul."""
    tensor = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    step = al.parallelize(
        mlp,
        cluster=al.Cluster.parse("1x2:cpu"),
        pins={"0": P(), "1": P(None, "x"), "2": P("x", None), "out": P()},
        options=al.PlanOptions(mesh_shape=(2,)),
    )
    plan = step.plan(tensor, tensor, tensor)
    mesh = DeviceMesh(shape=(2,), axis_names=("x",))
    assert [spec.local_shape((128, 128), mesh) for spec in plan.input_specs] == [(128, 128), (128, 64), (64, 128)]
    (reduction,) = plan.collectives
    assert (reduction.kind, reduction.size_bytes) == ("all-reduce", 128 * 128 * 4)
    matmuls = [d for d in plan.stages[0].decisions if d.results[0].unreduced]
    assert [d.operands for d in matmuls] == [(ShardingSpec.parse("[_,x]"), ShardingSpec.parse("[x,_]"))]
    assert step.compile(tensor, tensor, tensor).audit().ok
    rng = np.random.default_rng(0)
    x, w1, w2 = (rng.standard_normal((128, 128)).astype(np.float32) for _ in range(3))
    np.testing.assert_allclose(step(x, w1, w2), mlp(x, w1, w2), rtol=1e-4, atol=1e-3)


def test_tvm_reference_lowering_two_meshes():
    """The pipeline variant, devices 0-1 then 4-5: the hidden tensor is the one transfer; here as tiles, planned only."""
    mesh, whole = DeviceMesh(shape=(2,), axis_names=("x",)), ShardingSpec.replicated(2)
    sides = (Placement(spec=whole, mesh=mesh, devices=devices) for devices in ((0, 1), (4, 5)))
    plan = plan_tiles((128, 128), 4, *sides)
    check_tiles(plan)
    assert [(t.source, t.target, t.size_bytes) for t in plan.transfers] == [(0, 4, 65536), (1, 5, 65536)]


def attention(x, wq, wk, wv, wo):
    """Llama's: 8 heads of 16, causal."""
    length = x.shape[0]
    q, k, v = (jnp.reshape(x @ w, (length, 8, 16)) for w in (wq, wk, wv))
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), jnp.einsum("shd,thd->hst", q, k) / 4, -jnp.inf)
    return jnp.einsum("hst,thd->shd", jax.nn.softmax(scores), v).reshape(length, 128) @ wo


@pytest.mark.parametrize("length", [32, 48])
@pytest.mark.medium
def test_tvm_reference_lowering_llama_attention(length):
    """Heads over two workers: one all-reduce, after the last matmul, whatever the sequence length."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((length, 128), (128, 128)))
    pins = {"0": P(), "1": P(None, "x"), "2": P(None, "x"), "3": P(None, "x"), "4": P("x", None), "out": P()}
    step = al.parallelize(
        attention, cluster=al.Cluster.parse("1x2:cpu"), pins=pins, options=al.PlanOptions(mesh_shape=(2,))
    )
    (reduction,) = step.plan(x, w, w, w, w).collectives
    assert (reduction.kind, reduction.size_bytes) == ("all-reduce", length * 128 * 4)
    assert step.compile(x, w, w, w, w).audit().ok
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((length, 128), *[(128, 128)] * 4)]
    np.testing.assert_allclose(step(*args), attention(*args), rtol=1e-4, atol=1e-4)
