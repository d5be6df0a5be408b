"""``al.fit`` with steps, checkpoints and losses that are played: when what is saved, restarted and closed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.api.fit import _Run
from alpa_lite.errors import CheckpointError, ClusterError
from alpa_lite.executor.batches import Batches


class Saving:
    """A checkpoint that is being written until somebody waits for it."""

    def __init__(self, number: int, fails: bool) -> None:
        self.number, self.fails, self.waited = number, fails, False

    def poll(self) -> Path | None:
        if self.fails:
            raise CheckpointError("stale file handle")
        return None

    def wait(self) -> Path:
        self.poll()
        self.waited = True
        return Path(f"step_{self.number}")


class Played:
    """A step without arrays; ``failing``: checkpoints of which steps fail."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.failing = failing
        self.begun: list[Saving] = []

    def plan(self, *_: Any) -> None: ...
    def restore_newest(self, _: Any) -> None: ...

    def init(self, make: Callable[[], Any]) -> Any:
        return make()

    def busy(self) -> tuple[()]:
        return ()

    def __call__(self, state: Any, _: Any) -> Any:
        return state + 1, np.float32(1)

    def begin_save(self, _: Any, number: int, *__: Any, **___: Any) -> Saving:
        self.begun.append(Saving(number, number in self.failing))
        return self.begun[-1]


def run_of(step: Any, folder: Path, num_steps: int, on_step: Any = None) -> _Run:
    return _Run(
        step=step,
        init=lambda: np.float32(0),
        batches=Batches(lambda position: position),
        num_steps=num_steps,
        checkpoint=al.Checkpoint(str(folder), every=5),
        elastic=None,
        on_nan="stop",
        budget=(100, 3),
        on_step=on_step,
    )


def test_an_earlier_checkpoint_that_failed_does_not_cost_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Played(failing=(10,))
    assert run_of(step, tmp_path, 11)().checkpoint == Path("step_11")
    assert [saving.number for saving in step.begun] == [5, 10, 11]
    assert "no checkpoint at step 10: stale file handle" in capsys.readouterr().err


def test_whoever_interrupts_a_run_keeps_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    def interrupted(report: al.StepReport) -> None:
        if len(step.begun) == 1:
            raise KeyboardInterrupt

    step = Played()
    with pytest.raises(KeyboardInterrupt):
        run_of(step, tmp_path, 11, interrupted)()
    assert [saving.waited for saving in step.begun] == [True]


class Shrinking(Played):
    """A step whose workers are lost in its first call, on a cluster that has no room for new ones."""

    def __init__(self, restarts: bool, closed: list[Any]) -> None:
        super().__init__()
        self.restarts, self.closed = restarts, closed

    def __call__(self, state: Any, batch: Any) -> Any:
        if not self.restarts:
            raise al.WorkerLost("a worker died", 0)
        return super().__call__(state, batch)

    def restart(self) -> None:
        if not self.restarts:
            raise ClusterError("the plan needs 8 CPU")

    def close(self) -> None:
        self.closed.append(self)


def test_a_cluster_that_shrinks_again_while_new_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[Any] = []
    first, second, third = (Shrinking(restarts, closed) for restarts in (False, False, True))
    after = {first: second, second: third}
    monkeypatch.setattr(sys.modules[_Run.__module__], "replanned", lambda step, *_: after[step])
    run = run_of(first, tmp_path, 7)
    run.elastic = al.Elastic()
    done = run()
    assert done.step is third and (done.position, done.restarts) == (7, 1)
    assert closed == [first, second]
    assert capsys.readouterr().err.count("the hosts are gone for good") == 2


def test_a_step_under_another_plan_starts_its_workers_with_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned for fewer hosts has not run yet: that there is no room for it must show where others are looked for."""
    started = []
    monkeypatch.setattr("alpa_lite.executor.ray.remote_step.RemoteStep.restart", lambda remote: started.append(remote))
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    cluster = al.Cluster.parse("1x1:cpu")
    step = al.parallelize(lambda s, b: (s + b, b), cluster=cluster, executor="ray", donate_argnums=0)
    made = step.with_plan(step.plan(shape, shape), cluster, step.options)
    made.plan(shape, shape)
    made.restart()
    assert [remote.plan.mesh.num_devices for remote in started] == [1]


def test_a_second_ctrl_c_leaves_no_actors_of_a_step_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Slow(Saving):
        def poll(self) -> Path | None:
            return None

        def wait(self) -> Path:
            raise KeyboardInterrupt

    class Other(Played):
        def begin_save(self, _: Any, number: int, *__: Any, **___: Any) -> Saving:
            self.begun.append(Slow(number, False))
            return self.begun[-1]

        def close(self) -> None:
            closed.append("actors")

    other, start = Other(), _Run._start

    def replanned(run: Any) -> Any:
        run.step = other
        return start(run)

    def interrupted(_: al.StepReport) -> None:
        if other.begun:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Run, "_start", replanned)
    with pytest.raises(KeyboardInterrupt):
        run_of(Played(), tmp_path, 11, interrupted)()
    assert closed == ["actors"]


def test_a_checkpoint_that_failed_before_a_nan_is_tried_again(tmp_path: Path) -> None:
    class Fails(Saving):
        def poll(self) -> Path | None:
            return None

        def wait(self) -> Path:
            raise CheckpointError("stale file handle")

    class Step(Played):
        spoiled = False

        def __call__(self, state: Any, position: Any) -> Any:
            if position == 5 and not self.spoiled:
                self.spoiled = True
                return state + 1, np.float32("nan")
            return super().__call__(state, position)

        def begin_save(self, folder: Any, number: int, *rest: Any, **named: Any) -> Saving:
            if not self.begun:
                self.begun.append(Fails(number, True))
                return self.begun[-1]
            return super().begin_save(folder, number)

    step = Step()
    run = run_of(step, tmp_path, 9)
    run.on_nan = "restore"
    run()
    assert [saving.number for saving in step.begun] == [5, 5, 9]
