"""Under what a user set in JAX (a mesh, no compilation), and with what is no function or has no values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, ArgumentsError, TraceError
from tests.trace.cases import floats


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("count", [2, 8])
def test_a_mesh_of_the_user_is_no_part_of_the_step(axis_type, count, tmp_path):
    """JAX refuses another mesh than that of ``jax.set_mesh``, under which training loops for GSPMD run."""

    def step(w, x):
        loss, grad = al.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    w, x = floats(16, 16), floats(8, 16)
    wanted = float(jax.jit(step)(w, x)[1])
    mesh = jax.make_mesh((count,), ("mine",), axis_types=(axis_type,), devices=jax.devices()[:count])
    with jax.set_mesh(mesh):
        parallel = al.parallelize(step)
        state, loss = parallel(w, x)
        assert float(parallel.compile(w, x)(w, x)[1]) == pytest.approx(wanted)
        parallel.save(tmp_path, state)
        made, restored = parallel.init(lambda: jnp.zeros((16, 16))), parallel.restore(tmp_path)
        assert jax.sharding.get_abstract_mesh().axis_names == ("mine",)
    assert float(loss) == pytest.approx(wanted)
    assert np.array_equal(restored, state) and not np.any(np.asarray(made))


def test_compilation_that_is_off_is_told():
    with (
        jax.disable_jit(),
        pytest.raises(TraceError, match=r"compilation is off.*test_user_settings.*call it as it is"),
    ):
        al.parallelize(lambda x: x + 1)(np.ones(8, np.float32))


@pytest.mark.parametrize(
    "call", [lambda: al.plan({"w": 1}, 2, cluster=al.Cluster.parse("1x2:cpu")), lambda: al.graph(3, 2)]
)
def test_what_cannot_be_called_is_no_function(call):
    with pytest.raises(
        AlpaLiteError, match=r"al\.(plan|graph) was given .*which cannot be called.*test_user_settings.*Write al\."
    ):
        call()


@pytest.mark.parametrize("stages", [1, 2])
def test_state_that_was_donated_is_told(stages):
    """Also to a step that donates nothing, in one of several leaves, and by the user's own count of arguments."""

    def step(w, x):
        loss, grad = al.value_and_grad(lambda w, x: jnp.mean(al.layer_boundary(x @ w["a"]) @ w["b"]))(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grad), loss

    def state():
        return {"a": floats(16, 16), "b": floats(16, 16)}

    parallel = al.parallelize(
        step, cluster=al.Cluster.parse("1x2:cpu"), donate_argnums=0, options=al.PlanOptions(num_stages=stages)
    )
    placed, x = parallel(state(), floats(8, 16))[0], floats(8, 16)
    parallel(placed, x)
    with pytest.raises(ArgumentsError, match=r"the argument '0/a' was .*donated.*test_user_settings"):
        parallel(placed, x)
    x = jax.device_put(x)
    x.delete()
    with pytest.raises(ArgumentsError, match=r"the argument '1' was deleted"):
        parallel(state(), x)
    other = al.parallelize(
        lambda name, w, x: w["0"].sum() + jnp.mean(x @ w["a"] @ w["b"]),
        cluster=al.Cluster.parse("1x2:cpu"),
        static_argnums=0,
    )
    live = {"0": floats(4)}
    other("name", live | state(), x=floats(8, 16))
    for given, shown in (((live | placed, floats(8, 16)), "1/a"), ((live | state(), x), "x")):
        with pytest.raises(ArgumentsError, match=f"the argument '{shown}' was deleted, or donated"):
            other("name", given[0], x=given[1])
