"""``follow=``: a function takes parameters where another plan has them.

Acceptance table of alpa #550, the rows "read back placement of parameters" and "step 1"; Alpa's test_follow_parallel,
test_set_input_shard and test_manual_sharding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.api.request import Request
from alpa_lite.errors import AlpaLiteError, PinError
from alpa_lite.executor.local import RunnableStep

CLUSTER = al.Cluster.parse("1x4:cpu")
MESH = al.PlanOptions(mesh_shape=(2, 2), axis_names=("data", "model"))
# What the planner would not choose by itself for so small a batch.
PINS = {
    "0/params/up/kernel": P(None, "model"),
    "0/params/up/bias": P("model"),
    "0/params/down/kernel": P("model", "data"),
}


def forward(params, x):
    hidden = jax.nn.relu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"]


def train(state, x, y):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((forward(p, x) - y) ** 2))(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "count": state["count"] + 1}, loss


def evaluate(state, x):
    return forward(state["params"], x)


def made_state():
    keys = jax.random.split(jax.random.key(0), 2)
    up = {"kernel": jax.random.normal(keys[0], (16, 32)) / 4, "bias": jnp.zeros(32)}
    return {
        "params": {"up": up, "down": {"kernel": jax.random.normal(keys[1], (32, 8)) / 4}},
        "count": jnp.zeros((), int),
    }


def trained():
    """A train step with its plan, and the state after a step of it."""
    step = al.parallelize(train, cluster=CLUSTER, options=MESH, pins=PINS)
    state, _ = step(made_state(), jnp.ones((8, 16)), jnp.ones((8, 8)))
    return step, state


def no_move(monkeypatch):
    """Calls fail from here on where arrays would have to be moved."""

    def refused(self, dynamic):
        raise AssertionError("arguments are moved")

    monkeypatch.setattr(RunnableStep, "place", refused)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fn", "params"),
    [(evaluate, lambda state: state), (forward, lambda state: state["params"])],
    ids=["same path", "end"],
)
def test_trained_parameters_are_used_where_they_are(fn, params, monkeypatch):
    step, state = trained()
    run = al.parallelize(fn, cluster=CLUSTER, follow=step)
    given, x = params(state), jax.random.normal(jax.random.key(1), (16, 16))  # twice the batch
    planned = run.plan(given, x)
    mesh = state["params"]["up"]["bias"].sharding.mesh
    before = [
        shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(given) for shard in leaf.addressable_shards
    ]
    x = jax.device_put(x, NamedSharding(mesh, planned.specs_by_path["1"]))
    no_move(monkeypatch)
    with jax.transfer_guard("disallow"):
        found = run(given, x)
    after = [shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(given) for shard in leaf.addressable_shards]
    assert before == after
    np.testing.assert_allclose(found, fn(jax.device_get(given), jax.device_get(x)), rtol=1e-5, atol=1e-5)
    for path, (_, spec) in step.plan(made_state(), jnp.ones((8, 16)), jnp.ones((8, 8))).parameter_layout.items():
        own = path if fn is evaluate else path.replace("0/params", "0")
        assert planned.specs_by_path[own] == spec
    assert "follow: 3 parameters lie as they are" in str(planned.notes)


def test_without_following_they_would_be_moved(monkeypatch):
    """What the test above relies on: the planner alone lays these parameters out differently."""
    _, state = trained()
    run = al.parallelize(forward, cluster=CLUSTER, options=MESH)
    no_move(monkeypatch)
    with pytest.raises(AssertionError, match="are moved"):
        run(state["params"], jnp.ones((16, 16)))


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def train_plan(**settings):
    batch = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return al.plan(train, shapes(made_state()), *batch, cluster=CLUSTER, **settings)


def forward_plan(params=None, cluster=CLUSTER, **settings):
    params = shapes(made_state()["params"]) if params is None else params
    return al.plan(forward, params, jax.ShapeDtypeStruct((16, 16), jnp.float32), cluster=cluster, **settings)


def parameters(plan):
    return {path: spec for path, spec in plan.specs_by_path.items() if path.startswith("0/")}


def test_a_plan_from_a_file_a_layout_and_a_step_are_followed_alike(tmp_path):
    plan = train_plan(options=MESH, pins=PINS)
    plan.save(tmp_path / "plan.json")
    want = forward_plan(follow=plan)
    assert parameters(want) == {f"0/{path[9:]}": spec for path, (_, spec) in plan.parameter_layout.items()}
    assert parameters(forward_plan(follow=al.load_plan(tmp_path / "plan.json"))) == parameters(want)
    assert parameters(forward_plan(follow=plan.parameter_layout, options=MESH)) == parameters(want)
    assert parameters(forward_plan(follow=plan, follow_like={"0": "0/params"})) == parameters(want)


def test_a_shared_layout_is_followed():
    params, batch = shapes(made_state()["params"]), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    one = jax.ShapeDtypeStruct((1, 16), jnp.float32)
    graphs = {"many": (forward, (params, batch)), "one": (forward, (params, one))}
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=MESH, pins={"0/up/kernel": P(None, "model")})
    plan = forward_plan(follow=layout)
    assert parameters(plan) == {path: spec for path, (_, spec) in layout.parameter_layout.items()}
    assert (
        plan.specs_by_path["0/up/kernel"] == P(None, "model") != forward_plan(options=MESH).specs_by_path["0/up/kernel"]
    )


def test_some_follow_and_others_are_planned():
    plan = train_plan(options=MESH, pins=PINS)
    found = forward_plan(follow=plan, follow_like={"0/down": "0/params/down"}, pins={"0/up/kernel": P("data")})
    assert found.specs_by_path["0/down/kernel"] == P("model", "data")
    assert found.specs_by_path["0/up/kernel"] == P("data", None)


def test_a_step_that_follows_is_planned_so_by_others_too():
    plan = train_plan(options=MESH, pins=PINS)
    run = al.parallelize(forward, cluster=CLUSTER, follow=plan)
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    again = al.plan(run, shapes(made_state()["params"]), batch, cluster=CLUSTER)
    assert parameters(again) == parameters(forward_plan(follow=plan))


def test_following_its_own_optimum_changes_nothing():
    free = train_plan(options=MESH)
    again = train_plan(follow=free)
    assert (again.objective, again.input_specs, again.output_specs) == (
        free.objective,
        free.input_specs,
        free.output_specs,
    )
    assert forward_plan(follow=train_plan(options=MESH, pins=PINS)).objective >= forward_plan(options=MESH).objective


def linear(kernels, x):
    for kernel in kernels:
        x = x @ kernel
    return x


def test_set_input_shard():
    """Four linear layers; for a batch of 1, of 8 and of 8 that follows the first: specs(1) = specs(3), specs(2) != specs(3).

    The layout of batch 1 is given by pins: left free, kernels lie whole for either batch, by our prices and by Alpa's.
    """
    kernels = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    options = al.PlanOptions(mesh_shape=(4,), forbid=("all-gather", "all-to-all"), memory_budget_bytes=150_000)
    cluster = al.Cluster.parse("1x4:v100-sxm2-16gb")

    def planned(batch, **settings):
        x = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
        return parameters(al.plan(linear, kernels, x, cluster=cluster, options=options, **settings))

    one = al.plan(linear, kernels, jax.ShapeDtypeStruct((1, 64), jnp.float32), cluster=cluster, options=options,
                  pins={"0/0": P(None, "x"), "0/1": P("x"), "0/2": P(None, "x"), "0/3": P("x")})  # fmt: skip
    assert planned(8, follow=one) == parameters(one) != planned(8)


PAIRS = [(P(None, "model"), (6, 2)), (P("data"), (3, 4)), (P("data", "model"), (3, 2)), (P(), (6, 4))]


@pytest.mark.parametrize(("spec", "local"), PAIRS)
@pytest.mark.parametrize("side", ["0", "out"])
def test_manual_sharding(spec, local, side):
    """Alpa's cases: f32[6,4] on (data 2, model 2), pinned as argument or as result."""
    step = al.parallelize(lambda x: x * 2, cluster=CLUSTER, options=MESH, pins={side: spec})
    x = jnp.arange(24.0).reshape(6, 4)
    planned, found = step.plan(x), step(x)
    mesh = found.sharding.mesh
    held = found if side == "out" else jax.device_put(x, NamedSharding(mesh, planned.specs_by_path["0"]))
    assert {shard.data.shape for shard in held.addressable_shards} == {local}
    np.testing.assert_array_equal(found, x * 2)


