"""A state saved under one plan comes back under others bit for bit, each leaf where that plan wants it, and training goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import ArgumentsError, CheckpointError
from alpa_lite.executor import checkpoint_item, save_restore
from alpa_lite.executor.staged_array import StagedArray
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from alpa_lite.plan.encode import encode_plan
from tests.executor import exported_steps
from tests.executor.checkpoint_states import assert_equal
from tests.executor.pipeline_steps import MICROBATCHES, arguments, scanned_loss_fn, step_of

pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed: pip install 'alpa-lite[checkpoint]'")
train_step = step_of(scanned_loss_fn)
STATE, BATCH = arguments(stacked=True)
PINS = {"0/0/layers/a": P(None, None, "x"), "0/0/layers/b": P(None, "x")}
# name -> cluster, options; the first one saves
PLANS = {
    "two stages": ("1x8:cpu", {"num_stages": 2}),
    "four stages": ("1x8:cpu", {"num_stages": 4}),
    "one stage": ("1x8:cpu", {"num_stages": 1}),
    "fewer devices": ("1x4:cpu", {"num_stages": 2, "schedule": "interleaved-1f1b", "num_chunks": 2}),
    "one device": ("1x1:cpu", {"num_stages": 1}),
}


@cache
def parallel(name: str) -> Any:
    """Planned, but never run."""
    cluster, options = PLANS[name]
    pins = {"pins": PINS, "pin_like": {"0/1/1/0/mu": "0/0"}} if name != "one device" else {}
    step = al.parallelize(
        train_step,
        cluster=al.Cluster.parse(cluster),
        options=al.PlanOptions(num_microbatches=MICROBATCHES, **options),
        **pins,
    )
    step.plan(STATE, BATCH)
    return step


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, the state after one step under two stages, the result of a second step)."""
    root = tmp_path_factory.mktemp("checkpoints")
    step = parallel("two stages")
    state, _ = step(STATE, BATCH)
    step.save(root, state, step=1)
    return root, state, step(state, BATCH)


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


@pytest.mark.medium
@pytest.mark.parametrize("name", [pytest.param(p, marks=[pytest.mark.slow] * (p == "four stages")) for p in PLANS])
def test_restored_under_any_plan(trained, name):
    root, state, (_, loss) = trained
    step = parallel(name)
    got = step.restore(root)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    for one, other in zip(leaves(got), leaves(state), strict=True):
        assert_equal(one, other)
    plan = step.plan(STATE, BATCH)
    homes = {path: stage for path, (stage, _) in plan.parameter_layout.items()}
    weights = got[0]["layers"]["a"]
    parts = weights.parts if isinstance(weights, StagedArray) else (weights,)
    paths = [path for path in homes if path.startswith("0/0/layers/a")]
    assert len(parts) == len(paths)
    for path, part in zip(paths, parts, strict=True):
        stage = plan.stages[homes[path]]
        own = range(stage.first_device, stage.first_device + stage.mesh.num_devices)
        assert {device.id for device in part.devices()} == set(own)
        assert part.sharding.is_equivalent_to(
            jax.sharding.NamedSharding(part.sharding.mesh, plan.parameter_layout[path][1]), part.ndim
        )
    if name in ("four stages", "one stage"):  # training goes on where it was
        np.testing.assert_allclose(step(got, BATCH)[1], loss, rtol=1e-5)


@pytest.mark.medium
def test_one_item_per_submesh_and_the_plan_beside(trained):
    root, _, _ = trained
    folder = CheckpointFolder(root)
    manifest, path = folder.read(1, verify=True), folder.path(1)
    plan = parallel("two stages").plan(STATE, BATCH)
    assert al.load_plan(path / "plan.json") == plan and manifest.identity == plan.identity
    stored = {leaf.path: leaf for leaf in manifest.leaves}
    pieces = stored["0/layers/a"].pieces
    assert [(piece.item, piece.rows) for piece in pieces] == [("submesh_0", (0, 2)), ("submesh_1", (2, 4))]
    assert {piece.item for leaf in manifest.leaves for piece in leaf.pieces} == {"submesh_0", "submesh_1"}


