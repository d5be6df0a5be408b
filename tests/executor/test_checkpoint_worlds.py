"""Processes that write one item together, and groups of processes that write items of one checkpoint independently."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.executor.item_reader import read_leaves
from alpa_lite.plan.checkpoint import ItemRecord
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from benchmarks.ray_session import free_port
from tests.executor import exported_steps
from tests.executor.checkpoint_states import assert_equal
from tests.executor.checkpoint_worker import values
from tests.executor.test_processes import job

pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed: pip install 'alpa-lite[checkpoint]'")
pytestmark = pytest.mark.medium
ROOT = Path(__file__).parents[2]


class Worker:
    """A process of ``checkpoint_worker``."""

    def __init__(self, stack: ExitStack, log: Path, **request: Any) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.executor.checkpoint_worker", json.dumps(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            )
        stack.callback(self.process.communicate)
        stack.callback(self.process.kill)

    def ask(self, **order: Any) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self, refused: bool = False) -> Any:
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # gloo speaks on stdout too
                found = json.loads(line)
                assert refused or "refused" not in found, found
                return found
        raise AssertionError(self.log.read_text()[-4000:])


def test_two_processes_write_one_item_and_a_third_another_one(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    root = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    with ExitStack() as stack:
        pair = {"address": address, "item": "submesh_0", "rows": [0, 4]}
        workers = [Worker(stack, tmp_path / f"{k}.log", process=k, **pair) for k in range(2)]
        workers.append(Worker(stack, tmp_path / "2.log", process=0, address="", item="submesh_1", rows=[4, 8]))
        for step in (1, 2, 3):
            if step == 3:
                _refused_together(root, workers[:2])
            folder = root.begin(step)
            for worker in workers:
                worker.ask(folder=str(folder), step=step)
            first, second, third = (msgspec.convert(worker.answer(), ItemRecord) for worker in workers)
            assert first.leaves == second.leaves and first.files and not second.files
            assert {name.partition("/")[0] for name in first.files} >= {"ocdbt.process_0", "ocdbt.process_1"}
            root.commit(step, [first, third], plan_text="{}\n")
            workers[0].ask(said=True)
            assert workers[0].answer() == {"said": sorted([folder.name, "last"])}, (
                "what was said of other checkpoints stays"
            )
        assert root.steps() == (2, 3)
        for worker in workers:
            worker.ask(restore=str(root.root), step=3)
        assert [worker.answer() for worker in workers] == [{"restored": True}] * 3
    manifest = root.read(3, verify=True)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("p", "q"))
    whole = values(3)
    wanted = {
        path: jax.ShapeDtypeStruct(
            value.shape, value.dtype, sharding=NamedSharding(mesh, P(*("pq"[: value.ndim == 2])))
        )
        for path, value in whole.items()
    }
    got = read_leaves(root.path(3), manifest, wanted)
    for path, value in whole.items():
        assert np.asarray(got[path]).tobytes() == value.tobytes()


def _refused_together(root: CheckpointFolder, pair: list[Worker]) -> None:
    """One disk is full: both processes know it at once, and what they write next is whole."""
    folder, start = root.begin(3), time.monotonic()
    for number, worker in enumerate(pair):
        worker.ask(folder=str(folder), step=3, full=number == 1)
    first, second = (worker.answer(refused=True)["refused"] for worker in pair)
    assert time.monotonic() - start < 30  # they give up on one that says nothing after 60
    assert "process 1 on" in first and "not all of the 2 processes" in first
    assert all("File too large" in text for text in (first, second))
    root.abandon(3)


@pytest.mark.slow
def test_a_job_saves_and_restores_as_one_process_does(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = job("checkpoints", tmp_path, 2, 2)
    assert first["paths"] == ["step_00000001", "step_00000000"] and first["kept"] and second["kept"]
    assert first == second and "step 2 could not be written" in first["refused"]
    assert [p.name for p in (tmp_path / "checkpoints").glob(".*")] == []
    step = al.parallelize(exported_steps.step, plan=al.load_plan(tmp_path / "checkpoints/step_00000001/plan.json"))
    step.plan(exported_steps.state(), exported_steps.batch())
    at_start, after = (step.restore(tmp_path / "checkpoints", step=number) for number in (0, 1))
    for one, other in zip(jax.tree.leaves(at_start), jax.tree.leaves(exported_steps.state()), strict=True):
        assert_equal(one, other)
    expected, _ = step(exported_steps.state(), exported_steps.batch())
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        assert_equal(one, other)
    assert float(step(after, exported_steps.batch())[1]) == first["loss"]