SHORT = {
    "up": {"kernel": jax.ShapeDtypeStruct((16, 30), jnp.float32), "bias": jax.ShapeDtypeStruct((30,), jnp.float32)},
    "down": {"kernel": jax.ShapeDtypeStruct((30, 8), jnp.float32)},
}
OTHER = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), jax.eval_shape(made_state)["params"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"follow": 3}, r"follow=3 was given\. Allowed are a parallelized step, a plan"),
        (
            {"follow": {"0/w": (0, P(None, unreduced={"x"}))}},
            r"'0/w' as P\(None, unreduced=\{'x'\}\)\. A leaf that is followed lies as it is.* At .*test_follow",
        ),
        ({"follow": {"0/w": (0, P("x", "x"))}}, r"'0/w' as P\('x', 'x'\), with the axis 'x' twice.* At .*test_follow"),
        ({"follow": {}}, r"follow=\{\} was given.* At .*test_follow.*Give follow=plan, of which all arguments"),
        ({"follow": al.parallelize(train)}, r"has no plan yet.*step\.plan"),
        ({"follow": {"0/up/kernel": (0, P())}}, r"names axes and not their sizes.*mesh_shape"),
        ({"follow": {"0/up/kernel": (1, P())}, "options": MESH}, r"parameter_layout on 2 stages.*num_stages=2"),
        ({"follow": {"0/up": (0, P())}, "options": MESH}, r"no argument has leaves with the paths.*'0/up'"),
        (
            {"follow": {"0/up/bias": (0, P(None, "model"))}, "options": MESH},
            r"'0/up/bias' is float32\[32\].* has 2 dims",
        ),
        (
            {"follow": {"0/a/up/bias": (0, P()), "0/b/up/bias": (0, P())}, "options": MESH},
            r"could follow '0/a/up/bias' or '0/b/",
        ),
        (
            {"follow": "plan", "params": OTHER},
            r"'0/down/kernel' is bfloat16\[32,8\].*'0/params/down/kernel'.* is float32\[32,8\]",
        ),
        (
            {"follow": "plan", "pins": {"0/**/kernel": P("data")}},
            r"the pin '0/\*\*/kernel' and 'follow 0/params/.*' disagree .* would have to be moved",
        ),
        ({"follow": "plan", "follow_like": {"0": "1"}}, r"follow_like \{'0': '1'\} matches no leaf"),
        ({"follow": "plan", "follow_like": "0"}, r"follow_like='0' was given"),
        ({"follow": "plan", "cluster": al.Cluster.parse("2x2:cpu")}, r"plan for 1x4:cpu, and this one is for 2x2:cpu"),
        ({"follow": "plan", "options": al.PlanOptions(mesh_shape=(4,))}, r"plan on the mesh .*mesh_shape=\(4,\)"),
        ({"follow": {0: (0, P())}, "options": MESH}, r"follow=\{0: .* paths as in a plan \('0/w'\) and stages from 0"),
        ({"follow": {"0": (-1, P())}, "options": MESH}, r"follow=\{'0': \(-1, .* and stages from 0"),
        ({"follow": {"0": (True, P())}, "options": MESH}, r"follow=\{'0': \(True, .* and stages from 0"),
        (
            {"follow": {"0/up/bias": (0, P(("data", "model")))}, "options": MESH, "params": SHORT},
            r"'follow 0/up/bias' says that '0/up/bias' of shape \(30,\) lies as \[data\.model\], and no array does on the mesh",
        ),
    ],
)
def test_what_cannot_be_followed(settings, message):
    if settings["follow"] == "plan":
        settings = settings | {"follow": train_plan(options=MESH, pins=PINS)}
    with pytest.raises(PinError, match=message) as caught:
        forward_plan(**settings)
    assert "test_follow.py" in str(caught.value)


