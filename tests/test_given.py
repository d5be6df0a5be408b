"""Wrong arguments of the public functions: every message says what was given, what is allowed, where, and what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.api.given import argnums

CLUSTER = al.Cluster.parse("1x8:cpu")
X = jax.ShapeDtypeStruct((8, 8), "float32")
SCHEDULE = al.schedule.make_schedule("1f1b", 2, 2)


def step(w, x):
    return (x @ w).sum()


def plan(**settings):
    return al.plan(step, X, X, **{"cluster": CLUSTER, **settings})


def symbolic():
    cluster = al.Cluster.symbolic("n", device="h100-sxm", values=[1, 2])
    return al.plan(step, X, X, cluster=cluster, options=al.PlanOptions(mesh_shape=("n",)))


def test_a_function_keeps_keywords_of_its_own():
    """Also those that look like settings: the function's arguments come first."""

    def fn(x, option, mesh_shape):
        return x * option * mesh_shape

    assert al.plan(fn, X, option=X, mesh_shape=X, cluster=CLUSTER).input_paths == ("0", "mesh_shape", "option")
    assert al.plan(lambda x, **more: x * more["option"], X, option=X, cluster=CLUSTER).input_paths == ("0", "option")


def test_no_static_or_donated_arguments_may_be_said_as_in_jax():
    """``jax.jit`` takes None for none."""
    assert plan(static_argnames=None, static_argnums=None, donate_argnums=None).objective == plan().objective


def convert(before="[x,_]", after="[_,x]", shape=(8, 8), dtype="float32", **settings):
    return al.conversion(before, after, shape, dtype, **{"mesh": {"x": 8}, "cluster": CLUSTER, **settings})


def sharded():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, P("x")))


