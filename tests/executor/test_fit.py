"""``al.fit`` on both executors, with losses at many places."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import ArgumentsError, CheckpointError, NotFiniteError
from alpa_lite.executor.batches import Batches
from tests.executor import pipeline_steps
from tests.executor.test_ray import WATCHED, assert_equal, is_gone, local_step, run, steps, workers

NUM_STEPS = 12
ON_RAY = [pytest.mark.ray, pytest.mark.medium, pytest.mark.usefixtures("ray_session")]


def batch(position: int) -> Any:
    """Another one at every position."""
    tokens, labels = pipeline_steps.arguments()[1]
    noise = np.random.default_rng(position).standard_normal(labels.shape, dtype=np.float32)
    return np.asarray(tokens), np.asarray(labels) + 0.01 * noise


def state() -> Any:
    return pipeline_steps.arguments()[0]


def plain(count: int = NUM_STEPS, skipped: tuple[int, ...] = ()) -> tuple[Any, float]:
    """The local executor, step by step."""
    step = local_step()
    made, loss = state(), None
    for position in range(count):
        if position not in skipped:
            made, loss = step(made, batch(position))
    return made, float(loss)


@pytest.fixture(scope="module")
def expected() -> tuple[Any, float]:
    return plain()


@pytest.fixture
def remote() -> Iterator[Any]:
    _, step = steps(executor=WATCHED)
    yield step
    step.close()


def losing(step: Any, at: dict[int, Callable[[int], int]], seen: list[int]) -> Callable[[al.StepReport], None]:
    """An ``on_step`` that does something to a worker after the steps ``at``, each once: position -> which worker."""

    def on_step(report: al.StepReport) -> None:
        seen.append(report.position)
        if report.position in at:
            kill = at.pop(report.position)
            kill(workers(step)[report.position % 2])

    return on_step


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.medium
def test_the_local_executor_and_a_second_run_that_goes_on(tmp_path: Path, expected: tuple[Any, float]) -> None:
    local = local_step()
    kept = al.Checkpoint(tmp_path / "run", every=4, keep=2)
    first = al.fit(local, init=state, data=batch, num_steps=7, checkpoint=kept)
    assert (first.position, first.restarts, first.checkpoint.name) == (7, 0, "step_00000007")
    seen: list[int] = []
    given: dict[str, Any] = {"init": state, "data": batch, "num_steps": NUM_STEPS, "checkpoint": kept}
    second = al.fit(local, **given, on_step=lambda r: seen.append(r.position))
    assert seen == list(range(7, NUM_STEPS))
    assert_equal(second.state, expected[0])
    assert float(second.metrics) == expected[1]
    assert sorted(p.name for p in (tmp_path / "run").glob("step_*")) == ["step_00000008", "step_00000012"]
    third = al.fit(local, **given)
    assert third.metrics is None and third.position == NUM_STEPS
    assert_equal(third.state, expected[0])


class TestRay:
    pytestmark = ON_RAY

    @pytest.mark.slow
    def test_killed_and_stopped_workers(self, remote: Any, tmp_path: Path, expected: tuple[Any, float]) -> None:
        """One dies before there is a checkpoint, one hangs, one dies later: no batch is lost or used twice in the end."""
        seen: list[int] = []
        kept = al.Checkpoint(tmp_path, every=3, keep=2)
        lost: dict[int, Any] = {1: kill, 6: stop, 9: kill}
        done = al.fit(
            remote, init=state, data=batch, num_steps=NUM_STEPS, checkpoint=kept, on_step=losing(remote, lost, seen)
        )
        assert done.restarts == 3 and not lost
        assert set(seen) == set(range(NUM_STEPS))
        assert_equal(done.state, expected[0])
        assert float(done.metrics) == expected[1]

    @pytest.mark.slow
    def test_an_iterable_is_read_again_from_the_checkpoint(
        self, remote: Any, tmp_path: Path, expected: tuple[Any, float]
    ) -> None:
        kept = al.Checkpoint(tmp_path, every=4)
        data = (batch(position) for position in range(NUM_STEPS))
        on_step = losing(remote, {7: kill}, [])
        done = al.fit(remote, init=state(), data=data, num_steps=NUM_STEPS, checkpoint=kept, on_step=on_step)
        assert done.restarts == 1
        assert_equal(done.state, expected[0])

    @pytest.mark.slow
    def test_a_run_that_cannot_be_helped_ends(self, remote: Any, tmp_path: Path) -> None:
        pids: list[int] = []

        def on_step(report: al.StepReport) -> None:
            if report.position == 2:
                pids.extend(workers(remote))
                kill(pids[-1])

        kept = al.Checkpoint(tmp_path, every=2)
        with pytest.raises(al.WorkerLost, match=r"al.fit gave up after 2 losses at step 3; newest checkpoint:"):
            al.fit(
                remote, init=state, data=batch, num_steps=9, checkpoint=kept, on_step=on_step, max_restarts_in_place=2
            )
        assert all(is_gone(pid) for pid in pids)

    @pytest.mark.slow
    def test_a_worker_that_dies_while_it_starts_is_one_more_loss(
        self, remote: Any, tmp_path: Path, expected: tuple[Any, float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from alpa_lite.executor.ray.group import WorkerGroup

        start, started = WorkerGroup._start, []

        def struck(group: Any) -> None:
            started.append(group)
            if len(started) == 2:
                import ray

                ray.kill(group.actors[0])
            start(group)

        monkeypatch.setattr(WorkerGroup, "_start", struck)
        kept = al.Checkpoint(tmp_path, every=3)
        on_step = losing(remote, {4: kill}, [])
        done = al.fit(remote, init=state, data=batch, num_steps=NUM_STEPS, checkpoint=kept, on_step=on_step)
        assert (done.restarts, len(started)) == (2, 3)
        assert_equal(done.state, expected[0])

    @pytest.mark.slow
    def test_without_a_checkpoint_a_loss_starts_again(self, remote: Any) -> None:
        done = al.fit(remote, init=state, data=batch, num_steps=4, on_step=losing(remote, {2: kill}, []))
        assert done.restarts == 1 and done.checkpoint is None
        assert_equal(done.state, plain(4)[0])
        with pytest.raises(al.WorkerLost, match="which an iterable cannot give twice"):
            data = iter([batch(k) for k in range(4)])
            al.fit(remote, init=state, data=data, num_steps=4, on_step=losing(remote, {2: kill}, []))


# -- data -------------------------------------------------------------------------------------------------------------


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def read_part(position: int, path: str, index: tuple[slice, ...]) -> np.ndarray:
    """A part of one leaf of ``batch(position)``, as a worker reads it."""
    return batch(position)[int(path)][index]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
@pytest.mark.slow
def test_hosts_read_their_own_parts(remote: Any, tmp_path: Path, expected: tuple[Any, float]) -> None:
    shapes = shapes_of(batch(0))
    data = al.HostData(read_part, shapes)
    on_step = losing(remote, {7: kill}, [])
    kept = al.Checkpoint(tmp_path, every=4)
    done = al.fit(remote, init=state, data=data, num_steps=NUM_STEPS, checkpoint=kept, on_step=on_step)
    assert done.restarts == 1
    assert_equal(done.state, expected[0])
    wrong = al.HostData(lambda position, path, index: batch(position)[int(path)][:1], shapes)
    with pytest.raises(ArgumentsError, match=r"returned \w+\[1, 16.* for part .* of batch 0\. It must return"):
        al.fit(remote, init=state, data=wrong, num_steps=1)


@pytest.mark.medium
def test_the_local_executor_reads_all_parts(expected: tuple[Any, float]) -> None:
    local = local_step()
    data = al.HostData(read_part, shapes_of(batch(0)))
    assert_equal(al.fit(local, init=state, data=data, num_steps=NUM_STEPS).state, expected[0])
    with pytest.raises(ArgumentsError, match=r"to read with\. It must be a function"):
        al.HostData(7, None)


# -- other plans ------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
@pytest.mark.slow
def test_a_state_saved_by_workers_is_restored_under_other_plans(tmp_path: Path) -> None:
    """More stages and fewer, another mesh, the local executor; and back onto workers."""
    local, remote = steps()
    args = state(), batch(0)
    with remote:
        made, _ = run(remote, *args, 2)
        remote.save(tmp_path, made, step=2)
        with pytest.raises(CheckpointError, match="is no RemoteArray: it lies in this process"):
            remote.save(tmp_path, state(), step=3)
        again, losses = run(remote, remote.restore(tmp_path), batch(0), 2)
        again = jax.tree.map(np.asarray, again)
    local.plan(*args)
    restored = made_by(local, tmp_path)
    expected, same = run(local, restored, batch(0), 2)
    assert same == losses
    assert_equal(expected, again)
    for options in ({"num_stages": 1}, {"num_stages": 4}, {"num_stages": 2, "stage_mesh_shapes": ((1, 2), (2, 1))}):
        other, on_ray = steps(options=al.PlanOptions(num_microbatches=4, **options))
        other.plan(*args)
        assert_equal(restored, made_by(other, tmp_path))
        if options["num_stages"] == 4:
            with on_ray:
                on_ray.plan(*args)
                assert_equal(restored, on_ray.restore(tmp_path))


def made_by(step: Any, folder: Path) -> Any:
    return jax.tree.map(np.asarray, step.restore(folder))


# -- NaN --------------------------------------------------------------------------------------------------------------


def spoiled(at: int, times: list[int]) -> Callable[[int], Any]:
    """Data whose batch ``at`` is not finite, as often as ``times`` says."""

    def read(position: int) -> Any:
        tokens, labels = batch(position)
        if position == at and times[0]:
            times[0] -= 1
            return tokens, labels * np.float32("nan")
        return tokens, labels

    return read


@pytest.mark.slow
def test_what_is_not_finite_stops_is_left_out_or_is_tried_again(tmp_path: Path, expected: tuple[Any, float]) -> None:
    local = local_step()

    def fitted(name: str, count: int, **kwargs: Any) -> al.FitResult:
        kept = al.Checkpoint(tmp_path / name, every=3)
        return al.fit(local, init=state, data=spoiled(7, [count]), num_steps=NUM_STEPS, checkpoint=kept, **kwargs)

    with pytest.raises(NotFiniteError, match=r"a metric of batch 7 is not finite: nan.*step_00000006") as error:
        fitted("stop", 1)
    assert error.value.position == 7
    skipped = fitted("skip", 9, on_nan="skip")
    assert skipped.skipped == (7,)
    assert_equal(skipped.state, plain(skipped=(7,))[0])
    tried = fitted("restore", 1, on_nan="restore")
    assert_equal(tried.state, expected[0])
    with pytest.raises(NotFiniteError, match="is not finite again, after its state was restored"):
        fitted("again", 2, on_nan="restore")


# -- bad input --------------------------------------------------------------------------------------------------------


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    local = local_step()
    given: dict[str, Any] = {"init": state, "data": batch, "num_steps": 1}
    with pytest.raises(ArgumentsError, match=r"It must be what al\.parallelize returns"):
        al.fit(batch, **given)
    with pytest.raises(ArgumentsError, match="num_steps=-1 was given"):
        al.fit(local, **given | {"num_steps": -1})
    for data, name in ((np.ones((8, 4)), "array"), ({"x": np.ones(4)}, "dict")):
        with pytest.raises(ArgumentsError, match=rf"given one {name}, which is no series of batches.*At .*test_fit"):
            al.fit(local, **given | {"data": data})
    with pytest.raises(ArgumentsError, match=r"cannot be called without arguments: .*'key'.* At .*test_fit"):
        al.fit(local, **given | {"init": lambda key: state()})
    with pytest.raises(ArgumentsError, match=r"data=7 was given\. It must be a function of a position"):
        al.fit(local, **given | {"data": 7})
    with pytest.raises(ArgumentsError, match="on_nan='ignore' was given"):
        al.fit(local, **given, on_nan="ignore")
    gone = jax.tree.map(jax.numpy.array, state())
    jax.tree.leaves(gone)[0].delete()
    with pytest.raises(ArgumentsError, match=r"'init/.*' of al\.fit was deleted, or donated .*test_fit.*"):
        al.fit(local, **given | {"init": gone})
    with pytest.raises(ArgumentsError, match=r"It must be an al\.Checkpoint"):
        al.fit(local, **given, checkpoint=str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to '.*file': .* Give another folder"):
        al.fit(local, **given, checkpoint=al.Checkpoint(tmp_path / "file"))
    with pytest.raises(ArgumentsError, match="elastic=7 was given"):
        al.fit(local, **given, elastic=7)
    with pytest.raises(CheckpointError, match="every=0"):
        al.Checkpoint(tmp_path, every=0)


def test_data_that_ends_too_early() -> None:
    batches = Batches(iter("abc"))
    assert [batches.at(k) for k in (0, 2, 1)] == ["a", "c", "b"]
    batches.release(2)
    assert batches.at(2) == "c"
    with pytest.raises(ArgumentsError, match="the data has 3 batches, and batch 5 is wanted"):
        batches.at(5)
    resumed = Batches(iter("abcdef"))
    resumed.release(4)
    assert resumed.at(4) == "e"
