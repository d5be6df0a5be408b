"""Uneven dims from the user's side: what is planned, what is reported, and that the step stays exact."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, MemoryBudgetError, PinClashError, PinError, SolverError, UnevenPinError
from alpa_lite.plan.check import check_plan
from alpa_lite.planner import plan_step as plan_step_module
from alpa_lite.planner.padded import padded_like
from alpa_lite.trace.program import trace
from tests.harness import difference
from tests.marks import slow_but
from tests.padding_steps import language_model


def planned(vocabulary, shape, *, width=8, pins=None, **options):
    """A small language model on a mesh, its loss over the vocabulary priced high enough for padding to win."""
    step, args = language_model(vocabulary, width, batch=2, length=3)
    cluster = al.Cluster.parse(f"1x{math.prod(shape)}:cpu")
    axes = ("x", "y")[: len(shape)]
    made = al.plan(
        step,
        *args,
        cluster=cluster,
        pins=pins,
        options=al.PlanOptions(mesh_shape=shape, axis_names=axes, **options),
        donate_argnums=0,
    )
    return step, args, made


def exact(step, args, plan, donate=0):
    """Values, gradients and the next state agree with the unsharded step; the compiled step is the planned one."""
    want = jax.jit(step)(*args)
    ran = al.parallelize(step, plan=plan, donate_argnums=donate)
    compiled = ran.compile(*args)
    report = compiled.audit()
    assert report.ok, str(report)
    placed = jax.tree.map(jnp.array, args)
    got = ran(*placed)
    jax.tree.map(lambda g, w: np.testing.assert_(difference(g, w) <= 2e-5), got, want)
    return compiled


PINNED = {"0/0/wte": P("x", None)}


@pytest.mark.medium
@pytest.mark.parametrize("shape", slow_but({(8,)}, [(2,), (4,), (8,), (2, 4)]), ids=str)
def test_vocabulary_of_gpt2(shape):
    """50257 rows over 2, 4 and 8 devices: pinned to be split, so padded."""
    step, args, plan = planned(50257, shape, pins=PINNED)
    [padding] = plan.paddings
    devices = math.prod(shape)
    assert (padding.dim, padding.size, padding.padded) == ("0/0/wte dim 0", 50257, -(-50257 // devices) * devices)
    assert padding.shards >= shape[0]
    exact(step, args, plan)
    check_plan(plan)


@pytest.mark.medium
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_size_10_over_4(shape):
    step, args, plan = planned(10, shape, pins={"0/0/wte": P(("x", "y")[len(shape) - 1], None)})
    [padding] = plan.paddings
    assert (padding.size, padding.padded, padding.shards) == (10, 12, 4)
    exact(step, args, plan)


@pytest.mark.medium
def test_padding_is_taken_where_it_wins_and_said_so():
    """GPT-2's vocabulary and width, planned for GPUs: the loss is split over the vocabulary."""
    cluster = al.Cluster.parse("1x8:h100-sxm")
    step, args = language_model(50257, 768, batch=8, length=512)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    plans = {
        padding: al.plan(step, *shapes, cluster=cluster, options=al.PlanOptions(mesh_shape=(8,), padding=padding))
        for padding in ("auto", "off")
    }
    [padding] = plans["auto"].paddings
    assert (padding.size, padding.padded, padding.shards) == (50257, 50264, 8)
    assert plans["auto"].objective < plans["off"].objective == padding.without
    assert plans["off"].paddings == () and "Padding" not in str(plans["off"])
    text = str(plans["auto"])
    assert "50257 -> 50264" in text and "without it" in text
    assert all(leaf.spec.divides(leaf.value.shape, plans["auto"].mesh) for leaf in plans["auto"].inputs)
    assert {leaf.value.shape for leaf in plans["auto"].inputs if leaf.path.endswith("wte")} == {(50257, 768)}


