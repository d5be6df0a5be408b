"""What the driver does about Ray, where Ray and the workers are played."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import ClusterError
from alpa_lite.executor.ray.settings import RayExecutor
from tests.executor.test_ray import WATCHED

pytestmark = [pytest.mark.ray, pytest.mark.medium]


@pytest.mark.parametrize("call", ["the first", "a later one"])
def test_what_a_worker_raises_is_not_asked_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of arrays on some device, the local executor's complaints are about layouts."""
    calls: list[Any] = []

    class Remote:
        def run(self, *args: Any) -> Any:
            calls.append(args)
            raise ValueError("shard 2 is not there")

        def place(self, args: Any) -> tuple[Any, ...]:
            return tuple(args)

    step = al.parallelize(lambda x: x, cluster=al.Cluster.parse("1x1:cpu"), executor="ray")
    x = jax.device_put(np.ones(4, np.float32), jax.devices()[1])
    if call == "the first":
        monkeypatch.setattr(step, "_step", lambda *_: Remote())
    else:
        step._last, step._last_key = Remote(), step._key((x,), {})
    with pytest.raises(ValueError, match=r"^shard 2 is not there$"):
        step(x)
    assert len(calls) == 1


def test_two_threads_start_one_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine and each step has a thread that may be the first."""
    from alpa_lite.executor.ray import cluster

    started: list[dict[str, Any]] = []

    def init(**settings: Any) -> None:
        time.sleep(0.3)
        started.append(settings)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "_init", init)
    monkeypatch.setattr(cluster, "_guarded", contextlib.nullcontext)
    monkeypatch.setattr(cluster, "is_one_machine", lambda: True)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: bool(started))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: cluster.connect(None, 1), range(2))) == [True, True]
    assert len(started) == 1


@pytest.mark.parametrize("there_s", [2.5, 1e9])
def test_hosts_are_waited_for_in_turns(there_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No signal comes through while Ray waits: Ctrl-C would take ``start_timeout_s``."""
    from alpa_lite.executor.ray import group

    now_s, turns = 0.0, []

    class Placement:
        def wait(self, seconds: float) -> bool:
            nonlocal now_s
            turns.append(seconds)
            now_s = min(now_s + seconds, there_s) if now_s < there_s else now_s
            return now_s >= there_s

    made: Any = group.WorkerGroup.__new__(group.WorkerGroup)
    made.settings, made.sites, made.actors, made.platform = RayExecutor(start_timeout_s=5.0), (), [], "cpu"
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(group, "alive_nodes", list)
    monkeypatch.setattr(group.ray, "available_resources", dict)
    monkeypatch.setattr(group, "placement_group", lambda *_, **__: Placement())
    if there_s < 5:
        made._place([{"CPU": 1.0}])
    else:
        with pytest.raises(ClusterError, match="did not give 1 hosts to this step within 5 s"):
            made._place([{"CPU": 1.0}])
    assert max(turns) <= 1 and sum(turns) == pytest.approx(min(np.ceil(there_s), 5))


@pytest.mark.parametrize("answered", [False, True])
def test_ray_that_ends_while_a_call_waits_is_not_started_again(answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked of Ray then starts another cluster, with a dashboard, on all interfaces, which nobody ends."""
    from alpa_lite.executor.ray import group as group_module

    ended, asked = [], []

    def wait(refs: Any, **_: Any) -> Any:
        asked.extend(ended)
        ended.append("wait, or what comes after it")
        return (refs, []) if answered else ([], refs)

    def get(refs: Any, **_: Any) -> Any:
        asked.append("get or ping")
        raise RuntimeError

    group: Any = group_module.WorkerGroup.__new__(group_module.WorkerGroup)
    group.lost, group.steps, group.sites, group.started, group.settings = "", 4, (), True, WATCHED
    group.actors = [SimpleNamespace(ping=SimpleNamespace(remote=lambda: get(())))]
    monkeypatch.setattr(group_module.ray, "is_initialized", lambda: not ended)
    monkeypatch.setattr(group_module.ray, "wait", wait)
    monkeypatch.setattr(group_module.ray, "get", get)
    with pytest.raises(ClusterError, match="Ray was ended in this process"):
        group.wait([object()])
    assert not asked, "Ray was asked after its end"
