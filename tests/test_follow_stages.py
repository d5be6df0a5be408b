"""Parameters on several stages: a function that follows is cut so that every parameter is where it lies.

Acceptance table of alpa #550: steps 1, 3b and 3c; Alpa's test_manual_sharding with a pipeline.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import LayerError, PinError
from alpa_lite.lowering.transfer import Transfers
from alpa_lite.planner.stage_layers import layer_cuts
from alpa_lite.trace.program import trace
from alpa_lite.trace.staged import layers_of
from tests.marks import slow_but

CLUSTER = al.Cluster.parse("1x4:cpu")
KEY = jax.random.key(0)


def layers(*sizes: int) -> list[dict[str, jax.Array]]:
    pairs = itertools.pairwise(sizes)
    return [
        {"w": jax.random.normal(jax.random.fold_in(KEY, i), pair) / 4, "b": jnp.ones(pair[1:])}
        for i, pair in enumerate(pairs)
    ]


def mlp(params: Any, x: Any) -> Any:
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def scanned(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer["w"] + layer["b"]), None), x, params)[0]


def tied(params: Any, x: Any) -> Any:
    return mlp(params["layers"], jnp.tanh(x @ params["table"])) @ params["table"].T


def trained(forward: Any, params: Any, **options: Any) -> tuple[Any, Any]:
    """A train step on stages, and the state after a step of it."""

    def train(state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            return jnp.mean((forward(params, batch[0]) - batch[1]) ** 2)

        value, grads = al.value_and_grad(loss)(state["params"], (x, y))
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    x = jnp.ones((8, 16))
    y = jnp.zeros(jax.eval_shape(forward, params, x).shape)
    chosen = al.PlanOptions(**{"num_stages": 2, "num_microbatches": 2, **options})
    step = al.parallelize(train, cluster=CLUSTER, options=chosen)
    state, _ = step({"params": params}, x, y)
    return step, state


def stages_of(plan: Any, prefix: str) -> dict[str, int]:
    return {leaf.path.removeprefix(prefix): leaf.stage for leaf in plan.inputs if leaf.path.startswith(prefix)}


CASES = {
    "layers": (mlp, lambda: layers(16, 32, 32, 32, 8)),
    "scan": (scanned, lambda: jax.tree.map(lambda *xs: jnp.stack(xs), *layers(16, 16, 16, 16, 16))),
    "tied": (tied, lambda: {"table": jnp.eye(16) + 0.1, "layers": layers(16, 16, 16)}),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(("layers", "scan"), CASES))
def test_trained_parameters_are_used_where_they_are(name, monkeypatch):
    forward, init = CASES[name]
    step, state = trained(forward, init())
    run = al.parallelize(forward, cluster=CLUSTER, follow=step)
    x = jax.random.normal(KEY, (24, 16))  # another batch
    plan, other = run.plan(state["params"], x), step.known_plan()
    assert stages_of(plan, "0/") == stages_of(other, "0/params/")
    moved = []
    send = Transfers.send

    def noted(self: Any, array: Any, sharding: Any) -> Any:
        if not array.sharding.is_equivalent_to(sharding, array.ndim):
            moved.append(array.shape)
        return send(self, array, sharding)

    monkeypatch.setattr(Transfers, "send", noted)
    want = forward(jax.tree.map(np.asarray, state["params"]), x)
    np.testing.assert_allclose(run(state["params"], x), want, rtol=1e-4, atol=1e-5)
    # Parameters stay; the table that both stages read is sent by its own stage, as in training.
    parameters = {leaf.value.shape for leaf in plan.inputs if leaf.path.startswith("0/")}
    assert [shape for shape in moved if shape in parameters] == ([(16, 16)] if name == "tied" else [])
    if name == "tied":
        assert [t.when for t in plan.pipeline.transfers if t.tensor == "float32[16,16]"] == ["start"]


@pytest.mark.medium
@pytest.mark.parametrize("forward", [scanned, lambda p, x: mlp([{k: p[k][i] for k in p} for i in range(4)], x)])
def test_rows_of_a_searched_step(forward, monkeypatch):
    """Each stage of the step has several layers, and their rows apart."""
    params = jax.tree.map(lambda *xs: jnp.stack(xs), *layers(16, 16, 16, 16, 16))
    step, state = trained(scanned, params, stage_layers=(3, 1))
    rows = stages_of(step.known_plan(), "0/params/")
    assert rows == {f"{name}[{i}:{i + 1}]": int(i == 3) for name in "wb" for i in range(4)}
    run, x = al.parallelize(forward, cluster=CLUSTER, follow=step), jnp.ones((6, 16))
    assert stages_of(run.plan(state["params"], x), "0/") == rows
    want = scanned(jax.tree.map(np.asarray, state["params"]), x)
    np.testing.assert_allclose(run(state["params"], x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_parameters_that_nothing_reads_stay_too():
    params, x = layers(16, 16, 16, 16, 16), jnp.ones((8, 16))
    plan = al.plan(mlp, params, x, cluster=CLUSTER, options=al.PlanOptions(num_stages=2))
    part = al.plan(lambda p, x: mlp(p[:1], x), params, x, cluster=CLUSTER, follow=plan)
    assert stages_of(part, "0/") == stages_of(plan, "0/")


@pytest.mark.medium
def test_rows_that_nothing_reads_stay_too():
    def whole(params: Any, x: Any) -> Any:
        return scanned(params["stack"], x) @ params["out"] @ params["out"]

    params = {"stack": CASES["scan"][1](), "out": jnp.eye(16)}
    x = jnp.ones((8, 16))
    plan = al.plan(whole, params, x, cluster=CLUSTER, options=al.PlanOptions(num_stages=2))
    assert len(stages_of(plan, "0/stack/w")) == 2
    step = al.parallelize(lambda p, x: jnp.tanh(x @ p["out"]) @ p["out"], cluster=CLUSTER, follow=plan)
    assert stages_of(step.plan(params, x), "0/") == stages_of(plan, "0/")
    np.testing.assert_allclose(step(params, x), jnp.tanh(x), rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_what_is_followed_decides_the_cut(tmp_path):
    """Three layers and one, where the planner alone takes two and two; also from a file and from a layout."""
    params, x = layers(16, 16, 16, 16, 16), jnp.ones((8, 16))
    free = al.plan(mlp, params, x, cluster=CLUSTER, options=al.PlanOptions(num_stages=2))
    layout = {f"0/{i}/{name}": (int(i == 3), P()) for i in range(4) for name in "wb"}
    options = al.PlanOptions(num_stages=2, stage_mesh_shapes=((2,), (2,)), axis_names=("x",))
    plan = al.plan(mlp, params, x, cluster=CLUSTER, options=options, follow=layout)
    wanted = {path: stage for path, (stage, _) in layout.items()}
    assert {f"0/{path}": stage for path, stage in stages_of(plan, "0/").items()} == wanted
    assert stages_of(free, "0/") != stages_of(plan, "0/")
    plan.save(tmp_path / "plan.json")
    again = al.load_plan(tmp_path / "plan.json").bind(mlp, params, x)
    np.testing.assert_allclose(
        al.parallelize(mlp, plan=again, cluster=CLUSTER)(params, x), mlp(params, x), rtol=1e-4, atol=1e-5
    )
    assert stages_of(al.plan(mlp, params, x, cluster=CLUSTER, follow=again), "0/") == stages_of(plan, "0/")


def residual(x: Any, params: Any) -> Any:
    for layer in params[:3]:
        x = al.layer_boundary(mlp([layer], x))
    return mlp(params[3:], x)


OWN = {
    "a next value made elsewhere": lambda x, p: (residual(x, p), x.sum()),
    "without boundaries": lambda x, p: (mlp(p, x), x.sum()),
    "parameters that are no first argument": lambda x, p: mlp(p, x)[:4] + x[:4],
    "state that both stages read": lambda x, p: (residual(x, p) + x, x.sum()),
    "a batch that stages without parameters read": lambda x, p: (residual(x, p[:3]) * x).sum(),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", OWN)
def test_a_function_follows_its_own_plan(name):
    """A leaf lies where its next value is made, or where it is read first, and is sent to who else reads it."""
    fn, args = OWN[name], (jnp.ones((8, 16)), layers(16, 16, 16, 16, 16))
    plan = al.plan(fn, *args, cluster=CLUSTER, options=al.PlanOptions(num_stages=2, stage_layers=(3, 1)))
    again = al.plan(fn, *args, cluster=CLUSTER, follow=plan)
    assert any(t.when == "start" for t in plan.pipeline.transfers)
    lies, wanted = ([(leaf.path, leaf.stage, leaf.spec) for leaf in made.inputs] for made in (again, plan))
    assert lies == wanted
    assert again.pipeline.transfers == plan.pipeline.transfers


@pytest.mark.medium
def test_rows_that_other_stages_read_too_are_followed():
    """They say nothing of where their readers go, and still the leaf is cut so; of a layout, and of a plan in it."""

    def update(params, x):
        h = x
        for i in range(4):
            h = jnp.tanh(h @ params["w"][i])
        return h, params["w"] * h.sum()

    args = {n: ({"w": jnp.ones((4, 16, 16))}, jnp.ones((n, 16))) for n in (4, 2)}
    graphs = {"four": (update, args[4]), "two": (update, args[2])}
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=al.PlanOptions(num_stages=2))
    lies = {path: stage for path, (stage, _) in layout.parameter_layout.items()}
    assert set(lies.values()) == {0, 1}
    for follow in (layout, layout.plans["four"], layout.plans["two"]):
        plan = al.plan(update, *args[2], cluster=CLUSTER, follow=follow)
        assert lies.items() <= {leaf.path: leaf.stage for leaf in plan.inputs}.items()
    options = al.PlanOptions(num_stages=2, submeshes="auto")  # the best ones are those that are followed
    again = al.plan_shared(graphs, shared="0", cluster=CLUSTER, options=options, follow=layout)
    assert again.parameter_layout == layout.parameter_layout


@pytest.mark.medium
def test_rows_are_followed_by_several_functions():
    def scanned(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]

    def step(params, x):
        loss, grads = al.value_and_grad(lambda p, b: jnp.mean(scanned(p, b) ** 2))(params, x)
        return jax.tree.map(lambda a, b: a - b, params, grads), loss

    args = {"w": jnp.ones((4, 16, 16))}, jnp.ones((8, 16))
    options = al.PlanOptions(num_stages=2, num_microbatches=2)
    plan = al.plan(step, *args, cluster=CLUSTER, options=options)
    graphs = {"eight": (scanned, args), "two": (scanned, (args[0], jnp.ones((2, 16))))}
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, follow=plan)
    assert layout.parameter_layout == plan.parameter_layout
    assert {stage for stage, _ in layout.parameter_layout.values()} == {0, 1}


def test_a_leaf_that_some_graph_reads_at_home_alone_is_read_there():
    """Another graph reads it at its end, too. Its layer may be there only if there is no other way."""
    params = {k: jax.ShapeDtypeStruct((512, 512), jnp.float32) for k in "abcd"}

    def forward(p, x, again=0):
        for k in "abcd":
            x = jnp.tanh(x @ p[k])
            for _ in range(again if k == "a" else 0):
                x = jnp.tanh(x @ p[k] + x)
            x = al.layer_boundary(x) if k == "b" and not again else x
        return x

    def summed(p, x):
        return forward(p, x) * (p["a"].sum() + p["b"].sum())

    args = params, jax.ShapeDtypeStruct((8, 512), jnp.float32)
    graphs = {"forward": (forward, args), "summed": (summed, args)}
    options = al.PlanOptions(num_stages=2)
    layout = al.plan_shared(graphs, shared="0", cluster=CLUSTER, weights={"forward": 100}, options=options)
    assert [stage for stage, _ in layout.parameter_layout.values()] == [0, 0, 1, 1]
    plan = al.plan(functools.partial(forward, again=6), *args, cluster=CLUSTER, follow=layout)
    assert {leaf.path for leaf in plan.stages[1].inputs} >= {"0/c", "0/d"}
    assert not {leaf.path for leaf in plan.stages[1].inputs} & {"0/a", "0/b"}


@pytest.mark.medium
def test_a_layout_that_does_not_divide_is_refused_on_stages():
    args = layers(16, 18, 16), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    options = al.PlanOptions(num_stages=2, mesh_shape=(4,), axis_names=("x",))
    follow = {"0/0/w": (0, P(None, "x")), "0/1/w": (1, P("x", None))}
    with pytest.raises(
        PinError, match=r"'follow 0/0/w' says that '0/0/w' of shape \(16, 18\) lies as \[_,x\], and no array"
    ):
        al.plan(mlp, *args, cluster=al.Cluster.parse("2x4:cpu"), follow=follow, options=options)


ORDERS = [*itertools.permutations(("early", "late", "both"))]


@pytest.mark.medium
@pytest.mark.parametrize("names", slow_but(ORDERS[:2], ORDERS))
def test_a_layout_is_followed_whatever_the_order_of_its_graphs(names):
    """Where a leaf is read is known of all graphs, not of the first alone."""

    def of(early: bool, late: bool):
        def fn(params, x):
            x = al.layer_boundary(jnp.tanh((x * params["s"] if early else x) @ params["a"]))
            return jnp.tanh(x @ params["b"]) * (params["s"] if late else 1)

        return fn

    fns = {"early": of(True, False), "late": of(False, True), "both": of(True, True)}
    args = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64)), "s": jnp.ones(64)}, jnp.ones((8, 64))
    layout = al.plan_shared(
        {name: (fns[name], args) for name in names},
        shared="0",
        weights={"both": 10},
        cluster=CLUSTER,
        options=al.PlanOptions(num_stages=2),
    )
    for name in names:
        plan = al.plan(fns[name], *args, cluster=CLUSTER, follow=layout)
        assert plan.specs_by_path["0/s"] == layout.plans[name].specs_by_path["0/s"]


HOMES = st.integers(2, 7).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 3), min_size=n, max_size=n)))


def numbered(stages: list[int]) -> list[int]:
    """The same with every number from 0 on."""
    rank = {stage: i for i, stage in enumerate(sorted(set(stages)))}
    return [rank[stage] for stage in stages]


@pytest.mark.medium
@settings(max_examples=40)
@given(homes=HOMES, pinned=st.data())
def test_layers_lie_where_their_parameters_lie(homes, pinned):
    """Steps 3b and 3c: any parameters pinned to stages. Each layer reads parameters of one stage, and stages rise with layers;
    an order that data cannot flow in is refused with the cycle."""
    count, stages = homes
    stages = numbered(stages)
    some = pinned.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    pins = {f"0/{i}/w": stage for i, (stage, is_pinned) in enumerate(zip(stages, some, strict=True)) if is_pinned}
    num_stages = 1 + max(pins.values(), default=0)
    args = layers(*[4] * (count + 1)), jnp.ones((2, 4))
    rises = list(pins.values()) == sorted(pins.values())
    if num_stages == 1:
        return

    def traced() -> Any:
        return trace(mlp, args, {}, layers=layer_cuts(num_stages), forward=True, homes=pins)

    if not rises:
        with pytest.raises(LayerError, match=r"a cycle of stages: \d( -> \d)+") as caught:
            traced()
        assert "'0/" in str(caught.value)
        return
    try:
        found = traced()
    except LayerError as error:  # nothing is left for a stage
        assert "has at least one op" in str(error) or "no place where a stage can end" in str(error)
        return
    paths = found.program.input_paths
    layered = layers_of(found.layered, [(pins[p], p) if p in pins else None for p in paths])
    assert layered.num_layers == num_stages
    assert {(pin.leaf, pin.place) for pin in layered.pins} == set(pins.items())


def reverse(params: Any, x: Any) -> Any:
    return mlp(params[::-1], x)


def bounded(params: Any, x: Any) -> Any:
    return mlp(params[2:], al.layer_boundary(mlp(params[:2], x)))


LAYOUT = {f"0/{i}/w": (i // 2, P()) for i in range(4)}
MIXED = {f"0/{i}/w": (int(i > 0), P()) for i in range(4)}
OPTIONS = al.PlanOptions(num_stages=2, stage_mesh_shapes=((2,), (2,)), axis_names=("x",))


@pytest.mark.parametrize(
    ("fn", "follow", "options", "error", "message"),
    [
        (
            reverse,
            LAYOUT,
            OPTIONS,
            LayerError,
            r"'0/1/w' contradicts the flow .*'0/2/w' .*a cycle of stages: 0 -> 1 -> 0",
        ),
        (bounded, MIXED, OPTIONS, LayerError, r"'0/0/w' asks for stage 0, the parameter '0/1/w' for stage 1, and both"),
        (mlp, LAYOUT, al.PlanOptions(num_stages=2), PinError, r"parameter_layout on 2 stages.*stage_mesh_shapes"),
        (mlp, "plan", al.PlanOptions(num_stages=4), PinError, r"PlanOptions\(num_stages=4\)"),
        (mlp, "plan", al.PlanOptions(mesh_shape=(4,)), PinError, r"plan on 2 stages.*mesh_shape"),
    ],
)
def test_what_cannot_be_followed(fn, follow, options, error, message):
    params, x = layers(16, 16, 16, 16, 16), jnp.ones((8, 16))
    if follow == "plan":
        follow = al.plan(mlp, params, x, cluster=CLUSTER, options=al.PlanOptions(num_stages=2))
    with pytest.raises(error, match=message) as caught:
        al.plan(fn, params, x, cluster=CLUSTER, follow=follow, options=options)
    assert "test_follow_stages.py" in str(caught.value)


@pytest.mark.medium
def test_stages_that_share_a_submesh_are_not_followed():
    step, _ = trained(mlp, layers(*[16] * 5), num_stages=4, num_chunks=2, schedule="interleaved-1f1b")
    with pytest.raises(PinError, match="share a submesh"):
        al.plan(mlp, layers(*[16] * 5), jnp.ones((8, 16)), cluster=CLUSTER, follow=step)


@pytest.mark.medium
@pytest.mark.parametrize(("axis", "rows"), [("data", 16), (None, 32)])
def test_manual_sharding_on_stages(axis, rows):
    """Alpa's case: sizes 6-8-10-12-14, 64 examples in two microbatches, two stages of (1, 2), the first parallel over tensors
    and the second over data; what passes between them over data, or whole."""

    def loss(params: Any, batch: Any) -> Any:
        x = al.layer_boundary(mlp(params[:2], batch[0]))
        return jnp.mean((mlp(params[2:], al.pin(x, P(axis))) - al.pin(batch[1], P("data"))) ** 2)

    def train(params: Any, x: Any, y: Any) -> Any:
        value, grads = al.value_and_grad(loss)(params, (x, y))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    options = al.PlanOptions(
        submeshes=((1, 2), (1, 2)),
        stage_mesh_shapes=((1, 2), (2, 1)),
        axis_names=("data", "model"),
        num_microbatches=2,
    )
    pins = {
        "0/0/w": P(None, "model"),
        "0/0/b": P("model"),
        "0/1/w": P("model", None),
        "0/1/b": P(),
        "0/2/*": P(),
        "0/3/*": P(),
        "1": P(),
        "2": P("data"),
    }
    step = al.parallelize(train, cluster=CLUSTER, options=options, pins=pins)
    args = layers(6, 8, 10, 12, 14), jnp.ones((64, 6)), jnp.zeros((64, 14))
    wanted = [
        {"w": (6, 4), "b": (4,)},
        {"w": (4, 10), "b": (10,)},
        {"w": (10, 12), "b": (12,)},
        {"w": (12, 14), "b": (14,)},
    ]
    plan = step.plan(*args)
    local = {leaf.path: leaf.spec.local_shape(leaf.value.shape, plan.stages[leaf.stage].mesh) for leaf in plan.inputs}
    assert local == {f"0/{i}/{n}": s for i, shapes in enumerate(wanted) for n, s in shapes.items()} | {
        "1": (64, 6), "2": (32, 14)
    }  # fmt: skip
    runners = step.compile(*args).runnable.step.runners
    batch = {"1": (32, 6), "2": (16, 14)}
    for number, runner in enumerate(runners):
        stage, cut = runner.stage, runner.stage.cut

        def tile(pair: Any, cut: Any = cut) -> tuple[int, ...]:
            return pair[1].local_shape(cut.body_values[pair[0]].shape, cut.mesh)

        assert [tile(pair) for pair in cut.loop_inputs.slices] == [batch[str(number + 1)]]
        sums = sorted(tile(pair) for pair in cut.loop_inputs.carries)
        assert sums == sorted(s for shapes in wanted[2 * number : 2 * number + 2] for s in shapes.values())
        assert all(spec.unreduced == () or number == 1 for _, spec in cut.loop_inputs.carries), stage
    pinned = next(d for d in plan.stages[1].decisions if d.op.startswith("pin(float32[32,10])"))
    assert pinned.results[0].local_shape((32, 10), plan.stages[1].mesh) == (rows, 10)
    params, value = step(*args)
    for layer, shapes in zip(params, wanted, strict=True):
        assert {n: {s.data.shape for s in a.addressable_shards} for n, a in layer.items()} == {
            n: {shape} for n, shape in shapes.items()
        }
    np.testing.assert_allclose(value, loss(args[0], args[1:]), rtol=1e-5)
