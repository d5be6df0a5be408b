"""Prices of the decisions: where memory counts, a loop keeps no layout of an argument that no usage sees; convolutions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.cluster import Calibration
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.fusion import dims_read_across, patch_passes
from alpa_lite.costs.memory import Order, timeline
from alpa_lite.intraop.decisions import build_graph
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.trace.program import trace


def loop(w: jax.Array, xs: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda total, x: (total + (x @ w).sum(), None), jnp.zeros(()), xs)[0]


def test_a_limit_forbids_layouts_that_a_loop_keeps_uncounted() -> None:
    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    program = trace(loop, args, {}).program
    mesh = DeviceMesh(shape=(2, 2), axis_names=("x", "y"))
    costs = cost_model("roofline", al.Cluster.parse("1x4:h100-sxm"), mesh)
    graph = build_graph(program, Conversions(mesh=mesh, costs=costs))
    pricer = Pricer.of(program, graph, costs)
    line = timeline(program, Order.LATE, facts=Facts(program))
    free, limited = pricer.problem(), pricer.problem(timeline=line, usage_limit=1 << 40)
    (copy,) = (node for node, n in enumerate(graph.nodes) if n.kind == "copy" and n.pairs is not None)
    (reader,) = graph.loop_reads
    specs = graph.conversions.space(2).specs
    pairs, read = graph.nodes[copy].pairs, graph.nodes[reader].specs
    assert pairs is not None and read is not None

    def between(problem) -> np.ndarray:
        (found,) = (e.costs for e in problem.edges if (e.u, e.v) == (copy, reader))
        return np.isfinite(found)

    def gathers_to(before, after) -> bool:
        return all(old[: len(new)] == new for old, new in zip(before.dims, after.dims, strict=True))

    slices = np.array([[any(gathers_to(specs[r], specs[there]) for there in pair) for r in read] for pair in pairs])
    moved = between(free) & ~slices
    assert moved.any()  # such as an all-to-all, once before the loop
    assert (between(limited) == (between(free) & slices)).all()
    counted = {usage.node: usage.size_bytes for usage in limited.usages}
    assert all((counted[copy][row] > 0) == (made != handed) for row, (made, handed) in enumerate(pairs))


def none_is_cheaper(fn: Callable[[jax.Array], Any], shape: tuple[int, ...], cluster: str) -> None:
    """With the argument pinned, on one mesh."""
    options = al.PlanOptions(padding="off", mesh_shape=(8,), axis_names=("x",))
    settings = {"cluster": al.Cluster.parse(cluster), "options": options}
    argument = jax.ShapeDtypeStruct(shape, jnp.float32)
    best = al.plan(fn, argument, **settings)
    for spec in (P(), P("x"), P(None, "x")):
        pinned = al.plan(fn, argument, pins={"0": spec}, **settings).objective
        assert best.lower_bound <= best.objective <= pinned * (1 + 1e-9)


@pytest.mark.medium
@pytest.mark.parametrize("cluster", ["1x8:cpu", "1x8:h100-sxm"])
def test_no_pinned_layout_of_an_argument_is_cheaper_than_the_best(cluster: str) -> None:
    """Readers want it in three ways: one conversion serves several, whatever it is, and others read what was passed."""
    row, column = (lambda b: b.sum(1, keepdims=True) + 1), (lambda b: b.sum(0, keepdims=True) + 1)
    functions = (
        lambda b: (b.sum(1), b / row(b) / column(b)),
        lambda b: (b.sum(0), b.sum(1), b / row(b), b / column(b)),
        lambda b: (jnp.sort(b, 0), jnp.cumsum(b, 0), b / row(b)),
        lambda b: (jnp.sort(b, 1), jnp.sort(b, 0), b.T @ b),
    )
    for fn in functions:
        none_is_cheaper(fn, (512, 64), cluster)


def test_no_pinned_layout_is_cheaper_than_the_best_for_a_value_inside() -> None:
    """Three readers want it converted, and the others as it was made, which is dear to come back to."""

    def fn(a: jax.Array) -> tuple[jax.Array, ...]:
        b = a @ jnp.ones((64, 64))
        rows = b / (b.sum(1, keepdims=True) + 1)
        return (rows, jnp.cumsum(b, 0), jnp.cumsum(b, 0), jnp.tanh(b), 2 * rows, jnp.cumsum(b, 0))

    none_is_cheaper(fn, (64, 64), "1x8:cpu")


@pytest.mark.parametrize("added", [0, 60])
def test_a_bound_that_leaves_plans_out_says_so(added: int) -> None:
    """In larger programs a value with three readers is handed on in one layout (``docs/design/0004-*.md``)."""

    def fn(a: jax.Array, s: jax.Array) -> tuple[jax.Array, ...]:
        for _ in range(added):
            s = s + 1.0
        b = a @ jnp.ones((64, 64))
        return jnp.cumsum(b, 0), jnp.tanh(b), b / b.sum(), s

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    for costs in ("roofline", "hidet"):
        options = al.PlanOptions(mesh_shape=(8,), axis_names=("x",), costs=costs)
        plan = al.plan(fn, *shapes, cluster=al.Cluster.parse("1x8:cpu"), options=options)
        assert any("handed to them in one layout" in note for note in plan.notes) == (added > 0 and costs == "roofline")


@pytest.mark.parametrize("looped", [False, True])
def test_a_limit_leaves_the_copies_of_arguments_as_they_are(looped: bool) -> None:
    """A loop has a value with the same readers, which pay from its copy alone under a limit."""

    def reads(b: jax.Array) -> jax.Array:
        return jnp.sort(b, 0) + jnp.sort(b, 1) + jnp.cumsum(b, 0)

    def fn(b: jax.Array) -> jax.Array:
        inner = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, reads(c[1])), (0, reads(b)))
        return inner[1] if looped else reads(b)

    program = trace(fn, (jax.ShapeDtypeStruct((64, 64), jnp.float32),), {}).program
    mesh = DeviceMesh(shape=(4,), axis_names=("x",))
    costs = cost_model("roofline", al.Cluster.parse("1x4:h100-sxm"), mesh)
    graph = build_graph(program, Conversions(mesh=mesh, costs=costs))
    pricer = Pricer.of(program, graph, costs)
    line = timeline(program, Order.LATE, facts=Facts(program))
    free, rented, limited = (
        {(e.u, e.v): e.costs for e in problem.edges}
        for problem in (pricer.problem(), pricer.problem(counted=True), pricer.problem(timeline=line))
    )
    assert all(np.array_equal(rented[edge], limited[edge]) for edge in limited)
    (link,) = (link for link in graph.links if link.is_argument and not link.region)
    edges = [(link.copy, consumer.node) for consumer in link.consumers]
    assert edges and all(np.array_equal(free[edge], limited[edge]) for edge in edges)
    assert looped == any(not np.array_equal(free[edge], limited[edge]) for edge in free)


def test_nine_readers_of_a_tensor_get_it_converted_for_all() -> None:
    """They take no rows of it: it is no stack, whatever its rank."""

    def fn(pin: bool, b: jax.Array) -> tuple[jax.Array, ...]:
        b = al.pin(b, P(None, "x")) if pin else b
        return tuple(jnp.sort(b + i, axis=0).sum(0) for i in range(9))

    options = al.PlanOptions(mesh_shape=(8,), axis_names=("x",))
    settings = {"cluster": al.Cluster.parse("1x8:h100-sxm"), "options": options, "pins": {"0": P("x")}}
    argument = jax.ShapeDtypeStruct((4096, 512, 64), jnp.float32)
    free, pinned = (al.plan(partial(fn, pin), argument, **settings).objective for pin in (False, True))
    assert free == pytest.approx(pinned, rel=1e-6)


DIMS = ("NHWC", "HWIO", "NHWC")


def convolution(images: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        images, kernel, (stride, stride), "SAME", dimension_numbers=DIMS, feature_group_count=groups
    )


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_patches_are_those_that_jax_makes(stride: int, groups: int) -> None:
    images = jax.ShapeDtypeStruct((4, 16, 16, 8), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 8 // groups, 12), jnp.float32)
    program = trace(lambda x, w: convolution(x, w, stride, groups), (images, kernel), {}).program
    (op,) = (op for op in program.ops if op.primitive == "conv_general_dilated")
    patches = jax.eval_shape(
        lambda x: jax.lax.conv_general_dilated_patches(x, (3, 3), (stride, stride), "SAME", dimension_numbers=DIMS),
        images,
    )
    assert patch_passes(op, program) == patches.size / images.size


def test_patches_of_a_gradient_cover_the_images_once_per_tap() -> None:
    args = jax.ShapeDtypeStruct((4, 16, 16, 8), jnp.float32), jax.ShapeDtypeStruct((3, 3, 8, 12), jnp.float32)
    program = trace(lambda x, w: jax.grad(lambda w: convolution(x, w).sum())(w), args, {}).program
    found = [patch_passes(op, program) for op in program.ops if op.primitive == "conv_general_dilated"]
    assert found[-1] == 9.0 and not any(
        patch_passes(op, program) for op in program.ops if op.primitive != "conv_general_dilated"
    )


def test_only_a_cpu_pays_for_patches_and_no_split_of_features_saves_them() -> None:
    args = jax.ShapeDtypeStruct((32, 16, 16, 16), jnp.float32), jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.float32)
    program = trace(convolution, args, {}).program
    mesh = DeviceMesh(shape=(8,), axis_names=("x",))

    def prices(cluster: str) -> dict[str, float]:
        costs = cost_model("roofline", al.Cluster.parse(cluster), mesh)
        graph = build_graph(program, Conversions(mesh=mesh, costs=costs))
        pricer = Pricer.of(program, graph, costs)
        (index,) = (i for i, n in enumerate(graph.nodes) if n.op is not None)
        strategies = graph.nodes[index].strategies
        assert strategies is not None
        names = [str(graph.conversions.space(4).specs[number]) for number in strategies.results[0]]
        return dict(zip(names, pricer.problem().node_costs[index].tolist(), strict=True))

    cpu, gpu = prices("1x8:cpu"), prices("1x8:a100-40gb")
    batch, features = "[x,_,_,_]", "[_,_,_,x]"
    assert cpu[features] > 3 * cpu[batch]
    assert gpu[features] == pytest.approx(gpu[batch], rel=0.5)


def test_dims_read_across_rows_are_those_of_a_weights_gradient() -> None:
    args = jax.ShapeDtypeStruct((4, 16, 8), jnp.float32), jax.ShapeDtypeStruct((8, 12), jnp.float32)
    program = trace(lambda x, w: jax.value_and_grad(lambda w: ((x @ w) ** 2).sum())(w), args, {}).program
    forward, gradient = (op for op in program.ops if op.primitive == "dot_general")
    assert dims_read_across(forward) == ()
    assert dims_read_across(gradient) == (0, 1)
    batched = trace(jax.vmap(lambda a, b: jnp.einsum("ki,kj->ij", a, b)), (args[0], args[0]), {}).program
    assert [dims_read_across(op) for op in batched.ops if op.primitive == "dot_general"] == [()]


def test_products_across_whole_rows_cost_what_was_measured_of_them() -> None:
    rows = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    program = trace(lambda a, b: jnp.einsum("ki,kj->ij", a, b), (rows, rows), {}).program
    mesh = DeviceMesh(shape=(8,), axis_names=("x",))

    def prices(across_s_per_byte: float) -> dict[str, float]:
        calibration = Calibration(
            device_kind="cpu",
            num_devices=8,
            matmul_flops_per_s=(("f32", 5e10),),
            ramp_s=0.0,
            memory_bandwidth_bytes_per_s=1e10,
            launch_s=0.0,
            across_s_per_byte=across_s_per_byte,
        )
        assert Calibration.from_text(calibration.to_text()) == calibration
        cluster = al.Cluster.of("cpu", devices_per_host=8, calibration=calibration)
        costs = cost_model("roofline", cluster, mesh)
        graph = build_graph(program, Conversions(mesh=mesh, costs=costs))
        problem = Pricer.of(program, graph, costs).problem()
        (index,) = (i for i, n in enumerate(graph.nodes) if n.op is not None and n.op.primitive == "dot_general")
        strategies = graph.nodes[index].strategies
        assert strategies is not None
        specs = graph.conversions.space(2).specs
        names = [f"{specs[a]} {specs[b]}" for a, b in zip(*strategies.operands, strict=True)]
        return dict(zip(names, problem.node_costs[index].tolist(), strict=True))

    plain, across = prices(0.0), prices(1e-9)
    reduced, columns, whole = "[x,_] [x,_]", "[_,x] [_,_]", "[_,_] [_,x]"
    assert across[reduced] == plain[reduced]  # each device has an eighth of the rows to sum over
    moved = 512 * 64 * 4 * (1 + 1 / 8) + 64 * 64 * 4 / 8
    assert across[columns] == pytest.approx(512 * 64 * 4 * (1e-9 / 8) + moved / 1e10)
    assert across[whole] == pytest.approx(512 * 64 * 4 * 1e-9 + moved / 1e10)
