"""Engines on actors that are lost, with actors that are played: how often new ones are started, and when not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import CheckpointError, ClusterError, EngineClosed, EngineLost, ServeError, WorkerLost
from alpa_lite.serve import engine
from tests.serve.fake_runner import FakeRunner, request_of, running, scheduler_of

pytest.importorskip("ray", reason="Ray is not installed: pip install 'alpa-lite[ray]'")

from alpa_lite.executor.sites import Site
from alpa_lite.serve import hosts


class Group:
    """Actors that answer; ``empties``: whether their slots can be emptied."""

    def __init__(self, *, empties: bool = True, lost: str = "") -> None:
        self.empties, self.lost = empties, lost

    def each(self, method: str, args_of: Any) -> list[Any]:
        if not self.empties:
            self.lost = "a worker failed: RESOURCE_EXHAUSTED"
            raise WorkerLost(self.lost, 0)
        return []

    def send(self, stage: int, method: str, *args: Any) -> str:
        return method

    def received(self, answers: Sequence[Any]) -> list[Any]:
        return [np.zeros(2, int) for _ in answers]


def runner_with(start: Callable[[], Group]) -> Any:
    """Whose actors are lost."""
    made: Any = hosts.Hosts.__new__(hosts.Hosts)
    made.parts, made.buckets, made.num_groups, made.per_group, made.slots = [None], (4,), 1, 2, 2
    made._start, made._group = start, Group(lost="an actor died")
    return made


def test_actors_that_are_lost_again_and_again_are_given_up() -> None:
    starts: list[Group] = []

    def start() -> Group:
        assert len(starts) < 10
        starts.append(Group(empties=False))
        return starts[-1]

    with pytest.raises(EngineLost):
        runner_with(start).reset()
    assert len(starts) == hosts._STARTS


def test_a_checkpoint_that_is_removed_while_actors_start_is_not_the_end() -> None:
    """The trainer keeps so many; a newer one is there."""
    starts: list[int] = []

    def start() -> Group:
        starts.append(len(starts))
        if len(starts) == 1:
            raise CheckpointError("step_00000100 is no checkpoint")
        return Group()

    made = runner_with(start)
    made.reset()
    assert len(starts) == 2 and not made._group.lost


@pytest.mark.parametrize("end", ["closed", "drained"])
def test_an_engine_that_ends_starts_nothing_again(end: str) -> None:
    """Whoever closes it would wait for it; one that drains has nothing left to do."""

    class Runner(FakeRunner):
        resets = 0

        def decode(self, tokens: Any, rows: Any) -> list[int]:
            began.set()
            assert ended.wait(20)
            raise EngineLost("an actor of the engine was lost")

        def reset(self) -> None:
            self.resets += 1

    began, ended, runner = threading.Event(), threading.Event(), Runner()
    with running(scheduler_of(runner)) as scheduler:
        request = request_of(1)
        scheduler.submit(request)
        assert began.wait(20)
        if end == "closed":
            scheduler.close("it was asked to")
        else:
            scheduler.drain()
        ended.set()
        with pytest.raises((EngineLost, EngineClosed)):
            request.result(20)
    assert runner.resets == 0


def test_an_engine_that_cannot_begin_leaves_no_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Played:
        vocab_size, slots, buckets, check_s = 8, 2, (4,), 5.0

        def close(self) -> None:
            closed.append("actors")

    class Model:
        def init_cache(self, slots: int, max_length: int) -> None: ...
        def prefill(self, *_: Any) -> None: ...
        def decode(self, *_: Any) -> None: ...

    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "alpa_lite-engine":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(engine, "runner_of", lambda *_, **__: Played())
    monkeypatch.setattr(threading.Thread, "start", fails)
    model: Any = Model()
    with pytest.raises(RuntimeError, match="new thread"):
        al.serve.Engine(model, {}, slots=2, max_length=8, buckets=(4,), executor="ray")
    assert closed == ["actors"]


def test_an_engine_whose_ray_was_ended_says_so_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks Ray for anything then starts a cluster, with settings of Ray's own."""

    class Actor:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of an actor was asked for")

    def start() -> Group:
        raise AssertionError("actors were started")

    group: Any = hosts.PartGroup.__new__(hosts.PartGroup)
    group.lost, group.steps, group.settings, group._sent = "", 0, al.RayExecutor(), []
    group.sites = (Site(number=0, submesh=0, stages=(0,), host=0, devices=(0,), process=0, num_processes=1),)
    group.actors = [Actor()]
    made = runner_with(start)
    made._group = group
    monkeypatch.setattr(hosts.ray, "is_initialized", lambda: False)
    scheduler, request = scheduler_of(made), request_of(1)
    scheduler.submit(request)
    with pytest.raises(ClusterError, match="Ray was ended in this process"):  # which ends the engine
        scheduler.step()
    with pytest.raises(ServeError, match=r"failed: ClusterError: Ray was ended in this process"):
        request.result(1)
    with pytest.raises(ClusterError, match="Ray was ended in this process"):
        made.check()
