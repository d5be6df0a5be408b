"""Parameters from a checkpoint of another plan: the same bits, on the devices, without ever being on the host together."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa_lite as al
from alpa_lite.errors import CheckpointError
from examples import gpt_linen
from examples.serving_models import MODELS
from tests.serve.engines import assert_split, model_and_params, split_layout

pytestmark = pytest.mark.medium
P = PartitionSpec
ROOT = Path(__file__).resolve().parents[2]
SIZES = {"slots": 2, "max_length": 16, "buckets": (8,)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of a GPT that was trained on two stages of 2x2 devices, and its parameters."""
    folder = tmp_path_factory.mktemp("checkpoints")
    example = gpt_linen.make("small")
    options = al.PlanOptions(mesh_shape=(2, 2), num_stages=2, num_microbatches=2)
    step = al.parallelize(example.train_step, options=options, donate_argnums=0)
    step.plan(*example.abstract_args())
    state = step.init(example.init, jax.random.key(0))
    state, _ = step(state, example.batch(0))
    step.save(folder, state, step=1)
    return folder, jax.tree.map(np.asarray, state.params)


@pytest.mark.slow
def test_a_model_is_served_from_the_checkpoint_of_a_training_plan(trained: tuple[Path, Any]) -> None:
    folder, params = trained
    model = MODELS["gpt"]("small")
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    stored = al.serve.StoredParams(folder, shapes)
    layout = split_layout("gpt", model, stored, SIZES)  # graphs are made of whatever an engine takes
    with al.serve.Engine(model, stored, layout, **SIZES) as engine:
        assert_split(engine)
        for (path, leaf), want in zip(
            jax.tree_util.tree_leaves_with_path(engine.params), jax.tree.leaves(params), strict=True
        ):
            planned = engine.plans["decode"].specs_by_path[
                "0/" + jax.tree_util.keystr(path, simple=True, separator="/")
            ]
            assert leaf.sharding.is_equivalent_to(NamedSharding(leaf.sharding.mesh, planned), leaf.ndim)
            assert np.array_equal(leaf, want)
        answer = engine.generate([[1, 2, 3]], max_tokens=5)
    with al.serve.Engine(model, params, **SIZES) as engine:  # in another layout
        assert engine.generate([[1, 2, 3]], max_tokens=5) == answer


def test_what_is_not_there_is_told(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = trained
    shapes = jax.eval_shape(MODELS["gpt"]("small").init_params, jax.random.key(0))
    shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        al.serve.StoredParams(folder, shapes, step=7).load(shardings)
    with pytest.raises(
        CheckpointError,
        match=r"path='weights' was given.*has nothing there, but in 'opt_state', 'params', 'step'. At .*test_stored",
    ):
        al.serve.StoredParams(folder, shapes, path="weights").load(shardings)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        al.serve.StoredParams(tmp_path / "none", shapes).load(shardings)
    other = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.dtype("bfloat16")), shapes)
    with pytest.raises(CheckpointError, match="is wanted as bfloat16"):
        al.serve.StoredParams(folder, other).load(shardings)
    leaves, tree = jax.tree.flatten(shapes)
    last = jax.tree.unflatten(tree, [*leaves[:-1], jax.tree.leaves(other)[-1]])
    with pytest.raises(CheckpointError, match="is wanted as bfloat16"):  # before anything is planned
        al.serve.StoredParams(folder, last).found()


def test_parameters_that_are_picked_keep_their_names(tmp_path: Path) -> None:
    """A list that is cut counts from 0 again."""
    params = {"layers": [{"w": np.full(3, number, np.float32)} for number in range(4)], "head": np.ones(2, np.float32)}
    step = al.parallelize(lambda state: state)
    step.plan({"params": params})
    step.save(tmp_path, {"params": params}, step=0)
    struct = jax.ShapeDtypeStruct((3,), np.float32)  # one object for all
    shapes = {"layers": [{"w": struct} for _ in range(4)], "head": jax.ShapeDtypeStruct((2,), np.float32)}
    half = al.serve.StoredParams(tmp_path, shapes).picked(lambda p: {"own": p["layers"][2:], "head": p["head"]})
    quarter = half.picked(lambda p: p["own"][1:])
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for stored, want in ((half, [1, 2, 3]), (quarter, [3])):
        found = stored.load(jax.tree.map(lambda _: sharding, stored.shapes))
        assert [float(leaf[0]) for leaf in jax.tree.leaves(found)] == want
    with pytest.raises(ValueError, match="'w' is none of the parameters"):
        half.picked(lambda p: {"w": jax.ShapeDtypeStruct((6,), np.float32)})


def saved(folder: Path, value: float, step: int) -> None:
    params = {"in": np.full(3, value, np.float32), "out": np.full(3, value, np.float32)}
    made = al.parallelize(lambda state: state)
    made.plan({"params": params})
    made.save(folder, {"params": params}, step=step)


def loaded(stored: Any) -> list[float]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return [float(leaf[0]) for leaf in jax.tree.leaves(stored.load(jax.tree.map(lambda _: sharding, stored.shapes)))]