@pytest.mark.parametrize(
    ("vocabulary", "padded", "shape"),
    [
        (10, 12, (4,)),
        *(pytest.param(*case, marks=pytest.mark.medium) for case in ((10, 12, (2, 4)), (50257, 50264, (8,)))),
    ],
)
def test_waste_is_what_the_tensors_of_the_plan_hold(vocabulary, padded, shape):
    """Counted anew from the decisions, tensor by tensor, on the plan's own program."""
    step, args, plan = planned(vocabulary, shape, pins={"0/0/wte": P("xy"[len(shape) - 1], None)})
    [padding] = plan.paddings
    program = padded_like(trace(step, args, {}, donate_argnums=(0,)), plan.paddings).program
    check_plan(plan, program)
    share = (padded - vocabulary) / padded
    size_bytes, seconds = 0, 0.0
    for decision, op in zip(plan.stages[0].decisions, program.ops, strict=True):
        made = [(program.values[v], spec) for v, spec in zip(op.outputs, decision.results, strict=True) if v >= 0]
        for value, spec in made:
            if padded in value.shape:
                size_bytes += round(math.prod(spec.local_shape(value.shape, plan.mesh)) * value.itemsize * share)
        if any(padded in program.values[v].shape for v in (*op.inputs, *op.outputs) if v >= 0):
            seconds += decision.time_s * (1.0 if op.primitive in ("pad", "slice", "pad_mask") else share)
    assert padding.waste_bytes == size_bytes > 0
    assert padding.waste_s == pytest.approx(seconds) and 0 < seconds < plan.objective


@pytest.mark.medium
def test_state_is_donated_and_keeps_its_size():
    step, args, plan = planned(10, (4,), pins=PINNED)
    compiled = exact(step, args, plan)
    state = sum(
        leaf.spec.local_size_bytes(leaf.value.shape, leaf.value.itemsize, plan.mesh) for leaf in plan.inputs[:6]
    )
    assert compiled.compiled.memory_analysis().alias_size_in_bytes >= state


@pytest.mark.medium
def test_a_plan_with_padding_is_saved_and_bound(tmp_path):
    step, args, plan = planned(10, (4,), pins=PINNED)
    plan.save(tmp_path / "plan.json")
    loaded = al.load_plan(tmp_path / "plan.json")
    assert loaded == plan and loaded.paddings
    bound = loaded.bind(step, *args)
    exact(step, args, bound)
    assert "pad_mask" in str(al.graph(step, *args, plan=bound))
    with pytest.raises(AlpaLiteError):
        loaded.bind(step, *language_model(11, 8, batch=2, length=3)[1])


def test_pin_moves_inside():
    _, _, plan = planned(10, (4,), pins=PINNED)
    assert plan.paddings[0].pins[0][1] == "[x,_]"
    assert any("holds as [x,_] for the padded form of 0/0/wte" in note for note in plan.notes)


@pytest.mark.medium
def test_every_uneven_pin_is_kept():
    """Without one of two the plan would be cheaper."""

    def fn(table, out, tokens):
        return jnp.tanh(table[tokens]) @ out

    args = np.ones((61, 16), np.float32), np.ones((16, 61), np.float32), np.arange(4, dtype=np.int32)
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",))
    both = {"0": P("x"), "1": P(None, "x")}
    for pins in ({"0": both["0"]}, {"1": both["1"]}, both):
        plan = al.plan(fn, *args, cluster=al.Cluster.parse("1x4:cpu"), pins=pins, options=options)
        assert [p.dim for p in plan.paddings] == [f"{path} dim {path}" for path in pins]
        assert sorted(p.pins for p in plan.paddings) == [
            ((int(path), f"[{('x,_', '_,x')[int(path)]}]"),) for path in pins
        ]
        assert sum("for the padded form of" in note for note in plan.notes) == len(pins)
    exact(fn, args, plan, donate=())


def _product(table, x):
    return x @ table @ table.T + (table @ table.T)[:1], table[:, ::2] * 2


