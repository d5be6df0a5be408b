"""Stages on submeshes that a user gives: which are possible, which layers they get, and what the plan says of them."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, LayerError
from alpa_lite.planner.stage_layers import _stages_by_devices

SIZE, DEPTH = 8, 8


def train_step(params: Any, x: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = al.layer_boundary(x) if i < DEPTH - 1 else x
        return jnp.mean(x**2)

    value, grads = al.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments() -> tuple[Any, Any]:
    return [jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)] * DEPTH, jax.ShapeDtypeStruct((8, SIZE), jnp.float32)


def planned(cluster: str = "1x8:v100-sxm2-16gb", **options: Any) -> al.Plan:
    chosen = al.PlanOptions(num_microbatches=4, **options)
    return al.plan(train_step, *arguments(), cluster=al.Cluster.parse(cluster), options=chosen)


def test_stored_solution_of_gpt_on_8_devices():
    """Alpa's stages of GPT 2.6B: layers 2/2/4 on (1,2), (1,2), (1,4) as (2,1), (2,1), (4,1)."""
    plan = planned(
        stage_layers=(2, 2, 4), submeshes=((1, 2), (1, 2), (1, 4)), stage_mesh_shapes=((2, 1), (2, 1), (4, 1))
    )
    assert [stage.layers for stage in plan.stages] == [(0, 1), (2, 3), (4, 5, 6, 7)]
    assert [stage.mesh.shape for stage in plan.stages] == [(2, 1), (2, 1), (4, 1)]
    assert [(stage.first_device, stage.submesh) for stage in plan.stages] == [(4, (1, 2)), (6, (1, 2)), (0, (1, 4))]
    text = str(plan)
    assert "0-1     1x2      4-5" in text, text
    assert "4-7     1x4      0-3" in text


def test_layers_follow_devices():
    plan = planned(submeshes=((1, 2), (1, 6)))
    assert [len(stage.layers) for stage in plan.stages] == [2, 6]


def test_the_link_is_the_one_between_the_places():
    """Parts of hosts lie beside each other: largest first, so the first two stages share host 1."""
    plan = planned("2x8:v100-sxm2-16gb", submeshes=((1, 4), (1, 4), (1, 8)), stage_layers=(2, 2, 4))
    assert [stage.first_device for stage in plan.stages] == [8, 12, 0]
    assert plan.pipeline is not None
    cluster = al.Cluster.parse("2x8:v100-sxm2-16gb")
    times = {(t.source, t.target): (t.time_s, t.size_bytes) for t in plan.pipeline.transfers if t.when == "loop"}
    time_s, size_bytes = times[0, 1]
    inside = cluster.inside
    assert time_s == inside.setup_s + inside.latency_s + size_bytes / (4 * inside.single_bytes_per_s)
    time_s, size_bytes = times[1, 2]
    between, lanes = cluster.between, 1 if cluster.between.per_host else 4
    assert time_s == between.setup_s + between.latency_s + size_bytes / (lanes * between.bandwidth_bytes_per_s)


def test_one_stage_is_one_mesh():
    plan = planned(submeshes=((1, 8),), stage_mesh_shapes=((2, 4),))
    assert plan.pipeline is None
    assert plan.mesh.shape == (2, 4)


def test_plan_file(tmp_path):
    plan = planned(submeshes=((1, 2), (1, 6)), stage_mesh_shapes=((2, 1), None))
    plan.save(tmp_path / "plan.json")
    assert al.load_plan(tmp_path / "plan.json") == plan
    assert dict(plan.options)["submeshes"] == ((1, 2), (1, 6))


