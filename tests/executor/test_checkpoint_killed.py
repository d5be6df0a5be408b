"""A process that is killed while it saves: whatever the moment, what is listed is complete, and the newest one restores."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from tests.executor.checkpoint_saver import KEEP, check

pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed: pip install 'alpa-lite[checkpoint]'")
ROOT = Path(__file__).parents[2]


def killed(root: Path, log: Path, moment_s: float) -> int:
    """The last step that a process said was complete before it was killed, so long after its second checkpoint."""
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.executor.checkpoint_saver", str(root)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        ) as process,
    ):
        try:
            said = [process.stdout.readline() for _ in range(2)]  # the first one compiles
            assert all(said), log.read_text()[-4000:]
            time.sleep(moment_s)
        finally:
            process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
    return int([*said, *rest.split()][-1])


def survives(tmp_path: Path, moments_s: list[float]) -> int:
    """How many of the kills left something unfinished."""
    root, unfinished = tmp_path / "checkpoints", 0
    for moment_s in moments_s:
        complete = killed(root, tmp_path / "log", moment_s)
        folder = CheckpointFolder(root, keep=KEEP)
        left = list(root.glob(".step_*"))
        unfinished += bool(left)
        with jax.enable_x64(True):
            newest = check(folder)
        # One more may be complete than it had time to say, and older ones not yet removed.
        assert newest in (complete, complete + 1), moment_s
        assert set(range(max(1, newest - KEEP + 1), newest + 1)) <= set(folder.steps()), moment_s
        assert len(folder.steps()) <= KEEP + 1, moment_s
        folder.clean()
        assert not list(root.glob(".step_*")), moment_s
    return unfinished


@pytest.mark.medium
def test_killed_at_three_moments(tmp_path):
    survives(tmp_path, [0.0, 0.013, 0.04])


@pytest.mark.slow
def test_killed_at_fifty_random_moments(tmp_path):
    moments = random.Random(7)
    assert survives(tmp_path, [moments.uniform(0, 0.3) for _ in range(50)]) > 20