def test_an_axis_of_one_device_does_not_contradict():
    """The pin that the followed step was planned with, on a mesh where x has one device."""
    pins, options = {"0/up/kernel": P("x", "y")}, al.PlanOptions(mesh_shape=(1, 4), axis_names=("x", "y"))
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plan = al.plan(forward, shapes(made_state()["params"]), batch, cluster=CLUSTER, pins=pins, options=options)
    found = forward_plan(follow=plan, pins=pins)
    assert found.specs_by_path["0/up/kernel"] == plan.specs_by_path["0/up/kernel"] == P(None, "y")


@pytest.mark.parametrize("as_layout", [False, True])
def test_what_lies_otherwise_than_its_uneven_pin_is_followed(as_layout):
    """The pin holds for the padded form, inside; the leaf itself lies as it is followed, in plans of several functions too."""

    def matmul(w, x):
        return x @ w

    def row_sums(w, x):
        return (x @ w).sum(1)

    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",))
    w, x = jax.ShapeDtypeStruct((10, 16), jnp.float32), jax.ShapeDtypeStruct((8, 10), jnp.float32)
    followed = al.plan(matmul, w, x, cluster=CLUSTER, pins={"0": P(None, "x")}, options=options)
    follow = {"0": (0, P(None, "x"))} if as_layout else followed
    settings = {
        "cluster": CLUSTER,
        "follow": follow,
        "follow_like": {"0": "0"},
        "pins": {"0": P("x")},
        "options": options,
    }
    graphs = {"matmul": (matmul, (w, x)), "row_sums": (row_sums, (w, x))}
    for plan in (al.plan(row_sums, w, x, **settings), *al.plan_shared(graphs, shared="0", **settings).plans.values()):
        assert plan.specs_by_path["0"] == P(None, "x")
        assert [padding.pins for padding in plan.paddings] == [((0, "[x,_]"),)]


