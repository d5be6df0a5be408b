"""The public surface: plan, parallelize, init, save and load, pins inside the function."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.api import request
from alpa_lite.errors import AlpaLiteError, ArgumentsError, PlanFileError
from alpa_lite.executor.local import local_mesh
from alpa_lite.plan.encode import encode_plan

CLUSTER = al.Cluster.parse("1x8:cpu")
MESH = al.PlanOptions(mesh_shape=(2, 4), axis_names=("data", "model"))


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean((hidden @ params["down"]["kernel"] - y) ** 2)


def step(state, x, y):
    """SGD with momentum."""
    value, grads = jax.value_and_grad(loss_fn)(state["params"], x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum), "momentum": momentum}, value


def init(key):
    up, down = jax.random.split(key)
    params = {
        "up": {"kernel": 0.1 * jax.random.normal(up, (32, 64)), "bias": jnp.zeros(64)},
        "down": {"kernel": 0.1 * jax.random.normal(down, (64, 16))},
    }
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def batch(size=16):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(size, 32)), jnp.float32), jnp.asarray(rng.normal(size=(size, 16)), jnp.float32)


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=1e-6), a, b)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# -- parallelize ----------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_bare_decorator_plans_for_this_process_and_computes_the_same():
    @al.parallelize
    def bare(state, x, y):
        """Its own words."""
        return step(state, x, y)

    state = init(jax.random.key(0))
    same(bare(state, *batch()), step(state, *batch()))
    assert bare.__name__ == "bare" and bare.__doc__ == "Its own words."
    assert bare.plan(state, *batch()).mesh.num_devices == len(jax.devices()) == 8


@pytest.mark.medium
def test_with_settings_it_is_a_decorator_too_and_honours_them():
    @al.parallelize(pins={"0/params/up/kernel": P(None, "model")}, options=MESH, donate_argnums=0)
    def pinned(state, x, y):
        return step(state, x, y)

    state = init(jax.random.key(0))
    expected = step(state, *batch())
    new, value = pinned(jax.tree.map(jnp.array, state), *batch())
    same((new, value), expected)
    assert new["params"]["up"]["kernel"].sharding.spec == P(None, "model")
    assert pinned.plan(state, *batch()).specs_by_path["0/params/up/kernel"] == P(None, "model")


@pytest.mark.medium
def test_new_shapes_are_planned_anew_and_old_ones_are_kept():
    parallel = al.parallelize(step, options=MESH)
    state = init(jax.random.key(0))
    same(parallel(state, *batch(16)), step(state, *batch(16)))
    same(parallel(state, *batch(24)), step(state, *batch(24)))
    first, second = parallel.plan(state, *batch(16)), parallel.plan(state, *batch(24))
    assert first.identity.fingerprint != second.identity.fingerprint
    assert parallel.plan(state, *batch(16)) is first
    same(parallel(state, *batch(16)), step(state, *batch(16)))


def test_static_and_keyword_arguments():
    def scaled(x, mode, *, factor, offset):
        return (jnp.tanh(x) if mode == "tanh" else x) * factor + offset

    parallel = al.parallelize(scaled, options=MESH, static_argnums=1, static_argnames="factor")
    x = jnp.arange(64.0).reshape(8, 8)
    for mode, factor in (("tanh", 2.0), ("same", 2.0), ("same", 3.0), ("tanh", 2.0)):
        offset = jnp.full((8, 8), 0.5)
        same(parallel(x, mode, factor=factor, offset=offset), scaled(x, mode, factor=factor, offset=offset))
    assert "offset" in parallel.plan(x, "tanh", factor=2.0, offset=x).specs_by_path


@pytest.mark.medium
def test_donated_arrays_are_gone_and_others_stay():
    parallel = al.parallelize(step, options=MESH, donate_argnums=0)
    x, y = batch()
    state = parallel(init(jax.random.key(0)), x, y)[0]
    kernel = state["params"]["up"]["kernel"]
    parallel(state, x, y)
    assert kernel.is_deleted()
    assert not x.is_deleted()
    keeping = al.parallelize(step, options=MESH)
    state = keeping(init(jax.random.key(0)), x, y)[0]
    keeping(state, x, y)
    assert not state["params"]["up"]["kernel"].is_deleted()


@pytest.mark.medium
def test_arrays_committed_to_another_layout_are_moved():
    pins = {"0/params/up/kernel": P(None, "model"), "1": P("data")}
    parallel = al.parallelize(step, options=MESH, pins=pins)
    state, (x, y) = init(jax.random.key(0)), batch()
    expected = step(state, x, y)
    mesh = local_mesh(parallel.plan(state, x, y).mesh)
    elsewhere = jax.device_put(x, NamedSharding(mesh, P("model", "data")))
    same(parallel(state, elsewhere, y), expected)
    same(parallel(state, jax.device_put(x, jax.devices()[5]), y), expected)
    same(parallel(state, elsewhere, y), expected)


@pytest.mark.medium
def test_init_makes_the_state_in_the_planned_layout():
    pins = {"0/params/*/kernel": P(None, "model"), "0/momentum/up/kernel": P("data", "model")}
    parallel = al.parallelize(step, options=MESH, pins=pins)
    abstract = jax.eval_shape(init, jax.random.key(0))
    plan = parallel.plan(abstract, *shapes(batch()))
    state = parallel.init(init, jax.random.key(0))
    flat = [s.sharding.spec for s in jax.tree.leaves(state)]
    planned = jax.tree.leaves(plan.in_specs[0], is_leaf=lambda s: isinstance(s, P))
    mesh = local_mesh(plan.mesh)
    pairs = zip(flat, planned, strict=True)
    assert all(NamedSharding(mesh, s).is_equivalent_to(NamedSharding(mesh, p), 2) for s, p in pairs)
    assert state["params"]["up"]["kernel"].sharding.spec == P(None, "model")
    assert state["params"]["up"]["kernel"].addressable_shards[0].data.shape == (32, 16)
    same(state, init(jax.random.key(0)))


def test_planning_a_parallelized_function_inherits_its_settings():
    parallel = al.parallelize(step, options=MESH, pins={"0/params/up/kernel": P(None, "model")}, donate_argnums=0)
    state = jax.eval_shape(init, jax.random.key(0))
    plan = al.plan(parallel, state, *shapes(batch()), cluster=al.Cluster.parse("1x8:h100-sxm"))
    assert plan.specs_by_path["0/params/up/kernel"] == P(None, "model")
    assert plan.mesh.axis_names == ("data", "model")
    assert plan.identity.cluster == "1x8:h100-sxm"


@pytest.mark.medium
def test_an_error_names_the_line_where_what_is_wrong_was_given():
    """Of settings of a call, its own line; of pins that it takes over, the line that gave them."""
    given = jax.eval_shape(init, jax.random.key(0)), *shapes(batch())

    def pinned(path):
        return al.parallelize(step, options=MESH, pins={path: P(None, "model")})

    def planned(parallel, **settings):
        return al.plan(parallel, *given, cluster=al.Cluster.parse("1x8:h100-sxm"), **settings)

    tight = dataclasses.replace(MESH, memory_budget_bytes=10.0)
    for settings in ({"pin_like": {"0/nowhere": "0/params"}}, {"options": tight}):
        with pytest.raises(AlpaLiteError, match=r"test_api.py:\d+ \(planned\)"):
            planned(pinned("0/params/up/kernel"), **settings)
    with pytest.raises(AlpaLiteError, match=r"test_api.py:\d+ \(pinned\)"):
        planned(pinned("0/nowhere"))


def test_microbatches_given_twice_and_differently():
    with pytest.raises(AlpaLiteError, match="num_microbatches"):
        al.parallelize(step, num_microbatches=4, options=al.PlanOptions(num_microbatches=2))


# -- plans as files -------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_saved_plan_runs_without_solving(tmp_path, monkeypatch):
    state, data = init(jax.random.key(0)), batch()
    plan = al.plan(step, state, *data, cluster=CLUSTER, options=MESH, donate_argnums=0)
    plan.save(tmp_path / "plan.json")
    expected = step(state, *data)

    def never(*args, **kwargs):
        raise AssertionError("a loaded plan must not be solved again")

    monkeypatch.setattr(request, "plan_step", never)
    loaded = al.load_plan(tmp_path / "plan.json")
    assert loaded == plan
    bound = loaded.bind(step, state, *data)
    assert bound.in_specs == plan.in_specs and bound.out_specs == plan.out_specs
    parallel = al.parallelize(step, plan=loaded, donate_argnums=0)
    made = parallel.init(init, jax.random.key(0))
    same(parallel(made, *data), expected)
    assert parallel.compile(shapes(state), *shapes(data)).audit().ok


def test_static_arguments_are_recorded_with_the_plan(tmp_path):
    def powered(x, n):
        return x**n

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = al.plan(powered, x, 3, cluster=CLUSTER, options=MESH, static_argnums=1)
    plan.save(tmp_path / "plan.json")
    assert al.load_plan(tmp_path / "plan.json").bind(powered, x, 3).in_specs == plan.in_specs


SCRIPT = """
import sys
import jax
sys.path.insert(0, {tests!r})
from tests import test_api
import alpa_lite as al
state = jax.eval_shape(test_api.init, jax.eval_shape(lambda: jax.random.key(0)))
x, y = jax.ShapeDtypeStruct((16, 32), "float32"), jax.ShapeDtypeStruct((16, 16), "float32")
plan = al.plan(test_api.step, state, x, y, cluster=al.Cluster.parse({cluster!r}))
plan.save({out!r})
"""


@pytest.mark.medium
def test_a_mesh_of_fewer_devices_than_there_are_is_noted():
    state, args = jax.eval_shape(init, jax.random.key(0)), shapes(batch())
    for shape, noted in (((3, 2), ["the mesh (x=3, y=2) uses 6 of the cluster's 8 devices"]), ((2, 4), [])):
        plan = al.plan(step, state, *args, cluster=CLUSTER, options=al.PlanOptions(mesh_shape=shape))
        assert [note for note in plan.notes if "uses" in note] == noted


@pytest.mark.medium
def test_the_same_input_gives_the_same_bytes_also_in_another_process(tmp_path):
    state = jax.eval_shape(init, jax.random.key(0))
    texts = [encode_plan(al.plan(step, state, *shapes(batch()), cluster=CLUSTER)) for _ in range(2)]
    assert texts[0] == texts[1]
    out = tmp_path / "plan.json"
    in_new_process(SCRIPT.format(tests=os.getcwd(), cluster="1x8:cpu", out=str(out)), PYTHONHASHSEED="7")
    assert out.read_bytes() == texts[0]


def test_a_plan_does_not_depend_on_the_line_that_asks_for_it():
    """Also where meshes are ruled out by a pin, whose refusal names that line."""
    x, options = jax.ShapeDtypeStruct((8, 6), "float32"), al.PlanOptions(padding="off", axis_names=("x", "y"))
    fn, settings = jnp.sin, {"cluster": CLUSTER, "pins": {"0": P(None, "y")}, "options": options}
    one = al.plan(fn, x, **settings)
    other = al.plan(fn, x, **settings)
    assert encode_plan(one) == encode_plan(other)
    assert any(candidate.status == "ruled out" for candidate in one.mesh_table)


@pytest.mark.medium
def test_planning_touches_no_device(tmp_path):
    """64 H100 are planned for in a process whose backends are never started."""
    code = SCRIPT.format(tests=os.getcwd(), cluster="8x8:h100-sxm", out=str(tmp_path / "plan.json"))
    code += "\nfrom jax._src import xla_bridge\nassert not xla_bridge._backends, xla_bridge._backends\n"
    in_new_process(code)
    assert al.load_plan(tmp_path / "plan.json").mesh.num_devices == 64


def in_new_process(code, **environment):
    path = os.pathsep.join([os.getcwd(), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, **environment}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=env)
    assert result.returncode == 0, result.stderr


# -- pins inside the function ---------------------------------------------------------------------------------------


def test_al_pin_is_honoured_and_changes_no_number():
    def fn(x, w):
        return al.pin(x @ w, P("model", "data")) * 2.0

    x, w = jnp.ones((16, 32)), jnp.full((32, 8), 0.5)
    parallel = al.parallelize(fn, options=MESH)
    plan = parallel.plan(x, w)
    pinned = [d for d in plan.stages[0].decisions if d.op.startswith("pin(")]
    assert [str(d.results[0]) for d in pinned] == ["[model,data]"]
    same(parallel(x, w), fn(x, w))


def test_al_pin_is_an_identity_outside_and_passes_gradients():
    x = jnp.arange(6.0).reshape(2, 3)
    same(al.pin(x, P("data")), x)
    same(jax.grad(lambda x: (al.pin(x, P("data")) ** 2).sum())(x), 2 * x)
    same(jax.jit(lambda x: al.pin(x, None) + 1)(x), x + 1)
    same(jax.vmap(lambda row: al.pin(row, P("data")) * 2)(x), 2 * x)


def test_al_pin_is_dropped_under_vmap():
    plan = al.plan(jax.vmap(lambda row: al.pin(row, P("data")) * 2), jnp.ones((8, 8)), cluster=CLUSTER, options=MESH)
    assert not any(d.op.startswith("pin(") for d in plan.stages[0].decisions)


@pytest.mark.medium
def test_annotations_are_reported_or_binding():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    state, (x, y) = init(jax.random.key(0)), batch()
    state["params"]["up"]["kernel"] = jax.device_put(
        state["params"]["up"]["kernel"], NamedSharding(mesh, P("model", "data"))
    )
    reported = al.plan(step, state, x, y, cluster=CLUSTER, options=MESH)
    assert any("annotation" in note for note in reported.notes)
    options = al.PlanOptions(mesh_shape=(2, 4), axis_names=("data", "model"), annotations="pin")
    binding = al.plan(step, state, x, y, cluster=CLUSTER, options=options)
    assert binding.specs_by_path["0/params/up/kernel"] == P("model", "data")
    assert binding.specs_by_path["out/0/params/up/kernel"] == P("model", "data")


def test_pin_like_ties_the_momentum_to_the_parameters():
    pins = {"0/params/up/kernel": P(None, "model"), "0/params/down/kernel": P(P.UNCONSTRAINED, "data")}
    state = jax.eval_shape(init, jax.random.key(0))
    settings = {"cluster": CLUSTER, "options": MESH, "pins": pins, "pin_like": {"0/momentum": "0/params"}}
    specs = al.plan(step, state, *shapes(batch()), **settings).specs_by_path
    assert specs["0/momentum/up/kernel"] == P(None, "model")
    for name in ("up/kernel", "up/bias", "down/kernel"):
        assert specs[f"0/momentum/{name}"] == specs[f"0/params/{name}"] == specs[f"out/0/momentum/{name}"]


def test_pins_name_the_axes_of_the_meshes_that_are_searched():
    """One axis name gives one candidate; two give every factorisation, size 1 allowed, earlier axes across hosts."""
    state = jax.eval_shape(init, jax.random.key(0))
    one = al.plan(step, state, *shapes(batch()), cluster=CLUSTER, pins={"1": P("batch")})
    assert [str(c.mesh) for c in one.mesh_table] == ["(batch=8)"]
    two = al.plan(
        step, state, *shapes(batch()), cluster=CLUSTER, pins={"1": P("data"), "0/params/up/kernel": P(None, "model")}
    )
    assert [c.mesh.shape for c in two.mesh_table] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert {c.mesh.axis_names for c in two.mesh_table} == {("data", "model")}
    assert two.mesh.axis_size("data") == 1 or two.specs_by_path["1"][0] == "data"
    cheapest = min(c.objective for c in two.mesh_table if c.objective is not None)
    assert two.objective == cheapest


# -- progress -------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def __init__(self, tty):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty


@pytest.mark.parametrize("tty", [True, False])
def test_progress_is_told_on_a_terminal_only(monkeypatch, tty):
    stream = Terminal(tty)
    monkeypatch.setattr(sys, "stderr", stream)
    al.parallelize(step, options=MESH, cluster=CLUSTER).plan(init(jax.random.key(0)), *batch())
    assert ("alpa_lite" in stream.getvalue()) == tty


@pytest.mark.parametrize("devices", [1, 2])
def test_an_array_that_is_donated_twice_is_refused(devices):
    """XLA ends the process on several devices."""
    step = al.parallelize(
        lambda x, y: (x[0] + y, x[1] * y), cluster=al.Cluster.parse(f"1x{devices}:cpu"), donate_argnums=0
    )
    zero, one = jnp.zeros(8), jnp.ones(8)
    with pytest.raises(ArgumentsError, match=r"leaves '0/0' and '0/1' .* donated.*test_api.py.*jnp.copy"):
        step([zero, zero], one)
    with pytest.raises(ArgumentsError, match=r"leaves '0/1' and '1' .* donated"):
        step([zero, one], one)
    again = step([zero, jnp.copy(one)], one)
    np.testing.assert_array_equal(step(again, one)[0], 2 * np.ones(8))


def by_structure(p, x):
    """Reads its arguments by their structure: leaves alone do not tell what is to run."""
    scale = p["scale"] * 100.0 if isinstance(p, dict) else p[0] * 10.0 if isinstance(p, tuple) else p
    y = al.layer_boundary(jnp.tanh(scale / 1000.0)) * (p[1] if x is None else x)
    return y, y + 1.0


@pytest.mark.medium
@pytest.mark.parametrize("settings", [{}, {"donate_argnums": 0}, {"options": al.PlanOptions(num_stages=2)}])
def test_arguments_of_another_structure_are_another_step(settings):
    parallel = al.parallelize(by_structure, **settings)

    def given(value: float) -> jax.Array:
        return jnp.full((8, 8), value)

    for make in (
        lambda: (given(1.0), given(2.0)),
        lambda: ({"scale": given(1.0)}, given(2.0)),
        lambda: ((given(1.0),), given(2.0)),
        lambda: ((given(1.0), given(2.0)), None),
        lambda: (given(1.0), given(2.0)),
    ):
        same(parallel(*make()), by_structure(*make()))


def test_a_plan_is_for_one_structure_of_arguments():
    given = jnp.ones((8, 8)), jnp.ones((8, 8))
    parallel = al.parallelize(by_structure, plan=al.plan(by_structure, *given, cluster=CLUSTER))
    same(parallel(*given), by_structure(*given))
    with pytest.raises(PlanFileError, match="arguments gone: '0'; arguments new: '0/scale'"):
        parallel({"scale": given[0]}, given[1])


@pytest.mark.parametrize(
    ("pins", "names"),
    [
        ({}, ("x", "y")),
        ({"0": P(None, "y")}, ("x", "y")),
        ({"0": P("y", "x")}, ("x", "y")),
        ({"0": P(None, "model")}, ("model", "x")),
        ({"0": P("data"), "1": P("model")}, ("data", "model")),
        ({"0": P("z")}, ("z", "x")),
    ],
)
def test_a_pin_that_uses_a_default_name_means_the_axis_that_has_it_without_pins(pins, names):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    made = al.plan(lambda a, b: a @ b, x, x, cluster=CLUSTER, pins=pins, options=al.PlanOptions(mesh_shape=(2, 4)))
    assert made.mesh.axis_names == names