def _scaled(table, x, b):
    return (jax.nn.softmax(x @ table) * 2 + b) @ table.T


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fn", "shapes", "pins", "taken"),
    [
        (_product, [(1026, 4096), (65536, 1026)], {"1": P(None, "x")}, (4, 1)),
        (_scaled, [(510, 4098), (65536, 510), (4098,)], {"0": P(None, "x")}, (4, 1)),
        (_product, [(4096, 1026), (64, 4096)], {"0": P("x", "y")}, None),  # the plan of a mesh on which it divides
    ],
)
def test_meshes_that_an_uneven_pin_needs_padding_on_are_searched(fn, shapes, pins, taken):
    """Where those on which it divides are dearer, and where they are not. In the second case padding also pays on those."""
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    given = {"cluster": al.Cluster.parse("1x4:h100-sxm"), "pins": pins}
    fixed = {
        shape: al.plan(fn, *args, options=al.PlanOptions(mesh_shape=shape, axis_names=("x", "y")), **given)
        for shape in [(1, 4), (2, 2), (4, 1)]
    }
    plan = al.plan(fn, *args, options=al.PlanOptions(axis_names=("x", "y")), **given)
    best = min(fixed.values(), key=lambda p: p.objective)
    assert plan.objective == pytest.approx(best.objective)
    if taken:
        assert plan.mesh.shape == taken and plan.paddings
        assert plan.objective < min(p.objective for p in fixed.values() if not p.paddings)
    tried = {c.mesh.shape: c.objective for c in plan.mesh_table}
    assert tried == pytest.approx({shape: p.objective for shape, p in fixed.items()})
    assert plan.lower_bound == pytest.approx(min(p.lower_bound for p in fixed.values()))


@pytest.mark.parametrize(
    ("pins", "taken"), [({"1": P(None, "y"), "out/1": P("y", None)}, (1, 4)), ({"1": P(None, "x")}, (2, 2))]
)
def test_a_mesh_that_takes_too_long_leaves_what_was_found_on_others(monkeypatch, pins, taken):
    """With padding one of them is planned for itself."""

    def cut_short(task, cluster, mesh, **given):
        result = plan_on_mesh(task, cluster, mesh, **given)
        if mesh.shape != (4, 1):
            return result
        return replace(result, status="no-solution", realised=None, objective=np.inf, lower_bound=-np.inf, peak=None)

    plan_on_mesh = plan_step_module.plan_on_mesh
    monkeypatch.setattr(plan_step_module, "plan_on_mesh", cut_short)
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in [(1026, 4096), (65536, 1026)]]
    given = {"cluster": al.Cluster.parse("1x4:h100-sxm"), "options": al.PlanOptions(axis_names=("x", "y"))}
    plan = al.plan(_product, *args, pins=pins, **given)
    assert plan.mesh.shape == taken
    assert {c.mesh.shape: c.status for c in plan.mesh_table}[4, 1] == "no-solution"
    layout = al.plan_shared({"one": (_product, args)}, shared="0", pins=pins, **given)
    assert layout.mesh.shape == taken and layout.objective == pytest.approx(plan.objective)
    assert layout.lower_bound == 0
    with pytest.raises(SolverError, match="no plan was found within time_limit_s"):
        al.plan(
            _product,
            *args,
            pins=pins,
            cluster=given["cluster"],
            options=al.PlanOptions(mesh_shape=(4, 1), axis_names=("x", "y")),
        )


