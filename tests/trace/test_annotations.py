"""Annotations that arguments already carry."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.trace.annotations import annotation_note, annotations_from_args
from alpa_lite.trace.paths import leaf_paths


def test_linen_boxes():
    nn = pytest.importorskip("flax.linen")
    boxed = {
        "kernel": nn.Partitioned(jnp.ones((4, 8)), names=(None, "model")),
        "logical": nn.LogicallyPartitioned(jax.ShapeDtypeStruct((4,), jnp.float32), names=("embed",)),
        "free": nn.Partitioned(jnp.ones(3), names=(None,)),
        "bare": jnp.ones(3),
    }
    found = annotations_from_args((boxed,))
    assert [(a.path, a.spec) for a in found] == [
        ("0/kernel/value", P(None, "model")),
        ("0/logical/value", P("embed")),
    ]
    assert {a.path for a in found} <= {path for path, _ in leaf_paths(boxed, "0")}
    assert found[0].origin == "flax box Partitioned"


def test_nnx_metadata():
    nnx = pytest.importorskip("flax.nnx")

    def make():
        init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
        return nnx.Linear(4, 8, rngs=nnx.Rngs(0), kernel_init=init)

    with jax.set_mesh(jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))):
        _, state = nnx.split(make())
    found = annotations_from_args(({"state": state},))
    assert [(a.path, a.spec) for a in found] == [("0/state/kernel/value", P(None, "model"))]
    assert found[0].origin == "flax variable Param"
    assert found[0].path in {path for path, _ in leaf_paths({"state": state}, "0")}


def test_committed_arrays():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    committed = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("x")))
    single = jax.device_put(jnp.ones(3), jax.devices()[0])
    found = annotations_from_args((committed, single, jnp.ones(3), 1.0), {"k": committed})
    assert [(a.path, a.spec, a.origin) for a in found] == [
        ("0", P("x"), "committed array"),
        ("k", P("x"), "committed array"),
    ]


def test_replicated_is_an_annotation_of_an_array():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    (found,) = annotations_from_args((jax.device_put(jnp.ones(3), NamedSharding(mesh, P())),))
    assert found.spec == P()


def test_tracers_have_none():
    seen = []

    @jax.jit
    def f(x):
        seen.append(annotations_from_args((x,)))
        return x

    f(jnp.ones(3))
    assert seen == [()]


def test_note():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    array = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("x")))
    found = annotations_from_args((array,) * 5)
    (note,) = annotation_note(found, binding=False)
    assert note.startswith(
        'the arguments carry 5 sharding annotations, not binding; annotations="pin" makes them pins: 0'
    )
    assert note.endswith("2 P('x') (committed array) and 2 more")
    assert 'read as pins (annotations="pin")' in annotation_note(found, binding=True)[0]
    assert annotation_note((), binding=True) == ()


@pytest.mark.medium
def test_flax_is_not_imported():
    code = (
        "import sys, jax.numpy as jnp\n"
        "from alpa_lite.trace.annotations import annotations_from_args\n"
        "assert annotations_from_args((jnp.ones(3),)) == ()\n"
        "assert 'flax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