@pytest.mark.medium
def test_keys_and_bfloat16_in_a_donated_state(tmp_path):
    plan = exported_steps.plan(4)
    step = al.parallelize(exported_steps.step, plan=plan, donate_argnums=0)
    state = exported_steps.state()
    step.plan(state, exported_steps.batch())
    expected = leaves(step.restore(step.save(tmp_path, state, step=0).parent))
    for one, other in zip(leaves(state), expected, strict=True):
        assert_equal(one, other)
    first = step(step.restore(tmp_path), exported_steps.batch())
    second = step(step.restore(tmp_path), exported_steps.batch())
    for one, other in zip(leaves(first), leaves(second), strict=True):
        assert_equal(one, other)


def small() -> tuple[Any, Any]:
    """A step that is planned in no time, and a state of it."""
    step = al.parallelize(
        lambda state, x: ({"n": state["n"] + 1, "w": state["w"] * 2}, x), cluster=al.Cluster.parse("1x2:cpu")
    )
    state = {"n": 3, "w": np.arange(8, dtype=np.float32)}
    step.plan(state, np.ones(2, np.float32))
    return step, state


def test_numbers_and_numpy_arrays_are_leaves_too(tmp_path):
    step, state = small()
    assert step.save(tmp_path, state).name == "step_00000000"
    got = step.restore(tmp_path)
    assert int(got["n"]) == 3 and got["n"].dtype == np.int32
    np.testing.assert_array_equal(got["w"], state["w"])


def test_a_state_that_is_one_leaf(tmp_path):
    step = al.parallelize(lambda w, x: (w + 1, x), cluster=al.Cluster.parse("1x2:cpu"))
    step.plan(np.ones(4, np.float32), np.ones(2, np.float32))
    step.save(tmp_path, np.full(4, 7, np.float32), step=5)
    np.testing.assert_array_equal(step.restore(tmp_path, step=5), np.full(4, 7, np.float32))


@pytest.mark.medium
def test_saving_goes_on_beside_the_program(tmp_path, monkeypatch):
    step, state = small()
    plan = step.plan(state, np.ones(2, np.float32))
    folder = al.Checkpoint(tmp_path, every=1, keep=2).open()
    for number in range(4):
        state, _ = step(state, np.ones(2, np.float32))
        saving = save_restore.Saving(folder, number, state, plan, position=number, extra={"n": number})
        while saving.poll() is None:
            pass
        assert saving.wait() == saving.poll() == folder.path(number)
    assert folder.steps() == (2, 3) and folder.read().extra == {"n": 3} and folder.read().position == 3
    assert int(step.restore(tmp_path)["n"]) == 7 and int(step.restore(tmp_path, step=2)["n"]) == 6


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_the_text_of_a_plan_is_made_once_per_run(tmp_path, monkeypatch):
    plans = [parallel(name).plan(STATE, BATCH) for name in ("one stage", "one device")]
    texts = [encode_plan(plan).decode() for plan in plans]
    calls = []
    monkeypatch.setattr(save_restore, "encode_plan", lambda plan: calls.append(plan) or encode_plan(plan))
    found = [save_restore.plan_text(plans[k]) for k in (0, 0, 1, 1, 0)]
    assert found == [texts[k] for k in (0, 0, 1, 1, 0)]
    assert len(calls) <= 3