def test_the_bound_is_of_all_meshes(monkeypatch):
    """Also of one whose plan is dearer, where a cheaper one is not ruled out."""

    def loose(task, cluster, mesh, **given):
        result = plan_on_mesh(task, cluster, mesh, **given)
        return replace(result, lower_bound=result.objective / 3) if mesh.shape == (4, 1) else result

    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in [(1024, 4096), (65536, 1024)]]
    given = {"cluster": al.Cluster.parse("1x4:h100-sxm"), "options": al.PlanOptions(axis_names=("x", "y"))}
    proven = al.plan(_product, *args, **given)
    plan_on_mesh = plan_step_module.plan_on_mesh
    monkeypatch.setattr(plan_step_module, "plan_on_mesh", loose)
    plan = al.plan(_product, *args, **given)
    assert plan.mesh == proven.mesh and plan.mesh.shape != (4, 1) and proven.gap == 0
    (row,) = [c for c in plan.mesh_table if c.mesh.shape == (4, 1)]
    assert plan.lower_bound == row.lower_bound < plan.objective and plan.status == "feasible"


def test_padding_where_pins_clash_without_it():
    """Every contraction is to be split, also that of a convolution over three rows, which lie whole by the pins."""

    def fn(a, b, kernel, x):
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(((x @ a) @ b)[None], kernel, (1,), "SAME", dimension_numbers=numbers)

    shapes = (64, 128), (128, 64), (3, 64, 64), (3, 64)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    settings = {"cluster": al.Cluster.parse("1x4:h100-sxm"), "options": al.PlanOptions(costs="slapo-head")}
    free = al.plan(fn, *args, **settings)
    assert free.paddings
    again = al.plan(fn, *args, pins=free.specs_by_path, **settings)
    assert (again.objective, [p.dim for p in again.paddings]) == (free.objective, [p.dim for p in free.paddings])


@pytest.mark.medium
def test_pin_of_a_result():
    step, args, plan = planned(10, (4,), pins={"out/2/wte": P("x", None)})
    [padding] = plan.paddings
    assert plan.output_paths[padding.pins[0][0] - len(plan.inputs)] == "out/2/wte" and padding.shards == 4
    exact(step, args, plan)


def test_pin_of_a_result_that_is_an_argument():
    step = jax.jit(lambda x: (x, x.sum()))
    args = (np.arange(10, dtype=np.float32),)
    plan = al.plan(step, *args, cluster=al.Cluster.parse("1x4:cpu"), pins={"out/0": P("x")})
    assert plan.paddings[0].shards == 4
    exact(step, args, plan, donate=())


def test_pin_of_a_tensor_inside():
    def step(w, x):
        return jnp.sum(al.pin(x @ w, P(None, "x")) ** 2)

    args = (np.ones((6, 10), np.float32), np.ones((4, 6), np.float32))
    plan = al.plan(step, *args, cluster=al.Cluster.parse("1x4:cpu"), options=al.PlanOptions(mesh_shape=(4,)))
    [padding] = plan.paddings
    assert (padding.dim, padding.padded, padding.shards, padding.without) == ("0 dim 1", 12, 4, None)
    assert float(al.parallelize(step, plan=plan)(*args)) == pytest.approx(float(step(*args)))


def test_uneven_pin_without_padding_is_refused():
    with pytest.raises(
        UnevenPinError, match=r"dim 0 of size 10 does not divide over axis 'x' of 4 devices.*without padding.*12"
    ):
        planned(10, (4,), pins=PINNED, padding="off")


def test_uneven_pin_where_nothing_can_be_padded():
    """A sort does not tie its dim to anything, so there is nothing to pad."""
    with pytest.raises(UnevenPinError, match=r"does not divide.*'auto', and there is no way to"):
        al.plan(jnp.sort, np.ones(10, np.float32), cluster=al.Cluster.parse("1x4:cpu"), pins={"0": P("x")})


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"0": P("x"), "1": P("zz")}, "the pin '1' uses the axis 'zz'"),
        ({"0": P("x"), "out/0": P("x")}, "the pin 'out/0' cannot split.*no way to"),
    ],
)
def test_a_pin_that_is_kept_is_not_blamed_for_another(pins, message):
    def fn(w, x):
        return jnp.linalg.qr(x.T @ x)[0], x @ w

    args, cluster = (np.ones((10, 16), np.float32), np.ones((8, 10), np.float32)), al.Cluster.parse("1x4:cpu")
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",))
    assert al.plan(fn, *args, cluster=cluster, options=options, pins={"0": P("x")}).paddings
    with pytest.raises(PinError, match=message):
        al.plan(fn, *args, cluster=cluster, options=options, pins=pins)