HERE = "test_given.py"
WRONG = {
    "plan: options": (lambda: plan(options={"seed": 1}), ["options={'seed': 1}", "al.PlanOptions", HERE, "Write"]),
    "plan: pin_like": (lambda: plan(pin_like=["0"]), ["pin_like=['0']", "a dict of paths", HERE, "Write"]),
    "plan: donated": (lambda: plan(donate_argnums=2), ["donate_argnums=2", "2 positions, 0 to 1", HERE, "Correct"]),
    "plan: donated by name": (lambda: plan(donate_argnums="w"), ["donate_argnums='w'", "0 to 1", HERE, "Correct"]),
    "plan: static": (lambda: plan(static_argnums=-3), ["static_argnums=-3", "0 to 1", HERE, "Correct"]),
    "plan: static name": (lambda: plan(static_argnames=3), ["static_argnames=3", "names of arguments", HERE, "Write"]),
    "plan: follow_like": (
        lambda: plan(follow=plan(), follow_like={}),
        ["follow_like={} names no leaf", "at least one pair", HERE, "Leave follow_like out"],
    ),
    "plan: too few": (lambda: al.plan(step, X, cluster=CLUSTER), ["argument: 'x'", HERE, "allowed:", "next:"]),
    "parallelize: fn": (lambda: al.parallelize(5), ["given 5", "a function of arrays", HERE, "Write"]),
    "parallelize: options": (lambda: al.parallelize(step, options={}), ["options={}", "al.PlanOptions", HERE, "Write"]),
    "parallelize: plan": (
        lambda: al.parallelize(step, plan="plan.json"),
        ["plan='plan.json'", "that al.plan made", HERE, "al.load_plan(path)"],
    ),
    "pin": (lambda: al.pin(jnp.ones(3), "x"), ["al.pin got 'x' of type str", "PartitionSpec", HERE, "Write"]),
    "conversion: spec": (lambda: convert(None), ["the spec None", "like '[x,_]'", "al.conversion (before)", "correct"]),
    "conversion: shape": (lambda: convert(shape=8), ["the shape 8", "sizes of at least 1", "al.conversion (shape)"]),
    "conversion: size": (lambda: convert(shape=(8, -8)), ["the shape (8, -8)", "sizes of at least 1", "correct it"]),
    "conversion: dtype": (lambda: convert(dtype="float3"), ["dtype 'float3'", "'float32'", "al.conversion (dtype)"]),
    "conversion: cluster": (
        lambda: convert(cluster="1x8:cpu"),
        ["cluster='1x8:cpu'", "al.Cluster", "write for example"],
    ),
    "reshard": (lambda: al.reshard(sharded(), P()), ["asked for P", "a NamedSharding", "given as sharding", "write"]),
    "Cluster.parse": (
        lambda: al.Cluster.parse(8),
        ["text 8", "HOSTSxDEVICES_PER_HOST:DEVICE", HERE, "Correct what was given to Cluster.parse"],
    ),
    "Cluster.parse: device": (
        lambda: al.Cluster.parse("1x8:h10"),
        ["device 'h10' is not in the hardware table", "Did you mean 'h100-sxm'?", HERE, "Take one"],
    ),
    "PlanOptions": (
        lambda: al.PlanOptions(mesh_shape=8),
        ["mesh_shape=8 was given", "must be a tuple, e.g. (2, 4)", HERE],
    ),
    "load_plan: no file": (
        lambda: al.load_plan("nowhere/plan.json"),
        ["cannot read the plan file 'nowhere/plan.json'", HERE, "Check the path"],
    ),
    "SharedLayout.load: no file": (
        lambda: al.SharedLayout.load("nowhere/layout.json"),
        ["cannot read the layout 'nowhere/layout.json'", HERE, "Check the path"],
    ),
    "plan: a keyword like a setting": (
        lambda: plan(option=al.PlanOptions()),
        ["keyword 'option'", "cluster, pins,", HERE, "Did you mean options=...?"],
    ),
    "plan: an option as a keyword": (
        lambda: plan(mesh_shape=(8,)),
        ["keyword 'mesh_shape'", "step does not take", HERE, "options=al.PlanOptions(mesh_shape=...)?"],
    ),
    "plan: another keyword": (lambda: plan(temperature=1.0), ["'temperature'", HERE, "allowed:", "next:"]),
    "load_plan": (lambda: al.load_plan(None), ["al.load_plan got None", "a str or an os.PathLike", HERE, "Write"]),
    "load_export": (lambda: al.load_export(3, 0), ["al.load_export got 3", "os.PathLike", HERE, "Write"]),
    "save: no path": (lambda: plan().save(None), ["plan.save got None", "a str or an os.PathLike", HERE, "Write"]),
    "save: an empty path": (lambda: plan().save(""), ["plan.save got ''", "and not an empty one", HERE, "Write"]),
    "save: no folder": (
        lambda: plan().save("nowhere/plan.json"),
        ["saved as 'nowhere/plan.json'", "an existing folder", HERE, "Make the folder 'nowhere'"],
    ),
    "export: swapped": (
        lambda: plan().export("out", step, X, X),
        ["plan.export got step of type function as a path", "os.PathLike", HERE, "Write plan.export(fn, "],
    ),
    "export: no function": (
        lambda: plan().export(X, "out", X),
        ["for the function", "that was planned", HERE, "Write plan.export(fn, 'out'"],
    ),
    "plot": (
        lambda: symbolic().plot("memory.png", budget="16GB"),
        ["plan.plot got budget='16GB'", "a positive number of bytes", HERE, "budget=16e9"],
    ),
    "plot: an ending": (
        lambda: symbolic().plot("memory.gif"),
        [
            "plan.plot got the path 'memory.gif'",
            "end in .png, .svg, .pdf",
            HERE,
            'Write for example plan.plot("memory.png")',
        ],
    ),
    "plot: no path": (lambda: symbolic().plot(None), ["plan.plot got None", "os.PathLike", HERE, "Write plan.plot("]),
    "plot: no folder": (
        lambda: symbolic().plot("nowhere/memory.png"),
        ["saved as 'nowhere/memory.png'", "an existing folder", HERE, "Make the folder 'nowhere'"],
    ),
    "write_trace": (
        lambda: al.schedule.write_trace("nowhere/trace.json", {}),
        ["the trace cannot be saved as 'nowhere/trace.json'", "an existing folder", HERE, "Make the folder 'nowhere'"],
    ),
    "write_schedule": (
        lambda: al.schedule.write_schedule(None, SCHEDULE),
        ["write_schedule got None", "os.PathLike", HERE, "Write write_schedule("],
    ),
    "read_schedule": (
        lambda: al.schedule.read_schedule(3),
        ["read_schedule got 3", "os.PathLike", HERE, "Write read_schedule("],
    ),
    "register_rule": (
        lambda: al.register_rule("i -> i")(3),
        ["given 3", "a function, or to a primitive", HERE, "Use it"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_messages_have_four_parts(name):
    call, parts = WRONG[name]
    with pytest.raises(al.AlpaLiteError) as caught:
        call()
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"the message lacks {missing}:\n{caught.value}"


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("mesh_shape", 8, "a tuple, e.g. (2, 4)"),
        ("mesh_shape", (2.5,), "sizes of at least 1"),
        ("axis_names", "xy", "a tuple, e.g. ('x', 'y')"),
        ("forbid", "all-gather", "a tuple, e.g. ('all-gather',)"),
        ("memory_budget_bytes", "16GB", "a number, e.g. 16e9"),
        ("memory_budget_bytes", float("nan"), "must be positive"),
        ("time_limit_s", [1], "a number"),
    ],
)
def test_options_say_what_they_take(option, value, allowed):
    with pytest.raises(al.AlpaLiteError) as caught:
        al.PlanOptions(**{option: value})
    said = str(caught.value)
    assert f"PlanOptions: {option}={value!r} was given" in said and allowed in said and "test_given.py" in said


def test_positions_may_be_counted_from_the_end():
    def fn(a, b, *, c=0): ...

    assert argnums(fn, "donate_argnums", -1) == (1,)
    assert argnums(fn, "donate_argnums", (0, -2)) == (0, 0)
    assert argnums(lambda *args: None, "donate_argnums", [7]) == (7,)
    with pytest.raises(al.AlpaLiteError, match="positions from 0 on"):
        argnums(lambda *args: None, "donate_argnums", -1)


def test_a_step_that_is_parallelized_again_keeps_its_own_settings():
    first = al.parallelize(step, pins={"0": P("x")}, options=al.PlanOptions(mesh_shape=(8,)), donate_argnums=-1)
    again = al.parallelize(first, pins={"1": P("x")})
    assert [leaf.pin for leaf in first.plan(X, X).inputs] == ["0", ""]
    assert [leaf.pin for leaf in again.plan(X, X).inputs] == ["", "1"]
    assert again.plan(X, X).mesh.shape == (8,)
    assert dict(again.plan(X, X).options)["donate_argnums"] == (1,)
    assert al.plan(first, X, X, cluster=CLUSTER).pins == first.plan(X, X).pins