def added(a, b):
    return jnp.tanh(a) + b


def products(a, x):
    return jnp.tanh(x @ a.T) @ a


TWO_AXES = al.PlanOptions(mesh_shape=(2, 4), axis_names=("x", "y"))
EIGHT = {"cluster": al.Cluster.parse("1x8:cpu"), "options": TWO_AXES}


@pytest.mark.parametrize("fixed", [{"follow": {"0": (0, P("x", None))}}, {"pins": {"0": P("x", None)}}])
def test_what_divides_lies_as_it_is_fixed_beside_an_uneven_pin_of_another_leaf(fixed):
    """Their dims are padded together, and only the pin that does not divide moves inside."""
    a = jax.ShapeDtypeStruct((30, 9), jnp.float32)
    pins = {"1": P("y", None)} | fixed.get("pins", {})
    plan = al.plan(added, a, a, **EIGHT, **fixed | {"pins": pins})
    assert plan.specs_by_path["0"] == P("x", None)
    assert [padding.pins for padding in plan.paddings] == [((1, "[y,_]"),)]


@pytest.mark.parametrize("fixed", [{}, {"follow": {"0": (0, P("x", None))}, "follow_like": {"0": "0"}}])
def test_graphs_have_one_layout_where_one_of_them_pads_the_shared_leaf(fixed):
    a, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((30, 4009), (4096, 4009)))
    graphs = {"pinned": (added, (a, a)), "often": (products, (a, x))}
    pins = {"pinned": {"1": P("y", None)}}
    layout = al.plan_shared(graphs, shared="0", weights={"often": 100}, pins=pins, **EIGHT, **fixed)
    (spec,) = {plan.specs_by_path["0"] for plan in layout.plans.values()}
    assert spec == layout.parameter_layout["0"][1]
    assert not fixed or spec == P("x", None)