def test_a_clash_of_a_padded_form_says_whose_it_is():
    """The pin moved inside, and nothing may bring the parts of the sum together."""
    forbid = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), forbid=forbid)
    args = np.ones((10, 16), np.float32), np.ones((8, 10), np.float32)
    with pytest.raises(PinClashError, match=r"al.pin at the padded form of 0: the tensor is \[x,_\]"):
        al.plan(
            lambda w, x: (x @ w).sum(1), *args, cluster=al.Cluster.parse("1x4:cpu"), options=options, pins={"0": P("x")}
        )


def test_padding_must_be_auto_or_off():
    with pytest.raises(AlpaLiteError, match="padding='on' was given; allowed are 'auto' and 'off'"):
        al.PlanOptions(padding="on")


def test_a_plan_without_uneven_dims_says_nothing_of_padding():
    _, _, plan = planned(16, (4,))
    assert plan.paddings == () and not any("padding" in note for note in plan.notes)


@pytest.mark.medium
def test_padding_of_one_dim_that_costs_more_than_it_saves_is_left_out():
    """With both dims padded the step is cheaper than with none, and 4.5 % dearer than with one: no layout of the parameters
    that is pinned may be cheaper than the best of all."""

    def step(params, x):
        return jax.grad(lambda p: ((jnp.tanh(x @ p[0]) @ p[1]) ** 2).sum())(params)

    shapes = [jax.ShapeDtypeStruct(sizes, jnp.bfloat16) for sizes in ((1024, 2050), (2050, 1024), (4098, 1024))]
    args = tuple(shapes[:2]), shapes[2]
    settings = {
        "cluster": al.Cluster.parse("1x4:h100-sxm"),
        "options": al.PlanOptions(mesh_shape=(4,), axis_names=("x",)),
    }
    best = al.plan(step, *args, **settings)
    assert [padding.dim for padding in best.paddings] == ["1 dim 0"]
    for spec in (P(), P("x")):
        pinned = al.plan(step, *args, pins={"0/0": spec, "0/1": P()}, **settings)
        assert best.objective <= pinned.objective * (1 + 1e-9)


def test_padding_that_loses_is_reported():
    _, _, plan = planned(10, (4,))
    tried = [note for note in plan.notes if note.startswith("padding ")]
    assert plan.paddings or all("so it is not used" in note for note in tried)
    free = replace(plan, notes=(), paddings=())
    off = planned(10, (4,), padding="off")[2]
    assert plan.objective <= off.objective
    if not plan.paddings:
        assert free.stages == off.stages


@pytest.mark.medium
def test_a_budget_that_only_padding_keeps():
    """Every dim is uneven, so without padding each device computes everything."""

    def step(a, b):
        return jax.value_and_grad(lambda a: jnp.log(jnp.exp(jnp.outer(a, b)).sum(0)).mean())(a)

    args = (np.linspace(0, 1, 5, dtype=np.float32), np.linspace(0, 1, 100_001, dtype=np.float32))
    settings = {"mesh_shape": (4,), "memory_budget_bytes": 2.5e6}
    cluster = al.Cluster.parse("1x4:cpu")
    with pytest.raises(MemoryBudgetError):
        al.plan(step, *args, cluster=cluster, options=al.PlanOptions(**settings, padding="off"))
    plan = al.plan(step, *args, cluster=cluster, options=al.PlanOptions(**settings))
    assert plan.paddings and all(p.without is None for p in plan.paddings)
    assert "there is no plan without it" in str(plan)
    exact(step, args, plan, donate=())
