"""Workers and drivers that are killed or stopped at random moments: every run ends with the parameters of one without a loss."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alpa_lite as al
from tests.executor.test_fit import NUM_STEPS, batch, plain, state
from tests.executor.test_ray import WATCHED, assert_equal, is_gone, steps

pytestmark = [pytest.mark.ray]
PAUSE_S = 0.03  # per batch, so that a run takes long enough to be hit


def slow_batch(position: int) -> Any:
    time.sleep(PAUSE_S)
    return batch(position)


class Striker(threading.Thread):
    """Sends a signal to a random worker of the newest group after a while, whatever it does then: load, step, save or restore."""

    def __init__(self, groups: list[Any], delay_s: float, number: int, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self.groups, self.delay_s, self.number, self.rng = groups, delay_s, number, rng
        self.struck = 0

    def run(self) -> None:
        time.sleep(self.delay_s)
        while not self.struck:
            places = getattr(self.groups[-1], "places", ()) if self.groups else ()
            if places and self.groups[-1].actors:
                _, pid = self.rng.choice(places)
                with contextlib.suppress(ProcessLookupError):  # a group that has just ended
                    os.kill(pid, self.number)
                    self.struck = pid
            time.sleep(0.01)


def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, count: int, seed: int) -> list[int]:
    """Restarts of each of ``count`` runs, every one struck once, at a moment within the time that a run takes here unharmed."""
    import ray

    from alpa_lite.executor.ray.group import WorkerGroup

    groups: list[Any] = []
    begin = WorkerGroup.__init__

    def noted(self: Any, *args: Any) -> None:
        groups.append(self)
        begin(self, *args)

    monkeypatch.setattr(WorkerGroup, "__init__", noted)
    expected, loss = plain()
    rng = random.Random(seed)
    _, step = steps(executor=WATCHED)
    restarts = []

    def run(name: str) -> tuple[Any, float]:
        start_s = time.monotonic()
        kept = al.Checkpoint(tmp_path / name, every=3, keep=2)
        done = al.fit(step, init=state, data=slow_batch, num_steps=NUM_STEPS, checkpoint=kept)
        assert_equal(done.state, expected)
        assert float(done.metrics) == loss
        return done, time.monotonic() - start_s

    with step:
        unharmed_s = {starts: run(f"unharmed, starts {starts}")[1] for starts in (True, False)}
        for k in range(count):
            if k % 4 == 0:
                step.close()  # so that some are struck while they start
            striker = Striker(groups, rng.uniform(0, 0.7 * unharmed_s[k % 4 == 0]), number, rng)
            striker.start()
            done, _ = run(str(k))
            restarts.append(done.restarts)
            striker.join(30)
            assert striker.struck and (done.restarts == 0 or is_gone(striker.struck))
            alive = [g for g in ray.util.placement_group_table().values() if g["state"] not in ("REMOVED", "PENDING")]
            assert len(alive) <= 1
    for group in groups:
        assert all(is_gone(pid) for _, pid in getattr(group, "places", ()))
    return restarts


@pytest.mark.usefixtures("ray_session")
@pytest.mark.slow
def test_two_killed_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(series(tmp_path, monkeypatch, signal.SIGKILL, 2, seed=5)) >= 1


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_twenty_killed_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(series(tmp_path, monkeypatch, signal.SIGKILL, 20, seed=1)) >= 10


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_five_stopped_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(series(tmp_path, monkeypatch, signal.SIGSTOP, 5, seed=2)) >= 3


# -- the driver -------------------------------------------------------------------------------------------------------

DRIVER = """
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np

import alpa_lite as al
from tests.executor.test_fit import state
from tests.executor.test_losses import slow_batch
from tests.executor.test_ray import WATCHED, steps

_, step = steps(executor=WATCHED)
kept = al.Checkpoint(Path(sys.argv[1]) / "run", every=3, keep=2)
given = {"init": state, "data": slow_batch, "num_steps": int(sys.argv[2]), "checkpoint": kept}
done = al.fit(step, **given, on_step=lambda r: print(r.position, flush=True))
np.savez(Path(sys.argv[1]) / "final.npz", *[np.asarray(x) for x in jax.tree.leaves(done.state)])
step.close()
"""


def drive(folder: Path, mark: str) -> subprocess.Popen[str]:
    """A driver with a Ray of its own; everything that it starts has ``mark`` in its environment."""
    path = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    env = os.environ | {"PYTHONPATH": path, "ALPA_LITE_TEST_MARK": mark, "RAY_AUTH_TOKEN": mark * 2}
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", DRIVER, str(folder), str(NUM_STEPS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def marked(mark: str) -> list[str]:
    """Processes with ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
            except OSError:
                continue
    return found


def all_gone(mark: str, limit_s: float = 60.0) -> list[str]:
    """What is left of a killed driver's processes after a while."""
    end = time.monotonic() + limit_s
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.5)
    return left


def killed_drivers(tmp_path: Path, count: int, seed: int) -> None:
    expected, _ = plain()
    rng = random.Random(seed)
    for k in range(count):
        folder = tmp_path / str(k)
        folder.mkdir()
        mark = uuid.uuid4().hex
        driver = drive(folder, mark)
        assert driver.stdout is not None
        for _ in range(rng.randrange(NUM_STEPS)):
            driver.stdout.readline()
        time.sleep(rng.uniform(0, 2 * PAUSE_S))
        driver.kill()
        driver.communicate()
        assert all_gone(mark) == []
        again = drive(folder, mark)
        _, told = again.communicate(timeout=200)
        assert again.returncode == 0, told
        assert all_gone(mark) == []
        with np.load(folder / "final.npz") as found:
            assert_equal(expected, [found[name] for name in found.files])


@pytest.mark.slow
def test_five_killed_drivers(tmp_path: Path) -> None:
    killed_drivers(tmp_path, 5, seed=3)