STRUCTS = {name: jax.ShapeDtypeStruct((3,), np.float32) for name in ("in", "out")}


def test_parts_are_of_one_checkpoint_while_newer_ones_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "checkpoints", 1.0, 1)
    monkeypatch.chdir(tmp_path)
    settled = al.serve.StoredParams("checkpoints", STRUCTS).found()
    first = settled.picked(lambda p: {"in": p["in"]})
    saved(tmp_path / "checkpoints", 2.0, 2)
    monkeypatch.chdir("/")  # as that of actors
    second = settled.picked(lambda p: {"out": p["out"]})
    assert loaded(first) == loaded(second) == loaded(settled.found().picked(lambda p: {"in": p["in"]})) == [1.0]
    assert loaded(al.serve.StoredParams(tmp_path / "checkpoints", STRUCTS)) == [2.0, 2.0]
    shutil.rmtree(settled.place)  # as training does with old ones
    with pytest.raises(CheckpointError, match=r"step_00000001' is no checkpoint"):
        loaded(settled)
    assert loaded(settled.found()) == [2.0, 2.0]


def test_stages_are_of_one_checkpoint(tmp_path: Path) -> None:
    """The model's own ``pick`` is where something happens between two stages."""
    model, params = model_and_params("gpt")

    def save(step: int) -> None:
        made = al.parallelize(lambda state: state)
        state = {"params": jax.tree.map(lambda x: np.full(x.shape, step, x.dtype), params)}
        made.plan(state)
        made.save(tmp_path, state, step=step)

    class Watched(type(model)):  # type: ignore[misc]
        def split(self, num_stages: int) -> Any:
            parts = super().split(num_stages)

            def late(p: Any, pick: Any = parts[-1][1]) -> Any:
                save(2)
                return pick(p)

            return [*parts[:-1], (parts[-1][0], late)]

    save(1)
    stored = al.serve.StoredParams(tmp_path, jax.eval_shape(lambda: params))
    with al.serve.Engine(Watched(model.config), stored, num_stages=2, **SIZES) as engine:
        assert {float(leaf.max()) for stage in engine.params for leaf in jax.tree.leaves(stage)} == {1.0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step": "1"}, r"step='1' was given; it must be a whole number from 0, or None. At .*test_stored"),
        ({"step": True}, "step=True was given"),
        ({"step": -1}, "step=-1 was given"),
        ({"step": [1]}, r"step=\[1\] was given"),
        ({"path": 1}, "path=1 was given; it must be a str"),
        ({"dir": ""}, "got '' of type str as a path"),
        ({"dir": "a\0b"}, r"nor one with a null character"),
    ],
)
def test_settings_that_cannot_be(given: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        al.serve.StoredParams(**{"dir": "checkpoints", "shapes": STRUCTS} | given)


SCRIPT = """
import gc, json, resource, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_platforms", "cpu")
from pathlib import Path
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from alpa_lite.serve.stored import StoredParams

def rss(name):
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0]) * 1024

mesh = Mesh(np.array(jax.devices()).reshape(4), ("x",))
sharding = NamedSharding(mesh, P(None, "x"))
shapes = {f"w{n}": jax.ShapeDtypeStruct((SIZE, SIZE), np.float32) for n in range(COUNT)}
small = {"w0": shapes["w0"]}
StoredParams(sys.argv[1], small, path="").load({"w0": sharding})  # brings the libraries
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = rss("VmRSS")
params = StoredParams(sys.argv[1], shapes, path="").load(dict.fromkeys(shapes, sharding))
total = sum(x.nbytes for x in params.values())
print(json.dumps({"peak": rss("VmHWM") - before, "held": total}))
"""
COUNT, SIZE = 36, 1408  # 36 parameters of 7.6 MiB
# What the reader keeps: stored chunks as they are and decoded, pieces of files whose digests are compared, the allocator's rest.
BUFFER = 160 * 2**20


def test_host_memory_never_holds_more_than_one_parameter_and_a_buffer(tmp_path: Path) -> None:
    """Devices are the host here: all parameters are in its memory at the end, and little more on the way."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is read from Linux's /proc")
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rng = np.random.default_rng(0)
    rows = NamedSharding(mesh, P("x", None))
    params = {f"w{n}": jax.device_put(rng.random((SIZE, SIZE), np.float32), rows) for n in range(COUNT)}
    step = al.parallelize(lambda params: jax.tree.map(lambda x: x * 2, params), donate_argnums=0)
    step.plan(jax.eval_shape(lambda: params))
    step.save(tmp_path, params, step=0)
    excess = []
    for count in (COUNT // 3, COUNT):
        script = SCRIPT.replace("SIZE", str(SIZE)).replace("COUNT", str(count))
        command = [sys.executable, "-c", script, str(tmp_path)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
        assert found.returncode == 0, found.stderr
        measured = json.loads(found.stdout)
        assert measured["held"] == count * SIZE * SIZE * 4
        excess.append(measured["peak"] - measured["held"])
    one = SIZE * SIZE * 4  # read together, the further parameters would take 24 of them
    assert excess[1] - excess[0] <= 10 * one, "it grows with the number of parameters"
    assert excess[1] <= one + BUFFER, excess