def test_without_a_plan(tmp_path):
    step = al.parallelize(lambda w: w + 1, cluster=al.Cluster.parse("1x2:cpu"))
    with pytest.raises(ArgumentsError, match=r"step\.save needs a plan.*Call step\.plan"):
        step.save(tmp_path, np.ones(4))
    with pytest.raises(ArgumentsError, match=r"step\.restore needs a plan.*Call step\.plan"):
        step.restore(tmp_path)
    plan = al.plan(lambda w: w + 1, np.ones(4, np.float32), cluster=al.Cluster.parse("1x2:cpu"))
    plan.save(tmp_path / "plan.json")
    given = al.parallelize(lambda w: w + 1, plan=al.load_plan(tmp_path / "plan.json"))
    with pytest.raises(ArgumentsError, match=r"read from a file.*Call step\.plan"):
        given.restore(tmp_path)


def test_arguments_that_are_not_allowed(tmp_path):
    step, state = small()
    for bad in ((state, np.ones(2)), {**state, "w": np.ones(9, np.float32)}, {}):
        with pytest.raises(
            CheckpointError, match=r"step\.save got a state of .*first difference at .*test_save_restore"
        ):
            step.save(tmp_path, bad)
    with pytest.raises(CheckpointError, match=r"step=-1.*whole number.*test_save_restore"):
        step.save(tmp_path, state, step=-1)
    with pytest.raises(CheckpointError, match=r"step\.save got 7 of type int as a path"):
        step.save(7, state)
    with pytest.raises(
        CheckpointError, match=r"step\.save got \{.* of type dict as a path.*Write step\.save\(dir, state\)"
    ):
        step.save(state, "checkpoints")
    with pytest.raises(CheckpointError, match=r"step\.save got a state of 1 leaves"):
        step.save(tmp_path, "f4")
    with pytest.raises(
        CheckpointError, match=r"step\.restore got step='1'.*whole number.*step\.restore\(dir, step=200\)"
    ):
        step.restore(tmp_path, step="1")
    with pytest.raises(CheckpointError, match="complete ones: none"):
        step.restore(tmp_path)
    step.save(tmp_path, state, step=4)
    with pytest.raises(ArgumentsError, match=r"argnum=5.*position of an argument"):
        step.restore(tmp_path, argnum=5)
    with pytest.raises(CheckpointError, match=r"no leaf 'state'"):
        step.restore(tmp_path, argnum=1)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
@pytest.mark.parametrize("name", ["every", "keep"])
def test_the_record_of_checkpoints_checks_itself(name, value):
    with pytest.raises(CheckpointError, match=rf"al\.Checkpoint got {name}={value}.*at least 1.*test_save_restore"):
        al.Checkpoint("out", **{name: value})
    with pytest.raises(CheckpointError, match="as a path"):
        al.Checkpoint(None)
    assert (al.Checkpoint("out").every, al.Checkpoint("out").keep) == (200, 3)


@pytest.mark.parametrize("when", ["digests", "_words"])
def test_no_space_leaves_older_checkpoints_and_nothing_else(tmp_path, monkeypatch, when):
    step, state = small()
    step.save(tmp_path, state, step=1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_item, when, full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*older checkpoints are untouched"):
        step.save(tmp_path, state, step=2)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    monkeypatch.undo()
    step.save(tmp_path, state, step=2)
    assert CheckpointFolder(tmp_path).steps() == (1, 2)


LIMITED = """
import resource, signal, sys
import jax, numpy as np, alpa_lite as al
from alpa_lite.errors import CheckpointError
step = al.parallelize(lambda w: w + 1, cluster=al.Cluster.parse("1x1:cpu"))
w = np.random.default_rng(0).standard_normal(2**20).astype(np.float32)
step.plan(w)
step.save(sys.argv[1], w, step=1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, -1))
try:
    step.save(sys.argv[1], w, step=2)
except CheckpointError as error:
    print("refused:", error)
np.testing.assert_array_equal(step.restore(sys.argv[1]), w)
"""


@pytest.mark.medium
def test_files_that_the_system_does_not_let_grow(tmp_path):
    """A real failure inside the writer: no file of the process may have more than a MiB."""
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    assert "refused:" in run.stdout and "older checkpoints are untouched" in run.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
