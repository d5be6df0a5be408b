"""Checkpoints that workers write: who gives them up, and when. Workers are played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import CheckpointError, WorkerLost
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from tests.executor.test_fit_played import Played, run_of

pytest.importorskip("ray", reason="Ray is not installed: pip install 'alpa-lite[ray]'")

from alpa_lite.executor.ray import checkpoints
from alpa_lite.executor.ray import group as group_module
from alpa_lite.executor.ray.group import WorkerGroup
from alpa_lite.executor.ray.remote_array import RemoteArray
from alpa_lite.executor.ray.values import RemoteValues

pytestmark = [pytest.mark.ray, pytest.mark.medium]


class Workers:
    """A group of workers without any; ``fails``: what is raised when they are asked for a method."""

    lost = ""

    def __init__(self, fails: dict[str, BaseException]) -> None:
        self.fails = fails
        self.asked: list[str] = []

    def each(self, method: str, args_of: Any) -> list[Any]:
        self.asked.append(method)
        if method in self.fails:
            raise self.fails[method]
        return []


@pytest.mark.parametrize("at", ["save", "finish_save"])
def test_a_checkpoint_that_is_given_up_is_gone_also_where_workers_are_lost_meanwhile(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    group = Workers({at: CheckpointError("no space left"), "end_save": WorkerLost("a worker died", 3)})
    step: Any = SimpleNamespace(group=group, values=SimpleNamespace(group=group), parcel=SimpleNamespace(sites=()))
    monkeypatch.setattr(checkpoints, "_by_submesh", lambda *_: {})
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(WorkerLost):
        checkpoints.RemoteSaving(step, folder, 3, {}).wait()
    assert group.asked[-1] == "end_save"
    assert not list(tmp_path.iterdir())
    folder.begin(3)  # new workers may write it again
    folder.abandon(3)


class InterruptedOnce(Workers):
    def each(self, method: str, args_of: Any) -> list[Any]:
        found = super().each(method, args_of)
        if method == "finish_save" and self.asked.count(method) == 1:
            raise KeyboardInterrupt
        return found


def remote_saving_step(group: Any) -> Any:
    plan = SimpleNamespace(identity=None)
    values = SimpleNamespace(group=group)
    return SimpleNamespace(group=group, values=values, saving=True, parcel=SimpleNamespace(sites=()), plan=plan)


def test_ctrl_c_while_a_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as such, and what is being written is completed; ``step.save`` waits no longer, and leaves nothing."""
    monkeypatch.setattr(checkpoints, "_by_submesh", lambda *_: {})
    monkeypatch.setattr(checkpoints, "plan_text", lambda _: "{}")
    completed: list[int] = []

    def commit(self: CheckpointFolder, number: int, *_: Any, **__: Any) -> Path:
        completed.append(number)
        self.abandon(number)
        return self.root / f"step_{number}"

    monkeypatch.setattr(CheckpointFolder, "commit", commit)

    class Step(Played):
        def begin_save(self, folder: Any, number: int, state: Any, **rest: Any) -> Any:
            return checkpoints.RemoteSaving(remote, folder, number, state, **rest)

    remote = remote_saving_step(InterruptedOnce({}))
    with pytest.raises(KeyboardInterrupt):
        run_of(Step(), tmp_path, 11)()
    assert completed == [5]

    remote = remote_saving_step(InterruptedOnce({}))
    step = al.parallelize(lambda x: x, cluster=al.Cluster.parse("1x1:cpu"), executor="ray")
    step.plan(np.ones(4, np.float32))
    monkeypatch.setattr(step, "begin_save", lambda *args: checkpoints.RemoteSaving(remote, *args))
    with pytest.raises(KeyboardInterrupt):
        step.save(tmp_path, np.ones(4, np.float32), step=3)
    assert completed == [5] and remote.group.asked == ["save", "finish_save", "end_save"]
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_of_a_step_that_was_closed_starts_no_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Step:
        parcel = SimpleNamespace(sites=())
        closed = False

        def __init__(self) -> None:
            self.values: Any = SimpleNamespace(group=Workers({}))

        @property
        def group(self) -> Any:
            assert not self.closed, "workers were started again"
            return self.values.group

    monkeypatch.setattr(checkpoints, "_by_submesh", lambda *_: {})
    step: Any = Step()
    saving = checkpoints.RemoteSaving(step, CheckpointFolder(tmp_path), 3, {})
    group = step.values.group
    group.lost, group.fails["finish_save"] = "the step was closed", WorkerLost("the step was closed", 3)
    step.values, step.closed = None, True
    with pytest.raises((WorkerLost, CheckpointError)):
        saving.wait()
    assert not list(tmp_path.iterdir())


def test_a_state_of_lost_workers_was_not_donated(monkeypatch: pytest.MonkeyPatch) -> None:

    group: Any = WorkerGroup.__new__(WorkerGroup)
    group.lost, group.steps, group.sites, group.actors, group.group = "", 4, (), [], None
    monkeypatch.setattr(group_module.ray, "is_initialized", lambda: True)
    values = RemoteValues(group)
    kind: Any = SimpleNamespace(spec="[x]", stage=0, shape=(4,), dtype="float32")
    mesh: Any = None
    state = {"w": RemoteArray(values, values.new(), kind, mesh, 0)}
    step: Any = SimpleNamespace(values=values)
    assert checkpoints._by_submesh(step, state)
    group.lost = "worker 1 died"
    with pytest.raises(WorkerLost, match="worker 1 died"):
        checkpoints._by_submesh(step, state)