def test_work_by_devices_is_the_best_of_all_cuts():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        layers, stages = int(rng.integers(3, 8)), int(rng.integers(2, 4))
        flops, cut_bytes = rng.integers(1, 9, layers).tolist(), rng.integers(1, 9, layers - 1).tolist()
        devices = rng.integers(1, 6, stages).tolist()

        def slowest(of_layer: tuple[int, ...], flops: Any = flops, devices: Any = devices) -> float:
            loads = [sum(f for f, s in zip(flops, of_layer, strict=True) if s == n) for n in range(len(devices))]
            return max(load / d for load, d in zip(loads, devices, strict=True))

        cuts = itertools.combinations(range(1, layers), stages - 1)
        every = [tuple(sum(k >= c for c in cut) for k in range(layers)) for cut in cuts]
        found = _stages_by_devices(flops, cut_bytes, devices)
        assert found in every
        assert slowest(found) == pytest.approx(min(map(slowest, every)))


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"submeshes": "1x2"}, ["submeshes='1x2'", "must be a tuple"]),
        ({"submeshes": ()}, ["submeshes=()", "(hosts, devices per host)"]),
        ({"submeshes": ((1, 2, 3),)}, ["submeshes=((1, 2, 3),)", "((1, 2), (1, 6))"]),
        ({"submeshes": ((1, 0), (1, 8))}, ["at least 1"]),
        ({"stage_layers": (4, 0)}, ["stage_layers=(4, 0)", "at least 1", "(4, 2, 2)"]),
        ({"stage_layers": (4, True)}, ["stage_layers=(4, True)"]),
        ({"stage_mesh_shapes": ((1, 1, 1, 1),)}, ["stage_mesh_shapes", "1 to 3 sizes"]),
        ({"stage_mesh_shapes": (4, 4)}, ["stage_mesh_shapes=(4, 4)", "one mesh shape per stage"]),
        ({"mesh_shape": (4,), "stage_mesh_shapes": ((4,), (4,))}, ["mesh_shape=(4,)", "Give one of them"]),
        ({"axis_names": ("a",), "stage_mesh_shapes": ((4,), (2, 2))}, ["(2, 2) of 2 axes", "one name per axis"]),
        (
            {"num_stages": 3, "submeshes": ((1, 4), (1, 4))},
            ["numbers of stages differ", "num_stages=3 has 3", "submeshes=((1, 4), (1, 4)) has 2"],
        ),
        ({"stage_layers": (4, 4), "submeshes": ((1, 8),)}, ["stage_layers=(4, 4) has 2", "has 1"]),
        ({"submeshes": ((1, 4), (1, 4)), "schedule": "2f2b"}, ["schedule='2f2b'", "'1f1b'"]),
    ],
)
def test_options_that_contradict_themselves(options, parts):
    with pytest.raises(AlpaLiteError) as caught:
        al.PlanOptions(**options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"submeshes": ((1, 4), (1, 2))}, ["have 6 devices", "1x8", "together all 8 devices"]),
        ({"submeshes": ((1, 4),)}, ["have 4 devices", "together all 8 devices"]),
        ({"submeshes": ((2, 4),)}, ["submesh 2x4 cannot be part", "(hosts, 8)"]),
        ({"submeshes": ((1, 9), (1, 1))}, ["submesh 1x9 cannot be part"]),
        ({"cluster": "2x4:cpu", "submeshes": ((1, 3), (1, 3), (1, 2))}, ["no host has room", "each host full"]),
        ({"stage_layers": (4, 2)}, ["stage_layers=(4, 2) has 6 layers", "the step has 8", "al.layer_boundary"]),
        (
            {"submeshes": ((1, 2), (1, 6)), "stage_mesh_shapes": ((2,), (2, 2))},
            ["stage 1 has 4 devices in the mesh (2, 2)", "6 in its submesh (1, 6)"],
        ),
        ({"num_stages": 1, "stage_mesh_shapes": ((2, 2),)}, ["stage 0 has 4 devices", "8 in its submesh (1, 8)"]),
        ({"num_stages": 3}, ["num_stages=3", "submeshes=((hosts, devices per host), ...)"]),
    ],
)
def test_stages_that_do_not_fit(options, parts):
    with pytest.raises(LayerError) as caught:
        planned(**options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "test_stage_cut.py" in str(caught.value)


def test_more_stages_than_a_loss_can_be_cut_into():
    def step(params: Any, x: Any) -> Any:
        return al.value_and_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))(params, x)

    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    options = al.PlanOptions(num_stages=8, num_microbatches=2)
    with pytest.raises(
        LayerError, match=r"8 layers were asked of a function that can be cut into at most \d.*fewer stages"
    ):
        al.plan(step, shapes, shapes, cluster=al.Cluster.parse("1x8:cpu"), options=options)


def test_stages_say_what_could_not_be_split():
    """As plans on one mesh do: sizes that the mesh of some stage does not divide, loops of unknown length."""

    def fn(params: Any, x: Any) -> Any:
        for w in params:
            x = al.layer_boundary(jnp.tanh(x @ w))
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: 0.5 * x, x) * 2.0

    args = [jax.ShapeDtypeStruct((9, 9), jnp.float32)] * 4, jax.ShapeDtypeStruct((8, 9), jnp.float32)
    cluster, options = al.Cluster.parse("1x4:h100-sxm"), al.PlanOptions(num_stages=2)
    notes = al.plan(fn, *args, cluster=cluster, options=options).notes
    sizes = (
        "0/0 dim 0 of size 9 over x; 0/0 dim 1 of size 9 over x; 0/1 dim 0 of size 9 over x; 0/1 dim 1 of size 9 over x"
    )
    assert any(note.startswith(f"not split because sizes do not divide: {sizes}; and ") for note in notes)
    assert any(note.startswith("1 while loops count as one iteration: ") for note in notes)