def test_free_dims_of_an_uneven_pin_are_not_those_of_what_is_followed():
    """Otherwise a pin that nobody wrote would hold inside, and the leaf would lie anyhow."""
    free = P.UNCONSTRAINED
    w, x = jax.ShapeDtypeStruct((9, 16), jnp.float32), jax.ShapeDtypeStruct((8, 9), jnp.float32)
    options = al.PlanOptions(mesh_shape=(2, 2), axis_names=("x", "y"))
    settings = {"cluster": CLUSTER, "options": options, "pins": {"0": P("x", free)}}
    plan = al.plan(lambda w, x: x @ w, w, x, follow={"0": (0, P(free, "y"))}, **settings)
    assert plan.specs_by_path["0"] in (P(None, "y"), P("x", "y"))
    assert [padding.pins for padding in plan.paddings] == [((0, "[x,?]"),)]
    with pytest.raises(PinError, match=r"'0' and 'follow 0' disagree on '0': \[y,\?\] and \[\?,y\]"):
        even = jax.ShapeDtypeStruct((16, 16), jnp.float32)
        settings["pins"] = {"0": P("y", free)}
        al.plan(lambda w, x: x @ w, even, even, follow={"0": (0, P(free, "y"))}, **settings)


def test_an_uneven_pin_of_one_graph_and_a_followed_layout_hold_together():
    w, x = jax.ShapeDtypeStruct((10, 16), jnp.float32), jax.ShapeDtypeStruct((8, 10), jnp.float32)
    graphs = {"pinned": (lambda w, x: x @ w, (w, x)), "other": (lambda w, x: (x @ w).sum(1), (w, x))}
    layout = al.plan_shared(
        graphs,
        shared="0",
        cluster=CLUSTER,
        pins={"pinned": {"0": P("x")}},
        follow={"0": (0, P(None, "x"))},
        follow_like={"0": "0"},
        options=al.PlanOptions(mesh_shape=(4,), axis_names=("x",)),
    )
    assert {plan.specs_by_path["0"] for plan in layout.plans.values()} == {P(None, "x")}


def test_a_plan_of_which_nothing_fits_is_refused():
    """It trains nothing, so that leaves of other shapes are left free; but not all."""

    def scaled(x, factor):
        return (x * factor).sum(axis=1)

    plan = al.plan(
        scaled, jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32), cluster=CLUSTER
    )
    half = jax.ShapeDtypeStruct((32, 8), jnp.float32)
    assert al.plan(scaled, half, jax.ShapeDtypeStruct((8,), jnp.float32), cluster=CLUSTER, follow=plan)
    with pytest.raises(
        PinError, match=r"nothing can follow: '0' is float32\[32,8\], and '0' is float32\[64,8\].*test_follow"
    ):
        al.plan(scaled, half, jax.ShapeDtypeStruct((1,), jnp.float32), cluster=CLUSTER, follow=plan)


def test_follow_like_alone_is_refused():
    with pytest.raises(PinError, match=r"follow_like=\{'0': '0/params'\} was given without follow.*test_follow"):
        forward_plan(follow_like={"0": "0/params"})


def test_where_layouts_are_chosen_for_several_functions():
    run = al.parallelize(forward, follow=train_plan(options=MESH))
    args = (shapes(made_state()["params"]), jax.ShapeDtypeStruct((16, 16), jnp.float32))
    request = Request.of(run, None, None, None, (), (), ())
    with pytest.raises(PinError, match=r"where layouts are chosen for several functions.*plain"):
        request._resolve(request.trace(args, {}), None)


def test_a_plan_and_what_is_followed():
    plan = train_plan(options=MESH)
    with pytest.raises(AlpaLiteError, match="plan and follow were given"):
        al.parallelize(forward, plan=plan, follow=plan)
