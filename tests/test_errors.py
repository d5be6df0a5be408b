"""Bad input through the public surface: every message says what was given, what is allowed, where, and what to do."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import (
    AlpaLiteError,
    ArgumentsError,
    ClusterError,
    LayerError,
    MemoryBudgetError,
    PinError,
    PlanFileError,
    SolverError,
    TraceError,
)
from alpa_lite.executor.local import stage_meshes
from alpa_lite.intraop.problem import Solution
from alpa_lite.planner import ties

CLUSTER = al.Cluster.parse("1x8:cpu")
MESH = al.PlanOptions(mesh_shape=(2, 4), axis_names=("data", "model"))
UNPADDED = dataclasses.replace(MESH, padding="off")
HERE = "test_errors.py"


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"layer_0": {"kernel": f32(16, 32)}, "layer_1": {"kernel": f32(32, 6)}}


def step(params, x):
    return jax.tree.map(lambda w: w * 2.0, params), x @ params["layer_0"]["kernel"] @ params["layer_1"]["kernel"]


def refused(kind, fn, *args, parts, **settings):
    """Plan, and check that the error is of ``kind`` and holds all ``parts``."""
    with pytest.raises(kind) as error:
        al.plan(fn, *args, **{"cluster": CLUSTER, "options": MESH, **settings})
    assert isinstance(error.value, AlpaLiteError) and isinstance(error.value, ValueError)
    message = str(error.value)
    missing = [part for part in parts if part not in message]
    assert not missing, f"the message lacks {missing}:\n{message}"
    return message


# -- pins -----------------------------------------------------------------------------------------------------------


def test_indivisible_pin():
    refused(
        PinError,
        step,
        PARAMS,
        f32(8, 16),
        pins={"0/layer_1/kernel": P(None, "model")},
        options=UNPADDED,
        parts=["'0/layer_1/kernel'", "shape (32, 6)", "dim 1 of size 6", "axis 'model' of 4", "Pad dim 1 to 8", HERE],
    )


def test_indivisible_pin_of_a_tensor_inside():
    refused(
        PinError,
        lambda x: al.pin(x * 2, P("model")),
        f32(6, 16),
        options=UNPADDED,
        parts=["al.pin at", "dim 0 of size 6", "axis 'model' of 4", "Pad dim 0 to 8", HERE],
    )


def test_unknown_axis():
    refused(
        PinError,
        step,
        PARAMS,
        f32(8, 16),
        pins={"0/layer_0/kernel": P(None, "modle")},
        parts=["'modle'", "'data', 'model'", "Close: 'model'", "Use one of them", HERE],
    )


def test_pin_that_matches_no_path():
    refused(
        PinError,
        step,
        PARAMS,
        f32(8, 16),
        pins={"0/layer_0/kernal": P(None, "model")},
        parts=["'0/layer_0/kernal' matches no", "Close: '0/layer_0/kernel'", "Correct the key or remove it", HERE],
    )


def test_two_globs_that_disagree():
    refused(
        PinError,
        step,
        PARAMS,
        f32(8, 16),
        pins={"0/*/kernel": P(None, "data"), "0/layer_0/*": P("data", None)},
        parts=["'0/*/kernel'", "'0/layer_0/*'", "disagree on '0/layer_0/kernel'", "an exact path beats both", HERE],
    )


# -- arguments and the function -----------------------------------------------------------------------------------


def test_a_function_that_cannot_be_traced_names_the_users_line():
    def branching(x):
        if x.sum() > 0:  # the line to be named
            return x
        return -x

    message = refused(
        TraceError,
        branching,
        f32(8, 8),
        parts=["branching", "TracerBoolConversionError", "where: ", "allowed: ", "static_argnums"],
    )
    line = branching.__code__.co_firstlineno + 1
    assert f"{HERE}:{line} (branching)" in message


def test_a_dim_of_size_zero():
    refused(TraceError, step, PARAMS, f32(0, 16), parts=["argument '1'", "size 0", "(0, 16)", "at least 1"])


def test_no_cluster():
    refused(AlpaLiteError, step, PARAMS, f32(8, 16), cluster="1x8:cpu", parts=["'1x8:cpu'", "al.Cluster.parse", HERE])


def test_a_plan_given_to_a_step_with_other_arguments():
    plan = al.plan(step, PARAMS, f32(8, 16), cluster=CLUSTER, options=MESH)
    given = al.parallelize(step, plan=plan)
    with pytest.raises(ArgumentsError) as error:
        given({"layer_0": PARAMS["layer_0"]}, jnp.ones((8, 16)))
    message = str(error.value)
    assert "the arguments do not fit the plan: they lack '0/layer_1/kernel' (2 leaves given, 3 planned)" in message
    assert "al.plan" in message and HERE in message
    with pytest.raises(PlanFileError, match=r"another program: argument '1' was float32\[8,16\]"):
        given(PARAMS, jnp.ones((24, 16)))


def test_a_step_called_with_a_tree_that_its_function_cannot_take():
    parallel = al.parallelize(step, cluster=CLUSTER, options=MESH)
    with pytest.raises(TraceError, match=r"KeyError: 'layer_1'") as error:
        parallel({"layer_0": {"kernel": jnp.ones((16, 32))}}, jnp.ones((8, 16)))
    assert f"{HERE}:{step.__code__.co_firstlineno + 1} (step)" in str(error.value)


@pytest.mark.parametrize("given", ["relu", "float32", object()])
def test_a_step_called_with_what_is_no_array(given):
    one, other = al.parallelize(lambda x, a: x * a), al.parallelize(lambda x, a: x * a)
    x = jnp.ones((8, 8))
    other(x, 2.0)  # the next call takes the fast path
    kind = type(given).__name__
    for call in (lambda: one(x, given), lambda: other(x, given), lambda: other(x, a=given)):
        with pytest.raises(TraceError, match=rf"type <class '{kind}'>") as error:
            call()
        assert "static_argnums" in str(error.value) and "runnable" not in str(error.value)
    assert other(x, 2.0)[0, 0] == 2


@pytest.mark.parametrize(
    ("mark", "error", "words"),
    [
        (lambda x: al.layer_boundary("a"), LayerError, "al.layer_boundary got 'a' of type str, which is no array"),
        (lambda x: al.layer_boundary({"a": "b"}), LayerError, "got 'b' of type str as 'x/a', which is no array"),
        (lambda x: al.pin_stage("a", 1), LayerError, r"Write al.pin_stage\(x, 1\) for arrays"),
        (lambda x: al.pin_stage(x, 1.0), LayerError, "al.pin_stage got stage=1.0. A stage is a whole number from 0"),
        (lambda x: al.pin("a", P()), PinError, "al.pin got 'a' of type str, which is no array"),
        (
            lambda x: al.pin({"a": x}, P("x")),
            PinError,
            "got a pytree: dict of 1 leaves. It takes one array.*jax.tree.map",
        ),
    ],
)
def test_marks_of_what_is_no_array(mark, error, words):
    with pytest.raises(error, match=words) as raised:
        mark(jnp.ones((8, 8)))
    assert HERE in str(raised.value)


def test_a_stage_may_be_a_number_of_numpy():
    jaxpr = jax.make_jaxpr(lambda x: al.pin_stage(x, np.int64(1)))(1.0)
    assert type(jaxpr.eqns[0].params["stage"]) is int


def test_a_wrong_argument_tree():
    plan = al.plan(step, PARAMS, f32(8, 16), cluster=CLUSTER, options=MESH)
    with pytest.raises(PlanFileError) as error:
        plan.bind(step, {**PARAMS, "layer_2": {"kernel": f32(2, 2)}}, f32(8, 16))
    message = str(error.value)
    assert "arguments new: '0/layer_2/kernel'" in message
    assert "exactly the function, argument tree and shapes it was made for" in message
    assert "al.plan" in message


def test_other_shapes_than_planned():
    plan = al.plan(step, PARAMS, f32(8, 16), cluster=CLUSTER, options=MESH)
    with pytest.raises(PlanFileError, match=r"argument '1' was float32\[8,16\] and is float32\[24,16\]"):
        plan.bind(step, PARAMS, f32(24, 16))


def test_init_before_there_is_a_plan_and_with_another_tree():
    parallel = al.parallelize(step, cluster=CLUSTER, options=MESH)
    with pytest.raises(ArgumentsError, match=r"there is none yet.*Call step\.plan\(\*shapes\) first"):
        parallel.init(lambda: PARAMS)
    parallel.plan(PARAMS, f32(8, 16))
    with pytest.raises(ArgumentsError, match="first difference at 0/layer_0/kernel"):
        parallel.init(lambda: {"layer_0": {"kernel": jnp.ones((4, 4))}})


# -- budget, time, devices ------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small():
    refused(
        MemoryBudgetError,
        lambda x: jnp.tanh(x),
        f32(1024, 1024),
        options=al.PlanOptions(mesh_shape=(2, 4), memory_budget_bytes=2**19),
        parts=["smallest possible peak 1.00 MiB > budget 512 KiB", "largest arguments", "next: donate", HERE],
    )


def test_no_solution_in_the_time_limit(monkeypatch):
    # The solver nearly always has some answer at once, so a solver that found none is put in its place.
    none = Solution(
        choice=np.zeros(0, dtype=np.int64), objective=math.inf, lower_bound=0.0, gap=math.inf, status="no-solution"
    )
    monkeypatch.setattr(ties, "solve", lambda problem, **_: none)
    refused(
        SolverError,
        jax.grad(lambda w, x: (x @ w).sum()),
        f32(32, 32),
        f32(8, 32),
        options=al.PlanOptions(mesh_shape=(8,), time_limit_s=0.5),
        parts=["time_limit_s=0.5", "Any positive time", "Raise PlanOptions.time_limit_s", HERE],
    )


def test_too_few_devices_for_the_plan():
    plan = al.plan(
        step, PARAMS, f32(64, 16), cluster=al.Cluster.parse("1x64:cpu"), options=al.PlanOptions(mesh_shape=(16, 4))
    )
    with pytest.raises(ClusterError) as error:
        al.parallelize(step, plan=plan).compile(PARAMS, f32(64, 16))
    message = str(error.value)
    assert "needs 64 devices, this process has 8 (cpu)" in message
    assert "jax.config.update('jax_num_cpu_devices', 64)" in message


def test_too_few_devices_for_stages():
    """Also where the last stage would have none at all."""
    options = al.PlanOptions(num_stages=2)
    plan = al.plan(
        lambda w, x: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]),
        [f32(32, 32)] * 2,
        f32(8, 32),
        cluster=al.Cluster.parse("1x4:cpu"),
        options=options,
    )
    with pytest.raises(ClusterError, match=r"the plan's 2 stages need 4 devices, this process has 1 \(cpu\)"):
        stage_meshes(plan, jax.devices()[:1])


@pytest.mark.parametrize("text", ["8 h100", "1x8", "0x8:cpu", "1x8:abacus"])
def test_a_cluster_text_that_cannot_be_read(text):
    with pytest.raises(ClusterError):
        al.Cluster.parse(text)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"mesh_shape": (0, 2)}, "sizes of at least 1"),
        ({"mesh_shape": (2, 4), "axis_names": ("a",)}, "give one name per axis"),
        ({"axis_names": ("a", "a")}, "different names"),
        ({"axis_names": ("_", "a")}, "'_' is none: letters, digits and underscores"),
        ({"axis_names": ("a,b", "c")}, "'a,b' is none"),
        ({"axis_names": (1, 2)}, "1 is none"),
        ({"max_axes": 7}, "1 to 3 are allowed"),
        ({"max_axes": 1.5}, "1 to 3 are allowed"),
        ({"verbose": "yes"}, "True and False"),
        ({"num_stages": 0}, "numbers from 1"),
        ({"num_microbatches": 0}, "numbers from 1"),
        ({"remat": "full"}, "jax.checkpoint"),
        ({"annotations": "maybe"}, "'report' and 'pin'"),
        ({"time_limit_s": 0}, "positive"),
        ({"memory_budget_bytes": -1}, "positive"),
    ],
)
def test_options_that_cannot_be(settings, part):
    with pytest.raises(AlpaLiteError, match="PlanOptions: ") as error:
        al.PlanOptions(**settings)
    assert part in str(error.value)


def test_an_array_in_the_place_of_something_else_is_not_printed_whole():
    x = jnp.ones((64, 64))
    for call in (
        lambda: al.parallelize(x),
        lambda: al.parallelize(None)(x),
        lambda: al.parallelize(step, options=x),
        lambda: al.parallelize(step, plan=x),
        lambda: al.plan(step, PARAMS, f32(8, 16), cluster=x),
        lambda: al.plan(step, PARAMS, f32(8, 16), cluster=CLUSTER, pins={"0/layer_0/kernel": x}),
    ):
        with pytest.raises(AlpaLiteError, match="Array") as error:
            call()
        assert len(str(error.value)) < 500, error.value


def test_options_that_the_cost_convention_does_not_know():
    refused(AlpaLiteError, step, PARAMS, f32(8, 16), options=al.PlanOptions(costs="guess"), parts=["'guess'", "'alpa'"])
    refused(
        AlpaLiteError,
        step,
        PARAMS,
        f32(8, 16),
        options=al.PlanOptions(forbid=("gossip",)),
        parts=["'gossip'", "all-gather"],
    )


def test_settings_of_parallelize_that_cannot_be():
    with pytest.raises(AlpaLiteError, match=r"executor='carrier pigeon' was given\. It must be 'local', 'ray'"):
        al.parallelize(step, executor="carrier pigeon")


# -- plan files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "plan.json"
    al.plan(step, PARAMS, f32(8, 16), cluster=CLUSTER, options=MESH).save(path)
    return path


def test_a_plan_file_that_is_cut_short(saved):
    saved.write_bytes(saved.read_bytes()[: saved.stat().st_size // 2])
    with pytest.raises(PlanFileError) as error:
        al.load_plan(saved)
    assert str(saved) in str(error.value)
    assert re.search(r"cut short|not complete|damaged", str(error.value))


def test_a_plan_file_that_is_not_there(tmp_path):
    with pytest.raises(PlanFileError, match=r"cannot read the plan file .* Check the path"):
        al.load_plan(tmp_path / "none.json")


def test_a_plan_file_of_another_version(saved):
    data = json.loads(saved.read_text())
    key = next(k for k in data if "version" in k)
    data[key] = 999
    saved.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match="999"):
        al.load_plan(saved)


def test_a_plan_file_of_another_program(saved):
    with pytest.raises(PlanFileError) as error:
        al.load_plan(saved).bind(lambda params, x: jnp.tanh(x), PARAMS, f32(8, 16))
    message = str(error.value)
    assert "this plan belongs to another program" in message
    assert "Make a new plan with `al.plan`" in message


def test_a_loaded_plan_has_no_pytrees_before_it_is_bound(saved):
    with pytest.raises(AlpaLiteError, match=r"specs_by_path.*plan\.bind\(fn, \*args\)"):
        _ = al.load_plan(saved).in_specs


@pytest.mark.medium
def test_a_local_cluster_text_with_more_devices_than_there_are():
    """In a process of its own: one CPU device, asked for four."""
    code = (
        "import jax, jax.numpy as jnp, alpa_lite as al\n"
        "step = al.parallelize(jnp.tanh, cluster=al.Cluster.parse('1x4:cpu'))\n"
        "step(jnp.ones((8, 8)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode != 0
    assert "jax.config.update('jax_num_cpu_devices', 4)" in result.stderr
